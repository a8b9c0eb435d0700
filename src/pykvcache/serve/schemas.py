"""The requests: one struct per endpoint, checked while it is decoded."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Struct

from pykvcache.sampling import SETTINGS
from pykvcache.serve.errors import ApiError

__all__ = [
    "AnthropicRequest",
    "CacheRequest",
    "ChatRequest",
    "CompletionRequest",
    "EmbeddingRequest",
    "OutputConfig",
    "ResponseRequest",
    "Sampling",
    "TokenizeRequest",
    "WhyRequest",
    "seconds",
]

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Limit = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
Breaker = Annotated[str, Meta(max_length=40)]
#: Tokens that penalties count; -1 is llama-server's "all of the context".
LastN = Annotated[int, Meta(ge=-1, le=SETTINGS["penalty_last_n"].high)]
Share = Annotated[float, Meta(ge=0, le=1)]
Samples = Annotated[int, Meta(ge=1, le=128)]
#: Bounds the memory for log-probabilities.
Likeliest = Annotated[int, Meta(ge=0, le=100)]
Bias = dict[str, float] | Annotated[list[tuple[int | str, float | bool]], Meta(max_length=100_000)]
Stops = str | Annotated[list[str], Meta(max_length=64)]
Object = dict[str, Any]

#: Fields that would change the answer, but that this server does not have.
_REFUSED = {
    "lora": "adapters are set when the server starts, not by requests",
    "functions": "send tools",
    "suffix": "this server does not fill in the middle",
    "conversation": "send previous_response_id",
}


class Common(Struct, kw_only=True):
    """Fields of every generating endpoint; None stands for the server's default."""

    stream: bool = False
    seed: Annotated[int, Meta(ge=-1, le=2**63 - 1)] | None = None
    grammar: str | None = None
    chat_template_kwargs: Object | None = None
    cache_prompt: bool = True
    prompt_cache_key: str | None = None
    prompt_cache_options: Object | None = None
    prompt_cache_retention: str | None = None
    lora: list[Any] | None = None

    def __post_init__(self) -> None:
        for name, told in _REFUSED.items():
            if getattr(self, name, None):
                raise ValueError(f"{name} is not supported: {told} - at `$.{name}`")

    @property
    def cache_ttl(self) -> float | None:
        """Seconds for which breakpoints are kept; None if the request does not say."""
        ttl = (self.prompt_cache_options or {}).get("ttl")
        if ttl is None and self.prompt_cache_retention == "24h":
            return 86_400.0
        return None if ttl is None else seconds(ttl)

    @property
    def is_explicit(self) -> bool:
        """Whether only prefixes that end at a breakpoint go into the cache."""
        mode = (self.prompt_cache_options or {}).get("mode", "implicit")
        if mode not in ("implicit", "explicit"):
            raise ApiError(
                400,
                f"prompt_cache_options.mode is {mode!r}: it must be 'implicit' or 'explicit'",
                param="prompt_cache_options.mode",
            )
        return bool(mode == "explicit")


if TYPE_CHECKING:

    class Settings(Common, kw_only=True):
        """The numbers of `Sampler`; these are set by name."""

        temperature: float | None = None
        top_k: int | None = None
        top_p: float | None = None

else:
    Settings = msgspec.defstruct(
        "Settings",
        [
            (name, Annotated[one.kind, Meta(ge=one.low, le=one.high)] | None, None)
            for name, one in SETTINGS.items()
        ],
        bases=(Common,),
        kw_only=True,
    )


class Sampling(Settings, kw_only=True):
    """Fields of chats and completions."""

    model: str | None = None
    stream_options: Object | None = None
    n: Samples = 1
    n_cmpl: Samples | None = None
    max_tokens: Limit | None = None
    max_completion_tokens: Count | None = None
    n_predict: Limit | None = None
    top_k: Limit | None = None
    # Negative: off, or the whole context, as in llama-server.
    adaptive_target: Annotated[float, Meta(le=1)] | None = None
    top_n_sigma: Annotated[float, Meta(le=SETTINGS["top_n_sigma"].high)] | None = None
    penalty_last_n: LastN | None = None
    dry_last_n: LastN | None = None
    repeat_last_n: LastN | None = None
    dry_penalty_last_n: LastN | None = None
    # Each costs a walk over the vocabulary.
    dry_sequence_breakers: Annotated[list[Breaker], Meta(max_length=16)] | None = None
    samplers: Annotated[list[str], Meta(max_length=64)] | None = None
    logit_bias: Bias | None = None
    ignore_eos: bool = False
    stop: Stops | None = None
    json_schema: Object | bool | None = None
    timings_per_token: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.n = self.n_cmpl or self.n
        if self.stream_options and not self.stream:
            raise ValueError("Needs `stream`: true - at `$.stream_options`")

    @property
    def limit(self) -> int | None:
        """Tokens to generate at most; None: until the end."""
        given = (self.max_completion_tokens, self.max_tokens, self.n_predict)
        found = [n for n in given if n is not None]
        return found[0] if found and found[0] >= 0 else None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        given = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        return tuple(text for text in given if text)

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool((self.stream_options or {}).get("include_usage"))


