"""Anthropic's endpoints: messages and count_tokens."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pykvcache.openai_format import make_id
from pykvcache.serve.answers import Part, Parts, Writer, answer
from pykvcache.serve.engine import Generation, Piece
from pykvcache.serve.errors import ApiError
from pykvcache.serve.http import Json, event, models_of, read, tenant_of
from pykvcache.serve.prompts import MOST_BREAKPOINTS, chat_job
from pykvcache.serve.schemas import AnthropicRequest, ChatRequest, OutputConfig

__all__ = ["Diagnoses", "count_tokens", "messages"]

_STOPS = {"length": "max_tokens", "full": "model_context_window_exceeded"}
_CHOICES = {None: None, "auto": "auto", "any": "required", "none": "none"}


async def messages(http: Request) -> Response:
    """``POST /v1/messages``."""
    request = read(http, AnthropicRequest)
    if request.max_tokens is None:
        raise ApiError(400, "max_tokens is missing", param="max_tokens")
    job = partial(chat_job, as_chat(request), tenant_of(http))
    writer = partial(_MessageWriter, request, http.app.state.diagnoses)
    return await answer(http, request.model, job, writer, is_stream=request.stream)


async def count_tokens(http: Request) -> Response:
    """``POST /v1/messages/count_tokens``."""
    request = read(http, AnthropicRequest)
    async with models_of(http).engine(request.model) as engine:
        job = await asyncio.to_thread(chat_job, as_chat(request), tenant_of(http), engine)
    return Json({"input_tokens": len(job.prompts[0])})


# In -----------------------------------------------------------------------------------------------


def as_chat(request: AnthropicRequest) -> ChatRequest:
    """Return the same request in OpenAI's form.

    Raises
    ------
    ApiError
        400: content that this server cannot read, or more breakpoints than Anthropic allows.
    """
    found: list[dict[str, Any]] = []
    if request.system:
        found.append({"role": "system", "content": _texts(request.system, "system")})
    for i, message in enumerate(request.messages):
        found += _messages(message, f"messages[{i}]")
    # Without the tools that Anthropic's servers run, or whose schemas its models know.
    tools = [one for one in request.tools or [] if one.get("type") in (None, "custom")]
    marks = [tool["cache_control"] for tool in tools if tool.get("cache_control")]
    if marks and found[:1] and found[0]["role"] == "system":
        # Templates write tools around the system prompt, so both end together.
        found[0].setdefault("cache_control", _mark(marks[-1]))
    if request.cache_control and found:
        found[-1]["cache_control"] = _mark(request.cache_control)
    n = sum(_n_breakpoints(one) for one in (request.system, request.messages, tools))
    if n > MOST_BREAKPOINTS:
        told = f"{n} blocks have cache_control: at most {MOST_BREAKPOINTS}"
        raise ApiError(400, told, param="messages")
    thinking = (request.thinking or {}).get("type")
    thinks = {} if thinking is None else {"enable_thinking": thinking != "disabled"}
    choice, output = request.tool_choice or {}, request.output_config or OutputConfig()
    return ChatRequest(
        messages=found,
        model=request.model,
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        stop=request.stop_sequences,
        tools=[_tool(tool) for tool in tools] or None,
        tool_choice=_tool_choice(choice),
        response_format=output.format or request.output_format,
        reasoning_effort=output.effort,
        parallel_tool_calls=not choice.get("disable_parallel_tool_use", False),
        chat_template_kwargs={**thinks, **(request.chat_template_kwargs or {})},
        seed=request.seed,
        grammar=request.grammar,
        cache_prompt=request.cache_prompt,
    )


def _n_breakpoints(thing: Any) -> int:
    if isinstance(thing, list):
        return sum(map(_n_breakpoints, thing))
    if isinstance(thing, dict):
        return bool(thing.get("cache_control")) + _n_breakpoints(thing.get("content"))
    return 0


def _texts(content: Any, where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    parts = []
    for block in content if isinstance(content, list) else [content]:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind != "text" or not isinstance(block.get("text"), str):
            what = "image input is not supported: " if kind == "image" else ""
            told = f"{what}{where} has a block of type {kind!r}, but this server reads only text"
            raise ApiError(400, told, param=where)
        part = {"type": "text", "text": block["text"]}
        # Anthropic's default is 5 minutes.
        if mark := block.get("cache_control"):
            part["cache_control"] = _mark(mark)
        parts.append(part)
    return parts


def _mark(given: Any) -> dict[str, Any]:
    return {"ttl": "5m", **given} if isinstance(given, dict) else {"ttl": given}


def _messages(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Return an Anthropic message as OpenAI's, where each tool result is a message of its own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        told = f"{where}.role is {role!r}: it must be 'user' or 'assistant'"
        raise ApiError(400, told, param=f"{where}.role")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        told = f"{where}.content must be text, or a list of blocks"
        raise ApiError(400, told, param=f"{where}.content")
    new: dict[str, Any] = {"role": role, "content": []}
    results: list[dict[str, Any]] = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            call = {"id": block.get("id"), "type": "function", "function": function}
            new.setdefault("tool_calls", []).append(call)
        elif kind == "tool_result":
            text = _texts(block.get("content") or "", where)
            results.append(
                {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}
            )
        elif kind == "thinking":
            new["reasoning_content"] = new.get("reasoning_content", "") + block.get("thinking", "")
        elif kind != "redacted_thinking":
            new["content"] += _texts([block], where)
        if kind in ("tool_use", "tool_result") and block.get("cache_control"):
            (results[-1] if kind == "tool_result" else new)["cache_control"] = _mark(
                block["cache_control"]
            )
    is_empty = not new["content"] and len(new) == 2
    return results if results and is_empty else [*results, new]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(tool.get("name"), str):
        raise ApiError(400, "a tool has no name", param="tools")
    function = {
        "name": tool["name"],
        "description": tool.get("description", ""),
        "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


def _tool_choice(choice: dict[str, Any]) -> str | dict[str, Any] | None:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str | None) or kind not in _CHOICES:
        told = f"tool_choice.type is {kind!r}: it must be 'auto', 'any', 'tool' or 'none'"
        raise ApiError(400, told, param="tool_choice")
    return _CHOICES[kind]


# Cache diagnostics -----------------------------------------------------------------------


@dataclass(frozen=True)
class Fingerprint:
    """Digests of a request's parts, to compare with those of a later one."""

    tenant: str
    model: str
    system: bytes
    tools: bytes
    n_messages: int
    messages: bytes
    n_tokens: int

    @classmethod
    def of(cls, request: AnthropicRequest, generation: Generation) -> Fingerprint:
        """Return the fingerprint of a request."""
        return cls(
            generation.job.namespace,
            generation.engine.name,
            _digest(request.system),
            _digest(request.tools),
            len(request.messages),
            _digest(request.messages),
            len(generation.job.prompts[0]),
        )


