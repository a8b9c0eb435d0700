"""OpenAI's endpoints: chat completions, completions, embeddings, models."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from pykvcache.openai_format import (
    ChatStream,
    finish_reason,
    head,
    message_of,
    parse_answer,
    text_logprobs,
    token_logprobs,
)
from pykvcache.serve.answers import event, sampler_of
from pykvcache.serve.chat import ChatJob, chat_job
from pykvcache.serve.engine import Engine, Job, Piece
from pykvcache.serve.errors import ApiError
from pykvcache.serve.http import Json, body_of, models_of, stream, tenant_of
from pykvcache.serve.schemas import ChatRequest, CompletionRequest, EmbeddingRequest, read

__all__ = ["chat_completions", "completions", "embeddings", "list_models", "show_model"]


# Chat ---------------------------------------------------------------------------------------------


async def chat_completions(http: Request) -> Response:
    """``POST /v1/chat/completions``."""
    request = read(await body_of(http), ChatRequest)
    name = models_of(http).resolve(request.model)
    if request.stream:
        return await stream(http, _stream_chat(http, request, name))
    async with models_of(http).engine(name) as engine:
        chat = chat_job(request, engine, tenant_of(http))
        async with engine.generate(chat.job) as generation:
            pieces = await generation.whole()
            choices = [_chat_choice(engine, chat, request, piece) for piece in pieces]
            answer = {
                **head("chatcmpl-", "chat.completion", name),
                "choices": choices,
                "usage": generation.usage(),
                "timings": generation.timings().as_dict(),
            }
            http.state.log = (generation.reuse, generation.n_generated)
    return Json(answer)


def _chat_choice(
    engine: Engine, chat: ChatJob, request: ChatRequest, piece: Piece
) -> dict[str, Any]:
    message = parse_answer(chat.format, piece.raw)
    reason = finish_reason(piece.finish_reason, has_calls=bool(message.tool_calls))
    choice: dict[str, Any] = {
        "index": piece.index,
        "message": message_of(message),
        "finish_reason": reason,
        "logprobs": None,
    }
    if request.logprobs:
        content = token_logprobs(
            engine.llm.model, piece.tokens, piece.logprobs, request.top_logprobs or 0
        )
        choice["logprobs"] = {"content": content}
    return choice


async def _stream_chat(http: Request, request: ChatRequest, name: str) -> AsyncIterator[bytes]:
    async with models_of(http).engine(name) as engine:
        chat = chat_job(request, engine, tenant_of(http))
        async with engine.generate(chat.job) as generation:
            start = head("chatcmpl-", "chat.completion.chunk", name)

            def chunk(
                index: int, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None
            ) -> bytes:
                choice = {"index": index, "delta": delta, "finish_reason": reason}
                if logprobs is not None:
                    choice["logprobs"] = logprobs
                return event({**start, "choices": [choice]})

            for i in range(request.n):
                yield chunk(i, {"role": "assistant", "content": None})
            parsers = [ChatStream(chat.format) for _ in range(request.n)]
            async for piece in generation:
                parser = parsers[piece.index]
                deltas = parser.feed(piece.raw, is_end=piece.finish_reason is not None)
                logprobs = None
                if request.logprobs:
                    content = token_logprobs(
                        engine.llm.model, piece.tokens, piece.logprobs, request.top_logprobs or 0
                    )
                    logprobs = {"content": content}
                for delta in deltas:
                    yield chunk(piece.index, delta.as_dict(), logprobs=logprobs)
                    logprobs = None if logprobs is None else {"content": []}
                if piece.finish_reason:
                    reason = finish_reason(piece.finish_reason, has_calls=parser.has_calls)
                    yield chunk(piece.index, {}, reason)
            http.state.log = (generation.reuse, generation.n_generated)
            if (request.stream_options or {}).get("include_usage"):
                yield event(
                    {
                        **start,
                        "choices": [],
                        "usage": generation.usage(),
                        "timings": generation.timings().as_dict(),
                    }
                )
    yield b"data: [DONE]\n\n"


# Completions --------------------------------------------------------------------------------------


async def completions(http: Request) -> Response:
    """``POST /v1/completions``."""
    request = read(await body_of(http), CompletionRequest)
    name = models_of(http).resolve(request.model)
    if request.stream:
        return await stream(http, _stream_completion(http, request, name))
    choices: list[dict[str, Any]] = []
    usages: list[dict[str, Any]] = []
    timings: dict[str, Any] = {}
    async with models_of(http).engine(name) as engine:
        for prompt in prompts_of(request.prompt):
            job = completion_job(request, engine, prompt, tenant_of(http))
            async with engine.generate(job) as generation:
                for piece in await generation.whole():
                    choices.append(_text_choice(engine, request, prompt, piece, len(choices)))
                usages.append(generation.usage())
                timings = generation.timings().as_dict()
                http.state.log = (generation.reuse, generation.n_generated)
    answer = {
        **head("cmpl-", "text_completion", name),
        "choices": choices,
        "usage": add_usages(usages),
        "timings": timings,
    }
    return Json(answer)


def completion_job(
    request: CompletionRequest, engine: Engine, prompt: str | list[int], tenant: str
) -> Job:
    """Return the job of one prompt of a completion."""
    model = engine.llm.model
    if isinstance(prompt, str):
        tokens = model.tokenize(prompt, parse_special=True)
    else:
        tokens = np.array(prompt, np.int32)
    limit = request.max_tokens
    if limit is None:
        limit = (
            request.n_predict if request.n_predict is not None and request.n_predict >= 0 else None
        )
    n_logprobs = int(request.logprobs or 0) if request.logprobs is not True else 1
    return Job(
        tokens=tokens,
        max_tokens=16 if limit is None and request.n_predict is None else limit,
        sampler=sampler_of(request, model),
        n=request.n,
        stop=request.stops,
        logprobs=n_logprobs or request.n_probs,
        namespace=tenant,
        use_cache=request.cache_prompt,
    )


def prompts_of(given: Any) -> list[str | list[int]]:
    """Return the prompts of a completion: texts, token ids, or both mixed in one.

    Raises
    ------
    ApiError
        400: something else.
    """
    if isinstance(given, str):
        return [given]
    if isinstance(given, dict):
        text = given.get("prompt_string")
        if not isinstance(text, str) or given.get("multimodal_data"):
            raise ApiError(400, "prompt: this server reads text and token ids only", param="prompt")
        return [text]
    if isinstance(given, list) and given:
        if all(isinstance(one, int) and not isinstance(one, bool) for one in given):
            if not all(0 <= one < 2**31 for one in given):
                raise ApiError(400, "prompt holds a token id that is out of range", param="prompt")
            return [given]
        return [prompt for one in given for prompt in prompts_of(one)]
    raise ApiError(
        400, "prompt is text, token ids, or a list of prompts, and not empty", param="prompt"
    )


def _text_choice(
    engine: Engine, request: CompletionRequest, prompt: str | list[int], piece: Piece, index: int
) -> dict[str, Any]:
    text = piece.text
    if request.echo:
        before = prompt if isinstance(prompt, str) else engine.llm.model.detokenize(prompt)
        text = before + text
    choice: dict[str, Any] = {
        "index": index,
        "text": text,
        "finish_reason": finish_reason(piece.finish_reason),
        "logprobs": None,
    }
    if piece.logprobs:
        choice["logprobs"] = text_logprobs(
            engine.llm.model, piece.tokens, piece.logprobs, len(text) - len(piece.text)
        )
    return choice


def add_usages(usages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the sum of several ``usage`` objects."""
    total: dict[str, Any] = {}
    for usage in usages:
        for key, value in usage.items():
            if isinstance(value, dict):
                total[key] = add_usages([total.get(key, {}), value])
            else:
                total[key] = total.get(key, 0) + value
    return total


