"""Tools and reasoning, through all forms of chat and through LangChain.

The story model calls no tools by itself, so a grammar lets it write a call.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from pykvcache.serve.engine import Generation, Piece
from support.models import make_model

MESSAGES: list[Any] = [{"role": "user", "content": "How is the weather by the sea?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
FUNCTION = {"name": "get_weather", "description": "Weather of a city", "parameters": PARAMETERS}
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]
FLAT: list[Any] = [{"type": "function", "strict": False, **FUNCTION}]
ANTHROPIC: list[Any] = [{"name": "get_weather", "input_schema": PARAMETERS}]
BEGIN, END = (
    r'"<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \""',
    r'"}}\n</tool_call>"',
)
ONE = {"grammar": rf'root ::= {BEGIN} [a-z]{{1,5}} "\", \"days\": 3" {END}'}
THINKS = {"grammar": r'root ::= "<think>\n" [a-z ]{5,9} "\n</think>\n\n" [a-z]{3}'}


@pytest.fixture(scope="module")
def client(thinker: str, openai: Any) -> Any:
    with openai.OpenAI(base_url=f"{thinker}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def claude(thinker: str, anthropic: Any) -> Any:
    with anthropic.Anthropic(base_url=thinker, api_key="none", max_retries=0) as found:
        yield found


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_chat_calls_a_tool_and_gets_its_result(client: Any, is_stream: bool) -> None:
    options = {"model": "m", "messages": MESSAGES, "tools": TOOLS, "extra_body": ONE}
    if is_stream:
        with client.chat.completions.stream(**options) as stream:
            kinds = {event.type for event in stream}
            choice = stream.get_final_completion().choices[0]
        assert "tool_calls.function.arguments.delta" in kinds
    else:
        choice = client.chat.completions.create(**options).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments)["days"] == 3
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    asked = [*MESSAGES, choice.message.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(
        model="m", messages=asked, tools=TOOLS, max_tokens=4, extra_body={"tool_choice": "none"}
    )
    assert answer.choices[0].message.content


def test_a_model_without_a_template_answers_and_calls_tools(
    serve: Any, openai: Any, model_folder: Path
) -> None:
    address = serve(path=os.fspath(make_model("llama", model_folder)))
    written = "I look.\n<tool_call>\n{}\n</tool_call>\n<tool_call>\n{}\n</tool_call>"
    called = '{"name": "f", "arguments": {}}'
    calls = [{"function": {"name": "f", "arguments": "{}"}}] * 2
    for content in ("I look.", "I look.\n"):
        said = {"role": "assistant", "content": content, "tool_calls": calls}
        body = {"messages": [MESSAGES[0], said]}
        rendered = httpx.post(f"{address}/apply-template", json=body, timeout=60).json()["prompt"]
        assert written.format(called, called) in rendered
    with openai.OpenAI(base_url=address + "/v1", api_key="none") as client:
        answer = client.chat.completions.create(
            model="m",
            messages=MESSAGES,
            tools=TOOLS,
            tool_choice="required",
            max_tokens=400,
            temperature=0,
        )
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert isinstance(json.loads(call.function.arguments)["days"], int)
    body = {"model": "m", "messages": MESSAGES, "max_tokens": 40}
    mark = {"grammar": 'root ::= "Yes<|im_end|>"'}  # the template's, not the client's
    ended = httpx.post(f"{address}/v1/messages", json=body | mark, timeout=60).json()
    assert ended["content"][0]["text"] == "Yes"
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("end_turn", None)


@pytest.mark.parametrize("name", ["get_date", "get_time"])
def test_only_allowed_tools_are_called(client: Any, name: str) -> None:
    parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    names = ["get_weather", "get_date", "get_time"]
    functions = [{"name": one, "parameters": parameters} for one in names]
    tools = [{"type": "function", "function": function} for function in functions]
    wish = {"mode": "required", "tools": [{"type": "function", "function": {"name": name}}]}
    brief: dict[str, Any] = {"parallel_tool_calls": False, "temperature": 0}
    brief["extra_body"] = {"chat_template_kwargs": {"enable_thinking": False}}
    options = {"model": "m", "messages": MESSAGES, "tools": tools, **brief}
    answer = client.chat.completions.create(
        **options, tool_choice={"type": "allowed_tools", "allowed_tools": wish}
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == name
    again = client.chat.completions.create(**options, max_tokens=1)  # the prompt has all tools
    assert again.usage.prompt_tokens == answer.usage.prompt_tokens
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1
    response = client.responses.create(
        model="m",
        input=MESSAGES,
        tools=[{"type": "function", **function} for function in functions],
        tool_choice={
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": name}, {"type": "image_generation"}],
        },
        **brief,
    )
    assert [item.name for item in response.output if item.type == "function_call"] == [name]


@pytest.mark.parametrize(
    "wish",
    [
        {"mode": "none", "tools": []},
        {"mode": "auto"},
        {"mode": "auto", "tools": ["get_weather"]},
        {"mode": "auto", "tools": [{"type": "function", "function": {"name": "other"}}]},
        {"mode": "required", "tools": []},
        7,
    ],
)
def test_allowed_tools_must_be_tools_of_the_request(client: Any, openai: Any, wish: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="tool"):
        client.chat.completions.create(
            model="m",
            messages=MESSAGES,
            tools=TOOLS,
            tool_choice={"type": "allowed_tools", "allowed_tools": wish},
        )


def test_a_truncated_call_finishes_with_length(client: Any) -> None:
    whole = client.chat.completions.create(
        model="m", messages=MESSAGES, tools=TOOLS, extra_body=ONE, temperature=0
    )
    n = whole.usage.completion_tokens - 12
    cut = client.chat.completions.create(
        model="m", messages=MESSAGES, tools=TOOLS, extra_body=ONE, temperature=0, max_tokens=n
    ).choices[0]
    assert cut.finish_reason == "length"
    assert cut.message.tool_calls[0].function.name == "get_weather"
    assert "<tool_call>" not in (cut.message.content or "")


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_message_uses_a_tool(claude: Any, is_stream: bool) -> None:
    options = {"model": "m", "max_tokens": 100, "messages": MESSAGES, "tools": ANTHROPIC}
    if is_stream:
        with claude.messages.stream(**options, extra_body=ONE) as stream:
            kinds = {event.type for event in stream}
            answer = stream.get_final_message()
        assert "input_json" in kinds
    else:
        answer = claude.messages.create(**options, extra_body=ONE)
    assert answer.stop_reason == "tool_use"
    (use,) = (block for block in answer.content if block.type == "tool_use")
    assert use.input["days"] == 3
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
    options["messages"] = [
        *MESSAGES,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    more = claude.messages.create(**{**options, "max_tokens": 4})
    assert more.usage.cache_read_input_tokens > 50


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_response_calls_a_function(client: Any, is_stream: bool) -> None:
    options = {"model": "m", "input": MESSAGES, "tools": FLAT, "extra_body": ONE}
    if is_stream:
        with client.responses.stream(**options) as stream:
            kinds = {event.type for event in stream}
            answer = stream.get_final_response()
        assert "response.function_call_arguments.done" in kinds
    else:
        answer = client.responses.create(**options)
    (call,) = (item for item in answer.output if item.type == "function_call")
    assert json.loads(call.arguments)["days"] == 3
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    more = client.responses.create(
        model="m", previous_response_id=answer.id, input=[output], tools=FLAT, max_output_tokens=4
    )
    assert more.usage.input_tokens_details.cached_tokens > 50


def test_tools_that_a_server_would_run_are_left_out(client: Any, claude: Any) -> None:
    options = {"model": "m", "input": "Hi", "max_output_tokens": 1}
    plain = client.responses.create(**options)
    hosted = [{"type": "web_search"}, {"type": "custom", "name": "apply_patch"}]
    found = client.responses.create(**options, tools=hosted)
    assert (found.tools, found.usage.input_tokens) == ([], plain.usage.input_tokens)
    mixed = client.responses.create(**options, tools=[*FLAT, *hosted])
    assert [one.name for one in mixed.tools] == ["get_weather"]
    messages = {"model": "m", "messages": MESSAGES}
    search = {"type": "web_search_20250305", "name": "web_search"}
    count = claude.messages.count_tokens
    assert count(**messages, tools=[search]) == count(**messages)
    assert count(**messages, tools=[search, *ANTHROPIC]) == count(**messages, tools=ANTHROPIC)


def test_a_prompt_before_reasoning_is_said_to_be_cached(client: Any) -> None:
    options = {"model": "m", "messages": [{"role": "user", "content": "Tell me of Lucy."}]}
    first, second = (client.chat.completions.create(**options, max_tokens=1).usage for _ in "12")
    n, details = first.prompt_tokens, first.prompt_tokens_details
    assert details.cached_tokens + details.cache_write_tokens == n
    assert second.prompt_tokens_details.cached_tokens >= n - 1 > details.cached_tokens


@pytest.mark.parametrize("is_stream", [False, True])
def test_reasoning_is_separate_from_the_answer(client: Any, claude: Any, is_stream: bool) -> None:
    options = {"model": "m", "messages": MESSAGES, "extra_body": THINKS}
    if is_stream:
        deltas = [
            chunk.choices[0].delta
            for chunk in client.chat.completions.create(**options, stream=True)
        ]
        thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        content = "".join(delta.content or "" for delta in deltas)
    else:
        answer = client.chat.completions.create(**options)
        message = answer.choices[0].message
        thought, content = message.reasoning_content, message.content
        assert answer.usage.completion_tokens_details.reasoning_tokens > 0
    assert len(thought.strip()) >= 4
    assert len(content) == 3
    with claude.messages.stream(
        model="m", max_tokens=60, messages=MESSAGES, extra_body=THINKS
    ) as stream:
        blocks = stream.get_final_message().content
    assert [block.type for block in blocks] == ["thinking", "text"]
    found = client.responses.create(model="m", input=MESSAGES, extra_body=THINKS)
    assert [item.type for item in found.output] == ["reasoning", "message"]


def test_each_item_of_a_streamed_response_is_whole_when_the_next_begins(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_one = Generation.pieces

    async def by_character(self: Generation, *, stream: bool) -> AsyncIterator[Piece]:
        assert stream
        async for piece in in_one(self, stream=False):
            for character in piece.text:
                yield Piece(piece.index, character, [])
            yield replace(piece, text="")

    monkeypatch.setattr(Generation, "pieces", by_character)
    options = {"model": "m", "input": MESSAGES, "extra_body": THINKS, "stream": True}
    events = list(client.responses.create(**options))
    done = [one.item for one in events if one.type == "response.output_item.done"]
    assert [(one.type, one.status) for one in done] == [
        ("reasoning", "completed"),
        ("message", "completed"),
    ]
    assert all(one.content[0].text for one in done)
    assert done == events[-1].response.output


def test_a_chain_of_langchain_calls_tools(thinker: str) -> None:
    chat = pytest.importorskip("langchain_openai")
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    @tool
    def get_weather(city: str, days: int) -> str:
        """Weather of a city."""
        return f"sunny for {days} days"

    model = chat.ChatOpenAI(
        base_url=f"{thinker}/v1", api_key="none", model="m", max_retries=0, temperature=0
    )
    asked: list[Any] = [HumanMessage("How is the weather by the sea?")]
    answer = model.bind_tools([get_weather]).invoke(asked, extra_body=ONE)
    (call,) = answer.tool_calls
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    assert result.content == "sunny for 3 days"
    last = model.bind(max_tokens=4).invoke([*asked, answer, result])
    assert last.content
    assert answer.usage_metadata is not None
    assert last.usage_metadata["input_token_details"]["cache_read"] > 0
    text = "".join(chunk.text for chunk in model.bind(max_tokens=4).stream(asked))
    assert text
