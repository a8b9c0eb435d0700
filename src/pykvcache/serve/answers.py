"""What the endpoints share: samplers, usage, log-probabilities, event streams."""

from __future__ import annotations

import math
import secrets
from typing import Any

import msgspec

from pykvcache.model import LlamaModel
from pykvcache.sampling import Sampler
from pykvcache.serve.engine import Generation
from pykvcache.serve.errors import ApiError
from pykvcache.serve.schemas import Sampling

__all__ = [
    "FINGERPRINT",
    "dumps",
    "event",
    "finish_reason",
    "make_id",
    "sampler_of",
    "token_logprobs",
    "usage_of",
]

dumps = msgspec.json.encode

#: ``system_fingerprint``; clients of llama-server expect a leading b.
FINGERPRINT = "b-pykvcache-0.1.0"


def make_id(prefix: str) -> str:
    """Return a new id, such as ``chatcmpl-...``."""
    return f"{prefix}{secrets.token_urlsafe(18)}"


def event(data: Any, name: str | None = None) -> bytes:
    """Return one server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + dumps(data) + b"\n\n"


def sampler_of(request: Sampling, model: LlamaModel, **more: Any) -> Sampler:
    """Return the sampler that a request asks for.

    Parameters
    ----------
    request
        Fields that are None take `Sampler`'s defaults.
    model
        For grammars and for biases by text.
    **more
        What the endpoint adds, such as ``json_schema``.
    """
    names = (
        "temperature",
        "top_p",
        "min_p",
        "repeat_penalty",
        "frequency_penalty",
        "presence_penalty",
    )
    options = {name: getattr(request, name) for name in names if getattr(request, name) is not None}
    if request.top_k is not None:
        options["top_k"] = max(request.top_k, 0)  # -1 is vLLM's "all"
    if request.seed is not None and request.seed >= 0:
        options["seed"] = request.seed % (2**32 - 1)
    if request.logit_bias:
        options["logit_bias"] = _biases(request.logit_bias, model)
    if request.grammar is not None:
        options["grammar"] = request.grammar
    if request.json_schema is not None:
        options["json_schema"] = request.json_schema
    options.update(more)
    if "grammar" in options and "json_schema" in options:
        raise ApiError(400, "grammar and a JSON schema exclude each other", param="grammar")
    return Sampler(model=model, **options)


def _biases(given: Any, model: LlamaModel) -> dict[int, float]:
    """Return biases by token id: OpenAI's mapping, or llama-server's pairs, whose keys may be text."""
    pairs = given.items() if isinstance(given, dict) else given
    found: dict[int, float] = {}
    for key, value in pairs:
        bias = -math.inf if value is False else float(value)
        if isinstance(key, str) and not key.lstrip("-").isdigit():
            ids = model.tokenize(key, add_special=False).tolist()
        else:
            ids = [int(key)]
        found.update(dict.fromkeys(ids, -math.inf if bias <= -100 else bias))
    return found


def usage_of(generation: Generation, *, n_reasoning: int = 0) -> dict[str, Any]:
    """Return OpenAI's ``usage``: cached tokens are those that were not evaluated."""
    reuse, new = generation.reuse, generation.n_generated
    written = reuse.evaluated if generation.job.use_cache else 0
    return {
        "prompt_tokens": reuse.n_tokens,
        "completion_tokens": new,
        "total_tokens": reuse.n_tokens + new,
        "prompt_tokens_details": {
            "cached_tokens": reuse.n_tokens - reuse.evaluated,
            "cache_write_tokens": written,
        },
        "completion_tokens_details": {"reasoning_tokens": n_reasoning},
    }


def finish_reason(reason: str | None) -> str | None:
    """Return OpenAI's ``finish_reason``: a full context and a time limit count as the length."""
    return {"full": "length", "aborted": "length"}.get(reason or "", reason)


def token_logprobs(
    model: LlamaModel, tokens: list[int], rows: list[dict[int, float]], top: int
) -> list[dict[str, Any]]:
    """Return ``logprobs.content`` of chat completions."""

    def entry(token: int, value: float) -> dict[str, Any]:
        piece = model.token_to_piece(token)
        text = piece.decode("utf-8", "replace")
        return {"id": token, "token": text, "bytes": list(piece), "logprob": value}

    found = []
    for token, row in zip(tokens, rows, strict=False):
        ranked = sorted(row.items(), key=lambda pair: -pair[1])[:top]
        found.append({**entry(token, row[token]), "top_logprobs": [entry(t, v) for t, v in ranked]})
    return found
