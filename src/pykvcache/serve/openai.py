"""OpenAI's endpoints: chat completions, completions, embeddings, models."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from datetime import datetime, timezone
from functools import partial
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from pykvcache.openai_format import finish_reason, head, message_of, text_logprobs, token_logprobs
from pykvcache.serve.answers import Writer, answer
from pykvcache.serve.engine import Engine, Generation, Job, Piece
from pykvcache.serve.errors import ApiError
from pykvcache.serve.http import Json, event, models_of, read, tenant_of
from pykvcache.serve.prompts import chat_job, chat_prompt, prompts_of, sampler_of
from pykvcache.serve.schemas import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    Sampling,
    TokenizeRequest,
)

__all__ = [
    "chat_completions",
    "completion_job",
    "completions",
    "count_input_tokens",
    "embeddings",
    "list_models",
    "show_model",
]


class _ChoiceWriter(Writer):
    """Base of chat completions and completions: choices, usage, timings."""

    prefix = kind = ""

    def __init__(self, request: Sampling, generation: Generation) -> None:
        super().__init__(generation)
        self.request = request
        self.head = head(self.prefix, self.kind, generation.engine.name)
        self.choices: dict[int, dict[str, Any]] = {}
        self.is_begun = False

    def chunk(self, choice: dict[str, Any]) -> bytes:
        """Return the event of one choice."""
        is_timed = self.request.timings_per_token and self.is_begun
        more = {"timings": self.generation.timings()} if is_timed else {}
        return event({**self.head, "choices": [choice], **more})

    def finish(self) -> Iterator[bytes]:
        """Yield the usage, if the request asks for it, and the end mark."""
        if self.request.with_usage:
            yield event({**self.head, "choices": [], **self.figures()})
        yield b"data: [DONE]\n\n"

    def body(self) -> dict[str, Any]:
        """Return the whole answer."""
        choices = [choice for _, choice in sorted(self.choices.items())]
        return {**self.head, "choices": choices, **self.figures()}

    def figures(self) -> dict[str, Any]:
        """Return OpenAI's ``usage`` and llama-server's ``timings``."""
        return {"usage": self.usage(), "timings": self.generation.timings()}


# Chat ---------------------------------------------------------------------------------------------


async def chat_completions(http: Request) -> Response:
    """``POST /v1/chat/completions``."""
    request = read(http, ChatRequest)
    writer = partial(_ChunkWriter if request.stream else _ChatWriter, request)
    job = partial(chat_job, request, tenant_of(http))
    return await answer(http, request.model, job, writer, is_stream=request.stream)


class _ChatWriter(_ChoiceWriter):
    """A whole chat completion."""

    prefix, kind = "chatcmpl-", "chat.completion"

    def write(self, piece: Piece) -> Iterator[bytes]:
        self.deltas(piece)
        message = self.streams[piece.index].message
        reason = finish_reason(piece.finish_reason, has_calls=bool(message.tool_calls))
        self.choices[piece.index] = {
            "index": piece.index,
            "message": message_of(message),
            "finish_reason": reason,
            "logprobs": self.logprobs(piece),
        }
        return iter(())

    def logprobs(self, piece: Piece) -> dict[str, Any] | None:
        """Return the log-probabilities of a piece; None if the request does not ask for them."""
        assert isinstance(self.request, ChatRequest)
        if not self.request.logprobs:
            return None
        model, top = self.generation.engine.llm.model, self.request.top_logprobs or 0
        rows = token_logprobs(model, piece.tokens, piece.logprobs, top)
        return {"content": rows, "refusal": None}


class _ChunkWriter(_ChatWriter):
    """A chat completion as chunks."""

    kind = "chat.completion.chunk"

    def __init__(self, request: ChatRequest, generation: Generation) -> None:
        super().__init__(request, generation)
        # Log-probabilities of tokens whose text is not sent yet.
        self._waiting: dict[int, list[Any]] = {i: [] for i in range(generation.job.n)}

    def write(self, piece: Piece) -> Iterator[bytes]:
        i = piece.index
        if not self.is_begun:
            for k in self._waiting:
                yield self._delta(k, {"role": "assistant", "content": None})
            self.is_begun = True
        if (logprobs := self.logprobs(piece)) is not None:
            self._waiting[i] += logprobs["content"]
        for delta in self.deltas(piece):
            yield self._delta(i, delta.as_dict())
        if piece.finish_reason:
            reason = finish_reason(piece.finish_reason, has_calls=self.streams[i].has_calls)
            yield self._delta(i, {}, reason)

    def _delta(self, index: int, delta: dict[str, Any], reason: str | None = None) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": reason}
        if self.request.logprobs:  # type: ignore[attr-defined]
            choice["logprobs"] = {"content": self._waiting[index], "refusal": None}
            self._waiting[index] = []
        return self.chunk(choice)


async def count_input_tokens(http: Request) -> Response:
    """``POST /v1/chat/completions/input_tokens``, as in llama-server."""
    request = read(http, TokenizeRequest)
    async with models_of(http).engine(request.model) as engine:
        prompt = await asyncio.to_thread(chat_prompt, engine, request.messages, tools=request.tools)
    return Json({"object": "chat.completion.input_tokens", "input_tokens": len(prompt.tokens)})


# Completions --------------------------------------------------------------------------------------


async def completions(http: Request) -> Response:
    """``POST /v1/completions``."""
    request = read(http, CompletionRequest)
    job = partial(completion_job, request, tenant_of(http), 16)
    writer = partial(_TextWriter, request)
    return await answer(http, request.model, job, writer, is_stream=request.stream)


def completion_job(
    request: CompletionRequest, tenant: str, default: int | None, engine: Engine
) -> Job:
    """Return the job of a completion; `default` is its ``max_tokens``."""
    prompts = [_tokens(engine, parts) for parts in prompts_of(request.prompt)]
    if len(prompts) * request.n > 2048:
        raise ApiError(
            400,
            f"{len(prompts)} prompts with {request.n} samples each: at most 2048 texts",
            param="n",
        )
    says = any(n is not None for n in (request.max_tokens, request.n_predict))
    # With logprobs 0, only the chosen tokens are shown.
    logprobs = request.n_top or int(request.logprobs is not None and request.logprobs is not False)
    scores = request.echo and logprobs > 0
    return Job(
        prompts=tuple(prompts),
        max_tokens=request.limit if says else default,
        sampler=sampler_of(request, engine),
        n=request.n,
        stop=request.stops,
        logprobs=logprobs,
        scores_prompts=scores,
        namespace=tenant,
        use_cache=request.cache_prompt and not scores,
    )


def _tokens(engine: Engine, parts: list[str | list[int]]) -> Any:
    """Return the tokens of texts and token ids; a text that comes first gets special tokens."""
    model = engine.llm.model
    found = [
        model.tokenize(part, parse_special=True, add_special=i == 0)
        if isinstance(part, str)
        else np.array(part, np.int32)
        for i, part in enumerate(parts)
    ]
    return np.concatenate(found)


class _TextWriter(_ChoiceWriter):
    """A text completion, whole or as chunks."""

    prefix, kind = "cmpl-", "text_completion"

    def __init__(self, request: CompletionRequest, generation: Generation) -> None:
        super().__init__(request, generation)
        self._is_echo = request.echo
        self._n_characters: dict[int, int] = {}

    def write(self, piece: Piece) -> Iterator[bytes]:
        i, generation = piece.index, self.generation
        self.is_begun = True
        tokens, rows, n_prompt = piece.tokens, [*piece.logprobs], 0
        before = ""
        if self._is_echo and i not in self._n_characters:
            before = self._prompt(i)
            if generation.scores:
                k = i // generation.job.n
                prompt = generation.job.prompts[k].tolist()
                tokens, rows, n_prompt = prompt + tokens, generation.scores[k] + rows, len(prompt)
        at = self._n_characters.get(i, 0) + len(before)
        self._n_characters[i] = at + len(piece.text)
        choice: dict[str, Any] = {
            "index": i,
            "text": before + piece.text,
            "finish_reason": finish_reason(piece.finish_reason),
            "logprobs": None,
        }
        if rows or n_prompt:
            model, top = generation.engine.llm.model, self.request.n_top  # type: ignore[attr-defined]
            choice["logprobs"] = text_logprobs(model, tokens, rows, at, top, n_prompt)
        self.choices[i] = choice
        if choice["text"] or not piece.finish_reason:
            yield self.chunk({**choice, "finish_reason": None})
        if piece.finish_reason:
            yield self.chunk({**choice, "text": "", "logprobs": None})

    def _prompt(self, index: int) -> str:
        given, k = self.request.prompt, index // self.generation.job.n  # type: ignore[attr-defined]
        (parts,) = prompts_of(given)[k : k + 1]
        if all(isinstance(part, str) for part in parts):
            return "".join(str(part) for part in parts)
        return self.generation.engine.llm.model.detokenize(self.generation.job.prompts[k])


# Embeddings and models ----------------------------------------------------------------------------


async def embeddings(http: Request) -> Response:
    """``POST /v1/embeddings``."""
    request = read(http, EmbeddingRequest)
    if request.encoding_format not in ("float", "base64"):
        told = f"encoding_format is {request.encoding_format!r}: it must be 'float' or 'base64'"
        raise ApiError(400, told, param="encoding_format")
    name = models_of(http).resolve(request.model)
    async with models_of(http).engine(name) as engine:
        given = prompts_of(request.input)
        prompts = await asyncio.to_thread(lambda: [_tokens(engine, one) for one in given])
        rows = await engine.embed(prompts)
    if request.dimensions is not None:
        if request.dimensions > rows.shape[1]:
            told = f"dimensions is {request.dimensions}: it must be at most {rows.shape[1]}"
            raise ApiError(400, told, param="dimensions")
        rows = rows[:, : request.dimensions]
        rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    values = [
        base64.b64encode(row.astype("<f4").tobytes()).decode("ascii")
        if request.encoding_format == "base64"
        else row.tolist()
        for row in rows
    ]
    data = [{"object": "embedding", "index": i, "embedding": one} for i, one in enumerate(values)]
    n = sum(map(len, prompts))
    usage = {"prompt_tokens": n, "total_tokens": n}
    return Json({"object": "list", "model": name, "data": data, "usage": usage})


def _model_card(http: Request, name: str) -> dict[str, Any]:
    models = models_of(http)
    card = {"id": name, "object": "model", "created": models.started, "owned_by": "pykvcache"}
    engine = models.loaded.get(name)
    card["status"] = {"value": "loaded" if engine else "unloaded"}
    # Anthropic's form.
    at = datetime.fromtimestamp(models.started, timezone.utc)
    card.update(type="model", display_name=name, created_at=at.isoformat())
    if engine is not None:
        model = engine.llm.model
        facts = ("n_vocab", "n_ctx_train", "n_embd", "n_params", "size")
        card["meta"] = {"n_ctx": engine.n_ctx, **{fact: getattr(model, fact) for fact in facts}}
    return card


async def list_models(http: Request) -> Response:
    """``GET /v1/models``."""
    names = list(models_of(http).files)
    data = [_model_card(http, name) for name in names]
    page = {"has_more": False, "first_id": names[0], "last_id": names[-1]}  # Anthropic's
    return Json({"object": "list", "data": data, **page})


async def show_model(http: Request) -> Response:
    """``GET /v1/models/{id}``."""
    name = http.path_params["id"]
    if name not in models_of(http).files:
        told = f"the model {name!r} does not exist"
        raise ApiError(404, told, param="model", code="model_not_found")
    return Json(_model_card(http, name))
