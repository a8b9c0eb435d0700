"""What the endpoints share: samplers and events."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from pykvcache.model import LlamaModel
from pykvcache.sampling import Sampler
from pykvcache.serve.errors import ApiError
from pykvcache.serve.schemas import Sampling

__all__ = ["dumps", "event", "sampler_of"]

dumps = msgspec.json.encode


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
    """Return biases by token id: of OpenAI's mapping, or of llama-server's pairs with text."""
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
