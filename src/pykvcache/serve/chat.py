"""A chat request as a job of the engine, and its output as content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pykvcache.chat_format import ChatFormat
from pykvcache.errors import ChatParseError
from pykvcache.serve.answers import make_id, sampler_of
from pykvcache.serve.engine import Engine, Job, Piece
from pykvcache.serve.errors import ApiError
from pykvcache.serve.prompts import chat_prompt
from pykvcache.serve.schemas import ChatRequest

__all__ = ["ChatJob", "Delta", "ParsedMessage", "StreamParser", "ToolCall", "chat_job"]


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool; ``arguments`` is JSON text."""

    id: str
    name: str
    arguments: str
    index: int = 0

    def as_openai(self) -> dict[str, Any]:
        """Return the member of ``tool_calls``."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True)
class ParsedMessage:
    """What the assistant said."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def as_openai(self) -> dict[str, Any]:
        """Return the members of ``message``."""
        found: dict[str, Any] = {
            "content": self.content if self.content or not self.tool_calls else None
        }
        if self.reasoning:
            found["reasoning_content"] = self.reasoning
        if self.tool_calls:
            found["tool_calls"] = [call.as_openai() for call in self.tool_calls]
        return found


@dataclass(frozen=True)
class Delta:
    """What is new of a message: some content, some reasoning, or a part of one call."""

    content: str = ""
    reasoning: str = ""
    call: ToolCall | None = None
    is_first_of_call: bool = False

    def as_openai(self) -> dict[str, Any]:
        """Return the ``delta`` of a chunk."""
        if self.call is not None:
            function: dict[str, Any] = {"arguments": self.call.arguments}
            entry: dict[str, Any] = {"index": self.call.index, "function": function}
            if self.is_first_of_call:
                function["name"] = self.call.name
                entry.update(id=self.call.id, type="function")
            return {"tool_calls": [entry]}
        return (
            {"reasoning_content": self.reasoning} if self.reasoning else {"content": self.content}
        )


class StreamParser:
    """Turns the tokens of an answer into deltas as they come."""

    def __init__(self, chat: ChatJob) -> None:
        self._chat = chat
        self._text = ""
        self._shown = ParsedMessage()
        self._ids: list[str] = []

    @property
    def has_calls(self) -> bool:
        """Whether a tool was called so far."""
        return bool(self._shown.tool_calls)

    def feed(self, piece: Piece) -> list[Delta]:
        """Take what is new of a sample; return what is certain now."""
        self._text += piece.raw
        is_end = piece.finish_reason is not None
        if not piece.raw and not is_end:
            return []
        return self._advance(self._chat.parse(self._text, partial=not is_end))

    def _advance(self, new: ParsedMessage) -> list[Delta]:
        old, found = self._shown, list[Delta]()
        if len(new.reasoning) > len(old.reasoning):
            found.append(Delta(reasoning=new.reasoning[len(old.reasoning) :]))
        if len(new.content) > len(old.content):
            found.append(Delta(content=new.content[len(old.content) :]))
        for i, call in enumerate(new.tool_calls):
            if i == len(old.tool_calls):
                self._ids.append(call.id)
                part = ToolCall(call.id, call.name, call.arguments, i)
                found.append(Delta(call=part, is_first_of_call=True))
            elif len(call.arguments) > len(old.tool_calls[i].arguments):
                new_part = call.arguments[len(old.tool_calls[i].arguments) :]
                found.append(Delta(call=ToolCall(self._ids[i], call.name, new_part, i)))
        self._shown = new
        return found


@dataclass(frozen=True)
class ChatJob:
    """A chat that is ready to run, and how its output is read.

    Attributes
    ----------
    job
        For the engine.
    format
        How the model writes reasoning and tool calls.
    """

    job: Job
    format: ChatFormat

    def parse(self, text: str, *, partial: bool = False) -> ParsedMessage:
        """Return content, reasoning and calls of an output, or of its beginning.

        What the model wrote wrongly is content: the client sees it.
        """
        try:
            found = self.format.parse(text, partial=partial)
        except ChatParseError:
            return ParsedMessage(text)
        calls = tuple(
            ToolCall(call.id or make_id("call_"), call.name, call.arguments_json, i)
            for i, call in enumerate(found.tool_calls)
        )
        return ParsedMessage(found.content, found.reasoning, calls)


def chat_job(request: ChatRequest, engine: Engine, tenant: str) -> ChatJob:
    """Return what the engine runs for a chat request.

    Raises
    ------
    ApiError
        400: the messages, tools or formats are not what they should be.
    """
    if request.add_generation_prompt and request.continue_final_message:
        raise ApiError(400, "add_generation_prompt and continue_final_message exclude each other")
    model = engine.llm.model
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
    tools = None if request.tool_choice == "none" else request.tools
    continues = request.continue_final_message or (
        request.add_generation_prompt is None
        and request.messages[-1:] != []
        and request.messages[-1].get("role") == "assistant"
    )
    prompt = chat_prompt(
        model,
        request.messages,
        tools=tools,
        ttl=request.cache_ttl,
        continues=continues,
        variables=variables,
    )
    schema = _schema(request.response_format)
    form = model.chat_format(
        tools=tools,
        tool_choice=request.tool_choice or "auto",  # type: ignore[arg-type]
        parallel_tool_calls=request.parallel_tool_calls,
        json_schema=request.json_schema if schema is None else schema,
        strict=False,
        **variables,
    )
    request.json_schema = None  # the format has it
    more = {} if form.grammar is None or request.grammar is not None else {"chat_format": form}
    job = Job(
        tokens=prompt.tokens,
        max_tokens=request.limit,
        sampler=sampler_of(request, model, **more),
        n=request.n,
        stop=(*request.stops, *form.stop),
        logprobs=max(request.top_logprobs or 0, 1) if request.logprobs else 0,
        namespace=tenant,
        use_cache=request.cache_prompt,
        boundaries=prompt.boundaries,
        breakpoints=prompt.breakpoints,
    )
    return ChatJob(job, form)


def _schema(wish: Mapping[str, Any] | None) -> Any:
    """Return the JSON schema of ``response_format``; None where any text will do."""
    kind = (wish or {}).get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return (wish or {}).get("schema", {"type": "object"})
    if kind == "json_schema":
        given = (wish or {}).get("json_schema")
        if isinstance(given, Mapping) and isinstance(given.get("schema"), Mapping | bool):
            return given["schema"]
        raise ApiError(400, "response_format.json_schema has no schema", param="response_format")
    raise ApiError(
        400,
        f"response_format.type is {kind!r}: 'text', 'json_object' or 'json_schema'",
        param="response_format",
    )
