"""llama-server's own endpoints: completion, tokenize, props, slots, templates."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pykvcache import __version__
from pykvcache.model import LlamaModel
from pykvcache.openai_format import token_logprobs
from pykvcache.serve.answers import Writer, answer
from pykvcache.serve.engine import Generation, Piece
from pykvcache.serve.http import Json, event, models_of, read, tenant_of
from pykvcache.serve.openai import completion_job
from pykvcache.serve.prompts import chat_prompt
from pykvcache.serve.schemas import CompletionRequest, TokenizeRequest

__all__ = ["apply_template", "completion", "detokenize", "health", "props", "slots", "tokenize"]

_STOP_TYPES = {"length": "limit", "full": "limit", "stop": "eos", "aborted": "limit"}


async def completion(http: Request) -> Response:
    """``POST /completion``: llama-server's form, one object for a prompt, a list for several."""
    request = read(http, CompletionRequest)
    job = partial(completion_job, request, tenant_of(http), None)
    writer = partial(_CompletionWriter, request)
    return await answer(http, request.model, job, writer, is_stream=request.stream)


class _CompletionWriter(Writer):
    """A completion, whole or as events."""

    def __init__(self, request: CompletionRequest, generation: Generation) -> None:
        super().__init__(generation)
        self._request = request
        self._answers: dict[int, dict[str, Any]] = {}
        self._n_tokens: dict[int, int] = {}

    def write(self, piece: Piece) -> Iterator[bytes]:
        i, model = piece.index, self.generation.engine.llm.model
        self._n_tokens[i] = self._n_tokens.get(i, 0) + len(piece.tokens)
        new: dict[str, Any] = {"index": i, "content": piece.text, "tokens": piece.tokens}
        if piece.logprobs:
            rows = token_logprobs(model, piece.tokens, piece.logprobs, self._request.n_probs)
            new["completion_probabilities"] = rows
        if piece.tokens:
            yield event({**new, "id_slot": 0, "stop": False, "tokens_predicted": self._n_tokens[i]})
        if piece.finish_reason:
            end = self._end(piece)
            tokens = piece.tokens if self._request.return_tokens else []
            self._answers[i] = {**new, "tokens": tokens, **end}
            yield event({"index": i, "content": "", "tokens": [], **end})

    def _end(self, piece: Piece) -> dict[str, Any]:
        generation = self.generation
        job, by = generation.job, generation.stopped_by(piece.index)
        prompt, n_new = job.prompts[piece.index // job.n], self._n_tokens[piece.index]
        is_full = len(prompt) + n_new >= generation.engine.n_ctx
        return {
            "id_slot": 0,
            "stop": True,
            "model": generation.engine.name,
            "tokens_predicted": n_new,
            "tokens_evaluated": len(prompt),
            "tokens_cached": len(prompt) + n_new,
            "truncated": is_full and piece.finish_reason in ("full", "length"),
            "has_new_line": "\n" in piece.text,
            "stop_type": "word" if by else _STOP_TYPES.get(piece.finish_reason or "", "none"),
            "stopping_word": by or "",
            "prompt": generation.engine.llm.model.detokenize(prompt, special=True),
            "generation_settings": {
                "n_predict": -1 if job.max_tokens is None else job.max_tokens,
                "n_ctx": generation.engine.n_ctx,
                "seed": job.sampler.seed,
                "stop": list(job.stop),
            },
            "timings": generation.timings(),
        }

    def finish(self) -> Iterator[bytes]:
        return iter(())

    def body(self) -> Any:
        answers = [one for _, one in sorted(self._answers.items())]
        return answers[0] if len(answers) == 1 else answers


async def tokenize(http: Request) -> Response:
    """``POST /tokenize``: the tokens of a text (`content`, vLLM's `prompt`) or of messages."""
    request = read(http, TokenizeRequest)
    async with models_of(http).engine(request.model) as engine:
        return Json(await asyncio.to_thread(_tokenize, engine, request))


def _tokenize(engine: Any, request: TokenizeRequest) -> dict[str, Any]:
    model = engine.llm.model
    if request.messages:
        ids = chat_prompt(engine, request.messages, tools=request.tools).tokens
    else:
        text = request.content if request.prompt is None else request.prompt
        options = {"add_special": request.add_special, "parse_special": request.parse_special}
        ids = model.tokenize(text, **options)
    tokens: list[Any] = ids.tolist()
    if request.with_pieces:
        pieces = [model.token_to_piece(token, special=True) for token in tokens]
        tokens = [
            {"id": token, "piece": _piece(p)} for token, p in zip(tokens, pieces, strict=True)
        ]
    return {"tokens": tokens, "count": len(tokens), "max_model_len": engine.n_ctx}


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return list(data)


async def detokenize(http: Request) -> Response:
    """``POST /detokenize``."""
    request = read(http, TokenizeRequest)
    async with models_of(http).engine(request.model) as engine:
        text = await asyncio.to_thread(engine.llm.model.detokenize, request.tokens, special=True)
    return Json({"content": text, "prompt": text})


async def apply_template(http: Request) -> Response:
    """``POST /apply-template``: the rendered text of a chat."""
    request = read(http, TokenizeRequest)
    async with models_of(http).engine(request.model) as engine:
        prompt = await asyncio.to_thread(
            chat_prompt,
            engine,
            request.messages,
            tools=request.tools or None,
            answers=request.add_generation_prompt,
            variables=request.chat_template_kwargs,
        )
    return Json({"prompt": prompt.text})


async def props(http: Request) -> Response:
    """``GET /props``."""
    async with models_of(http).engine(http.query_params.get("model")) as engine:
        model, context = engine.llm.model, engine.llm.context
        return Json(
            {
                "model_path": model.path,
                "model_alias": engine.name,
                "total_slots": context.n_seq_max,
                "chat_template": engine.defaults.template or model.chat_template or "",
                "default_generation_settings": {"n_ctx": engine.n_ctx, "params": {}},
                "modalities": {"vision": False, "audio": False},
                "build_info": f"pykvcache {__version__}",
                "bos_token": _text(model, model.token_bos),
                "eos_token": _text(model, model.token_eos),
            }
        )


def _text(model: LlamaModel, token: int | None) -> str:
    return "" if token is None else model.detokenize([token], special=True)


async def slots(http: Request) -> Response:
    """``GET /slots``: one entry per request that may run, without prompts or texts."""
    async with models_of(http).engine(http.query_params.get("model")) as engine:
        running = engine.llm.generator.n_running
        return Json(
            [
                {"id": i, "n_ctx": engine.n_ctx, "is_processing": i < running}
                for i in range(engine.llm.context.n_seq_max)
            ]
        )


async def health(http: Request) -> Response:
    """``GET /health``."""
    return Json({"status": "ok"})
