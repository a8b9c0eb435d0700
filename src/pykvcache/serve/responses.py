"""OpenAI's responses: a stored response is a conversation that a later request continues."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pykvcache.openai_format import make_id, message_of, token_logprobs
from pykvcache.prefix.stores import BlockStore, Envelope, Rejection, open_store
from pykvcache.sampling import SETTINGS
from pykvcache.serve.answers import Part, Parts, Writer, answer
from pykvcache.serve.engine import Generation, Piece
from pykvcache.serve.errors import ApiError
from pykvcache.serve.http import Json, event, read, tenant_of
from pykvcache.serve.prompts import chat_job
from pykvcache.serve.schemas import ChatRequest, ResponseRequest

log = logging.getLogger("pykvcache.serve")

__all__ = ["Responses", "create_response", "delete_response", "show_response"]


# Stored responses ---------------------------------------------------------------------------------


class Stored(msgspec.Struct):
    """A response, and the conversation up to its end."""

    body: dict[str, Any]
    messages: list[dict[str, Any]]


class Responses:
    """Stored responses by tenant and id, in memory and in the tiers of the cache.

    With tiers they outlive the server, and machines that share a tier share them. The key of a
    response includes the tenant, so other tenants cannot find it.

    Parameters
    ----------
    tiers
        Folders and addresses, as for `PrefixCache`.
    secret
        Encrypts the responses in the tiers.
    max_bytes
        Bytes of memory for the latest responses.
    """

    #: Size of the largest response that is written to the tiers.
    MOST_BYTES = 8 << 20

    def __init__(
        self, tiers: Sequence[Any] = (), secret: str | None = None, max_bytes: int = 64 << 20
    ) -> None:
        self._stores: list[BlockStore] = [open_store(tier) for tier in tiers]
        self._envelope = Envelope(model=b"", layout=b"pykvcache.responses.1", secret=secret)
        self._max_bytes = max_bytes
        self._known: OrderedDict[bytes, bytes] = OrderedDict()
        self.n_bytes = 0
        self._lock = threading.Lock()

    @staticmethod
    def _key(response_id: str, tenant: str) -> bytes:
        names = msgspec.json.encode(["pykvcache.response.1", tenant, response_id])
        return hashlib.sha256(names).digest()

    def add(self, new: Stored, tenant: str) -> None:
        """Store a response."""
        key, data = self._key(new.body["id"], tenant), msgspec.json.encode(new)
        self._remember(key, data)
        if len(data) <= self.MOST_BYTES:
            for store in self._stores:
                store.put([(self._envelope.name(key), self._envelope.seal(key, data))])

    def _remember(self, key: bytes, data: bytes) -> None:
        with self._lock:
            self._known[key] = data
            self.n_bytes += len(data)
            while self.n_bytes > self._max_bytes:
                self.n_bytes -= len(self._known.popitem(last=False)[1])

    def get(self, response_id: str, tenant: str) -> Stored:
        """Return a response.

        Raises
        ------
        ApiError
            404: it is not stored, or belongs to another tenant.
        """
        key = self._key(response_id, tenant)
        data = self._known.get(key) or self._load(key)
        if data is None:
            told = f"the response {response_id!r} is not stored"
            raise ApiError(404, told, param="previous_response_id")
        return msgspec.json.decode(data, type=Stored)

    def _load(self, key: bytes) -> bytes | None:
        name = self._envelope.name(key)
        for store in self._stores:
            if store.contains([name]):
                buffer = bytearray(self.MOST_BYTES + self._envelope.overhead)
                if store.get_into([name], [buffer]):
                    found = self._envelope.open(key, buffer)
                    if not isinstance(found, Rejection):
                        store.touch([name])
                        return bytes(found)
        return None

    def remove(self, response_id: str, tenant: str) -> None:
        """Remove a response."""
        self.get(response_id, tenant)
        key = self._key(response_id, tenant)
        with self._lock:
            self.n_bytes -= len(self._known.pop(key, b""))
        for store in self._stores:
            store.discard([self._envelope.name(key)])

    def close(self) -> None:
        """Close the stores."""
        for store in self._stores:
            store.close()


def _stored(http: Request) -> Responses:
    found: Responses = http.app.state.responses
    return found


async def create_response(http: Request) -> Response:
    """``POST /v1/responses``."""
    request, tenant = read(http, ResponseRequest), tenant_of(http)
    before: list[dict[str, Any]] = []
    if request.previous_response_id is not None:
        stored = await asyncio.to_thread(_stored(http).get, request.previous_response_id, tenant)
        before = stored.messages
    asked = [*before, *messages_of(request)]
    job = partial(chat_job, as_chat(request, asked), tenant)

    def store(body: dict[str, Any], message: dict[str, Any]) -> None:
        _stored(http).add(Stored(body, [*asked, message]), tenant)

    writer = partial(_ResponseWriter, request, store)
    return await answer(http, request.model, job, writer, is_stream=request.stream)


async def show_response(http: Request) -> Response:
    """``GET /v1/responses/{id}``."""
    get = _stored(http).get
    return Json((await asyncio.to_thread(get, http.path_params["id"], tenant_of(http))).body)


async def delete_response(http: Request) -> Response:
    """``DELETE /v1/responses/{id}``."""
    response_id = http.path_params["id"]
    await asyncio.to_thread(_stored(http).remove, response_id, tenant_of(http))
    return Json({"id": response_id, "object": "response", "deleted": True})


# In -----------------------------------------------------------------------------------------------


def messages_of(request: ResponseRequest) -> list[dict[str, Any]]:
    """Return the new messages of a request, in the form of chat completions."""
    if isinstance(request.input, str):
        return [{"role": "user", "content": request.input}]
    found: list[dict[str, Any]] = []
    for i, item in enumerate(request.input):
        kind = item.get("type", "message")
        if kind == "message":
            found.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if found and found[-1].get("tool_calls"):
                found[-1]["tool_calls"].append(call)
            else:
                found.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif kind == "function_call_output":
            output = item.get("output", "")
            found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        elif kind != "reasoning":
            told = f"input[{i}] is of type {kind!r}: this server reads text and tools"
            raise ApiError(400, told, param="input")
    return found


def as_chat(request: ResponseRequest, messages: list[dict[str, Any]]) -> ChatRequest:
    """Return the same request in the form of chat completions."""
    head = [{"role": "system", "content": request.instructions}] if request.instructions else []
    form = (request.text or {}).get("format") or {}
    choice = request.tool_choice
    if isinstance(choice, dict) and "name" in choice:
        choice = {"type": "function", "function": {"name": choice["name"]}}
    return ChatRequest(
        messages=[*head, *messages],
        model=request.model,
        **{name: getattr(request, name) for name in SETTINGS},
        max_tokens=request.max_output_tokens,
        logprobs=request.logprobs,
        top_logprobs=request.top_logprobs,
        tools=_tools(request.tools or []) or None,
        tool_choice=choice,
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=form or None,
        reasoning_effort=(request.reasoning or {}).get("effort"),
        chat_template_kwargs=request.chat_template_kwargs,
        seed=request.seed,
        grammar=request.grammar,
        cache_prompt=request.cache_prompt,
        prompt_cache_options=request.prompt_cache_options,
        prompt_cache_retention=request.prompt_cache_retention,
        add_generation_prompt=True,
    )


def _tools(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the functions in the form of chat completions.

    Other tools are left out: agents declare those that a server runs, such as ``web_search``, in
    every request.
    """
    found = []
    for tool in given:
        if tool.get("type") != "function":
            log.debug("left out a tool of type %r", tool.get("type"))
            continue
        keys = ("name", "description", "parameters", "strict")
        function = {key: tool[key] for key in keys if tool.get(key) is not None}
        found.append({"type": "function", "function": function})
    return found


