"""LlamaSequence: tokens are the truth, and the memory follows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, SupportsIndex

import numpy as np
import numpy.typing as npt

from pykvcache._closing import Closing
from pykvcache._convert import TokenInput, as_bool, as_int
from pykvcache._drawing.html import bar_html
from pykvcache.context import LlamaContext
from pykvcache.errors import ArgumentError, ClosedError, UnsupportedOperation
from pykvcache.errors._shown import shown
from pykvcache.sampling import Sampler, check_sampler
from pykvcache.sequence.cells import SequenceCells
from pykvcache.sequence.checkpoints import POINTS, CheckpointPolicy
from pykvcache.sequence.edits import EditMethods
from pykvcache.sequence.generation import Generation, OnFull, TextGeneration
from pykvcache.sequence.ledger import Ledger
from pykvcache.sequence.pool import pool_of
from pykvcache.sequence.saved import load_sequence, save_sequence
from pykvcache.sequence.text import Stop, StopInput, text_of
from pykvcache.state.saved import Path

__all__ = ["LlamaSequence"]

_ON_FULL = ("raise", "stop", "shift")


class LlamaSequence(EditMethods, Closing):
    """Tokens of one context that are evaluated when their logits are needed.

    Nobody counts positions, ids or cells. Edits change the tokens at once and the memory later:
    `evaluate`, `logits`, `generate` and `stream` do the least work that makes the logits those
    of a fresh run over `tokens`. A context serves any number of sequences: where ids or
    cells are short, those that were not used for longest are parked (their state is kept outside
    the cache) and put back at their next use. It works on every kind of memory: what cannot be
    rewound goes back to a checkpoint and is evaluated again from there.

    Threads may share a sequence, and the sequences of one context; they wait for each other. A
    sequence that is dropped, or closed, frees its cells; so does closing its context.

    Parameters
    ----------
    context
        Where it is evaluated. Ids that hold something already are left to those who work with
        them by hand.
    prompt
        Text (with the model's special tokens in front), token ids, or None.
    checkpoints
        For memories that cannot be rewound: where checkpoints are taken.

    Raises
    ------
    UnsupportedOperation
        The model keeps no memory or has an encoder, or the context's attention is not causal.
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
                "LlamaSequence", "what the cells hold depends on the encoder's input, too"
            )
        if not context.native.causal:
            raise UnsupportedOperation(
                "LlamaSequence",
                "with non-causal attention every token changes what is held of those before it",
            )
        self._context = context
        pool = pool_of(context)
        with pool.hold():
            self._cells = SequenceCells(pool, Ledger(), checkpoints or POINTS)
        self._closed = False
        if prompt is not None:
            self.append(prompt)

    # Evaluation -----------------------------------------------------------------------------

    def evaluate(self) -> None:
        """Evaluate the tokens that are pending.

        Raises
        ------
        NoKvCacheSlot
            They do not fit the cache by themselves. No token is lost.
        DecodeAborted
            `LlamaContext.abort` was called meanwhile; what was evaluated counts.
        """
        with self._held():
            # Where the last token cannot be evaluated again by itself, its logits are kept: forks
            # need them, and generate does.
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
        max_tokens: SupportsIndex,
        sampler: Sampler | None = None,
        *,
        stop: StopInput = (),
        on_full: OnFull = "raise",
        n_keep: SupportsIndex = 4,
    ) -> Generation:
        """Generate tokens; each that is yielded is in `tokens`, and no other.

        An end-of-generation token ends it, and is neither yielded nor kept. So chained calls,
        ``break``, a full cache or an exception lose nothing: the next call goes on.

        Parameters
        ----------
        max_tokens
            Tokens to yield at most.
        sampler
            Default: greedy.
        stop
            Strings or token ids that end it. The tokens that complete one are yielded and kept.
        on_full
            What a full cache does: ``"raise"`` `NoKvCacheSlot`, ``"stop"``, or ``"shift"``: keep
            the first ``n_keep`` tokens, drop half of the rest, go on (where the memory cannot
            shift, the rest is evaluated again).
        n_keep
            For ``"shift"``: tokens at the beginning that stay (attention sinks).

        Returns
        -------
        Generation
            An iterator of token ids with a ``finish_reason``.

        Raises
        ------
        ValueError, TypeError, IndexError
            An argument is wrong, or the sampler is for another model; raised by the call itself.
        UnsupportedOperation
            A stop string, and the model has no vocabulary; raised by the call itself.
        """
        return self._generation(max_tokens, sampler, stop, on_full, n_keep, as_text=False)

    def _generation(
        self,
        max_tokens: SupportsIndex,
        sampler: Sampler | None,
        stop: StopInput,
        on_full: OnFull,
        n_keep: SupportsIndex,
        *,
        as_text: bool,
    ) -> Generation:
        sampler = Sampler(temperature=0) if sampler is None else check_sampler(sampler)
        if not isinstance(on_full, str):
            raise TypeError(f"on_full must be a str, not {type(on_full).__name__}")
        if on_full not in _ON_FULL:
            raise ArgumentError(
                f"on_full is {shown(on_full)}: it must be one of {', '.join(_ON_FULL)}",
                "on_full",
                on_full,
                tuple(_ON_FULL),
            )
        self._check_open()
        stops = Stop.of(stop, self._context.model.n_vocab)
        stops.check_text(self._context.model, always=as_text)
        sampler.native.check(self._context.model.native)
        return Generation(
            self,
            as_int(max_tokens, "max_tokens", 0, 2**31 - 1),
            sampler,
            stops,
            on_full,
            as_int(n_keep, "n_keep", 0, 2**31 - 1),
            as_text=as_text,
        )

    def stream(
        self,
        max_tokens: SupportsIndex,
        sampler: Sampler | None = None,
        *,
        stop: StopInput = (),
        on_full: OnFull = "raise",
        n_keep: SupportsIndex = 4,
    ) -> TextGeneration:
        """Generate text, as soon as it is certain; parameters as for `generate`.

        Whole characters only, and nothing of a stop string: the text ends before it. Bytes at
        the very end that are not a character become U+FFFD.

        Raises
        ------
        ValueError, TypeError, IndexError
            As for `generate`; raised by the call itself.
        UnsupportedOperation
            The model has no vocabulary; raised by the call itself.
        """
        return TextGeneration(
            self._generation(max_tokens, sampler, stop, on_full, n_keep, as_text=True)
        )

    # Life -----------------------------------------------------------------------------------

    def park(self) -> None:
        """Leave the cells and keep the state in memory; any later use puts it back."""
        with self._held():
            self._cells.park()

    def save(
        self, path: Path, metadata: Mapping[str, Any] | None = None, *, sync: bool = True
    ) -> int:
        """Write tokens, pending ones too, and what was evaluated to a file.

        Parameters
        ----------
        path
            A file that `LlamaContext.load_sequence` reads as well.
        metadata
            Anything that JSON can hold, with str keys; `describe_state` has it below "metadata".
        sync
            Wait until the disk has it.

        Returns
        -------
        int
            Size of the file in bytes.

        Raises
        ------
        UnsupportedOperation
            The memory's layout is not known here.
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
        """Return the sequence that a file holds; nothing of it is evaluated again.

        Parameters
        ----------
        context
            Where it goes on: of the same model, and of the same settings but ``n_ctx``,
            ``n_seq_max``, ``kv_unified`` and flash attention.
        path
            A file of `save`, or of `LlamaContext.save_sequence` with its tokens.
        checkpoints
            As for `LlamaSequence`.
        convert
            Convert K and V where this context stores other types, which rounds each value by what
            `LlamaContext.restore_sequence` says.

        Raises
        ------
        StateError
            The file is damaged, or of another model or layout; or of other types of K and V, and
            ``convert`` is false.
        NoKvCacheSlot
            It does not fit the cache.
        """
        convert = as_bool(convert, "convert")
        sequence = cls(context, checkpoints=checkpoints)
        with sequence._held():
            try:
                load_sequence(sequence._cells, path, convert=convert)
            except BaseException:
                sequence._cells.release()
                raise
        return sequence

    def close(self) -> None:
        """Free its cells, its state and its id; twice does nothing. The tokens stay readable."""
        if self.is_closed:
            self._closed = True
            return
        with self._cells.pool.hold():
            if not self._closed:
                self._cells.release()  # first: after an interrupt the next close goes on
                self._closed = True

    def __reduce__(self) -> NoReturn:
        raise TypeError("a LlamaSequence belongs to a context: use fork() or save()")

    def __copy__(self) -> NoReturn:
        self.__reduce__()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self.__reduce__()

    def _repr_html_(self) -> str:
        done = self.n_evaluated
        state = "parked" if self.is_parked else "evaluated"
        text = None if self.is_closed else text_of(self._context.model, self.tokens[-64:])
        parts = [(state, done), ("pending", len(self) - done)]
        return bar_html(repr(self)[1:-1], parts, text or "")

    def __repr__(self) -> str:
        where = (
            "closed"
            if self.is_closed
            else "parked"
            if self.is_parked
            else "not evaluated"
            if self.seq_id is None
            else f"id {self.seq_id}"
        )
        return f"<LlamaSequence: {len(self)} tokens, {self.n_evaluated} evaluated, {where}>"
