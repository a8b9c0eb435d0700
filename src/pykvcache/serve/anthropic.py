"""Anthropic's endpoints: messages and count_tokens."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.responses import Response

from pykvcache.chat_format import ChatMessage
from pykvcache.openai_format import ChatStream, Delta, make_id, parse_answer
from pykvcache.serve.answers import event
from pykvcache.serve.chat import ChatJob, chat_job
from pykvcache.serve.engine import Generation, Piece
from pykvcache.serve.errors import ApiError
from pykvcache.serve.http import Json, body_of, models_of, stream, tenant_of
from pykvcache.serve.schemas import AnthropicRequest, ChatRequest, read

__all__ = ["Diagnoses", "count_tokens", "messages"]

_STOPS = {
    "length": "max_tokens",
    "full": "model_context_window_exceeded",
    "stop": "end_turn",
    "aborted": "end_turn",
}


# In -----------------------------------------------------------------------------------------------


def as_chat(request: AnthropicRequest) -> ChatRequest:
    """Return the same request in OpenAI's form.

    Raises
    ------
    ApiError
        400: content that this server cannot read.
    """
    found: list[dict[str, Any]] = []
    if request.system:
        found.append({"role": "system", "content": _text_parts(request.system, "system")})
    for i, message in enumerate(request.messages):
        found += _messages(message, f"messages[{i}]")
    if request.cache_control and found:
        found[-1] = {**found[-1], "cache_control": request.cache_control}
    thinking = (request.thinking or {}).get("type")
    return ChatRequest(
        messages=found,
        model=request.model,
        max_tokens=request.max_tokens,
        stream=request.stream,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        stop=request.stop_sequences,
        tools=[_tool(tool) for tool in request.tools] if request.tools else None,
        tool_choice=_tool_choice(request.tool_choice),
        parallel_tool_calls=not (request.tool_choice or {}).get("disable_parallel_tool_use", False),
        chat_template_kwargs=None
        if thinking is None
        else {"enable_thinking": thinking != "disabled"},
        continue_final_message=bool(found) and found[-1]["role"] == "assistant",
    )


def _text_parts(content: Any, where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    parts = []
    for block in content:
        if (
            not isinstance(block, dict)
            or block.get("type") != "text"
            or not isinstance(block.get("text"), str)
        ):
            raise ApiError(400, f"{where} has a block that is no text", param=where)
        parts.append({key: block[key] for key in ("type", "text", "cache_control") if key in block})
    return parts


def _messages(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Return an Anthropic message as one or more of OpenAI's: results of tools are their own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise ApiError(
            400, f"{where}.role is {role!r}: 'user' or 'assistant'", param=f"{where}.role"
        )
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise ApiError(
            400, f"{where}.content is text, or a list of blocks", param=f"{where}.content"
        )
    texts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    thinking = ""
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            parts = _text_parts([block], where)
            texts += parts if isinstance(parts, list) else []
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            given = block.get("content") or ""
            text = _text_parts(given, where)
            result = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}
            if "cache_control" in block:
                result["cache_control"] = block["cache_control"]
            results.append(result)
        elif kind == "thinking":
            thinking += block.get("thinking", "")
        elif kind != "redacted_thinking":
            raise ApiError(
                400,
                f"{where} has a block of type {kind!r}: this server reads text and tools",
                param=where,
            )
    found = results
    if texts or calls or thinking or not results:
        new: dict[str, Any] = {"role": role, "content": texts or ""}
        if calls:
            new["tool_calls"] = calls
        if thinking:
            new["reasoning_content"] = thinking
        found.append(new)
    return found


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(tool.get("name"), str):
        raise ApiError(400, "a tool has no name", param="tools")
    function = {
        "name": tool["name"],
        "description": tool.get("description", ""),
        "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


def _tool_choice(choice: dict[str, Any] | None) -> str | dict[str, Any] | None:
    kind = (choice or {}).get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": (choice or {}).get("name")}}
    found = {None: None, "auto": "auto", "any": "required", "none": "none"}
    if kind not in found:
        raise ApiError(
            400,
            f"tool_choice.type is {kind!r}: 'auto', 'any', 'tool' or 'none'",
            param="tool_choice",
        )
    return found[kind]


# Why a prompt was not known -----------------------------------------------------------------------


@dataclass(frozen=True)
class Fingerprint:
    """What a request consisted of, to compare a later one with."""

    tenant: str
    model: str
    system: bytes
    tools: bytes
    messages: list[bytes]
    tokens: npt.NDArray[np.int32]

    @classmethod
    def of(cls, request: AnthropicRequest, name: str, chat: ChatJob) -> Fingerprint:
        """Return that of a request."""
        messages = [_digest(message) for message in request.messages]
        system, tools = _digest(request.system), _digest(request.tools)
        return cls(chat.job.namespace, name, system, tools, messages, chat.job.tokens)


def _digest(thing: Any) -> bytes:
    """Return a digest of what a part of a request says, wherever it sets breakpoints."""
    return hashlib.sha256(json.dumps(_without_breakpoints(thing), sort_keys=True).encode()).digest()


def _without_breakpoints(thing: Any) -> Any:
    if isinstance(thing, dict):
        return {k: _without_breakpoints(v) for k, v in thing.items() if k != "cache_control"}
    return [_without_breakpoints(one) for one in thing] if isinstance(thing, list) else thing


class Diagnoses:
    """Fingerprints of the last answers, by message id."""

    def __init__(self, most: int = 1024) -> None:
        self._most = most
        self._known: OrderedDict[str, Fingerprint] = OrderedDict()

    def add(self, message_id: str, new: Fingerprint) -> None:
        """Remember a request."""
        self._known[message_id] = new
        while len(self._known) > self._most:
            self._known.popitem(last=False)

    def why(self, previous: str, new: Fingerprint, cached: int) -> dict[str, Any] | None:
        """Return ``cache_miss_reason``; None where the prefix of the previous request was reused.

        Parameters
        ----------
        previous
            ``diagnostics.previous_message_id``.
        new
            The request that is answered.
        cached
            Tokens of it that were not evaluated.
        """
        old = self._known.get(previous)
        if old is None or old.tenant != new.tenant:
            return {"type": "previous_message_not_found"}
        missed = max(len(old.tokens) - cached, 0)
        for kind in ("model", "system", "tools"):
            if getattr(old, kind) != getattr(new, kind):
                return {"type": f"{kind}_changed", "cache_missed_input_tokens": missed}
        if new.messages[: len(old.messages)] != old.messages:
            return {"type": "messages_changed", "cache_missed_input_tokens": missed}
        return None


# Out ----------------------------------------------------------------------------------------------


def _usage(generation: Generation, new: int) -> dict[str, Any]:
    reuse = generation.reuse
    cached = reuse.n_tokens - reuse.evaluated
    written = sum(place.n_tokens for place in generation.job.breakpoints[-1:])
    written = max(min(written - cached, reuse.evaluated), 0)
    return {
        "input_tokens": reuse.evaluated - written,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": written,
        "output_tokens": new,
    }


def _blocks(message: ChatMessage) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.content or not (message.reasoning or message.tool_calls):
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        block = {"type": "tool_use", "id": call.id, "name": call.name}
        blocks.append({**block, "input": call.arguments or {}})
    return blocks


def _stop(generation: Generation, piece: Piece, has_calls: bool) -> dict[str, Any]:
    by = generation.stopped_by(piece.index)
    if by is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": by}
    reason = "tool_use" if has_calls else _STOPS.get(piece.finish_reason or "", "end_turn")
    return {"stop_reason": reason, "stop_sequence": None}


async def messages(http: Request) -> Response:
    """``POST /v1/messages``."""
    request = read(await body_of(http), AnthropicRequest)
    if request.max_tokens is None:
        raise ApiError(400, "max_tokens is missing", param="max_tokens")
    name = models_of(http).resolve(request.model)
    if request.stream:
        return await stream(http, _stream(http, request, name))
    async with models_of(http).engine(name) as engine:
        chat = chat_job(as_chat(request), engine, tenant_of(http))
        async with engine.generate(chat.job) as generation:
            (piece,) = await generation.whole()
            message = parse_answer(chat.format, piece.raw)
            answer = {
                **_start(http, request, name, chat, generation),
                "content": _blocks(message),
                **_stop(generation, piece, bool(message.tool_calls)),
                "usage": _usage(generation, len(piece.tokens)),
            }
            http.state.log = (generation.reuse, generation.n_generated)
    return Json(answer)


def _start(
    http: Request, request: AnthropicRequest, name: str, chat: ChatJob, generation: Generation
) -> dict[str, Any]:
    message_id = make_id("msg_")
    known: Diagnoses = http.app.state.diagnoses
    new = Fingerprint.of(request, name, chat)
    diagnostics = None
    previous = (request.diagnostics or {}).get("previous_message_id")
    if isinstance(previous, str):
        reuse = generation.reuse
        reason = known.why(previous, new, reuse.n_tokens - reuse.evaluated)
        diagnostics = None if reason is None else {"cache_miss_reason": reason}
    known.add(message_id, new)
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": name,
        "diagnostics": diagnostics,
    }


async def _stream(http: Request, request: AnthropicRequest, name: str) -> AsyncIterator[bytes]:
    async with models_of(http).engine(name) as engine:
        chat = chat_job(as_chat(request), engine, tenant_of(http))
        async with engine.generate(chat.job) as generation:
            parser = ChatStream(chat.format)
            blocks = _BlockWriter()
            is_first = True
            async for piece in generation:
                if is_first:
                    start = _start(http, request, name, chat, generation)
                    empty: dict[str, Any] = {
                        "content": [],
                        "stop_reason": None,
                        "stop_sequence": None,
                    }
                    yield event(
                        {
                            "type": "message_start",
                            "message": {**start, **empty, "usage": _usage(generation, 0)},
                        },
                        "message_start",
                    )
                    is_first = False
                deltas = parser.feed(piece.raw, is_end=piece.finish_reason is not None)
                for delta in deltas:
                    for one in blocks.write(delta):
                        yield one
                if piece.finish_reason:
                    for one in blocks.end():
                        yield one
                    stop = _stop(generation, piece, parser.has_calls)
                    usage = _usage(generation, generation.n_generated)
                    yield event(
                        {"type": "message_delta", "delta": stop, "usage": usage}, "message_delta"
                    )
            http.state.log = (generation.reuse, generation.n_generated)
    yield event({"type": "message_stop"}, "message_stop")


class _BlockWriter:
    """Writes deltas as content blocks: one open block at a time."""

    def __init__(self) -> None:
        self._index = -1
        self._open: tuple[str, int] | None = None  # the kind of the open block, and of which call

    def write(self, delta: Delta) -> list[bytes]:
        """Return the events of one delta."""
        found: list[bytes] = []
        if delta.reasoning:
            found += self._turn_to(
                ("thinking", 0), {"type": "thinking", "thinking": "", "signature": ""}
            )
            found.append(self._delta({"type": "thinking_delta", "thinking": delta.reasoning}))
        if delta.content:
            found += self._turn_to(("text", 0), {"type": "text", "text": ""})
            found.append(self._delta({"type": "text_delta", "text": delta.content}))
        call = delta.call
        if call is not None:
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            found += self._turn_to(("tool_use", call.index), block)
            if call.arguments:
                found.append(
                    self._delta({"type": "input_json_delta", "partial_json": call.arguments})
                )
        return found

    def end(self) -> list[bytes]:
        """Return the events that end the last block; an answer without any gets an empty one."""
        found = [] if self._index >= 0 else self._turn_to(("text", 0), {"type": "text", "text": ""})
        found.append(self._stop())
        return found

    def _turn_to(self, kind: tuple[str, int], block: dict[str, Any]) -> list[bytes]:
        if self._open == kind:
            return []
        found = [self._stop()] if self._open is not None else []
        self._open = kind
        self._index += 1
        data = {"type": "content_block_start", "index": self._index, "content_block": block}
        return [*found, event(data, "content_block_start")]

    def _delta(self, delta: dict[str, Any]) -> bytes:
        data = {"type": "content_block_delta", "index": self._index, "delta": delta}
        return event(data, "content_block_delta")

    def _stop(self) -> bytes:
        return event({"type": "content_block_stop", "index": self._index}, "content_block_stop")


async def count_tokens(http: Request) -> Response:
    """``POST /v1/messages/count_tokens``."""
    request = read(await body_of(http), AnthropicRequest)
    name = models_of(http).resolve(request.model)
    async with models_of(http).engine(name) as engine:
        return Json(
            {"input_tokens": len(chat_job(as_chat(request), engine, tenant_of(http)).job.tokens)}
        )
