"""Chat formats: content, reasoning and tool calls out of a text, and the grammars of them.

The answers are written by hand, in the formats of the templates that come with llama.cpp: another
llama.cpp has to read them, too.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pykvcache import LlamaModel, Sampler
from pykvcache.errors import (
    ArgumentError,
    ChatParseError,
    ChatTemplateError,
    GrammarError,
    UnsupportedOperation,
)
from support.chat_formats import (
    ANSWERS,
    CLOCK,
    TEMPLATES,
    TOOLS,
    Answer,
    needs_templates,
    source,
)
from support.children import child

pytest.importorskip("jinja2")


def format_of(vocab: LlamaModel, answer: Answer, **more: Any) -> Any:
    return vocab.chat_format(
        tools=TOOLS, template=source(answer.template), **answer.variables, **more
    )


@needs_templates
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_and_each_of_its_beginnings_is_parsed(vocab: LlamaModel, name: str) -> None:
    """Content and reasoning only grow, and no call disappears."""
    answer, form = ANSWERS[name], format_of(vocab, ANSWERS[name])
    message = form.parse(answer.text)
    assert message.content.strip() == answer.content
    assert message.reasoning.strip() == answer.reasoning
    assert tuple((one.name, one.arguments) for one in message.tool_calls) == answer.calls
    content = reasoning = ""
    n_calls = 0
    for i in range(len(answer.text) + 1):
        message = form.parse(answer.text[:i], partial=True)
        assert message.content.startswith(content.rstrip())
        assert message.reasoning.startswith(reasoning.rstrip())
        assert len(message.tool_calls) >= n_calls
        content, reasoning, n_calls = message.content, message.reasoning, len(message.tool_calls)


@needs_templates
@pytest.mark.parametrize("name", [name for name, one in ANSWERS.items() if one.calls])
def test_the_grammar_of_required_calls_allows_the_answer(vocab: LlamaModel, name: str) -> None:
    answer = ANSWERS[name]
    form = format_of(vocab, answer, tool_choice="required")
    assert form.grammar is not None
    assert form.triggers is None
    if answer.content:
        return
    sampler = Sampler(chat_format=form, model=vocab)
    for _ in range(2):
        for token in vocab.tokenize(answer.text, add_special=False):
            sampler.accept(token, grammar=True)
        sampler.reset()
    logits = np.zeros(vocab.native.n_vocab, np.float32)
    logits[vocab.token_eos] = 10  # an answer must have a call
    assert Sampler(temperature=0, chat_format=form, model=vocab).sample(logits) != vocab.token_eos


PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


HERMES = "Qwen-Qwen2.5-7B-Instruct"


@pytest.fixture(scope="module")
def hermes(vocab: LlamaModel) -> Callable[..., Any]:
    """``hermes(...)``: the format of Qwen 2.5 with two tools."""

    def form(**more: Any) -> Any:
        return vocab.chat_format(tools=TOOLS, template=source(HERMES), **more)

    return form


def call(arguments: str, name: str = "get_weather") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_without_tools_all_is_content(vocab: LlamaModel) -> None:
    message = vocab.parse_chat('A {"name": "f"} 漢字 😀\n', template=PLAIN)
    assert message.content.strip() == 'A {"name": "f"} 漢字 😀'
    assert (message.reasoning, message.tool_calls) == ("", ())
    assert vocab.parse_chat("", template=PLAIN).content == ""


@needs_templates
def test_tokens_are_read_with_the_token_that_ends_them(vocab: LlamaModel) -> None:
    text = call('{"place": "Paris"}')
    tokens = [*vocab.tokenize(text, add_special=False), vocab.token_eos]
    for given in (
        tokens,
        text,
        text + vocab.token_to_piece(vocab.token_eos, special=True).decode(),
    ):
        (one,) = vocab.parse_chat(given, tools=TOOLS, template=source(HERMES)).tool_calls
        assert (one.name, one.arguments) == ("get_weather", {"place": "Paris"})


@needs_templates
def test_a_message_goes_back_into_the_template(vocab: LlamaModel, hermes: Any) -> None:
    given = hermes().parse("I look.\n" + call('{"place": "Paris"}')).to_dict()
    assert given["tool_calls"][0]["function"] == {
        "name": "get_weather",
        "arguments": {"place": "Paris"},
    }
    text = vocab.apply_chat_template(
        [{"role": "user", "content": "Hi"}, given],
        template=source(HERMES),
        tools=TOOLS,
        add_generation_prompt=False,
    )
    assert call('{"place": "Paris"}') in text


@needs_templates
@pytest.mark.parametrize(
    ("text", "why"),
    [
        (call('{"days": 3}'), "lacks 'place'"),
        (call('{"place": 3}'), "place must be of type string, but is 3"),
        (call('{"place": "Paris", "days": 1.5}'), "days must be of type integer"),
        (call('{"place": "Paris"'), "not a message"),
        (call('{"place": Paris}'), "not a message"),
        (call("[]"), "lacks 'place'|not a JSON object|not a message"),
        (call('{"place": "Paris"}', "get_rain"), "not a message|get_rain"),
    ],
)
def test_wrong_arguments_are_an_error_with_the_text(hermes: Any, text: str, why: str) -> None:
    with pytest.raises(ChatParseError, match=why) as caught:
        hermes().parse(text)
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert (error.text, str(error)) == (text, str(caught.value))
    assert hermes().parse(text, partial=True).content == ""


def sampled(sampler: Sampler, vocab: LlamaModel, text: str) -> bool:
    """Tell whether a sampler chooses each token of a text where it is the likeliest."""
    for token in vocab.tokenize(text, add_special=False):
        logits = np.zeros(vocab.native.n_vocab, np.float32)
        logits[token] = 10
        if sampler.sample(logits) != token:
            return False
    return True


def allows(vocab: LlamaModel, form: Any, text: str) -> bool:
    return sampled(Sampler(temperature=0, chat_format=form, model=vocab), vocab, text)


ONE, OTHER = call('{"place": "Rome"}'), call('{"zone": "CET"}', "clock")
TWO = f"{ONE}\n{ONE}"
BY_NAME = {"type": "function", "function": {"name": "get_weather"}}


@needs_templates
@pytest.mark.parametrize(
    ("options", "allowed", "refused", "calls"),
    [
        # A lazy grammar begins at the call.
        ({}, ['Any text {"at": all} <tool_', f"I look. {ONE}"], ['I look. <tool_call>\n{"x'], 2),
        ({}, [ONE, TWO], ["I look. " + call('{"town": "Paris"}')], 2),
        ({"parallel_tool_calls": False}, [ONE], [TWO], 1),
        # A required call comes first, and one by name alone.
        ({"tool_choice": "required"}, [f"{ONE}\n{OTHER}", TWO], [f"I look. {ONE}"], 2),
        ({"tool_choice": "required", "parallel_tool_calls": False}, [ONE], [TWO], 1),
        ({"tool_choice": BY_NAME}, [ONE], [OTHER, TWO], 1),
    ],
)
def test_a_grammar_allows_the_calls_that_were_chosen(
    vocab: LlamaModel, hermes: Any, options: Any, allowed: list[str], refused: list[str], calls: int
) -> None:
    form = hermes(**options)
    assert bool(form.triggers) == ("tool_choice" not in options)
    assert [allows(vocab, form, text) for text in allowed] == [True] * len(allowed)
    assert [allows(vocab, form, text) for text in refused] == [False] * len(refused)
    found = form.parse(TWO).tool_calls
    assert [one.arguments for one in found] == [{"place": "Rome"}] * calls


@needs_templates
def test_a_call_of_tool_choice_none_is_text(hermes: Any) -> None:
    form = hermes(tool_choice="none")
    assert form.grammar is None
    message = form.parse(ONE)
    assert message.tool_calls == ()
    assert "get_weather" in message.content


@needs_templates
def test_a_copy_is_as_far_in_the_call(vocab: LlamaModel, hermes: Any) -> None:
    one = Sampler(temperature=0, chat_format=hermes(), model=vocab)
    assert sampled(one, vocab, "I look. <tool_call>\n")
    copied = one.clone()
    assert not sampled(one, vocab, "nonsense")
    assert sampled(copied, vocab, '{"name": "clock", "arguments": {"zone"')
    one.reset()
    assert sampled(one, vocab, "nonsense")


@needs_templates
def test_a_schema_holds_the_content_after_the_reasoning(vocab: LlamaModel) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    form = vocab.chat_format(json_schema=schema, template=source("Qwen-Qwen3-0.6B"))
    text = '<think>\nHow many?\n</think>\n\n{"n": 3}'
    assert allows(vocab, form, text)
    assert not allows(vocab, form, "<think>\n?\n</think>\n\nThree")
    message = form.parse(text)
    assert (message.reasoning.strip(), message.content.strip()) == ("How many?", '{"n": 3}')


@pytest.mark.parametrize(
    ("more", "error", "why"),
    [
        ({"tools": [{"name": "f"}]}, ArgumentError, r"tools\[0\] must be"),
        ({"tools": [{"type": "function", "function": {}}]}, ArgumentError, "has no 'name'"),
        ({"tools": [CLOCK, CLOCK]}, ArgumentError, "two tools named 'clock'"),
        ({"tools": [CLOCK], "tool_choice": "some"}, ArgumentError, "tool_choice is 'some'"),
        (
            {"tools": [CLOCK], "tool_choice": {"function": {"name": "f"}}},
            ArgumentError,
            "tool_choice is 'f'",
        ),
        ({"tool_choice": "required"}, ArgumentError, "there are no tools"),
        ({"tools": [CLOCK], "tool_choice": "required"}, UnsupportedOperation, "no tool calls"),
        ({"tools": [CLOCK], "json_schema": {}}, ArgumentError, "without tools"),
        ({"json_schema": {"type": "number", "minimum": 0}}, GrammarError, "minimum"),
        ({"json_schema": 5}, GrammarError, "not a JSON schema"),
        ({"template": "{{ raise_exception('no') }}"}, ChatTemplateError, "no"),
        ({"template": "{% for"}, ChatTemplateError, "template"),
        (
            {"template": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"},
            ChatTemplateError,
            "ecursion",
        ),
        ({"template": 5}, TypeError, "template must be text"),
        ({"x": object()}, TypeError, "plain data"),
        ({"strict": 1}, TypeError, "strict"),
    ],
)
def test_wrong_arguments_are_refused(
    vocab: LlamaModel, more: dict[str, Any], error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        vocab.chat_format(**{"template": PLAIN, **more})


def test_a_sampler_takes_one_grammar(vocab: LlamaModel) -> None:
    form = vocab.chat_format(template=PLAIN)
    with pytest.raises(ArgumentError, match="json_schema and chat_format"):
        Sampler(json_schema={}, chat_format=form, model=vocab)
    with pytest.raises(ArgumentError, match="needs model"):
        Sampler(chat_format=form)
    with pytest.raises(TypeError, match="chat_format must be a ChatFormat"):
        Sampler(chat_format="json", model=vocab)  # type: ignore[arg-type]
    assert Sampler(chat_format=form, model=vocab).logprobs  # no grammar: the model is free


# In a child with a small stack, and of a thread's, which ends the process where it overflows.
DEEP = """
import sys, threading
from pathlib import Path
from pykvcache import LlamaModel, embedded_model_path
from pykvcache.errors import ChatParseError
from support.chat_formats import TOOLS
model = LlamaModel(embedded_model_path(), vocab_only=True)
def run():
    for name, begin in {
        "Qwen-Qwen2.5-7B-Instruct": '<tool_call>\\n{"name": "get_weather", "arguments": {"place": ',
        "mistralai-Mistral-Nemo-Instruct-2407": "[TOOL_CALLS]",
        "LFM2.5-8B-A1B": "<|tool_call_start|>[get_weather(place=",
        "google-gemma-4-31B-it": "<|tool_call>call:get_weather{place:",
        "Qwen3-Coder": "<tool_call>\\n<function=get_weather>\\n<parameter=days>\\n",
    }.items():
        template = (Path(sys.argv[1]) / f"{name}.jinja").read_text(encoding="utf-8")
        form = model.chat_format(tools=TOOLS, template=template)
        for inside in ("[", '{"a":', '["]",', '[{"a": [', "{a:["):
            for n in (4000, 100000):
                for partial in (True, False):
                    try:
                        form.parse(begin + inside * n, partial=partial)
                    except ChatParseError:
                        pass
    print("alive")
threading.stack_size(1 << 20)
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""


@needs_templates
def test_no_nesting_ends_the_process() -> None:
    done = child(DEEP, TEMPLATES)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr[-1000:]