# Out ----------------------------------------------------------------------------------------------


class _ResponseWriter(Writer):
    """A response, whole or as events."""

    def __init__(
        self,
        request: ResponseRequest,
        store: Callable[[dict[str, Any], dict[str, Any]], None],
        generation: Generation,
    ) -> None:
        super().__init__(generation)
        self._request, self._store = request, store
        self._parts = Parts()
        self._n_events = 0
        self._state: dict[str, Any] = {"status": "in_progress"}
        self._id, self._created = make_id("resp_"), int(time.time())
        self._logprobs: dict[int, list[Any]] = {}  # by index of the part
        self._waiting: list[Any] = []  # of tokens whose text is not sent yet

    def write(self, piece: Piece) -> Iterator[bytes]:
        if not self._n_events:
            yield self._event("response.created", response=self.body())
            yield self._event("response.in_progress", response=self.body())
        if self._request.logprobs:
            model, top = self.generation.engine.llm.model, self._request.top_logprobs
            self._waiting += token_logprobs(model, piece.tokens, piece.logprobs, top)
        is_end = piece.finish_reason is not None
        if piece.finish_reason == "stop":
            self._state = {"status": "completed", "completed_at": int(time.time())}
        elif is_end:
            details = {"reason": "max_output_tokens"}
            self._state = {"status": "incomplete", "incomplete_details": details}
        for what, part, text in self._parts.split(self.deltas(piece), is_end=is_end):
            yield from getattr(self, f"_{what}")(part, text)

    async def keep(self) -> None:
        if self._request.store:
            message = message_of(self.streams[0].message)
            await asyncio.to_thread(self._store, self.body(), message)

    def finish(self) -> Iterator[bytes]:
        kind, timings = f"response.{self._state['status']}", self.generation.timings()
        yield self._event(kind, response=self.body(), timings=timings)

    def _event(self, kind: str, **data: Any) -> bytes:
        found = event({"type": kind, "sequence_number": self._n_events, **data}, kind)
        self._n_events += 1
        return found

    def _open(self, part: Part, _: str) -> Iterator[bytes]:
        item = self._item(part, "in_progress")
        yield self._event("response.output_item.added", output_index=part.index, item=item)
        if part.kind == "text":
            text = _output_text("", [])
            yield self._event("response.content_part.added", **_place(part), part=text)

    def _more(self, part: Part, text: str) -> Iterator[bytes]:
        new, self._waiting = self._waiting, []
        more: dict[str, Any] = {"logprobs": new} if part.kind == "text" else {}
        self._logprobs[part.index] = self._logprobs.get(part.index, []) + new
        yield self._event(f"response.{_NAMES[part.kind]}.delta", **_place(part), delta=text, **more)

    def _close(self, part: Part, _: str) -> Iterator[bytes]:
        done: dict[str, Any] = {"text": part.text}
        if part.kind == "call":
            done = {"name": part.name, "arguments": part.text}
        elif part.kind == "text":
            done["logprobs"] = self._logprobs.get(part.index, [])
        yield self._event(f"response.{_NAMES[part.kind]}.done", **_place(part), **done)
        if part.kind == "text":
            text = _output_text(part.text, done["logprobs"])
            yield self._event("response.content_part.done", **_place(part), part=text)
        item = self._item(part, self._status(part))
        yield self._event("response.output_item.done", output_index=part.index, item=item)

    def _status(self, part: Part) -> str:
        """Return how a part ended: only the last one can be cut."""
        is_last = part is self._parts.all[-1]
        return str(self._state["status"]) if is_last else "completed"

    def _item(self, part: Part, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": part.id, "status": status}
        is_over = status != "in_progress"
        if part.kind == "call":
            arguments = part.text if is_over else ""
            facts = {"call_id": part.call_id, "name": part.name, "arguments": arguments}
            return {**item, "type": "function_call", **facts}
        if part.kind == "reasoning":
            content = [{"type": "reasoning_text", "text": part.text}] if is_over else []
            return {**item, "type": "reasoning", "summary": [], "content": content}
        logprobs = self._logprobs.get(part.index, [])
        content = [_output_text(part.text, logprobs)] if is_over else []
        return {**item, "type": "message", "role": "assistant", "content": content}

    def body(self) -> dict[str, Any]:
        request = self._request
        is_over = self._state["status"] != "in_progress"
        defaults = self.generation.engine.defaults.sampling
        sampling = {name: getattr(request, name) for name in _SHOWN}
        for name, value in sampling.items():
            if value is None:
                sampling[name] = defaults.get(name, SETTINGS[name].default)
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "metadata": request.metadata or {},
            "model": self.generation.engine.name,
            "output": [self._item(part, self._status(part)) for part in self._parts.all],
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": request.previous_response_id,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None, **(request.reasoning or {})},
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "store": request.store,
            "text": {"format": {"type": "text"}, **(request.text or {})},
            "tool_choice": request.tool_choice or "auto",
            "tools": [
                _FUNCTION | one for one in request.tools or () if one.get("type") == "function"
            ],
            "top_logprobs": request.top_logprobs,
            "truncation": request.truncation or "disabled",
            "user": request.user,
            **sampling,
            "usage": self._usage() if is_over else None,
            **self._state,
        }

    def _usage(self) -> dict[str, Any]:
        generation, usage = self.generation, self.usage()
        hours = generation.n_written(least_ttl=43_200)
        details = {
            **usage["prompt_tokens_details"],
            "cache_write_tokens_details": {
                "ttl_30m_tokens": usage["prompt_tokens_details"]["cache_write_tokens"] - hours,
                "ttl_12h_tokens": hours,
            },
        }
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": details,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }


#: Settings that an answer repeats.
_SHOWN = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
#: Members that every function of an answer has.
_FUNCTION = {"description": None, "parameters": None, "strict": None}
_NAMES = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}


def _place(part: Part) -> dict[str, Any]:
    place = {"item_id": part.id, "output_index": part.index}
    return place if part.kind == "call" else {**place, "content_index": 0}


def _output_text(text: str, logprobs: list[Any]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
