"""Chat templates, rendered as in transformers; needs Jinja2."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from pykvcache._arguments import as_bool
from pykvcache.errors import ArgumentError, ChatTemplateError, how_to_install

try:
    from jinja2 import nodes
    from jinja2.ext import Extension, LoopControlExtension
    from jinja2.parser import Parser
    from jinja2.runtime import Macro
    from jinja2.sandbox import ImmutableSandboxedEnvironment
except ImportError:
    raise ImportError(
        f"chat templates need Jinja2 3.1.6 or newer: {how_to_install('chat')}"
    ) from None

if TYPE_CHECKING:
    from pykvcache._native import lib

__all__ = ["plain", "render", "special_token_texts"]

#: Maximum nesting of messages, tools and variables.
MAX_DEPTH = 100
#: Maximum length of a template's message in an exception.
MAX_MESSAGE = 1000
# Keys of a message's reasoning; transformers reads the first one present.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Without any of these keys most templates render an empty turn.
_CONTENT = ("content", "tool_calls", *_REASONING)


class _Refused(Exception):
    """The template called ``raise_exception``."""


class GenerationTag(Extension):
    """``{% generation %}``: marks the assistant's text; its content is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 - as declared by Jinja

    def parse(self, parser: Parser) -> nodes.Node:
        """Read up to ``{% endgeneration %}``; a variable set inside is local to the block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("render_body"), [], [], body).set_lineno(line)

    def render_body(self, caller: Macro) -> str:
        """Return the text of the block."""
        return caller()


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON; unlike Jinja's filter it does not escape HTML characters."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message: object = "") -> NoReturn:
    """Refuse the messages with the template's message."""
    raise _Refused(str(message)[:MAX_MESSAGE])


def strftime_now(format: str) -> str:
    """Return the local date or time."""
    return datetime.now().strftime(format)


_environment = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, LoopControlExtension]
)
_environment.filters["tojson"] = tojson
_environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
_compiled = lru_cache(maxsize=16)(_environment.from_string)


def plain(value: object, name: str, depth: int = 0) -> Any:
    """Return a copy with JSON types only."""
    if depth > MAX_DEPTH:
        raise ArgumentError(f"{name} is nested deeper than {MAX_DEPTH}", name, depth, MAX_DEPTH)
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):  # str() of an enum member would be its name
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {
            plain(key, name, depth + 1): plain(one, name, depth + 1) for key, one in value.items()
        }
    if isinstance(value, (list, tuple)):
        items = [plain(one, name, depth + 1) for one in value]
        return items if isinstance(value, list) else tuple(items)
    raise TypeError(f"{name} holds a {type(value).__name__}: a chat template reads plain data")


def _plain_list(values: object, name: str, content: str) -> list[dict[Any, Any]]:
    is_sequence = isinstance(values, Sequence) and not isinstance(values, (str, bytes))
    if not is_sequence or not all(isinstance(one, Mapping) for one in values):  # type: ignore[attr-defined]
        raise TypeError(f"{name} must be a sequence of mappings with {content}")
    return [plain(one, name) for one in values]  # type: ignore[attr-defined]


def _message(given: dict[Any, Any], name: str) -> dict[Any, Any]:
    """Return a message without empty keys, and with its reasoning under each known key."""
    message = {key: value for key, value in given.items() if value is not None}
    known = ", ".join(map(repr, message))[:200] or "none"
    if "role" not in message:
        raise ArgumentError(f"{name} has no 'role': its keys are {known}", name, list(message))
    if not isinstance(message["role"], str):
        kind = type(message["role"]).__name__
        raise TypeError(f"the 'role' of {name} must be a str, not {kind}")
    if not any(key in message for key in _CONTENT):
        raise ArgumentError(
            f"{name} has neither 'content' nor 'tool_calls': its keys are {known}",
            name,
            list(message),
        )
    found = [message[key] for key in _REASONING if key in message]
    if not found:
        return message
    return {"thinking": found[0], **message, "reasoning_content": found[0]}


def special_token_texts(model: lib.Model) -> dict[str, str]:
    """Return the texts of a model's special tokens by template variable."""
    bos, eos, _, sep, _, pad, mask, _ = model.special_tokens()
    number = model.metadata.get("tokenizer.ggml.unknown_token_id", "")
    unk = int(number) if number.isdecimal() and int(number) < model.n_vocab else -1
    found = {"bos": bos, "eos": eos, "unk": unk, "sep": sep, "pad": pad, "mask": mask}
    return {
        f"{name}_token": model.token_to_piece(token, True).decode("utf-8", "replace")
        for name, token in found.items()
        if token >= 0
    }


def render(
    template: str, given: Mapping[str, object], variables: Mapping[str, object], generate: bool
) -> str:
    """Render a template with messages, tools, documents and variables."""
    messages = _plain_list(given["messages"], "messages", "'role' and 'content'")
    values: dict[str, object] = {
        "messages": [_message(one, f"messages[{i}]") for i, one in enumerate(messages)],
        "add_generation_prompt": as_bool(generate, "add_generation_prompt"),
    }
    for name, content in (("tools", "a JSON schema each"), ("documents", "'title' and 'text'")):
        one = given[name]
        values[name] = None if one is None else _plain_list(one, name, content)
    values.update(plain(variables, "a variable"))
    try:
        return _compiled(template).render(values)
    except _Refused as error:
        raise ChatTemplateError(
            "refused", f"the chat template refused the messages: {error}"
        ) from None
    except Exception as error:  # a template is a program and may raise anything
        text = f"{type(error).__name__}: {str(error)[:MAX_MESSAGE]}"
        raise ChatTemplateError("error", f"the chat template cannot be rendered: {text}") from error
