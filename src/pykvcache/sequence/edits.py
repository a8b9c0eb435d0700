"""The tokens of a `LlamaSequence`, and the edits of them: nothing here evaluates."""

from __future__ import annotations

from typing import TYPE_CHECKING, SupportsIndex

import numpy as np
import numpy.typing as npt

from pykvcache._convert import IntArray, TokenInput, as_bool, as_int, as_token_array
from pykvcache._native import lib
from pykvcache.context import LlamaContext
from pykvcache.errors import (
    ArgumentError,
    ClosedError,
    InvalidBatch,
    PositionError,
    UnsupportedOperation,
)
from pykvcache.sequence.cells import SequenceCells
from pykvcache.sequence.discarding import discard
from pykvcache.sequence.ledger import Ledger, common_prefix

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["EditMethods"]


class EditMethods:
    """Facts and edits of `LlamaSequence`; not made by itself."""

    _context: LlamaContext
    _cells: SequenceCells
    _closed: bool

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
        """The context it is evaluated in."""
        return self._context

    @property
    def tokens(self) -> IntArray:
        """All tokens, evaluated or not; int32, shape (n,), read-only; later edits do not show."""
        return self._cells.ledger.tokens

    @property
    def text(self) -> str:
        """The text of all tokens, without special tokens."""
        return self._context.model.detokenize(self.tokens)

    @property
    def n_evaluated(self) -> int:
        """How many tokens, from the first on, the memory or the parked state holds."""
        return self._cells.ledger.n_evaluated

    @property
    def seq_id(self) -> int | None:
        """The id under which the memory holds it now; None while it has none.

        The memory may hold more than the sequence: tokens that were taken back stay until others
        take their place, in case they come again. The context's own calls, such as
        `LlamaContext.get_state` with this id, see them; `save` and `fork` do not.
        """
        return self._cells.seq_id

    @property
    def is_parked(self) -> bool:
        """Whether its state is kept outside the cache."""
        return self._cells.state is not None

    @property
    def is_closed(self) -> bool:
        """Whether it, or its context, was closed."""
        return self._closed or self._context.is_closed

    def __len__(self) -> int:
        return len(self._cells.ledger)

    # Edits ----------------------------------------------------------------------------------

    def append(self, more: str | TokenInput) -> None:
        """Put tokens at the end; evaluates nothing.

        Parameters
        ----------
        more
            Text, or token ids. Text gets the model's special tokens (BOS) only where the
            sequence is empty; for special tokens inside a text, pass
            ``model.tokenize(text, parse_special=True)``.

        Raises
        ------
        InvalidBatch
            A token is not in the vocabulary; nothing was appended.
        """
        with self._held():
            cells, n = self._cells, len(self)
            # First: after an interrupt logits must not be those of other tokens.
            row, cells.row = cells.row, None
            try:
                self._append(more)
            finally:
                if len(self) == n:
                    cells.row = row

    def _append(self, more: str | TokenInput) -> None:
        """Put tokens into the ledger; what is plain is checked and copied at once."""
        ledger = self._cells.ledger
        if len(ledger.stale) or not ledger.append_plain(more, self._context.model.n_vocab):
            ledger.append(self._as_tokens(more))

    def truncate(self, n: SupportsIndex) -> None:
        """Keep the first n tokens.

        Raises
        ------
        PositionError
            ``n`` is not in ``[0, len(self)]``; nothing was changed.
        """
        with self._held():
            n = self._within(n, "n", 0)
            if n < len(self):
                self._cells.row = None
                self._cells.ledger.truncate(n)

    def sync(self, tokens: str | TokenInput) -> int:
        """Become these tokens: keep the longest common prefix, drop the rest, append the rest.

        Returns
        -------
        int
            How many tokens were kept.
        """
        with self._held():
            wanted = self._as_tokens(tokens, empty=True)
            ledger = self._cells.ledger
            kept = common_prefix(ledger.part(0, len(ledger)), wanted)
            if kept < len(ledger) or kept < len(wanted):
                self._cells.row = None
                ledger.become(kept, wanted[kept:])
            return kept

    def discard(
        self, begin: SupportsIndex, end: SupportsIndex, *, reevaluate: bool = False
    ) -> None:
        """Drop the tokens ``[begin, end)`` and close the gap (context shift).

        Those after the gap keep the keys and values that they were given while the dropped ones
        were seen; keys are rotated to their new places. `logits` evaluates the last token again,
        over what is held now.

        Parameters
        ----------
        begin, end
            Half-open range of tokens.
        reevaluate
            Where the memory cannot shift (M-RoPE, recurrent and hybrid memory, windows that
            dropped cells): evaluate what comes after ``begin`` again, which is a fresh run.

        Raises
        ------
        PositionError
            Not ``0 <= begin <= end <= len(self)``; nothing was changed.
        UnsupportedOperation
            The memory cannot shift and ``reevaluate`` is false; nothing was changed.
        """
        reevaluate = as_bool(reevaluate, "reevaluate")
        with self._held():
            end = self._within(end, "end", 0)
            begin = self._within(begin, "begin", 0, end)
            if begin < end:
                self._discard(begin, end, reevaluate)

    def _discard(self, begin: int, end: int, reevaluate: bool) -> None:
        cells, ledger = self._cells, self._cells.ledger
        cells.row = None
        if ledger.n_evaluated > end:
            cells.attach()
            cells.rewind(ledger.n_evaluated)
        if ledger.n_evaluated > end:
            try:
                discard(cells, begin, end)
                ledger.n_evaluated -= end - begin
                ledger.delete(begin, end)
                cells.note()
                return
            except UnsupportedOperation as error:
                if not reevaluate:
                    raise UnsupportedOperation("discard", error.reason) from None
        ledger.become(begin, ledger.part(end, len(ledger)).copy())

    def fork(self, n: SupportsIndex | None = None) -> Self:
        """Return a new sequence of the first n tokens, which shares what was evaluated.

        With ``kv_unified=True`` the cells are shared, and the fork costs no memory. Where no id
        is free, the fork begins parked.

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
            n = len(self) if n is None else self._within(n, "n", 0)
            mine = self._cells
            ledger = Ledger(mine.ledger.part(0, n))
            child = SequenceCells(mine.pool, ledger, mine.policy)
            mine.fork_into(child, n)
            if n == len(self) and mine.row is not None and ledger.n_evaluated == n:
                child.row = mine.row
            return self._made(self._context, child)

    # For those who evaluate -----------------------------------------------------------------

    def _held(self) -> lib.Checked:
        """Take a turn of the pool, and check with it that nothing is closed."""
        return lib.Checked(self._cells.pool, self._check_open)

    def _check_open(self) -> None:
        if self._context.is_closed:
            raise ClosedError("the context of this sequence is closed")
        if self._closed:
            raise ClosedError("the sequence is closed")

    def _row(self) -> npt.NDArray[np.float32]:
        if not len(self):
            raise ArgumentError(
                "the sequence has no tokens: there is nothing to evaluate", "tokens", 0, 1
            )
        row = self._cells.evaluate(want_row=True)
        assert row is not None
        self._evaluated(row)
        return row

    def _evaluated(self, row: npt.NDArray[np.float32] | None) -> None:
        """Everything is evaluated, with these logits; sequences of a cache tell it.

        The lock is held.
        """

    def _as_tokens(self, more: str | TokenInput, *, empty: bool = False) -> IntArray:
        if isinstance(more, str):
            special = empty or not len(self)
            return self._context.model.tokenize(more, add_special=special)
        tokens = as_token_array(more)
        n_vocab = self._context.model.n_vocab
        # Negative ones are the largest of all without a sign: one pass for both limits.
        if len(tokens) and tokens.view(np.uint32).max() >= n_vocab:
            at = int(((tokens < 0) | (tokens >= n_vocab)).argmax())
            raise InvalidBatch(
                f"token {tokens[at]} (at {at}) is outside [0, {n_vocab})",
                index=at,
                value=int(tokens[at]),
                limit=n_vocab,
            )
        return tokens

    def _within(self, value: SupportsIndex, what: str, lo: int, hi: int | None = None) -> int:
        """Return a place among the tokens; raise PositionError for any other."""
        limit = len(self) if hi is None else hi
        n = as_int(value, what, -(2**63), 2**63)
        if not lo <= n <= limit:
            raise PositionError(
                f"{what} is {n}: it must be in [{lo}, {limit}], and the sequence has "
                f"{len(self)} tokens",
                what=what,
                value=n,
                limit=lo if n < lo else limit,
            )
        return n
