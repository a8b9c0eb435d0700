"""A saved sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from pykvcache._arguments import TokenInput, as_int
from pykvcache.errors import (
    ArgumentError,
    StateDamaged,
    StateError,
    StateLayoutMismatch,
    UnsupportedOperation,
)
from pykvcache.state.container import Container, Tensor
from pykvcache.state.facts import Fingerprint
from pykvcache.state.layout import IntArray, Part
from pykvcache.state.saved import (
    Saved,
    check_tokens,
    layouts_of,
    read_fingerprint,
    read_ints,
    read_metadata,
    read_part,
    write_ints,
    write_part,
)

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["SequenceState"]


class SequenceState(Saved):
    """The saved state of a sequence, independent of any context.

    Created by `LlamaContext.sequence_state`, `load`, `from_bytes`, slices and `join`. Immutable;
    its arrays are read-only views, of the file if it was loaded from one. Thread-safe.

    Notes
    -----
    ``state[:n]`` returns the first n tokens and ``state[a:b]`` a block, bit for bit, if the
    memory is plain attention. A sliding window allows only prefixes whose window is complete. A
    recurrent state covers all its tokens and cannot be cut.
    """

    kind = "sequence"

    def __init__(
        self,
        parts: Sequence[Part],
        fingerprint: Fingerprint,
        *,
        first: int = 0,
        tokens: TokenInput | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__([part.layout for part in parts], fingerprint, metadata)
        self._parts = tuple(part.in_order().freeze() for part in parts)
        self._range = self._find_range(first)
        self._tokens = None if tokens is None else check_tokens(tokens, self.n_tokens)

    def _find_range(self, first: int) -> range | None:
        """Return the positions if the memory has no cell per token; None otherwise."""
        part = self._parts[0]
        if part.layout.part != "recurrent":
            return None
        if not len(part):
            return range(0)
        last = int(part.positions[0])
        if not 0 <= first <= last:
            raise ArgumentError(
                f"a sequence that ends at {last} cannot begin at {first}", "first", first, last
            )
        return range(first, last + 1)

    @cached_property
    def _positions(self) -> IntArray:
        if self._range is None:
            return self._parts[0].positions
        # Created on demand: a file may claim 2^31 tokens.
        positions = np.arange(self._range.start, self._range.stop, dtype=np.int32)
        positions.flags.writeable = False
        return positions

    # Facts --------------------------------------------------------------------------------

    @property
    def positions(self) -> IntArray:
        """Position of each token, ascending; int32, shape (n_tokens,), read-only."""
        return self._positions

    @property
    def tokens(self) -> IntArray | None:
        """Token ids, if they were given; int32, shape (n_tokens,), read-only."""
        return self._tokens

    @property
    def parts(self) -> tuple[Part, ...]:
        """The cells, one part per kind of cache in the memory."""
        return self._parts

    @property
    def n_tokens(self) -> int:
        """Number of tokens."""
        return len(self._parts[0]) if self._range is None else len(self._range)

    @property
    def first(self) -> int:
        """Position of the first token, 0 if empty."""
        if self._range is None:
            return int(self._positions[0]) if len(self) else 0
        return self._range.start

    @property
    def nbytes(self) -> int:
        """Size of keys, values and states in bytes."""
        return sum(tensor.nbytes for part in self._parts for tensor in part.tensors)

    def __len__(self) -> int:
        return self.n_tokens

    def __repr__(self) -> str:
        last = self._range[-1:] if self._range is not None else self._positions[-1:]
        span = f"{self.first}..{last[0]}" if len(self) else "none"
        return (
            f"<SequenceState: {len(self)} tokens at {span}, {self._fingerprint.memory}, "
            f"{self.nbytes} bytes>"
        )

    # Cut and join -------------------------------------------------------------------------

    def __getitem__(self, which: slice) -> SequenceState:
        if not isinstance(which, slice):
            raise TypeError(f"a state can only be indexed by slices, not by {type(which).__name__}")
        start, stop, step = which.indices(len(self))
        if step != 1:
            raise ArgumentError(
                f"the step of a slice of a state is {step}: it must be 1", "step", step, 1
            )
        stop = max(start, stop)
        if (start, stop) == (0, len(self)):
            return self
        tokens = None if self._tokens is None else self._tokens[start:stop]
        self._need_cut(start)
        parts = [
            self._cut_window(part, start, stop)
            if part.layout.part == "window"
            else part.take(slice(start, stop))
            for part in self._parts
        ]
        return SequenceState(parts, self._fingerprint, tokens=tokens, metadata=self._metadata)

    def _need_cut(self, start: int) -> None:
        names = {part.layout.part for part in self._parts}
        if "recurrent" in names:
            raise UnsupportedOperation(
                "slice", "a recurrent state covers all its tokens and cannot be cut", "state"
            )
        if "window" in names and start:
            raise UnsupportedOperation(
                "slice", "a sliding-window sequence can only be cut to a prefix", "state"
            )

    def _cut_window(self, window: Part, start: int, stop: int) -> Part:
        """Keep the window cells of a prefix; raise if its next token would miss any."""
        if start == stop:
            return window.take(slice(0, 0))
        last = int(self._positions[stop - 1])
        kept = self._positions[:stop]
        seen = kept[kept > last + 1 - self._fingerprint.n_swa]
        n = int(np.searchsorted(window.positions, last, side="right"))
        held = window.positions[:n]
        if not np.array_equal(held[held > last + 1 - self._fingerprint.n_swa], seen):
            raise UnsupportedOperation(
                "slice",
                f"the state lacks window cells that position {last + 1} would see: it keeps those "
                "of two windows at most. Rewind the sequence in its context first, and take the "
                "state then",
                "state",
            )
        return window.take(slice(0, n))

    def blocks(self, size: int) -> list[SequenceState]:
        """Cut into blocks of ``size`` tokens; the last one may be shorter.

        Raises
        ------
        UnsupportedOperation
            The memory is not plain attention.
        """
        size = as_int(size, "size", 1, 2**31 - 1)
        self._need_blocks("blocks")
        return [self[at : at + size] for at in range(0, len(self), size)]

    @staticmethod
    def join(states: Sequence[SequenceState]) -> SequenceState:
        """Concatenate blocks in the given order; the inverse of `blocks`.

        The metadata is taken from the first block.

        Raises
        ------
        StateLayoutMismatch
            The blocks differ in model or layout.
        StateError
            The positions of a block do not follow those of the previous block.
        UnsupportedOperation
            The memory is not plain attention.
        """
        states = list(states)
        if not states:
            raise ArgumentError("there is nothing to join", "states", 0, 1)
        for state in states:
            if not isinstance(state, SequenceState):
                raise TypeError(f"only SequenceStates can be joined, not {type(state).__name__}")
            state._check_joins(states[0])
        for before, after in pairwise(states):
            if len(before) and len(after) and before.positions[-1] >= after.positions[0]:
                start, end = int(after.positions[0]), int(before.positions[-1])
                message = f"a block that starts at {start} cannot follow one that ends at {end}"
                raise StateError(message, "first position", start, end + 1)
        if len(states) == 1:
            return states[0]
        tokens = [state.tokens for state in states]
        known = [t for t in tokens if t is not None]
        return SequenceState(
            [_joined([state._parts[0] for state in states])],
            states[0]._fingerprint,
            tokens=np.concatenate(known) if len(known) == len(states) else None,
            metadata=states[0]._metadata,
        )

    def _need_blocks(self, operation: str) -> None:
        if len(self._parts) > 1 or self._parts[0].layout.part != "attention":
            raise UnsupportedOperation(
                operation, "only sequences of plain attention can be cut into blocks", "state"
            )

    def _check_joins(self, other: SequenceState) -> None:
        self._need_blocks("join")
        self._fingerprint.check(other._fingerprint)
        if self._layouts != other._layouts:
            raise StateLayoutMismatch("the states store K and V in different ways")

    # Files --------------------------------------------------------------------------------

    def _text(self) -> dict[str, str]:
        return {"first": str(self.first)}

    def _tensors(self) -> list[Tensor]:
        tensors = [] if self._tokens is None else [write_ints("tokens", self._tokens)]
        for part in self._parts:
            tensors += write_part(part.layout.part, part)
        return tensors

    @classmethod
    def _parsed(cls, container: Container) -> Self:
        tensors = container.tensors
        parts = [
            read_part(tensors, layout.part, layout, members=False)
            for layout in layouts_of(container)
        ]
        first = container.metadata.get("first", "")
        if not parts or not first.isdecimal() or any(_disordered(part) for part in parts):
            raise StateDamaged("the state's positions are invalid", what="positions")
        tokens = read_ints(tensors, "tokens", (-1,)) if "tokens" in tensors else None
        fingerprint = read_fingerprint(container)
        metadata = read_metadata(container)
        state = cls(parts, fingerprint, first=int(first), tokens=tokens, metadata=metadata)
        if state.first != int(first):
            message = f"the state begins at {state.first}, not at {first}"
            raise StateDamaged(message, "first position", state.first, int(first))
        return state


def _disordered(part: Part) -> bool:
    return bool((part.positions[:-1] > part.positions[1:]).any() or (part.positions < 0).any())


def _joined(parts: list[Part]) -> Part:
    tensors = tuple(
        np.concatenate([part.tensors[i] for part in parts], axis=int(parts[0].is_transposed(i)))
        for i in range(len(parts[0].tensors))
    )
    exts = [part.ext for part in parts if part.ext is not None]
    return Part(
        parts[0].layout,
        np.concatenate([part.positions for part in parts]),
        np.concatenate(exts) if exts else None,
        tensors,
    )
