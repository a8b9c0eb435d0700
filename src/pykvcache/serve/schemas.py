"""The requests that the server reads: one struct per endpoint, checked while it is decoded."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from pykvcache.serve.errors import ApiError

__all__ = [
    "AnthropicRequest",
    "CacheRequest",
    "ChatRequest",
    "CompletionRequest",
    "EmbeddingRequest",
    "ResponseRequest",
    "Sampling",
    "TokenizeRequest",
    "WhyRequest",
    "read",
]

S = TypeVar("S")

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-1, le=2**63 - 1)]
Samples = Annotated[int, Meta(ge=1, le=128)]
Temperature = Annotated[float, Meta(ge=0, le=1e4)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-1e6, le=1e6)]
Object = dict[str, Any]


class Sampling(Struct, kw_only=True):
    """What every generating endpoint knows of sampling; None takes the server's default."""

    model: str | None = None
    stream: bool = False
    temperature: Temperature | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    repeat_penalty: Annotated[float, Meta(ge=1e-6, le=1e6)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    seed: Seed | None = None
    logit_bias: dict[str, float] | list[tuple[int | str, float | bool]] | None = None
    stop: str | list[str] | None = None
    grammar: str | None = None
    json_schema: Object | bool | None = None
    cache_prompt: bool = True
    prompt_cache_key: str | None = None
    prompt_cache_options: Object | None = None
    prompt_cache_retention: str | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        if self.stop is None:
            return ()
        given = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        return tuple(text for text in given if text)

    @property
    def cache_ttl(self) -> float | None:
        """Seconds for which breakpoints without a ttl of their own are kept."""
        ttl = (self.prompt_cache_options or {}).get("ttl")
        if ttl is None and self.prompt_cache_retention == "24h":
            return 86_400.0
        return None if ttl is None else seconds(ttl)


class ChatRequest(Sampling, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[Object]
    n: Samples = 1
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n_predict: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    stream_options: Object | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: Object | None = None
    tools: list[Object] | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    chat_template_kwargs: Object | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    timings_per_token: bool = False

    @property
    def limit(self) -> int | None:
        """Tokens to generate at most; None: until the end."""
        given = (self.max_completion_tokens, self.max_tokens, self.n_predict)
        found = [n for n in given if n is not None and n >= 0]
        return found[0] if found else None


class CompletionRequest(Sampling, kw_only=True):
    """``POST /v1/completions`` and llama-server's ``POST /completion``."""

    prompt: str | list[Any] | Object
    n: Samples = 1
    max_tokens: Count | None = None
    n_predict: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    echo: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=20)] | bool | None = None
    n_probs: Count = 0
    stream_options: Object | None = None
    suffix: str | None = None
    return_tokens: bool = False


class EmbeddingRequest(Struct, kw_only=True):
    """``POST /v1/embeddings``."""

    input: str | list[Any]
    model: str | None = None
    encoding_format: str = "float"
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    user: str | None = None


class AnthropicRequest(Struct, kw_only=True):
    """``POST /v1/messages``."""

    messages: list[Object]
    model: str
    max_tokens: Count | None = None
    system: str | list[Object] | None = None
    stream: bool = False
    temperature: Share | None = None
    top_k: Count | None = None
    top_p: Share | None = None
    stop_sequences: list[str] | None = None
    tools: list[Object] | None = None
    tool_choice: Object | None = None
    thinking: Object | None = None
    metadata: Object | None = None
    cache_control: Object | None = None
    diagnostics: Object | None = None


class ResponseRequest(Struct, kw_only=True):
    """``POST /v1/responses``."""

    input: str | list[Object] = ""
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    stream: bool = False
    max_output_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    tools: list[Object] | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool = True
    text: Object | None = None
    reasoning: Object | None = None
    metadata: Object | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Object | None = None
    truncation: str | None = None
    user: str | None = None


class TokenizeRequest(Struct, kw_only=True):
    """``POST /tokenize``, ``/detokenize`` and ``/apply-template``."""

    content: str = ""
    prompt: str | None = None
    tokens: list[int] = []
    messages: list[Object] = []
    tools: list[Object] | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False
    model: str | None = None


class CacheRequest(Struct, kw_only=True):
    """``POST /cache/pin``, ``/cache/prefetch`` and ``/cache/clear``."""

    prompt: str | list[int] | None = None
    messages: list[Object] | None = None
    tools: list[Object] | None = None
    ttl: Annotated[float, Meta(gt=0)] | None = None
    model: str | None = None


class WhyRequest(Struct, kw_only=True):
    """``POST /cache/why``: two transcripts."""

    before: list[Object]
    after: list[Object]
    tools: list[Object] | None = None
    model: str | None = None


def read(body: bytes, kind: type[S]) -> S:
    """Decode a request body.

    Raises
    ------
    ApiError
        400: it is not JSON, or a field is missing or of another type.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        text = str(error)
        at = text.rpartition(" - at `$.")[2].rstrip("`") if " - at `$." in text else None
        raise ApiError(400, text, param=at) from None
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def seconds(ttl: Any) -> float:
    """Return a ttl such as ``"5m"`` or ``"12h"``, or a number of seconds, in seconds."""
    if isinstance(ttl, int | float) and not isinstance(ttl, bool) and ttl > 0:
        return float(ttl)
    if isinstance(ttl, str) and ttl[:-1].isdigit() and ttl[-1:] in _UNITS and int(ttl[:-1]):
        return float(ttl[:-1]) * _UNITS[ttl[-1]]
    raise ApiError(
        400, f"ttl is {ttl!r}: a number of seconds, or text such as '5m' or '1h'", param="ttl"
    )
