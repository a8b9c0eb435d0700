"""BatchGenerator: generates many requests together, one decode per step."""

from __future__ import annotations

import contextlib
import secrets
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, SupportsIndex, overload

from pykvcache._arguments import TokenInput, as_bool, as_int
from pykvcache._closing import Closing
from pykvcache.context import LlamaContext
from pykvcache.errors import (
    ArgumentError,
    ClosedError,
    DecodeAborted,
    KvCacheError,
    ReentryError,
    how_to_install,
)
from pykvcache.generate.request import GenerationHandle, GenerationRequest
from pykvcache.generate.schedule import Schedule
from pykvcache.generate.step import Stepper
from pykvcache.prefix.cache import PrefixCache, core_of
from pykvcache.prefix.sequence import request_of
from pykvcache.sampling import Sampler, check_sampler
from pykvcache.sequence.cells import SequenceCells
from pykvcache.sequence.pool import pool_of
from pykvcache.sequence.sequence import MOST, LlamaSequence
from pykvcache.sequence.text import Stop, StopInput

if TYPE_CHECKING:
    from typing import Literal

__all__ = ["BatchGenerator"]


class BatchGenerator(Closing):
    """Continuous batching: every `step` is one decode for all running requests.

    New requests join at any step. Long prompts are evaluated in parts, in the same decodes as the
    running requests (chunked prefill). Several samples of one prompt share its evaluation. When
    cells run out, the newest request of the lowest priority is preempted: parked, and resumed
    later. Each request has its own sampler and gets the tokens that it would get alone, up to
    rounding.

    Any thread may submit, iterate and abort. Iterating over a handle drives the generator unless
    another thread does; `start` runs the steps in a background thread.

    Parameters
    ----------
    context
        The context; or a `PrefixCache`, which supplies cached prefixes and stores evaluated tokens.
        Requests that arrive together and share at least 16 tokens (one block, for memories that
        cannot rewind) evaluate these once.
    max_sequences
        Maximum number of running requests; default and limit: ``n_seq_max`` of the context.
    n_chunk
        Tokens of a prompt per step; default: ``n_ubatch`` of the context.

    Examples
    --------
    >>> from pykvcache import BatchGenerator, LlamaContext, LlamaModel, embedded_model_path
    >>> with LlamaModel(embedded_model_path()) as model, LlamaContext(model, n_ctx=512) as ctx:
    ...     generator = BatchGenerator(ctx)
    ...     handles = [generator.submit(text, 5) for text in ("Once upon", "One day", "Tim")]
    ...     generator.run()
    ...     [len(handle.tokens) for handle in handles]
    [5, 5, 5]
    """

    def __init__(
        self,
        context: LlamaContext | PrefixCache,
        max_sequences: SupportsIndex | None = None,
        *,
        n_chunk: SupportsIndex | None = None,
    ) -> None:
        cache = None
        if isinstance(context, PrefixCache):
            cache = core_of(context)
            cache.check_open()
            context = cache.context
        LlamaSequence(context).close()  # raises if this context cannot have sequences
        most = context.n_seq_max
        n = most if max_sequences is None else as_int(max_sequences, "max_sequences", 1, most)
        chunk = context.n_ubatch if n_chunk is None else as_int(n_chunk, "n_chunk", 1, 2**31 - 1)
        self._ctx, self._native, self._cache = context, context.native, cache
        self._pool = pool_of(context)
        self._schedule = Schedule(context, self._pool, n, cache)
        self._stepper = Stepper(self._schedule, chunk)
        # Acquired directly: Ctrl-C in a Condition's `__enter__` leaves its lock held.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._driver: int | None = None  # the thread that is making a step
        self._n_awaiting = 0  # threads that wait for another thread's step
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def context(self) -> LlamaContext:
        """The context of this generator."""
        return self._ctx

    @property
    def n_running(self) -> int:
        """Requests that take part in the next step."""
        return len(self._schedule.running)

    @property
    def n_waiting(self) -> int:
        """Requests that wait for ids or cells."""
        return len(self._schedule.waiting)

    # Requests -----------------------------------------------------------------------------------

    @overload
    def submit(  # type: ignore[overload-overlap]
        self,
        prompt: str | TokenInput | LlamaSequence,
        max_tokens: SupportsIndex | None = None,
        sampler: Sampler | None = None,
        *,
        n: Literal[1] = 1,
        stop: StopInput = (),
        logprobs: SupportsIndex = 0,
        priority: SupportsIndex = 0,
        namespace: str | None = None,
        boundaries: Iterable[SupportsIndex] = (),
        keep: SupportsIndex | None = None,
    ) -> GenerationHandle: ...

    @overload
    def submit(
        self,
        prompt: str | TokenInput | LlamaSequence,
        max_tokens: SupportsIndex | None = None,
        sampler: Sampler | None = None,
        *,
        n: int,
        stop: StopInput = (),
        logprobs: SupportsIndex = 0,
        priority: SupportsIndex = 0,
        namespace: str | None = None,
        boundaries: Iterable[SupportsIndex] = (),
        keep: SupportsIndex | None = None,
    ) -> list[GenerationHandle]: ...

    def submit(
        self,
        prompt: str | TokenInput | LlamaSequence,
        max_tokens: SupportsIndex | None = None,
        sampler: Sampler | None = None,
        *,
        n: SupportsIndex = 1,
        stop: StopInput = (),
        logprobs: SupportsIndex = 0,
        priority: SupportsIndex = 0,
        namespace: str | None = None,
        boundaries: Iterable[SupportsIndex] = (),
        keep: SupportsIndex | None = None,
    ) -> GenerationHandle | list[GenerationHandle]:
        """Submit a request; `step`, `run`, or iterating over the handle generates it.

        Parameters
        ----------
        prompt
            Text, token ids, or a LlamaSequence, which grows; do not edit it during the
            generation. If a sequence has several generations (by `LlamaSequence.generate` or
            another generator), only the newest continues: an older request ends with
            `OvertakenError`.
        max_tokens
            Maximum number of new tokens; None: until the text ends or the context is full.
        sampler
            Copied for this request. Default: greedy.
        n
            Number of samples of this prompt. Sample i has the sampler's seed plus i, so that all
            differ and are reproducible. The first continues a LlamaSequence; the others are forks.
        stop
            As in `LlamaSequence.generate`.
        logprobs
            Number of likeliest tokens whose log-probabilities are returned for each token.
        priority
            Requests of higher priority run first, and a cache evicts their blocks last.
        namespace
            Namespace of the cache whose prefixes may be reused; default: the cache's own.
        boundaries
            Token counts of the prompt at which messages end, as in `PrefixCache.sequence`.
        keep
            Number of tokens, counted from the start of the prompt, that the cache stores when the
            request ends, for example without a model's reasoning. None for all.

        Returns
        -------
        GenerationHandle, or a list of n handles if n is more than 1

        Raises
        ------
        NoKvCacheSlot, PositionError
            The prompt does not fit the context, or exceeds the model's positions.
        InvalidBatch, ValueError, TypeError, IndexError
            An argument is invalid, the sampler is for another model, or the prompt has no tokens.
            Other requests are not affected.
        UnsupportedOperation
            A stop string is given, but the model has no vocabulary.
        """
        limit = MOST if max_tokens is None else as_int(max_tokens, "max_tokens", 0, MOST)
        count = as_int(n, "n", 1, 2**16)
        n_logprobs = as_int(logprobs, "logprobs", 0, self._ctx.model.n_vocab)
        rank = as_int(priority, "priority", -(2**31), 2**31 - 1)
        kept = None if keep is None else as_int(keep, "keep", 0)
        if self._cache is None or isinstance(prompt, LlamaSequence):
            for name, given in (("boundaries", list(boundaries) or None), ("keep", keep)):
                if given is not None:
                    raise ArgumentError(f"{name} needs a prompt, and a PrefixCache", name, given)
        sampler = check_sampler(sampler, self._ctx.model)
        stops = Stop.of(stop, self._ctx.model.n_vocab)
        if stops.strings:
            self._ctx.model.token_to_piece(0)  # raises if it has no vocabulary
        with self._pool:
            self._check_open()
            if isinstance(prompt, LlamaSequence):
                sequence = self._given(prompt)
            elif self._cache is not None:
                sequence = self._cache.open(
                    prompt, namespace, boundaries=boundaries, priority=rank, keep=kept
                )
            elif namespace is not None:
                raise ArgumentError("a namespace needs a PrefixCache", "namespace", namespace)
            else:
                sequence = self._plain(prompt)
            if not len(sequence):
                raise ArgumentError(
                    "the prompt has no tokens: there is nothing to evaluate", "prompt", 0, 1
                )
            self._pool.check_length(len(sequence))
            requests = []
            for i in range(count):
                own = sequence if i == 0 else self._sibling(sequence)
                request = GenerationRequest(
                    self,
                    own,
                    limit,
                    self._sampler_of(sampler, i),
                    stops,
                    n_logprobs,
                    rank,
                    None if self._cache is None else request_of(own),
                    is_owned=sequence is not prompt or i > 0,
                )
                requests.append(request)
            handles = [GenerationHandle(one) for one in requests]
            if limit:
                requests[0].siblings = requests[1:]
                self._schedule.add(requests[0])
                self._schedule.seek(requests[0])
            else:
                for request in requests:
                    request.end("length")
                    self._schedule.remove(request)
        self._wake()
        return handles[0] if count == 1 else handles

    def _given(self, sequence: LlamaSequence) -> LlamaSequence:
        """Check a sequence that the generation extends."""
        if sequence.context is not self._ctx:
            raise ArgumentError("the sequence belongs to another context", "prompt")
        sequence._check_open()
        if any(request.sequence is sequence for request in self._schedule.requests):
            raise ArgumentError("the sequence is being generated already", "prompt")
        return sequence

    def _plain(self, prompt: str | TokenInput) -> LlamaSequence:
        """Return a sequence without a cache.

        Skips LlamaSequence's checks of the context, which this generator has already made. The
        lock is held.
        """
        sequence = LlamaSequence._made(self._ctx, SequenceCells(self._pool))
        sequence._append(prompt)
        return sequence

    def _sibling(self, sequence: LlamaSequence) -> LlamaSequence:
        """Return a sequence for another sample of the same prompt."""
        if sequence._cells.ledger.shifted_at is not None:
            return sequence.fork()  # after a shift the tokens do not determine the cells
        request = request_of(sequence)
        if self._cache is not None and request is not None and request in self._cache.live:
            return self._cache.open_beside(request)
        return self._plain(sequence.tokens)

    @staticmethod
    def _sampler_of(sampler: Sampler, i: int) -> Sampler:
        """Return a copy for sample i; a random seed is drawn again for each sample."""
        if sampler.seed is None:
            return sampler.clone(seed=secrets.randbelow(2**32 - 1))
        return sampler.clone(seed=(sampler.seed + i) % (2**32 - 1)) if i else sampler.clone()

    # Steps --------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Whether the generator or its context is closed."""
        return self._closed or self._ctx.is_closed

    def step(self) -> list[tuple[GenerationHandle, int]]:
        """Make one decode for all running requests.

        Returns
        -------
        list of (GenerationHandle, int)
            The new tokens. Empty if nothing is left to do, only parts of prompts were evaluated,
            or all requests wait for tiers.

        Raises
        ------
        DecodeAborted
            `LlamaContext.abort` was called. Nothing is lost; the next step continues.
        """
        is_waiting = True
        while is_waiting:
            with self._pool as pool:
                self._check_open()
                if pool.depth > 1:
                    raise ReentryError("step() was called in the middle of a step")
                made = self._stepper.step()
            if self._stepper.aborted:
                self._drop_aborted()
            for request, _ in made:
                if request.watchers:
                    request.notify()
            is_waiting = not made and self._schedule.await_tiers()
        if self._n_awaiting or self._thread is not None:
            self._wake()
        return [
            (handle, token)
            for request, token in made
            if (handle := request.handle() or _new_handle(request)) is not None
        ]

    def run(self, *, progress: bool | None = None) -> None:
        """Make steps until all requests have ended.

        Parameters
        ----------
        progress
            Show a progress bar (needs the extra ``cli``). Default: if stderr is a terminal and
            rich is installed.

        Raises
        ------
        DecodeAborted, KeyboardInterrupt
            Nothing is lost; the next `run` or `step` continues.
        ClosedError
            It is closed.
        TypeError
            ``progress`` is neither None nor a bool.
        """
        self._check_open()
        wanted = None if progress is None else as_bool(progress, "progress")
        with _progress_bar(self._schedule.count, wanted) as look:
            while len(self._schedule):
                self._advance()
                look()

    def start(self) -> None:
        """Make the steps in a background thread until `close`. Idempotent.

        The thread also ends when the generator and its handles are dropped.

        Raises
        ------
        ClosedError
            It is closed.
        RuntimeError
            The system cannot start a thread; `run` and `step` need none.
        """
        self._check_open()
        with self._lock:
            if not self._has_thread:
                # The thread must not keep the generator alive, and must be woken at its end.
                given = weakref.ref(self), self._changed
                thread = threading.Thread(
                    target=_work, name="pykvcache-generate", args=given, daemon=True
                )
                thread.start()
                self._thread = thread
                weakref.finalize(self, _notify, self._changed).atexit = False

    def close(self) -> None:
        """Abort remaining requests and end the thread. Idempotent."""
        self._closed = True
        if self._native.is_inherited:
            return
        with self._lock:
            thread, self._thread = self._thread, None
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        with self._pool:
            self._stepper.end_all(self._schedule.requests, "aborted")
        self._wake()

    # Driving ------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._native.is_closed:
            raise ClosedError("the context of this LLM or BatchGenerator is closed")
        if self._closed:
            raise ClosedError("the generator is closed")

    def _end_aborted(self) -> None:
        self._stepper.aborted = True
        self._drop_aborted()
        self._wake()

    def _drop_aborted(self) -> None:
        """End aborted requests now, unless a step is under way, which then does so.

        May be called by a finalizer.
        """
        if not self._has_thread and not self._native.is_inherited:
            with contextlib.suppress(KvCacheError):
                self._pool.if_quiet(self._stepper.drop_aborted)

    def _wake(self) -> None:
        if not self._native.is_inherited:
            with self._lock:
                self._changed.notify_all()

    @property
    def _has_thread(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _advance(self) -> None:
        """Make a step; if another thread makes one, wait for that instead."""
        self._check_open()
        me = threading.get_ident()
        try:
            with self._lock:
                if self._has_thread or self._driver not in (None, me):
                    self._n_awaiting += 1
                    try:
                        self._changed.wait(0.05)
                    finally:
                        self._n_awaiting -= 1
                    return
                self._driver = me
            self.step()
        finally:
            if self._driver == me:
                self._driver = None

    def _work_once(self) -> None:
        """Make a step in the background thread; errors end requests."""
        try:
            self.step()
        except DecodeAborted as error:
            with self._pool:
                self._stepper.end_all(self._schedule.running, "aborted", error)
        except Exception as error:
            if self._closed:
                return
            with self._pool:
                self._stepper.end_all(self._schedule.requests, "error", error)
        self._wake()

    def __repr__(self) -> str:
        return f"<BatchGenerator: {self.n_running} running, {self.n_waiting} waiting>"


def _new_handle(request: GenerationRequest) -> GenerationHandle | None:
    """Return a new handle of a request whose handle was dropped; None if dropping has ended it."""
    return None if request.is_owned else GenerationHandle(request)


def _work(ref: weakref.ref[BatchGenerator], changed: threading.Condition) -> None:
    """Make steps while the generator exists and is open; wait while there are no requests."""
    while True:
        with changed:
            generator = ref()
            if generator is None or generator._closed:
                return
            if not len(generator._schedule):
                del generator
                changed.wait()
                continue
        generator._work_once()
        del generator


def _notify(changed: threading.Condition) -> None:
    with changed:
        changed.notify_all()


@contextlib.contextmanager
def _progress_bar(count: Callable[[], int], progress: bool | None) -> Iterator[Callable[[], None]]:
    """Yield a function that updates a bar; `count` returns the number of unfinished requests."""
    # sys.stderr is None in a process without one.
    terminal = sys.stderr is not None and sys.stderr.isatty()
    if progress is False or (progress is None and not terminal):
        yield lambda: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        if progress:
            raise ImportError(f"a progress bar needs rich: {how_to_install('cli')}") from None
        yield lambda: None
        return
    with Progress(console=Console(stderr=True)) as bar:
        left = total = count()
        task = bar.add_task("requests", total=total)

        def look() -> None:
            nonlocal left, total
            before, left = left, count()
            total += max(0, left - before)  # new requests
            bar.update(task, completed=total - left, total=total)

        yield look
