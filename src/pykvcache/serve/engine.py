"""Requests of the server on one model: a bounded queue in front of the batch generator."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pykvcache.chat_format import ChatFormat
from pykvcache.generate.request import FinishReason, GenerationHandle
from pykvcache.llm import LLM
from pykvcache.prefix.report import ReuseReport
from pykvcache.sampling import Sampler
from pykvcache.sequence.logprobs import prompt_logprobs
from pykvcache.sequence.sequence import LlamaSequence
from pykvcache.sequence.text import TextStream
from pykvcache.serve.errors import ApiError, context_exceeded
from pykvcache.serve.pins import PinBoard

__all__ = ["Breakpoint", "Defaults", "Engine", "Generation", "Job", "Piece"]

T = TypeVar("T")
Tokens = npt.NDArray[np.int32]

log = logging.getLogger("pykvcache.serve")

#: For models without a chat template, as in llama-server: clients cannot pass one.
CHATML = """\
{%- if tools -%}
<|im_start|>system
These functions can be called:
{% for tool in tools -%}
{{ tool | tojson }}
{% endfor -%}
A call is written as:
<tool_call>
{"name": "the function", "arguments": {"argument": "value"}}
</tool_call><|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] -%}
{{ "\n" if not loop.first or (message.content and message.content[-1] != "\n") -}}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


@dataclass(frozen=True)
class Defaults:
    """Defaults for fields that a request leaves out.

    Attributes
    ----------
    template
        Chat template in place of the model's own.
    variables
        Variables of the chat template, such as ``enable_thinking``.
    sampling
        Arguments of `Sampler`.
    stop
        Strings that end a chat's answer.
    """

    template: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Breakpoint:
    """A prefix to keep: the first ``n_tokens`` tokens, for ``ttl`` seconds."""

    n_tokens: int
    ttl: float


@dataclass(frozen=True)
class Job:
    """A request to the engine.

    Attributes
    ----------
    prompts
        Tokens of one prompt or several; int32, shape (n,) each.
    max_tokens
        Tokens to generate at most, per sample; None: until the model ends its text, or prompt and
        text reach the model's trained length or the end of the context.
    sampler
        Copied for each sample.
    n
        Samples of each prompt.
    stop
        Strings that end a text.
    logprobs
        Number of likeliest tokens to report for each generated token.
    scores_prompts
        Whether to report them for the prompts' tokens, too; such prompts do not use the cache.
    namespace
        The tenant: nothing is shared across namespaces.
    use_cache
        Whether to reuse cached prefixes, and to cache the evaluated tokens.
    boundaries
        Numbers of tokens of the (single) prompt after which messages end.
    breakpoints
        Prefixes of the first prompt to keep, the shortest first.
    keep
        How many of the prompt's first tokens to cache; None for all.
    format
        How the model writes reasoning and tool calls, for a chat.
    """

    prompts: tuple[Tokens, ...]
    max_tokens: int | None
    sampler: Sampler
    n: int = 1
    stop: tuple[str, ...] = ()
    logprobs: int = 0
    scores_prompts: bool = False
    namespace: str = ""
    use_cache: bool = True
    boundaries: tuple[int, ...] = ()
    breakpoints: tuple[Breakpoint, ...] = ()
    keep: int | None = None
    format: ChatFormat | None = None


