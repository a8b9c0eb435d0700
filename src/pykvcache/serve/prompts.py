"""From messages to tokens: the rendered chat, where its messages end, and what to pin."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pykvcache.model import LlamaModel
from pykvcache.serve.errors import ApiError
from pykvcache.serve.schemas import seconds

__all__ = ["Breakpoint", "ChatPrompt", "chat_prompt", "common_prefix", "plain_text"]

# Characters of Unicode's private area mark where content ends; they are taken out again.
_MARK = "\ue4f1\ue4f2"
_PIN = "\ue4f3"

#: Breakpoints that one request may set, as OpenAI and Anthropic have it.
MOST_BREAKPOINTS = 4


@dataclass(frozen=True)
class Breakpoint:
    """A prefix to keep: the first ``n_tokens`` tokens, for ``ttl`` seconds."""

    n_tokens: int
    ttl: float


@dataclass(frozen=True)
class ChatPrompt:
    """The tokens of a conversation.

    Attributes
    ----------
    text
        As the template rendered it.
    tokens
        int32, shape (n,).
    boundaries
        Numbers of tokens after which a message ends.
    breakpoints
        Prefixes that the client wants kept.
    """

    text: str
    tokens: npt.NDArray[np.int32]
    boundaries: tuple[int, ...]
    breakpoints: tuple[Breakpoint, ...]


def plain_text(content: Any, where: str) -> str:
    """Return the text of a message's content: a string, or parts of text."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, list):
        raise ApiError(
            400, f"{where} is {type(content).__name__}: text, or a list of parts", param=where
        )
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text", "refusal") or not isinstance(
            text, str
        ):
            raise ApiError(
                400,
                f"{where} has a part of type {kind!r}: this server reads text only",
                param=where,
            )
        texts.append(text)
    return "\n\n".join(texts)


def chat_prompt(
    model: LlamaModel,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    ttl: float | None = None,
    continues: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> ChatPrompt:
    """Render a conversation and find where its messages end.

    Parameters
    ----------
    model
        Whose template and tokenizer.
    messages
        In OpenAI's form.
    tools
        In OpenAI's form.
    ttl
        Seconds for breakpoints that name none; default: 5 minutes.
    continues
        The last message is the assistant's, and the answer goes on from it.
    variables
        What else the template reads, such as ``enable_thinking``.
    """
    if not messages:
        raise ApiError(400, "messages is empty", param="messages")
    marked = [_message(message, i, mark=True) for i, message in enumerate(messages)]
    pins = [ttl_ for i, m in enumerate(messages) for ttl_ in _pins(m, i, ttl)]
    if len(pins) > MOST_BREAKPOINTS:
        raise ApiError(
            400,
            f"{len(pins)} breakpoints: at most {MOST_BREAKPOINTS} in a request",
            param="messages",
        )
    if continues:
        last = marked[-1]
        if last.get("role") != "assistant":
            raise ApiError(400, "the last message is not the assistant's", param="messages")
    rendered = model.apply_chat_template(
        marked, tools=tools, add_generation_prompt=not continues, **dict(variables or {})
    )
    if continues:
        rendered = rendered[: rendered.rindex(_MARK) + len(_MARK)]
    text, ends, pinned = _take_marks(rendered)
    tokens = model.tokenize(text, add_special=False, parse_special=True)
    boundaries = sorted({_n_tokens(model, text[:end], tokens) for end in ends} - {0})
    places = [_n_tokens(model, text[:end], tokens) for end in pinned]
    breakpoints = tuple(Breakpoint(n, t) for n, t in zip(places, pins, strict=False) if n)
    return ChatPrompt(text, tokens, tuple(boundaries), breakpoints)


def _message(message: Mapping[str, Any], i: int, *, mark: bool) -> dict[str, Any]:
    """Return a message as templates take it: text as content, arguments of calls as objects."""
    where = f"messages[{i}]"
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ApiError(400, f"{where} has no role", param=f"{where}.role")
    new = {
        key: value
        for key, value in message.items()
        if key not in ("cache_control", "prompt_cache_breakpoint")
    }
    new["role"] = "system" if role == "developer" else role
    content = message.get("content")
    if content is None and not message.get("tool_calls") and not message.get("reasoning_content"):
        raise ApiError(400, f"{where} has no content", param=f"{where}.content")
    if isinstance(content, list) and any(_is_pin(part) for part in content):
        text = "\n\n".join(
            plain_text([part], f"{where}.content") + (_PIN if _is_pin(part) else "")
            for part in content
        )
    else:
        text = plain_text(content, f"{where}.content")
    if _is_pin(message):
        text += _PIN
    new["content"] = text + (_MARK if mark else "")
    if message.get("tool_calls"):
        new["tool_calls"] = [_call(call, where) for call in message["tool_calls"]]
    return new


def _is_pin(thing: Any) -> bool:
    return isinstance(thing, Mapping) and bool(
        thing.get("prompt_cache_breakpoint") or thing.get("cache_control")
    )


def _pins(message: Mapping[str, Any], i: int, ttl: float | None) -> list[float]:
    """Return how long each breakpoint of a message is kept, in the order of the text."""
    content = message.get("content")
    things = [*(content if isinstance(content, list) else []), message]
    found = []
    for thing in things:
        if _is_pin(thing):
            wish = thing.get("prompt_cache_breakpoint") or thing.get("cache_control")
            if not isinstance(wish, Mapping):
                raise ApiError(400, "a breakpoint is an object", param=f"messages[{i}]")
            found.append(seconds(wish["ttl"]) if "ttl" in wish else ttl or 300.0)
    return found


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ApiError(400, f"{where}.tool_calls: each has a function with a name", param=where)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except ValueError:
            parsed = arguments
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _take_marks(rendered: str) -> tuple[str, list[int], list[int]]:
    """Return the text without marks, and where those of messages and of breakpoints stood."""
    parts: list[str] = []
    ends: list[int] = []
    pins: list[int] = []
    n = 0
    for i, piece in enumerate(rendered.split(_MARK)):
        if i:
            ends.append(n)
        for k, part in enumerate(piece.split(_PIN)):
            if k:
                pins.append(n)
            parts.append(part)
            n += len(part)
    return "".join(parts), ends, pins


def _n_tokens(model: LlamaModel, text: str, tokens: npt.NDArray[np.int32]) -> int:
    """Return how many tokens lie before a place in the text; a token across it does not count."""
    return common_prefix(model.tokenize(text, add_special=False, parse_special=True), tokens)


def common_prefix(one: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int:
    """Return how many leading tokens are equal."""
    n = min(len(one), len(other))
    differ = np.flatnonzero(one[:n] != other[:n])
    return int(differ[0]) if len(differ) else n