def _digest(thing: Any) -> bytes:
    """Return a digest of a part of a request; breakpoints make no difference."""

    def plain(thing: Any) -> Any:
        if isinstance(thing, dict):
            return {key: plain(value) for key, value in thing.items() if key != "cache_control"}
        return [plain(one) for one in thing] if isinstance(thing, list) else thing

    return hashlib.sha256(json.dumps(plain(thing), sort_keys=True).encode()).digest()


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

    def why(
        self, previous: str, new: Fingerprint, request: AnthropicRequest, n_cached: int
    ) -> dict[str, Any] | None:
        """Return ``cache_miss_reason``; None if the request continues the previous one.

        Parameters
        ----------
        previous
            ``diagnostics.previous_message_id``.
        new, request
            The present request.
        n_cached
            Tokens of its prompt that came from the cache.
        """
        old = self._known.get(previous)
        if old is None or old.tenant != new.tenant:
            return {"type": "previous_message_not_found"}
        missed = max(old.n_tokens - n_cached, 0)
        for kind in ("model", "system", "tools"):
            if getattr(old, kind) != getattr(new, kind):
                return {"type": f"{kind}_changed", "cache_missed_input_tokens": missed}
        if _digest(request.messages[: old.n_messages]) != old.messages:
            return {"type": "messages_changed", "cache_missed_input_tokens": missed}
        return None