@dataclass(frozen=True)
class Piece:
    """The new part of one sample.

    Attributes
    ----------
    index
        Index of the sample.
    text
        Text that no later token changes; of chats with the special tokens, which mark reasoning
        and tool calls.
    tokens, logprobs
        Token ids, and log-probabilities by token id if they were requested.
    finish_reason
        How the sample ended; None while it runs.
    """

    index: int
    text: str
    tokens: list[int]
    logprobs: list[dict[int, float]] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class Generation:
    """A running job. `Engine.generate` makes and ends it; `pieces` yields its results."""

    def __init__(self, engine: Engine, job: Job) -> None:
        self.engine, self.job = engine, job
        self._handles: list[GenerationHandle] = []
        #: For each prompt, log-probabilities of its tokens after the first, if the job wants them.
        self.scores: list[list[dict[int, float]]] = []
        self._ready = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        n = len(job.prompts) * job.n
        self._texts = [TextStream(job.stop) for _ in range(n)]
        self._n_tokens = [0] * n

    def submit(self, prompts: Sequence[Tokens]) -> None:
        """Submit prompts of the job, in order, and score them if the job says so."""
        job, llm = self.job, self.engine.llm
        options: dict[str, Any] = {"n": job.n, "stop": job.stop, "logprobs": job.logprobs}
        if job.use_cache:
            options["namespace"] = job.namespace
            options["keep"] = job.keep
            options["boundaries"] = job.boundaries
        trained = llm.model.n_ctx_train
        try:
            for tokens in prompts:
                limit = self.engine.n_ctx - len(tokens)
                if job.max_tokens is not None:
                    limit = min(limit, job.max_tokens)
                elif len(tokens) < trained:  # beyond it, the text degrades
                    limit = min(limit, trained - len(tokens))
                prompt: Any = tokens if job.use_cache else LlamaSequence(llm.context, tokens)
                if job.scores_prompts:
                    self.scores.append(prompt_logprobs(prompt, job.logprobs))
                    self._close_ended()
                found = llm.generator.submit(prompt, limit, job.sampler, **options)
                self._handles += found if isinstance(found, list) else [found]
        except BaseException:
            self.abort()
            raise

    def _close_ended(self) -> None:
        """Free the cells of samples that have ended, before many scored prompts fill the memory."""
        for handle in self._handles:
            if handle.finish_reason:
                handle.sequence.close()

    async def pieces(self, *, stream: bool) -> AsyncIterator[Piece]:
        """Yield new parts of samples as they are generated; without `stream`, whole samples."""
        for handle in self._handles:
            handle.watch(self._waker(handle, every=stream))
        running = dict(enumerate(self._handles))
        while running:
            self._ready.clear()
            for i, handle in list(running.items()):
                reason = handle.finish_reason  # read before the tokens, which are complete then
                if reason == "error" and handle.error is not None:
                    raise handle.error
                if not (reason or stream):
                    continue
                piece = self._take(i, reason)
                if piece.tokens or reason:
                    yield piece
                if reason:
                    del running[i]
            if running:
                await self._ready.wait()

    def _waker(self, handle: GenerationHandle, *, every: bool) -> Callable[[], None]:
        def wake() -> None:
            if every or handle.finish_reason is not None:
                with contextlib.suppress(RuntimeError):  # the loop was closed
                    self._loop.call_soon_threadsafe(self._ready.set)

        return wake

    def _take(self, i: int, reason: FinishReason | None) -> Piece:
        handle, n = self._handles[i], self._n_tokens[i]
        tokens = handle.tokens[n:].tolist()
        logprobs: list[dict[int, float]] = []
        if self.job.logprobs:  # those of the last tokens may come later
            logprobs = handle.logprobs[n:]
            tokens = tokens[: len(logprobs)] if reason is None else tokens
        model, stream = self.engine.llm.model, self._texts[i]
        is_chat = self.job.format is not None
        shown = tokens if is_chat else [t for t in tokens if not model.is_eog(t)]
        text = "".join(stream.feed(model.token_to_piece(t, special=is_chat)) for t in shown)
        if reason:
            text += stream.finish()
        self._n_tokens[i] += len(tokens)
        return Piece(i, text, tokens, logprobs, reason)

    @property
    def reuse(self) -> ReuseReport:
        """Where the tokens of the prompts came from, summed over the prompts."""
        reports = [
            getattr(handle.sequence, "reuse", ReuseReport(len(prompt), evaluated=len(prompt)))
            for prompt, handle in zip(self.job.prompts, self._handles[:: self.job.n], strict=True)
        ]
        return reports[0] if len(reports) == 1 else sum_of(reports)

    @property
    def n_cached(self) -> int:
        """Tokens of the prompt that were not evaluated."""
        reuse = self.reuse
        return reuse.n_tokens - reuse.evaluated

    @property
    def n_generated(self) -> int:
        """Tokens of all samples so far."""
        return sum(len(handle.tokens) for handle in self._handles)

    def n_written(self, *, least_ttl: float = 0) -> int:
        """Return the number of prompt tokens written by breakpoints with at least this TTL."""
        n, reuse, written = 0, self.reuse, self.n_cached
        for place in self.job.breakpoints if self.job.use_cache else ():
            end = min(place.n_tokens, reuse.n_tokens - reuse.unshared)
            n += max(end - written, 0) if place.ttl >= least_ttl else 0
            written = max(written, end)
        return n

    def timings(self) -> dict[str, Any]:
        """Return llama-server's ``timings``: the first token belongs to the prompt."""
        times = self._handles[0].times
        now = time.perf_counter()
        first = times.first_token or now
        n_prompt, n_new = self.reuse.evaluated, self.n_generated
        prompt_ms = max(1e3 * (first - times.queued), 1e-3)
        new_ms = 1e3 * ((times.finished or now) - first)
        n_steps = max(n_new - len(self._handles), 0)
        return {
            "cache_n": self.n_cached,
            "prompt_n": n_prompt,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": prompt_ms / max(n_prompt, 1),
            "prompt_per_second": 1e3 * n_prompt / prompt_ms,
            "predicted_n": n_new,
            "predicted_ms": new_ms,
            "predicted_per_token_ms": new_ms / n_steps if n_steps else 0.0,
            "predicted_per_second": 1e3 / new_ms * n_steps if n_steps and new_ms else 0.0,
        }

    def stopped_by(self, index: int) -> str | None:
        """Return the stop string that ended a sample."""
        return self._handles[index].stop_string

    def abort(self) -> None:
        """End the samples that still run."""
        for handle in self._handles:
            if handle.finish_reason is None:
                handle.abort()

    def close(self) -> None:
        """Free the cells of the job's own sequences."""
        for handle in self._handles[:: self.job.n]:
            handle.sequence.close()