class ChatRequest(Sampling, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[Object]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: Object | None = None
    tools: list[Object] | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    functions: list[Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_logprobs and not self.logprobs:
            raise ValueError("Needs `logprobs`: true - at `$.top_logprobs`")


class CompletionRequest(Sampling, kw_only=True):
    """``POST /v1/completions`` and llama-server's ``POST /completion``."""

    prompt: str | list[Any] | Object
    echo: bool = False
    suffix: str | None = None
    best_of: Samples | None = None
    logprobs: Likeliest | bool | None = None
    n_probs: Likeliest = 0
    return_tokens: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.best_of and self.best_of > self.n:
            raise ValueError("Expected `int` <= `n` - at `$.best_of`")

    @property
    def n_top(self) -> int:
        """Number of likeliest tokens to show for each token."""
        shown = self.logprobs
        return self.n_probs if shown is None or shown is False else int(shown)


class EmbeddingRequest(Struct, kw_only=True):
    """``POST /v1/embeddings``."""

    input: str | list[Any]
    model: str | None = None
    encoding_format: str = "float"
    dimensions: Annotated[int, Meta(ge=1)] | None = None


class OutputConfig(Struct):
    """How an answer of ``POST /v1/messages`` looks."""

    format: Object | None = None
    effort: str | None = None


class AnthropicRequest(Common, kw_only=True):
    """``POST /v1/messages``."""

    messages: list[Object]
    model: str
    max_tokens: Count | None = None
    system: str | list[Object] | None = None
    temperature: Share | None = None
    top_k: Count | None = None
    top_p: Share | None = None
    stop_sequences: Annotated[list[str], Meta(max_length=64)] | None = None
    tools: list[Object] | None = None
    tool_choice: Object | None = None
    thinking: Object | None = None
    output_config: OutputConfig | None = None
    output_format: Object | None = None
    cache_control: Object | None = None
    diagnostics: Object | None = None


class ResponseRequest(Settings, kw_only=True):
    """``POST /v1/responses``."""

    input: str | list[Object] = ""
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    max_output_tokens: Count | None = None
    max_tool_calls: Count | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] = 0
    tools: list[Object] | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool = True
    text: Object | None = None
    reasoning: Object | None = None
    metadata: Object | None = None
    truncation: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    conversation: str | Object | None = None
    prompt_template: Object | None = msgspec.field(name="prompt", default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt_template:
            raise ValueError(
                "prompt is not supported: this server stores no prompts - at `$.prompt`"
            )

    @property
    def logprobs(self) -> bool:
        """Whether the answer has log-probabilities."""
        return self.top_logprobs > 0 or "message.output_text.logprobs" in (self.include or ())


class TokenizeRequest(Struct, kw_only=True):
    """``POST /tokenize``, ``/detokenize``, ``/apply-template`` and ``.../input_tokens``."""

    content: str = ""
    prompt: str | None = None
    tokens: list[int] = []
    messages: list[Object] = []
    tools: list[Object] | None = None
    chat_template_kwargs: Object | None = None
    add_generation_prompt: bool = True
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False
    model: str | None = None


class CacheRequest(Struct, kw_only=True):
    """``POST /cache/pin``, ``/cache/prefetch`` and ``/cache/clear``."""

    prompt: str | list[int] | None = None
    messages: list[Object] | None = None
    tools: list[Object] | None = None
    ttl: float | str | None = None
    model: str | None = None


class WhyRequest(Struct, kw_only=True):
    """``POST /cache/why``: two transcripts."""

    before: list[Object]
    after: list[Object]
    tools: list[Object] | None = None
    model: str | None = None


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LONGEST = 7 * 86_400


def seconds(ttl: Any) -> float:
    """Return a ttl such as ``"5m"`` or ``"12h"``, or a number of seconds, in seconds.

    Raises
    ------
    ApiError
        400: it is neither, not positive, or more than a week.
    """
    found = 0.0
    if isinstance(ttl, int | float) and not isinstance(ttl, bool):
        found = float(ttl)
    elif isinstance(ttl, str) and re.fullmatch("[0-9]{1,8}[smhd]", ttl):
        found = float(ttl[:-1]) * _UNITS[ttl[-1]]
    if 0 < found <= _LONGEST:
        return found
    told = f"ttl is {ttl!r}: it must be '5m', '12h' or a number of seconds, at most a week"
    raise ApiError(400, told, param="ttl")
