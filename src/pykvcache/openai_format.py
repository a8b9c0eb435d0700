"""OpenAI's objects as plain dicts, for `LLM.create_chat_completion` and the server."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from pykvcache.chat_format import ChatFormat, ChatMessage
from pykvcache.errors import ArgumentError, ChatParseError
from pykvcache.model import LlamaModel
from pykvcache.prefix.report import ReuseReport

#: ``system_fingerprint``; clients of llama-server expect a leading b.
FINGERPRINT = "b-pykvcache-0.1.0"


def make_id(prefix: str) -> str:
    """Return a new id, such as ``chatcmpl-...``."""
    return f"{prefix}{secrets.token_urlsafe(18)}"


def head(prefix: str, kind: str, model: str) -> dict[str, Any]:
    """Return the members that all answers have."""
    return {
        "id": make_id(prefix),
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": FINGERPRINT,
    }


def finish_reason(reason: str | None, *, has_calls: bool = False) -> str | None:
    """Return OpenAI's ``finish_reason``; a full context and a time limit are "length"."""
    if reason == "stop" and has_calls:
        return "tool_calls"
    return {"full": "length", "aborted": "length"}.get(reason or "", reason)


def usage_of(reuse: ReuseReport, n_new: int, keep: int | None = None) -> dict[str, Any]:
    """Return ``usage``: cached tokens of the prompt are those that were not evaluated.

    `keep` is the number of the prompt's first tokens that the cache may keep; None for all.
    """
    n = reuse.n_tokens
    cached = n - reuse.evaluated
    kept = n - reuse.unshared if keep is None else min(keep, n - reuse.unshared)
    return {
        "prompt_tokens": n,
        "completion_tokens": n_new,
        "total_tokens": n + n_new,
        "prompt_tokens_details": {
            "cached_tokens": cached,
            "cache_write_tokens": max(kept - cached, 0),
        },
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def schema_of(response_format: Mapping[str, Any] | None) -> Any:
    """Return the JSON schema of ``response_format``; None for unconstrained text."""
    wish = {} if response_format is None else response_format
    kind: Any = wish
    if isinstance(wish, Mapping):
        kind = wish.get("type", "text")
        if kind == "text":
            return None
        if kind == "json_object":
            schema = wish.get("schema")
            return {"type": "object"} if schema in (None, {}) else schema
        # In Responses and in Anthropic's API, the schema is in the format itself.
        given = wish.get("json_schema", wish) if kind == "json_schema" else None
        if isinstance(given, Mapping) and isinstance(given.get("schema"), Mapping):
            return given["schema"]
    raise ArgumentError(
        f"response_format has type {kind!r}: use 'text', 'json_object', or 'json_schema' with a "
        "schema",
        "response_format",
        kind,
    )


# Log probabilities --------------------------------------------------------------------------------


def token_logprobs(
    model: LlamaModel, tokens: Sequence[int], rows: Sequence[dict[int, float]], top: int
) -> list[dict[str, Any]]:
    """Return ``logprobs.content`` of chat completions, with the `top` likeliest of each row."""

    def entry(token: int, value: float) -> dict[str, Any]:
        piece = model.token_to_piece(token)
        text = piece.decode("utf-8", "replace")
        return {"id": token, "token": text, "bytes": list(piece), "logprob": value}

    found = []
    for token, row in zip(tokens, rows, strict=False):
        ranked = sorted(row.items(), key=lambda pair: -pair[1])[:top]
        found.append({**entry(token, row[token]), "top_logprobs": [entry(*one) for one in ranked]})
    return found


def text_logprobs(
    model: LlamaModel,
    tokens: Sequence[int],
    rows: Sequence[dict[int, float]],
    offset: int,
    top: int,
    n_prompt: int = 0,
) -> dict[str, Any]:
    """Return ``logprobs`` of completions: parallel lists.

    The first `n_prompt` tokens are the prompt's, of which the very first has no row, and `offset`
    is that of the text after them. Each row shows its `top` likeliest tokens and the chosen one.
    """

    def text(token: int) -> str:
        return model.token_to_piece(token).decode("utf-8", "replace")

    texts = [text(token) for token in tokens]
    ends = [0, *accumulate(map(len, texts))]
    n_first = 1 if n_prompt else 0
    first: list[Any] = [None] * n_first
    pairs = list(zip(tokens[n_first:], rows, strict=False))
    return {
        "tokens": texts,
        "token_logprobs": first + [row[token] for token, row in pairs],
        "top_logprobs": first
        + [{text(t): row[t] for t in (*list(row)[:top], token)} for token, row in pairs],
        # The prompt's text can lack a space that its first token has.
        "text_offset": [max(0, offset + end - ends[n_prompt]) for end in ends[:-1]],
    }


# Chat answers -------------------------------------------------------------------------------------


def parse_answer(form: ChatFormat, text: str, *, partial: bool = False) -> ChatMessage:
    """Parse a text into a message; in a complete message every call gets an id.

    A text that cannot be parsed becomes content.
    """
    try:
        found = form.parse(text, partial=partial)
    except ChatParseError:
        return ChatMessage(text)
    if partial:
        return found
    calls = tuple(replace(call, id=call.id or make_id("call_")) for call in found.tool_calls)
    return replace(found, tool_calls=calls)


def message_of(found: ChatMessage) -> dict[str, Any]:
    """Return the members of ``message``."""
    message: dict[str, Any] = {"role": "assistant", "content": found.content, "refusal": None}
    if found.reasoning:
        message["reasoning_content"] = found.reasoning
    if found.tool_calls:
        message["content"] = found.content or None
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments_json},
            }
            for call in found.tool_calls
        ]
    return message