def sum_of(reports: list[ReuseReport]) -> ReuseReport:
    """Return the sums of several reports."""
    total = ReuseReport()
    for report in reports:
        total = total.plus(report)
    return total


class Engine:
    """Runs jobs on an `LLM`, whose generator runs in its own thread.

    Parameters
    ----------
    name
        The model's name in requests.
    llm
        The model; closed with the engine.
    max_waiting
        Requests that may wait; one more is refused with status 429.
    timeout
        Seconds after which a job ends with the text so far; None: never.
    defaults
        Defaults for fields that a request leaves out.
    """

    def __init__(
        self,
        name: str,
        llm: LLM,
        max_waiting: int = 64,
        timeout: float | None = None,
        defaults: Defaults | None = None,
    ) -> None:
        self.name, self.llm = name, llm
        self.defaults = Defaults() if defaults is None else defaults
        if self.defaults.template is None and llm.model.chat_template is None:
            log.warning(
                "%s has no chat template: using ChatML (set another with --chat-template)", name
            )
            bos = "{{ bos_token }}" if llm.model.add_bos else ""
            # The model writes <|im_end|> as text if its vocabulary has no such token.
            self.defaults = replace(self.defaults, template=bos + CHATML, stop=("<|im_end|>",))
        self.pins = PinBoard(llm)
        self.last_used = time.monotonic()
        # Found once: for Gemma's 262,144 tokens this takes 60 ms.
        self.end_tokens = [t for t in range(llm.model.n_vocab) if llm.model.is_eog(t)]
        self.n_active = self._n_jobs = 0
        self._max_waiting, self._timeout = max_waiting, timeout
        llm.generator.start()

    @property
    def n_ctx(self) -> int:
        """Tokens that one sequence may have."""
        return self.llm.context.n_ctx_seq

    @contextlib.contextmanager
    def _admitted(self) -> Iterator[None]:
        """Count a request while it is queued or runs; refuse it if the queue is full."""
        if self._n_jobs >= self.llm.context.n_seq_max + self._max_waiting:
            raise ApiError(
                429, f"the queue is full (--max-waiting is {self._max_waiting})", retry_after=1
            )
        self._n_jobs += 1
        try:
            yield
        finally:
            self._n_jobs -= 1

    @contextlib.asynccontextmanager
    async def generate(self, make: Callable[[], Job]) -> AsyncIterator[Generation]:
        """Run a job; leaving the block aborts samples that still run.

        Parameters
        ----------
        make
            Returns the job; called in a thread, as templates, tokens and grammars take time.

        Raises
        ------
        ApiError
            400: the prompt does not fit; 429: too many requests wait.
        """
        with self._admitted():
            generation = Generation(self, await asyncio.to_thread(self._checked, make))
            job = generation.job
            # Scoring takes long: a cancelled request scores only its current prompt.
            parts = [[one] for one in job.prompts] if job.scores_prompts else [job.prompts]
            for part in parts:
                await asyncio.to_thread(generation.submit, part)
            loop = asyncio.get_running_loop()
            timer = loop.call_later(self._timeout or 1e9, generation.abort)
            try:
                yield generation
            finally:
                timer.cancel()
                generation.abort()
                if job.breakpoints or not job.use_cache:
                    # Not awaited: a cancelled request must not wait.
                    loop.run_in_executor(None, self._clean_up, generation)

    def _checked(self, make: Callable[[], Job]) -> Job:
        job = make()
        sizes = [len(prompt) for prompt in job.prompts]
        if not all(sizes):
            raise ApiError(400, "the prompt has no tokens", param="prompt")
        if max(sizes) >= self.n_ctx:
            param = "prompt" if job.format is None else "messages"
            raise context_exceeded(max(sizes), self.n_ctx, param)
        return job

    def _clean_up(self, generation: Generation) -> None:
        """Pin the breakpoints' prefixes; free the cells of sequences outside the cache."""
        job = generation.job
        if not job.use_cache:
            generation.close()
            return
        for place in job.breakpoints:
            self.pins.pin(job.prompts[0][: place.n_tokens], place.ttl, job.namespace)

    async def embed(self, prompts: list[Tokens]) -> npt.NDArray[np.float32]:
        """Return embeddings; float32, shape (n, n_embd)."""
        with self._admitted():
            return await asyncio.to_thread(self.llm.embed, prompts)

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        """Keep the model loaded while the block runs."""
        self.n_active += 1
        try:
            yield
        finally:
            self.n_active -= 1
            self.last_used = time.monotonic()

    def close(self) -> None:
        """Abort running jobs, write pending blocks to the tiers, and free the model."""
        self.llm.close()
