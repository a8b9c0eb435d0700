"""Requests of the server on one model: a bounded queue in front of the batch generator."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pykvcache.generate.handle import FinishReason, GenerationHandle
from pykvcache.llm import LLM
from pykvcache.openai_format import usage_of
from pykvcache.prefix.report import ReuseReport
from pykvcache.sampling import Sampler
from pykvcache.sequence.sequence import LlamaSequence
from pykvcache.sequence.text import TextStream
from pykvcache.serve.errors import ApiError, context_exceeded
from pykvcache.serve.prompts import Breakpoint

__all__ = ["Engine", "Generation", "Job", "Piece", "Timings"]


@dataclass(frozen=True)
class Job:
    """What to generate.

    Attributes
    ----------
    tokens
        The prompt; int32, shape (n,).
    max_tokens
        Tokens to generate at most; None: until the end, or until the context is full.
    sampler
        Copied for each sample.
    n
        Samples of the prompt.
    stop
        Strings that end a text.
    logprobs
        How many of the likeliest tokens to report, per token.
    namespace
        The tenant: nothing is shared across namespaces.
    use_cache
        Whether to begin with what is known, and to keep what is evaluated.
    boundaries
        Numbers of tokens after which messages end.
    breakpoints
        Prefixes to keep.
    """

    tokens: npt.NDArray[np.int32]
    max_tokens: int | None
    sampler: Sampler
    n: int = 1
    stop: tuple[str, ...] = ()
    logprobs: int = 0
    namespace: str = ""
    use_cache: bool = True
    boundaries: tuple[int, ...] = ()
    breakpoints: tuple[Breakpoint, ...] = ()


@dataclass(frozen=True)
class Piece:
    """What is new of one sample.

    Attributes
    ----------
    index
        Which sample.
    text
        Text that is certain, without special tokens.
    raw
        The same with special tokens, which mark reasoning and tool calls.
    tokens, logprobs
        Token ids, and log-probabilities by token id where they were asked for.
    finish_reason
        How it ended; None before.
    """

    index: int
    text: str
    raw: str
    tokens: list[int]
    logprobs: list[dict[int, float]] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class Timings:
    """Times of a request, as llama-server names them."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float

    def as_dict(self) -> dict[str, Any]:
        """Return the members of ``timings``."""
        return {
            "cache_n": self.cache_n,
            "prompt_n": self.prompt_n,
            "prompt_ms": self.prompt_ms,
            "prompt_per_token_ms": self.prompt_ms / max(self.prompt_n, 1),
            "prompt_per_second": 1e3 * self.prompt_n / max(self.prompt_ms, 1e-6),
            "predicted_n": self.predicted_n,
            "predicted_ms": self.predicted_ms,
            "predicted_per_token_ms": self.predicted_ms / max(self.predicted_n, 1),
            "predicted_per_second": 1e3 * self.predicted_n / max(self.predicted_ms, 1e-6),
        }


