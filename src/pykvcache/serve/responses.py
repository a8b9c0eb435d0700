"""OpenAI's responses: a stored response is a conversation that a later request goes on with."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pykvcache.chat_format import ChatMessage
from pykvcache.openai_format import ChatStream, Delta, make_id, message_of, parse_answer
from pykvcache.serve.answers import event
from pykvcache.serve.chat import chat_job
from pykvcache.serve.engine import Generation, Piece
from pykvcache.serve.errors import ApiError
from pykvcache.serve.http import Json, body_of, models_of, stream, tenant_of
from pykvcache.serve.schemas import ChatRequest, ResponseRequest, read

__all__ = ["StoredResponses", "create_response", "delete_response", "show_response"]


@dataclass(frozen=True)
class Stored:
    """A response, and the conversation up to its end."""

    tenant: str
    body: dict[str, Any]
    messages: list[dict[str, Any]]


class StoredResponses:
    """The last responses by id; each tenant finds its own only."""

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._known: OrderedDict[str, Stored] = OrderedDict()

    def add(self, new: Stored) -> None:
        """Remember a response; the oldest is forgotten."""
        self._known[new.body["id"]] = new
        while len(self._known) > self._most:
            self._known.popitem(last=False)

    def get(self, response_id: str, tenant: str) -> Stored:
        """Return a response.

        Raises
        ------
        ApiError
            404: it is not stored, or another tenant's.
        """
        found = self._known.get(response_id)
        if found is None or found.tenant != tenant:
            raise ApiError(
                404, f"the response {response_id!r} is not stored", param="previous_response_id"
            )
        return found

    def remove(self, response_id: str, tenant: str) -> None:
        """Forget a response."""
        self.get(response_id, tenant)
        del self._known[response_id]


def _stored(http: Request) -> StoredResponses:
    found: StoredResponses = http.app.state.responses
    return found


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
            found.append(
                {
                    "role": "tool",
                    "tool_call_id": item.get("call_id"),
                    "content": item.get("output", ""),
                }
            )
        elif kind != "reasoning":
            raise ApiError(
                400,
                f"input[{i}] is of type {kind!r}: this server reads text and tools",
                param="input",
            )
    return found


def as_chat(request: ResponseRequest, before: list[dict[str, Any]]) -> ChatRequest:
    """Return the same request in the form of chat completions."""
    head = [{"role": "system", "content": request.instructions}] if request.instructions else []
    form = (request.text or {}).get("format") or {}
    wish = None
    if form.get("type") == "json_schema":
        wish = {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
    elif form.get("type") == "json_object":
        wish = {"type": "json_object"}
    choice = request.tool_choice
    if isinstance(choice, dict) and "name" in choice:
        choice = {"type": "function", "function": {"name": choice["name"]}}
    return ChatRequest(
        messages=[*head, *before, *messages_of(request)],
        model=request.model,
        stream=request.stream,
        temperature=request.temperature,
        top_p=request.top_p,
        max_tokens=request.max_output_tokens,
        tools=[_tool(tool) for tool in request.tools] if request.tools else None,
        tool_choice=choice,
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=wish,
        reasoning_effort=(request.reasoning or {}).get("effort"),
        prompt_cache_key=request.prompt_cache_key,
        prompt_cache_options=request.prompt_cache_options,
        prompt_cache_retention=request.prompt_cache_retention,
    )


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise ApiError(400, "tools: this server knows functions only", param="tools")
    keys = ("name", "description", "parameters", "strict")
    return {
        "type": "function",
        "function": {key: tool[key] for key in keys if tool.get(key) is not None},
    }


# Out ----------------------------------------------------------------------------------------------


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _message_item(item_id: str, text: str, status: str = "completed") -> dict[str, Any]:
    content = [_text_part(text)] if status == "completed" else []
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": content,
    }


def _reasoning_item(item_id: str, text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": item_id, "type": "reasoning", "summary": [], "content": content}


def _call_item(
    item_id: str, call_id: str | None, name: str, arguments: str, status: str = "completed"
) -> dict[str, Any]:
    return {
        "id": item_id,
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": status,
    }


def _items(message: ChatMessage) -> list[dict[str, Any]]:
    found = []
    if message.reasoning:
        found.append(_reasoning_item(make_id("rs_"), message.reasoning))
    if message.content or not (message.tool_calls or message.reasoning):
        found.append(_message_item(make_id("msg_"), message.content))
    for call in message.tool_calls:
        found.append(_call_item(make_id("fc_"), call.id, call.name, call.arguments_json))
    return found


def _body(request: ResponseRequest, name: str, response_id: str, created: float) -> dict[str, Any]:
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "model": name,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": request.reasoning or {"effort": None, "summary": None},
        "store": request.store,
        "temperature": request.temperature,
        "text": request.text or {"format": {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "top_p": request.top_p,
        "truncation": request.truncation or "disabled",
        "usage": None,
        "user": request.user,
    }


def _end(
    body: dict[str, Any], piece: Piece, generation: Generation, items: list[dict[str, Any]]
) -> dict[str, Any]:
    usage = generation.usage()
    is_cut = piece.finish_reason in ("length", "full")
    details = usage["prompt_tokens_details"]
    return {
        **body,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": items,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": details,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        },
    }


def _keep(
    http: Request,
    request: ResponseRequest,
    before: list[dict[str, Any]],
    body: dict[str, Any],
    message: ChatMessage,
) -> None:
    if not request.store:
        return
    answer = message_of(message)
    messages = [*before, *messages_of(request), answer]
    _stored(http).add(Stored(tenant_of(http), body, messages))


async def create_response(http: Request) -> Response:
    """``POST /v1/responses``."""
    request = read(await body_of(http), ResponseRequest)
    before: list[dict[str, Any]] = []
    if request.previous_response_id is not None:
        before = _stored(http).get(request.previous_response_id, tenant_of(http)).messages
    name = models_of(http).resolve(request.model)
    if request.stream:
        return await stream(http, _stream(http, request, name, before))
    async with models_of(http).engine(name) as engine:
        chat = chat_job(as_chat(request, before), engine, tenant_of(http))
        body = _body(request, name, make_id("resp_"), time.time())
        async with engine.generate(chat.job) as generation:
            (piece,) = await generation.whole()
            message = parse_answer(chat.format, piece.raw)
            body = _end(body, piece, generation, _items(message))
            http.state.log = (generation.reuse, generation.n_generated)
    _keep(http, request, before, body, message)
    return Json(body)


async def _stream(
    http: Request, request: ResponseRequest, name: str, before: list[dict[str, Any]]
) -> AsyncIterator[bytes]:
    body = _body(request, name, make_id("resp_"), time.time())
    writer = _ItemWriter()
    async with models_of(http).engine(name) as engine:
        chat = chat_job(as_chat(request, before), engine, tenant_of(http))
        async with engine.generate(chat.job) as generation:
            yield writer.event("response.created", response=body)
            yield writer.event("response.in_progress", response=body)
            parser = ChatStream(chat.format)
            async for piece in generation:
                deltas = parser.feed(piece.raw, is_end=piece.finish_reason is not None)
                for delta in deltas:
                    for one in writer.write(delta):
                        yield one
                if piece.finish_reason:
                    for one in writer.end():
                        yield one
                    body = _end(body, piece, generation, writer.items)
            http.state.log = (generation.reuse, generation.n_generated)
    _keep(http, request, before, body, parser.message)
    kind = "response.completed" if body["status"] == "completed" else "response.incomplete"
    yield writer.event(kind, response=body)


class _ItemWriter:
    """Writes deltas as output items: one open item at a time."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._n = 0
        self._kind: tuple[str, int] | None = None
        self._id = ""
        self._text = ""
        self._call: tuple[str, str] = ("", "")

    def event(self, kind: str, **data: Any) -> bytes:
        """Return an event with the next number."""
        found = event({"type": kind, "sequence_number": self._n, **data}, kind)
        self._n += 1
        return found

    def write(self, delta: Delta) -> list[bytes]:
        """Return the events of one delta."""
        found: list[bytes] = []
        at = len(self.items)
        if delta.call is not None:
            if self._kind != ("call", delta.call.index):
                found += self._close()
                at = len(self.items)
                self._open(("call", delta.call.index), "fc_")
                self._call = (delta.call.id, delta.call.name)
                item = _call_item(self._id, *self._call, "", "in_progress")
                found.append(self.event("response.output_item.added", output_index=at, item=item))
            self._text += delta.call.arguments
            found.append(
                self.event(
                    "response.function_call_arguments.delta",
                    item_id=self._id,
                    output_index=at,
                    delta=delta.call.arguments,
                )
            )
        elif delta.reasoning:
            if self._kind != ("reasoning", 0):
                found += self._close()
                at = len(self.items)
                self._open(("reasoning", 0), "rs_")
                item = {"id": self._id, "type": "reasoning", "summary": [], "content": []}
                found.append(self.event("response.output_item.added", output_index=at, item=item))
            self._text += delta.reasoning
            found.append(
                self.event(
                    "response.reasoning_text.delta",
                    item_id=self._id,
                    output_index=at,
                    content_index=0,
                    delta=delta.reasoning,
                )
            )
        elif delta.content:
            found += self._open_message()
            self._text += delta.content
            found.append(
                self.event(
                    "response.output_text.delta",
                    item_id=self._id,
                    output_index=len(self.items),
                    content_index=0,
                    delta=delta.content,
                    logprobs=[],
                )
            )
        return found

    def _open_message(self) -> list[bytes]:
        if self._kind == ("message", 0):
            return []
        found = self._close()
        at = len(self.items)
        self._open(("message", 0), "msg_")
        item = _message_item(self._id, "", "in_progress")
        found.append(self.event("response.output_item.added", output_index=at, item=item))
        part = {"item_id": self._id, "output_index": at, "content_index": 0, "part": _text_part("")}
        found.append(self.event("response.content_part.added", **part))
        return found

    def end(self) -> list[bytes]:
        """Return the events that end the last item; an answer without any gets an empty message."""
        found = [] if self.items or self._kind else self._open_message()
        return found + self._close()

    def _open(self, kind: tuple[str, int], prefix: str) -> None:
        self._kind, self._id, self._text = kind, make_id(prefix), ""

    def _close(self) -> list[bytes]:
        """Return the events that end the open item."""
        if self._kind is None:
            return []
        at, found = len(self.items), list[bytes]()
        place = {"item_id": self._id, "output_index": at}
        if self._kind[0] == "call":
            item = _call_item(self._id, *self._call, self._text)
            kind = "response.function_call_arguments.done"
            found.append(self.event(kind, **place, name=self._call[1], arguments=self._text))
        elif self._kind[0] == "reasoning":
            item = _reasoning_item(self._id, self._text)
            found.append(
                self.event(
                    "response.reasoning_text.done", **place, content_index=0, text=self._text
                )
            )
        else:
            item = _message_item(self._id, self._text)
            done = {"content_index": 0, "text": self._text, "logprobs": []}
            found.append(self.event("response.output_text.done", **place, **done))
            part = {"content_index": 0, "part": _text_part(self._text)}
            found.append(self.event("response.content_part.done", **place, **part))
        found.append(self.event("response.output_item.done", output_index=at, item=item))
        self.items.append(item)
        self._kind = None
        return found


async def show_response(http: Request) -> Response:
    """``GET /v1/responses/{id}``."""
    return Json(_stored(http).get(http.path_params["id"], tenant_of(http)).body)


async def delete_response(http: Request) -> Response:
    """``DELETE /v1/responses/{id}``."""
    response_id = http.path_params["id"]
    _stored(http).remove(response_id, tenant_of(http))
    return Json({"id": response_id, "object": "response", "deleted": True})
