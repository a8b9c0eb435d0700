"""LlamaSequence: a list of tokens; the KV cache is updated to match it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NoReturn, SupportsIndex, get_args

import numpy as np
import numpy.typing as npt

from pykvcache._arguments import IntArray, TokenInput, as_bool, as_int, as_token_array
from pykvcache._closing import Closing
from pykvcache._drawing import bar_html
from pykvcache._native import lib
from pykvcache.context import LlamaContext
from pykvcache.errors import (
    ArgumentError,
    ClosedError,
    InvalidBatch,
    NoKvCacheSlot,
    OvertakenError,
    PositionError,
    UnsupportedOperation,
    shown,
)
from pykvcache.sampling import Sampler, check_sampler
from pykvcache.sequence.cells import SequenceCells
from pykvcache.sequence.checkpoints import CheckpointPolicy
from pykvcache.sequence.ledger import common_prefix
from pykvcache.sequence.logprobs import TokenLogprob, likeliest, named
from pykvcache.sequence.pool import pool_of
from pykvcache.sequence.saved import load_sequence, save_sequence
from pykvcache.sequence.text import Stop, StopInput, TextStream, text_of
from pykvcache.state.saved import Path

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["FinishReason", "Generation", "LlamaSequence", "OnFull", "TextGeneration"]

OnFull = Literal["raise", "stop", "shift"]
FinishReason = Literal["stop", "length", "full"]

#: Tokens of a generation without a limit.
MOST = 2**31 - 1


class LlamaSequence(Closing):
    """Tokens of one context that are evaluated when their logits are needed.

    You never handle positions, ids or cells. Edits change the tokens at once and the KV cache
    later: `evaluate`, `logits`, `generate` and `stream` do the minimum work needed to get the
    logits of a fresh run over `tokens` (after a shift see `discard`). A context serves any number
    of sequences: when ids or cells run out, the least recently used sequences are parked (their
    state is kept outside the KV cache) and restored at their next use. Every kind of memory works:
    if it cannot be rewound, a checkpoint is restored and the tokens after it are evaluated again.

    An aLoRA among the context's adapters applies from the last occurrence of its invocation tokens
    on. Every edit looks for them in all tokens; generated tokens alone activate nothing.

    Threads may share a sequence, and the sequences of one context; they wait for each other.
    Closing or garbage-collecting a sequence frees its cells; so does closing its context.

    Parameters
    ----------
    context
        The context that evaluates it. Ids that already hold cells are not used.
    prompt
        Text (with the model's special tokens in front), token ids, or None.
    checkpoints
        When checkpoints are taken, for memories that cannot be rewound.

    Raises
    ------
    UnsupportedOperation
        The model has no memory or has an encoder, or the context's attention is not causal.
    InvalidBatch
        A token is not in the vocabulary.

    Examples
    --------
    >>> from pykvcache import LlamaContext, LlamaModel, LlamaSequence, embedded_model_path
    >>> with LlamaModel(embedded_model_path()) as model, LlamaContext(model, n_ctx=512) as ctx:
    ...     story = LlamaSequence(ctx, "Once upon a time")
    ...     other = story.fork()
    ...     list(story.generate(4)) == list(other.generate(4))
    True
    """

    _metadata: Any = None

    def __init__(
        self,
        context: LlamaContext,
        prompt: str | TokenInput | None = None,
        *,
        checkpoints: CheckpointPolicy | None = None,
    ) -> None:
        if not isinstance(context, LlamaContext):
            raise TypeError(f"context must be a LlamaContext, not {type(context).__name__}")
        if checkpoints is not None and not isinstance(checkpoints, CheckpointPolicy):
            raise TypeError(
                f"checkpoints must be a CheckpointPolicy, not {type(checkpoints).__name__}"
            )
        if context.is_closed:
            raise ClosedError("the context is closed")
        if context.memory_kind == "none":
            raise UnsupportedOperation("LlamaSequence", "this model keeps no memory")
        if context.model.has_encoder:
            raise UnsupportedOperation(
                "LlamaSequence", "the cells also depend on the encoder's input"
            )
        if not context.native.causal:
            raise UnsupportedOperation(
                "LlamaSequence",
                "with non-causal attention each new token changes the K/V of earlier tokens",
            )
        self._context = context
        pool = pool_of(context)
        with pool:
            self._cells = SequenceCells(pool, checkpoints)
        self._closed = False
        if prompt is not None:
            self.append(prompt)

    @classmethod
    def _made(cls, context: LlamaContext, cells: SequenceCells) -> Self:
        self = object.__new__(cls)
        self._context = context
        self._cells = cells
        self._closed = False
        return self

    # Facts ----------------------------------------------------------------------------------

    @property
    def context(self) -> LlamaContext:
        """The context the sequence is evaluated in."""
        return self._context

    @property
    def tokens(self) -> IntArray:
        """All tokens, evaluated or not; int32, shape (n,), read-only; a snapshot."""
        return self._cells.ledger.tokens

    @property
    def text(self) -> str:
        """The text of all tokens, without special tokens."""
        return self._context.model.detokenize(self.tokens)

    @property
    def n_evaluated(self) -> int:
        """Number of leading tokens that the memory or the parked state holds."""
        return self._cells.ledger.n_evaluated

    @property
    def seq_id(self) -> int | None:
        """The id of the sequence in the memory; None while it has none.

        The memory may hold more tokens than the sequence: removed tokens stay until new tokens need
        their place, in case the same tokens return. `LlamaContext` methods with this id, such as
        `LlamaContext.get_state`, see them; `save` and `fork` do not.
        """
        return self._cells.seq_id

    @property
    def is_parked(self) -> bool:
        """Whether the state is kept outside the KV cache."""
        return self._cells.state is not None

    @property
    def is_closed(self) -> bool:
        """Whether the sequence or its context was closed."""
        return self._closed or self._cells.pool.native.is_closed

    def __len__(self) -> int:
        return len(self._cells.ledger)

    # Edits ----------------------------------------------------------------------------------

    def append(self, more: str | TokenInput) -> None:
        """Append tokens without evaluating them.

        Parameters
        ----------
        more
            Text, or token ids. Text gets the model's special tokens (BOS) only if the sequence
            is empty; for special tokens inside a text, pass
            ``model.tokenize(text, parse_special=True)``.

        Raises
        ------
        InvalidBatch
            A token is not in the vocabulary; nothing was appended.
        """
        with self._held():
            self._append(more)

    def _append(self, more: str | TokenInput) -> None:
        """Append to the ledger, with a fast path for plain token arrays."""
        ledger = self._cells.ledger
        if len(ledger.stale) or not ledger.append_plain(more, self._context.model.n_vocab):
            ledger.append(self._as_tokens(more))
        elif ledger.activated_at != ledger.invoked_at:
            ledger.settle()

    def truncate(self, n: SupportsIndex) -> None:
        """Keep the first n tokens.

        Raises
        ------
        PositionError
            ``n`` is not in ``[0, len(self)]``; nothing was changed.
        """
        with self._held():
            n = self._within(n, "n", len(self))
            if n < len(self):
                self._cells.ledger.truncate(n)

    def sync(self, tokens: str | TokenInput) -> int:
        """Turn the sequence into these tokens, keeping the longest common prefix.

        Returns
        -------
        int
            Length of the common prefix.
        """
        with self._held():
            wanted = self._as_tokens(tokens, empty=True)
            ledger = self._cells.ledger
            kept = common_prefix(ledger.part(0, len(ledger)), wanted)
            if kept < len(ledger) or kept < len(wanted):
                ledger.become(kept, wanted[kept:])
            return kept

    def discard(
        self, begin: SupportsIndex, end: SupportsIndex, *, reevaluate: bool = False
    ) -> None:
        """Drop the tokens ``[begin, end)`` and close the gap (context shift).

        Tokens after the gap are moved, not evaluated again: they keep K and V computed while the
        dropped ones were visible, with keys rotated to the new positions. So the next logits
        differ from those of a fresh run. `logits` evaluates the last token again, over the
        remaining cells.

        Parameters
        ----------
        begin, end
            Half-open range of tokens.
        reevaluate
            If the memory cannot shift (M-RoPE, recurrent and hybrid memory, windows that dropped
            cells), evaluate everything from ``begin`` on again; the result is that of a fresh run.

        Raises
        ------
        PositionError
            Not ``0 <= begin <= end <= len(self)``; nothing was changed.
        UnsupportedOperation
            The memory cannot shift and ``reevaluate`` is false; nothing was changed.
        """
        reevaluate = as_bool(reevaluate, "reevaluate")
        with self._held():
            end = self._within(end, "end", len(self))
            begin = self._within(begin, "begin", end)
            if begin < end:
                self._discard(begin, end, reevaluate)

    def _discard(self, begin: int, end: int, reevaluate: bool) -> None:
        cells, ledger = self._cells, self._cells.ledger
        if ledger.n_evaluated > end:
            cells.attach()
            cells.rewind(ledger.n_evaluated)
        if ledger.n_evaluated > end:
            try:
                cells.discard(begin, end)
                return
            except UnsupportedOperation as error:
                if not reevaluate:
                    raise UnsupportedOperation("discard", error.reason) from None
        ledger.become(begin, ledger.part(end, len(ledger)).copy())

    def fork(self, n: SupportsIndex | None = None) -> Self:
        """Return a new sequence of the first n tokens that reuses their evaluation.

        With ``kv_unified=True`` the cells are shared, and the fork costs no memory.
        If no id is free, the fork starts parked.

        Parameters
        ----------
        n
            Number of tokens; ``None`` for all.

        Raises
        ------
        PositionError
            ``n`` is not in ``[0, len(self)]``.
        """
        with self._held():
            n = len(self) if n is None else self._within(n, "n", len(self))
            mine = self._cells
            child = SequenceCells(mine.pool, mine.policy, mine.ledger.part(0, n))
            mine.fork_into(child, n)
            if n == len(self) and mine.row is not None and child.ledger.n_evaluated == n:
                child.row = mine.row
            return self._made(self._context, child)

    @property
    def metadata(self) -> Any:
        """The metadata that `save` wrote to the file of this sequence; None if not loaded.

        Forks have none.
        """
        return self._metadata

    # Evaluation -----------------------------------------------------------------------------

    def evaluate(self) -> None:
        """Evaluate the pending tokens.

        Raises
        ------
        NoKvCacheSlot
            The tokens do not fit the cache even alone. No token is lost.
        DecodeAborted
            `LlamaContext.abort` was called during the evaluation; the evaluated part is kept.
        """
        with self._held():
            # Keep the logits if the last token cannot be evaluated again alone: forks and
            # generate need them.
            self._cells.evaluate(want_row=self._cells.needs_points and len(self) > 0)

    def logits(self) -> npt.NDArray[np.float32]:
        """Return the logits after the last token; float32, shape (n_vocab,), a copy.

        Raises
        ------
        ValueError
            The sequence has no tokens.
        NoKvCacheSlot, DecodeAborted
            As for `evaluate`.
        """
        with self._held():
            row: npt.NDArray[np.float32] = self._row().copy()
            return row

    def generate(
        self,
        max_tokens: SupportsIndex | None = None,
        sampler: Sampler | None = None,
        *,
        stop: StopInput = (),
        on_full: OnFull | None = None,
        n_keep: SupportsIndex = 4,
        logprobs: SupportsIndex = 0,
    ) -> Generation:
        """Generate tokens; every yielded token is appended to `tokens`, and no other token is.

        An end-of-generation token ends the generation; it is neither yielded nor appended. Repeated
        calls, ``break``, a full cache or an exception lose nothing: the next call continues.

        Parameters
        ----------
        max_tokens
            Maximum number of tokens; None: until the generation ends or the cache is full.
        sampler
            Default: greedy.
        stop
            Strings or token ids that end it. Tokens that complete one are yielded and kept.
        on_full
            When the cache is full: ``"raise"`` `NoKvCacheSlot`, ``"stop"``, or ``"shift"``: keep
            the first ``n_keep`` tokens, drop half of the rest and continue (if the memory cannot
            shift, the rest is evaluated again). Default: ``"raise"``, and ``"stop"`` without
            ``max_tokens``.
        n_keep
            For ``"shift"``: number of leading tokens to keep (attention sinks).
        logprobs
            Number of likeliest tokens, per position, whose log-probabilities are recorded.

        Returns
        -------
        Generation
            An iterator of token ids with a ``finish_reason``, ``logprobs`` and
            ``token_logprobs``.

        Raises
        ------
        ValueError, TypeError, IndexError
            An argument is invalid, or the sampler is for another model; raised by the call itself.
        UnsupportedOperation
            A stop string was given, but the model has no vocabulary; raised by the call itself.
        """
        return Generation(self, max_tokens, sampler, stop, on_full, n_keep, logprobs)

    def stream(
        self,
        max_tokens: SupportsIndex | None = None,
        sampler: Sampler | None = None,
        *,
        stop: StopInput = (),
        on_full: OnFull | None = None,
        n_keep: SupportsIndex = 4,
        logprobs: SupportsIndex = 0,
    ) -> TextGeneration:
        """Generate text and yield it once it is final; parameters as for `generate`.

        Yields whole characters, and no part of a stop string: the text ends before it. Trailing
        bytes that do not form a character become U+FFFD.

        Raises
        ------
        ValueError, TypeError, IndexError
            As for `generate`; raised by the call itself.
        UnsupportedOperation
            The model has no vocabulary; raised by the call itself.
        """
        return TextGeneration(self, max_tokens, sampler, stop, on_full, n_keep, logprobs)

    # Park, save, close ----------------------------------------------------------------------

    def park(self) -> None:
        """Free the cells and keep the state in memory; the next use restores it."""
        with self._held():
            self._cells.park()

    def save(
        self, path: Path, metadata: Mapping[str, Any] | None = None, *, sync: bool = True
    ) -> int:
        """Write all tokens, and the state of the evaluated ones, to a file.

        Parameters
        ----------
        path
            A path; `LlamaContext.load_sequence` reads the file, too (with an aLoRA, only if the
            sequence had activated it).
        metadata
            JSON-serializable values with str keys; `describe_state` shows them under "metadata".
        sync
            Flush the file to disk before returning.

        Returns
        -------
        int
            Size of the file in bytes.

        Raises
        ------
        UnsupportedOperation
            The layout of this memory is unknown.
        """
        with self._held():
            return save_sequence(self._cells, path, metadata, sync=sync)

    @classmethod
    def load(
        cls,
        context: LlamaContext,
        path: Path,
        *,
        checkpoints: CheckpointPolicy | None = None,
        convert: bool = False,
    ) -> LlamaSequence:
        """Load a sequence from a file; its evaluated tokens are not evaluated again.

        Its `metadata` is that passed to `save`.

        Parameters
        ----------
        context
            The context to continue in. The model and all settings must match, except ``n_ctx``,
            ``n_seq_max``, ``kv_unified``, ``swa_full`` and flash attention.
        path
            A file from `save`, or from `LlamaContext.save_sequence` with its tokens.
        checkpoints
            As for `LlamaSequence`.
        convert
            Convert K and V if this context stores other types; see
            `LlamaContext.restore_sequence` for the rounding.

        Raises
        ------
        StateError
            The file is damaged, or from another model or layout, or stores other types of K and V
            while ``convert`` is false.
        NoKvCacheSlot
            The sequence does not fit the cache.
        """
        convert = as_bool(convert, "convert")
        sequence = cls(context, checkpoints=checkpoints)
        with sequence._held():
            try:
                sequence._metadata = load_sequence(sequence._cells, path, convert=convert)
            except BaseException:
                sequence._cells.release()
                raise
        return sequence

    def close(self) -> None:
        """Free the cells, the state and the id; idempotent. The tokens stay readable."""
        if self.is_closed:
            self._closed = True
            return
        with lib.Checked(self._cells.pool):
            if not self._closed:
                self._cells.release()
                self._closed = True

    def __reduce__(self) -> NoReturn:
        raise TypeError("a LlamaSequence belongs to a context: use fork() or save()")

    def _repr_html_(self) -> str:
        done = self.n_evaluated
        state = "parked" if self.is_parked else "evaluated"
        text = None if self.is_closed else text_of(self._context.model, self.tokens[-64:])
        parts = [(state, done), ("pending", len(self) - done)]
        return bar_html(repr(self)[1:-1], parts, text or "")

    def __repr__(self) -> str:
        if self.is_closed:
            where = "closed"
        elif self.is_parked:
            where = "parked"
        else:
            where = "no id" if self.seq_id is None else f"id {self.seq_id}"
        return f"<LlamaSequence: {len(self)} tokens, {self.n_evaluated} evaluated, {where}>"

    # Helpers --------------------------------------------------------------------------------

    def _held(self) -> lib.Checked:
        """Take a turn of the pool, after checking that nothing is closed."""
        return lib.Checked(self._cells.pool, self._check_open)

    def _check_open(self) -> None:
        if self._cells.pool.native.is_closed:
            raise ClosedError("the context of this sequence is closed")
        if self._closed:
            raise ClosedError("the sequence is closed")

    def _row(self) -> npt.NDArray[np.float32]:
        if not len(self._cells.ledger):
            raise ArgumentError(
                "the sequence has no tokens: there is nothing to evaluate", "tokens", 0, 1
            )
        row = self._cells.evaluate(want_row=True)
        assert row is not None
        self._evaluated(row)
        return row

    def _evaluated(self, row: npt.NDArray[np.float32]) -> None:
        """Notify a subclass, such as a cached sequence, that all tokens are evaluated.

        The lock is held.
        """

    def _as_tokens(self, more: str | TokenInput, *, empty: bool = False) -> IntArray:
        if isinstance(more, str):
            special = empty or not len(self)
            return self._context.model.tokenize(more, add_special=special)
        tokens = as_token_array(more)
        n_vocab = self._context.model.n_vocab
        # Viewed as unsigned, negative ids are the largest: one pass checks both limits.
        if len(tokens) and tokens.view(np.uint32).max() >= n_vocab:
            at = int(((tokens < 0) | (tokens >= n_vocab)).argmax())
            raise InvalidBatch(
                f"token {tokens[at]} (at {at}) is outside [0, {n_vocab})",
                index=at,
                value=int(tokens[at]),
                limit=n_vocab,
            )
        return tokens

    def _within(self, value: SupportsIndex, what: str, most: int) -> int:
        """Return `value` as an index in ``[0, most]``; raise PositionError otherwise."""
        n = as_int(value, what, -(2**63), 2**63)
        if not 0 <= n <= most:
            raise PositionError(
                f"{what} is {n}: it must be in [0, {most}], and the sequence has "
                f"{len(self)} tokens",
                what=what,
                value=n,
                limit=0 if n < 0 else most,
            )
        return n


class _Generation:
    """A generation of a sequence, one token at a time: the base of two iterators."""

    _is_text = False

    def __init__(
        self,
        sequence: LlamaSequence,
        max_tokens: SupportsIndex | None,
        sampler: Sampler | None,
        stop: StopInput,
        on_full: OnFull | None,
        n_keep: SupportsIndex,
        logprobs: SupportsIndex,
    ) -> None:
        model = sequence.context.model
        if on_full is None:
            on_full = "stop" if max_tokens is None else "raise"
        if not isinstance(on_full, str):
            raise TypeError(f"on_full must be a str, not {type(on_full).__name__}")
        known = get_args(OnFull)
        if on_full not in known:
            raise ArgumentError(
                f"on_full is {shown(on_full)}: it must be one of {', '.join(known)}",
                "on_full",
                on_full,
                known,
            )
        sequence._check_open()
        self._sequence = sequence
        self._stop = Stop.of(stop, model.n_vocab)
        self._text = TextStream(self._stop.strings) if self._is_text or self._stop.strings else None
        if self._text is not None:
            model.token_to_piece(0)  # raises if it has no vocabulary
        self._most = MOST if max_tokens is None else as_int(max_tokens, "max_tokens", 0, MOST)
        sampler = check_sampler(sampler, model)
        self._on_full = on_full
        self._n_keep = as_int(n_keep, "n_keep", 0, MOST)
        self._n_logprobs = as_int(logprobs, "logprobs", 0, model.n_vocab)
        self._writer = lib.Writer(sequence._cells.ledger, sampler.native)
        self._chosen: list[int] = []
        self._logprobs: list[dict[int, float]] = []
        self._finish: FinishReason | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the generation ended; None before.

        ``"stop"`` after an end-of-generation token or a stop, ``"length"`` after ``max_tokens``,
        ``"full"`` if the cache was full and ``on_full="stop"``.
        """
        return self._finish

    @property
    def logprobs(self) -> list[dict[int, float]]:
        """For each token so far, log-probabilities by token id; a copy.

        Contains the ``logprobs`` likeliest tokens and the chosen one; empty if ``logprobs`` is 0.
        """
        return [dict(one) for one in self._logprobs]

    @property
    def token_logprobs(self) -> list[TokenLogprob]:
        """`logprobs` with the text of each token."""
        model = self._sequence.context.model
        return named(model, self._chosen, self._logprobs, self._n_logprobs)

    def _next(self) -> tuple[int | None, str]:
        """Return the next token (None at the end) and the text that is final with it."""
        if self._finish is not None:
            return None, ""
        with self._sequence._held():
            if self._finish is None:  # re-check: another thread may have finished it
                self._finish = self._write()
            if self._finish is not None:
                return None, ""
            token, text = self._writer.last, ""
            if token in self._stop.tokens:
                self._finish = "stop"
            elif self._text is not None:
                text = self._text.feed(self._sequence.context.model.token_to_piece(token))
                if self._text.stopped is not None:
                    self._finish = "stop"
        return token, text

    def _write(self) -> FinishReason | None:
        """Evaluate, sample a token and append it; or return why the generation ended."""
        sequence, writer = self._sequence, self._writer
        if writer.n_written >= self._most:
            return "length"
        if self._text is not None and sequence.context.model.is_closed:
            raise ClosedError("the model is closed: its tokens have no text")
        while True:
            if writer.is_overtaken:
                raise OvertakenError(
                    "another generation has continued this sequence: make a new one to "
                    "continue from its current tokens"
                )
            try:
                row = sequence._row()
                break
            except (NoKvCacheSlot, PositionError):
                if self._on_full == "raise" or not self._helps():
                    raise
                if self._on_full == "stop":
                    return "full"
                self._shift()
        if not writer.write(sequence.context.native, row):
            return "stop"
        if self._n_logprobs:
            self._chosen.append(writer.last)
            self._logprobs.append(likeliest(row, self._n_logprobs, writer.last))
        return None

    def _helps(self) -> bool:
        """Return whether dropping tokens would help; False if only a sequence id is missing."""
        sequence = self._sequence
        is_long = len(sequence) > sequence._cells.pool.most_tokens
        return is_long or sequence.seq_id is not None

    def _shift(self) -> None:
        """Drop half of the tokens after the first n_keep."""
        n = len(self._sequence)
        gone = (n - self._n_keep) // 2
        if gone < 1:
            raise NoKvCacheSlot(
                f"the cache is full: it holds {n} tokens, and n_keep={self._n_keep} leaves none to "
                "drop; keep fewer, or create the context with a larger n_ctx",
                1,
                n_tokens=n + 1,
                n_cells=n,
            )
        self._sequence._discard(self._n_keep, self._n_keep + gone, reevaluate=True)


class Generation(_Generation, Iterator[int]):
    """Iterator of `LlamaSequence.generate`; each token is appended before it is yielded.

    Each step continues from the sequence's current tokens: it may be edited, parked or forked
    between steps. Only the newest generation of a sequence can continue; an older one raises
    `OvertakenError`.
    """

    def __next__(self) -> int:
        token = self._next()[0]
        if token is None:
            raise StopIteration
        return token


class TextGeneration(_Generation, Iterator[str]):
    """Iterator of `LlamaSequence.stream`: text in whole characters."""

    _is_text = True

    def __next__(self) -> str:
        while True:
            token, text = self._next()
            if token is None:
                assert self._text is not None
                text = self._text.finish()
                if not text:
                    raise StopIteration
            if text:
                return text