async def _stream_completion(
    http: Request, request: CompletionRequest, name: str
) -> AsyncIterator[bytes]:
    start = head("cmpl-", "text_completion", name)
    usages: list[dict[str, Any]] = []
    first = 0
    async with models_of(http).engine(name) as engine:
        for prompt in prompts_of(request.prompt):
            job = completion_job(request, engine, prompt, tenant_of(http))
            async with engine.generate(job) as generation:
                async for piece in generation:
                    index = first + piece.index
                    choice = _text_choice(engine, request, "", piece, index)
                    if piece.text or piece.finish_reason is None:
                        yield event({**start, "choices": [{**choice, "finish_reason": None}]})
                    if piece.finish_reason:
                        yield event(
                            {**start, "choices": [{**choice, "text": "", "logprobs": None}]}
                        )
                usages.append(generation.usage())
                http.state.log = (generation.reuse, generation.n_generated)
            first += request.n
    if (request.stream_options or {}).get("include_usage"):
        yield event({**start, "choices": [], "usage": add_usages(usages)})
    yield b"data: [DONE]\n\n"


# Embeddings and models ----------------------------------------------------------------------------


async def embeddings(http: Request) -> Response:
    """``POST /v1/embeddings``."""
    request = read(await body_of(http), EmbeddingRequest)
    if request.encoding_format not in ("float", "base64"):
        raise ApiError(
            400,
            f"encoding_format is {request.encoding_format!r}: 'float' or 'base64'",
            param="encoding_format",
        )
    prompts = prompts_of(request.input)
    name = models_of(http).resolve(request.model)
    async with models_of(http).engine(name) as engine:
        rows = await asyncio.to_thread(engine.llm.embed, prompts)
        n = sum(len(engine.llm.tokens_of(prompt)) for prompt in prompts)
    if request.dimensions is not None:
        if request.dimensions > rows.shape[1]:
            raise ApiError(
                400,
                f"dimensions is {request.dimensions}: at most {rows.shape[1]}",
                param="dimensions",
            )
        rows = rows[:, : request.dimensions]
        rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    data = []
    for i, row in enumerate(rows):
        value: Any = row.tolist()
        if request.encoding_format == "base64":
            value = base64.b64encode(row.astype("<f4").tobytes()).decode("ascii")
        data.append({"object": "embedding", "index": i, "embedding": value})
    return Json(
        {
            "object": "list",
            "model": name,
            "data": data,
            "usage": {"prompt_tokens": n, "total_tokens": n},
        }
    )


def _model_card(http: Request, name: str) -> dict[str, Any]:
    models = models_of(http)
    card = {"id": name, "object": "model", "created": models.started, "owned_by": "pykvcache"}
    engine = models.loaded.get(name)
    card["status"] = {"value": "loaded" if engine else "unloaded"}
    if engine is not None:
        model = engine.llm.model
        card["meta"] = {
            "n_vocab": model.n_vocab,
            "n_ctx": engine.n_ctx,
            "n_ctx_train": model.n_ctx_train,
            "n_embd": model.n_embd,
            "n_params": model.n_params,
            "size": model.size,
        }
    return card


async def list_models(http: Request) -> Response:
    """``GET /v1/models``."""
    return Json(
        {"object": "list", "data": [_model_card(http, name) for name in models_of(http).files]}
    )


async def show_model(http: Request) -> Response:
    """``GET /v1/models/{id}``."""
    name = http.path_params["id"]
    if name not in models_of(http).files:
        raise ApiError(
            404, f"the model {name!r} does not exist", param="model", code="model_not_found"
        )
    return Json(_model_card(http, name))