@dataclass(frozen=True)
class CallDelta:
    """New part of a tool call; ``is_first`` at its start."""

    index: int
    id: str
    name: str
    arguments: str
    is_first: bool


@dataclass(frozen=True)
class Delta:
    """New part of a message: content, reasoning, or a part of a call."""

    content: str = ""
    reasoning: str = ""
    call: CallDelta | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the ``delta`` of a chunk."""
        if self.call is None:
            if self.reasoning:
                return {"reasoning_content": self.reasoning}
            return {"content": self.content}
        call = self.call
        entry: dict[str, Any] = {"index": call.index, "function": {"arguments": call.arguments}}
        if call.is_first:
            entry.update(id=call.id, type="function")
            entry["function"]["name"] = call.name
        return {"tool_calls": [entry]}


class ChatStream:
    """Converts the text of an answer to deltas as it is generated."""

    def __init__(self, form: ChatFormat) -> None:
        self._form = form
        self._text = ""
        self._shown = ChatMessage("")
        self._ids: list[str] = []

    @property
    def has_calls(self) -> bool:
        """Whether the message has a tool call so far."""
        return bool(self._shown.tool_calls)

    @property
    def message(self) -> ChatMessage:
        """The message so far."""
        return self._shown

    def feed(self, text: str, *, is_end: bool = False, is_cut: bool = False) -> list[Delta]:
        """Add text, with special tokens; return the deltas that are now certain.

        If the answer `is_cut`, an unfinished call is kept as it is.
        """
        self._text += text
        if not text and not is_end:
            return []
        old, new = self._shown, parse_answer(self._form, self._text, partial=not is_end)
        if is_cut and not new.tool_calls:
            begun = parse_answer(self._form, self._text, partial=True)
            new = begun if begun.tool_calls else new
        found = []
        if len(new.reasoning) > len(old.reasoning):
            found.append(Delta(reasoning=new.reasoning[len(old.reasoning) :]))
        if len(new.content) > len(old.content):
            found.append(Delta(content=new.content[len(old.content) :]))
        calls = []
        for i, call in enumerate(new.tool_calls):
            is_first = i == len(self._ids)
            if is_first:
                self._ids.append(call.id or make_id("call_"))
            calls.append(replace(call, id=self._ids[i]))
            seen = 0 if i >= len(old.tool_calls) else len(old.tool_calls[i].arguments_json)
            if is_first or len(call.arguments_json) > seen:
                part = call.arguments_json[seen:]
                found.append(Delta(call=CallDelta(i, self._ids[i], call.name, part, is_first)))
        self._shown = replace(new, tool_calls=tuple(calls))
        return found