# Out ----------------------------------------------------------------------------------------------


class _MessageWriter(Writer):
    """A message, whole or as events."""

    def __init__(
        self, request: AnthropicRequest, diagnoses: Diagnoses, generation: Generation
    ) -> None:
        super().__init__(generation)
        self._parts = Parts()
        self._stop: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self._head = {
            "id": make_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": generation.engine.name,
        }
        self._request, self._diagnoses = request, diagnoses
        self._is_begun = False

    def write(self, piece: Piece) -> Iterator[bytes]:
        if not self._is_begun:
            self._is_begun = True
            self._diagnose()
            yield self._event("message_start", message=self.body())
        is_end = piece.finish_reason is not None
        for what, part, text in self._parts.split(self.deltas(piece), is_end=is_end):
            if what == "open":
                block = _block(part)
                yield self._event("content_block_start", index=part.index, content_block=block)
            elif what == "more":
                yield self._event("content_block_delta", index=part.index, delta=_more(part, text))
            else:
                if part.kind == "reasoning":
                    signature = {"type": "signature_delta", "signature": ""}
                    yield self._event("content_block_delta", index=part.index, delta=signature)
                yield self._event("content_block_stop", index=part.index)
        if is_end:
            by = self.generation.stopped_by(0)
            reason = _STOPS.get(piece.finish_reason or "", "end_turn")
            if by not in (self._request.stop_sequences or ()):
                by = None  # the template's own mark
            reason = "tool_use" if self.streams[0].has_calls and reason == "end_turn" else reason
            self._stop = {
                "stop_reason": reason if by is None else "stop_sequence",
                "stop_sequence": by,
            }

    def finish(self) -> Iterator[bytes]:
        yield self._event("message_delta", delta=self._stop, usage=self._usage())
        yield self._event("message_stop")

    def body(self) -> dict[str, Any]:
        content = [_block(part, is_whole=True) for part in self._parts.all]
        return {**self._head, "content": content, **self._stop, "usage": self._usage()}

    def _event(self, kind: str, **data: Any) -> bytes:
        return event({"type": kind, **data}, kind)

    def _diagnose(self) -> None:
        """Say why the previous request is not a prefix of this one."""
        new = Fingerprint.of(self._request, self.generation)
        previous = (self._request.diagnostics or {}).get("previous_message_id")
        why = None
        if isinstance(previous, str):
            cached = self.generation.n_cached
            why = self._diagnoses.why(previous, new, self._request, cached)
        self._head["diagnostics"] = None if why is None else {"cache_miss_reason": why}  # type: ignore[assignment]
        self._diagnoses.add(self._head["id"], new)

    def _usage(self) -> dict[str, Any]:
        generation = self.generation
        written = generation.n_written()
        long = generation.n_written(least_ttl=3600)
        return {
            "input_tokens": generation.reuse.evaluated - written,
            "cache_read_input_tokens": generation.n_cached,
            "cache_creation_input_tokens": written,
            "cache_creation": {
                "ephemeral_5m_input_tokens": written - long,
                "ephemeral_1h_input_tokens": long,
            },
            "output_tokens": generation.n_generated,
        }


def _block(part: Part, *, is_whole: bool = False) -> dict[str, Any]:
    text = part.text if is_whole else ""
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    if part.kind == "text":
        return {"type": "text", "text": text}
    try:
        arguments = json.loads(text or "{}")
    except ValueError:  # the answer was cut
        arguments = {}
    return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": arguments}


def _more(part: Part, text: str) -> dict[str, Any]:
    if part.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": text}
    if part.kind == "text":
        return {"type": "text_delta", "text": text}
    return {"type": "input_json_delta", "partial_json": text}
