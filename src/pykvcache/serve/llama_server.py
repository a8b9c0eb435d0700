"""llama-server's own endpoints: completion, tokenize, props, templates."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pykvcache.serve.answers import event
from pykvcache.serve.engine import Engine, Generation, Job, Piece
from pykvcache.serve.http import Json, body_of, models_of, stream, tenant_of
from pykvcache.serve.openai import completion_job, prompts_of
from pykvcache.serve.prompts import chat_prompt
from pykvcache.serve.schemas import CompletionRequest, TokenizeRequest, read

__all__ = ["apply_template", "completion", "detokenize", "health", "props", "tokenize"]

_STOP_TYPES = {"length": "limit", "full": "limit", "stop": "eos", "aborted": "none"}


async def completion(http: Request) -> Response:
    """``POST /completion``: llama-server's form, one object for a prompt, a list for several."""
    request = read(await body_of(http), CompletionRequest)
    if request.n_predict is None and request.max_tokens is None:
        request.n_predict = -1  # to the end, where OpenAI's default is 16
    name = models_of(http).resolve(request.model)
    if request.stream:
        return await stream(http, _stream(http, request, name))
    answers: list[dict[str, Any]] = []
    async with models_of(http).engine(name) as engine:
        for prompt in prompts_of(request.prompt):
            job = completion_job(request, engine, prompt, tenant_of(http))
            async with engine.generate(job) as generation:
                for piece in await generation.whole():
                    tokens = piece.tokens if request.return_tokens else []
                    answers.append(
                        _final(
                            engine, generation, job, piece, piece.text, tokens, name, len(answers)
                        )
                    )
                http.state.log = (generation.reuse, generation.n_generated)
    return Json(answers[0] if len(answers) == 1 else answers)


async def _stream(http: Request, request: CompletionRequest, name: str) -> AsyncIterator[bytes]:
    index = 0
    async with models_of(http).engine(name) as engine:
        for prompt in prompts_of(request.prompt):
            job = completion_job(request, engine, prompt, tenant_of(http))
            async with engine.generate(job) as generation:
                async for piece in generation:
                    at = index + piece.index
                    if piece.text or piece.tokens:
                        new = {
                            "index": at,
                            "content": piece.text,
                            "tokens": piece.tokens,
                            "stop": False,
                        }
                        yield event(
                            {**new, "id_slot": 0, "tokens_predicted": generation.n_generated}
                        )
                    if piece.finish_reason:
                        yield event(_final(engine, generation, job, piece, "", [], name, at))
                http.state.log = (generation.reuse, generation.n_generated)
            index += request.n


def _final(
    engine: Engine,
    generation: Generation,
    job: Job,
    piece: Piece,
    text: str,
    tokens: list[int],
    name: str,
    index: int,
) -> dict[str, Any]:
    reuse = generation.reuse
    by = generation.stopped_by(piece.index)
    return {
        "index": index,
        "content": text,
        "tokens": tokens,
        "id_slot": 0,
        "stop": True,
        "model": name,
        "tokens_predicted": len(piece.tokens),
        "tokens_evaluated": reuse.n_tokens,
        "tokens_cached": reuse.n_tokens + len(piece.tokens),
        "truncated": False,
        "has_new_line": "\n" in piece.text,
        "stop_type": "word" if by else _STOP_TYPES.get(piece.finish_reason or "", "none"),
        "stopping_word": by or "",
        "generation_settings": {
            "n_predict": job.max_tokens,
            "n_ctx": engine.n_ctx,
            "seed": job.sampler.seed,
        },
        "timings": generation.timings().as_dict(),
    }


async def tokenize(http: Request) -> Response:
    """``POST /tokenize``: of a text (`content`, vLLM's `prompt`) or of messages."""
    request = read(await body_of(http), TokenizeRequest)
    async with models_of(http).engine(request.model) as engine:
        model = engine.llm.model
        if request.messages:
            ids = chat_prompt(model, request.messages, tools=request.tools).tokens
        else:
            text = request.content if request.prompt is None else request.prompt
            ids = model.tokenize(
                text, add_special=request.add_special, parse_special=request.parse_special
            )
        tokens: list[Any] = ids.tolist()
        if request.with_pieces:
            tokens = [
                {"id": token, "piece": _piece(model.token_to_piece(token, special=True))}
                for token in tokens
            ]
        return Json({"tokens": tokens, "count": len(tokens), "max_model_len": engine.n_ctx})


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return list(data)


async def detokenize(http: Request) -> Response:
    """``POST /detokenize``."""
    request = read(await body_of(http), TokenizeRequest)
    async with models_of(http).engine(request.model) as engine:
        text = engine.llm.model.detokenize(request.tokens, special=True)
    return Json({"content": text, "prompt": text})


async def apply_template(http: Request) -> Response:
    """``POST /apply-template``: the text that a chat becomes."""
    request = read(await body_of(http), TokenizeRequest)
    async with models_of(http).engine(request.model) as engine:
        return Json(
            {"prompt": chat_prompt(engine.llm.model, request.messages, tools=request.tools).text}
        )


async def props(http: Request) -> Response:
    """``GET /props``."""
    models = models_of(http)
    name = models.resolve(http.query_params.get("model"))
    async with models.engine(name) as engine:
        model = engine.llm.model
        return Json(
            {
                "model_path": model.path,
                "model_alias": name,
                "total_slots": engine.llm.context.n_seq_max,
                "chat_template": model.chat_template or "",
                "default_generation_settings": {"n_ctx": engine.n_ctx, "params": {}},
            }
        )


async def health(http: Request) -> Response:
    """``GET /health``."""
    if http.app.state.is_draining:
        return Json({"status": "draining"}, status_code=503)
    return Json({"status": "ok"})