class Generation:
    """A job that runs: iterate over its pieces; leaving the ``with`` block ends it."""

    def __init__(self, job: Job, handles: list[GenerationHandle]) -> None:
        self.job = job
        self._handles = handles
        self._ready = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for handle in handles:
            handle.watch(self._wake)

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(self._ready.set)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        running = dict(enumerate(self._handles))
        raw = [TextStream(self.job.stop) for _ in self._handles]
        shown = [0] * len(self._handles)
        counted = [0] * len(self._handles)
        while running:
            self._ready.clear()
            for i, handle in list(running.items()):
                reason = handle.finish_reason  # before the text: what came until then is all
                if reason == "error" and handle.error is not None:
                    raise handle.error
                text = handle.text
                tokens = handle.tokens[counted[i] :].tolist()
                logprobs: list[dict[int, float]] = []
                if self.job.logprobs:  # those of the last tokens may be on their way
                    logprobs = handle.logprobs[counted[i] :]
                    tokens = tokens[: len(logprobs)] if reason is None else tokens
                if tokens or reason:
                    written = self._written(raw[i], tokens, reason is not None)
                    yield Piece(i, text[shown[i] :], written, tokens, logprobs, reason)
                    shown[i] = len(text)
                    counted[i] += len(tokens)
                if reason:
                    del running[i]
            if running:
                await self._ready.wait()

    def _written(self, stream: TextStream, tokens: list[int], is_end: bool) -> str:
        """Return the text of some tokens with the special ones."""
        model = self._handles[0].sequence.context.model
        text = "".join(stream.feed(model.token_to_piece(token, special=True)) for token in tokens)
        return text + stream.finish() if is_end else text

    async def whole(self) -> list[Piece]:
        """Wait for the end; return one piece for each sample."""
        texts = [""] * len(self._handles)
        raws = [""] * len(self._handles)
        tokens: list[list[int]] = [[] for _ in self._handles]
        logprobs: list[list[dict[int, float]]] = [[] for _ in self._handles]
        reasons: list[FinishReason | None] = [None] * len(self._handles)
        async for piece in self:
            texts[piece.index] += piece.text
            raws[piece.index] += piece.raw
            tokens[piece.index] += piece.tokens
            logprobs[piece.index] += piece.logprobs
            reasons[piece.index] = piece.finish_reason
        return [
            Piece(i, *one)
            for i, one in enumerate(zip(texts, raws, tokens, logprobs, reasons, strict=True))
        ]

    @property
    def reuse(self) -> ReuseReport:
        """Where the tokens of the prompt came from."""
        report = getattr(self._handles[0].sequence, "reuse", None)
        n = len(self.job.tokens)
        return report if report is not None else ReuseReport(n, evaluated=n)

    @property
    def n_generated(self) -> int:
        """Tokens of all samples so far."""
        return sum(len(handle.tokens) for handle in self._handles)

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's ``usage`` so far."""
        return usage_of(self.reuse, self.n_generated, writes=self.job.use_cache)

    def timings(self) -> Timings:
        """Return the times so far."""
        times = self._handles[0].times
        now = time.perf_counter()
        first = times.first_token or now
        reuse = self.reuse
        return Timings(
            cache_n=reuse.n_tokens - reuse.evaluated,
            prompt_n=reuse.evaluated,
            prompt_ms=1e3 * (first - times.queued),
            predicted_n=self.n_generated,
            predicted_ms=1e3 * ((times.finished or now) - first),
        )

    def stopped_by(self, index: int) -> str | None:
        """Return the stop string that ended a sample."""
        return self._handles[index].stop_string

    def abort(self) -> None:
        """End it; what has ended stays."""
        for handle in self._handles:
            if handle.finish_reason is None:
                handle.abort()


class Engine:
    """Runs jobs on an `LLM`, whose generator gets a thread of its own.

    Parameters
    ----------
    llm
        The model; closed with the engine.
    max_waiting
        Jobs that may wait for a place; one more is refused with status 429.
    timeout
        Seconds after which a job ends with what it has; None: never.
    """

    def __init__(self, llm: LLM, max_waiting: int = 64, timeout: float | None = None) -> None:
        self.llm = llm
        self._timeout = timeout
        self.max_waiting = max_waiting
        self.last_used = time.monotonic()
        self.n_active = self._n_jobs = 0
        llm.generator.start()

    @property
    def n_ctx(self) -> int:
        """Tokens that one sequence may have."""
        return self.llm.context.n_ctx_seq

    @contextlib.asynccontextmanager
    async def generate(self, job: Job) -> AsyncIterator[Generation]:
        """Run a job; when the block is left, what still runs is aborted.

        Raises
        ------
        ApiError
            400: the prompt does not fit; 429: too many jobs wait.
        """
        n = len(job.tokens)
        if not n:
            raise ApiError(400, "the prompt has no tokens", param="prompt")
        if n >= self.n_ctx:
            raise context_exceeded(n, self.n_ctx)
        if self._n_jobs >= self.llm.context.n_seq_max + self.max_waiting:
            raise ApiError(429, f"{self.max_waiting} requests wait already", retry_after=1)
        self._n_jobs += 1
        try:
            generation = Generation(job, await asyncio.to_thread(self._submit, job))
            loop = asyncio.get_running_loop()
            timer = (
                None if self._timeout is None else loop.call_later(self._timeout, generation.abort)
            )
            try:
                yield generation
            finally:
                if timer is not None:
                    timer.cancel()
                generation.abort()
                if job.use_cache and job.breakpoints:
                    # Not awaited: what is cancelled must not wait.
                    loop.run_in_executor(None, self._pin, job)
        finally:
            self._n_jobs -= 1

    def _submit(self, job: Job) -> list[GenerationHandle]:
        limit = self.n_ctx - len(job.tokens)
        if job.max_tokens is not None:
            limit = min(limit, job.max_tokens)
        options: dict[str, Any] = {"n": job.n, "stop": job.stop, "logprobs": job.logprobs}
        if job.use_cache:
            found = self.llm.generator.submit(
                job.tokens, limit, job.sampler, namespace=job.namespace, **options
            )
        else:
            sequence = LlamaSequence(self.llm.context, job.tokens)
            found = self.llm.generator.submit(sequence, limit, job.sampler, **options)
        return found if isinstance(found, list) else [found]

    def _pin(self, job: Job) -> None:
        for place in job.breakpoints:
            self.llm.cache.pin(job.tokens[: place.n_tokens], ttl=place.ttl, namespace=job.namespace)

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
        """Abort what runs, write the tiers, free the model."""
        self.llm.close()
