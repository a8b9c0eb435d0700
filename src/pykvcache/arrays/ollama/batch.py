"""The batch of a forward pass, and argument checks of this family's caches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays._checks import as_int, as_ints
from pykvcache.errors import CacheLayerError, CacheValueError, PositionError, shown

__all__ = [
    "MAX_POSITION",
    "UNLIMITED",
    "Batch",
    "as_copy",
    "as_layer",
    "as_place",
    "as_range",
]

#: Largest position: one below int32's maximum, so that the next position fits too.
MAX_POSITION = 2**31 - 2
#: A window, memory or end of range without a limit.
UNLIMITED = 2**31 - 1


def _sequence(name: str, seq: SupportsIndex) -> int:
    return as_int(name, seq, minimum=0, maximum=2**63 - 1)


def _position(name: str, pos: SupportsIndex) -> int:
    number = as_int(name, pos)
    if not 0 <= number <= UNLIMITED:
        message = f"{name} is {shown(number)}; it must be in [0, 2**31)"
        raise PositionError(message, p0=number, value=number, limit=UNLIMITED, what=name)
    return number


def as_place(seq: SupportsIndex, pos: SupportsIndex) -> tuple[int, int]:
    """Return a sequence id in ``[0, 2**63)`` and a position in ``[0, 2**31)``."""
    return _sequence("seq", seq), _position("pos", pos)


def as_layer(layer: SupportsIndex) -> int:
    """Return the index of a layer, at least 0."""
    index = as_int("layer", layer)
    if index < 0:
        raise CacheLayerError(f"layer is {shown(index)}; it must be at least 0", "layer", index, 0)
    return index


def as_range(
    seq: SupportsIndex, begin: SupportsIndex, end: SupportsIndex | None
) -> tuple[int, int, int]:
    """Return the arguments of ``remove``; an open end is `UNLIMITED`."""
    ident, first = _sequence("seq", seq), _position("begin", begin)
    last = UNLIMITED if end is None else _position("end", end)
    if first > last:
        raise PositionError(f"begin is {first}, above end, which is {last}", p0=first, p1=last)
    return ident, first, last


def as_copy(
    src_seq: SupportsIndex, dst_seq: SupportsIndex, n: SupportsIndex
) -> tuple[int, int, int]:
    """Return the arguments of ``copy_prefix``, `n` no larger than `UNLIMITED`."""
    src, dst = _sequence("src_seq", src_seq), _sequence("dst_seq", dst_seq)
    return src, dst, min(as_int("n", n, minimum=0), UNLIMITED)


class Batch:
    """Positions and sequences of a batch, and which of its tokens belong together.

    `ids` are its sequences, ascending, `lowest` the lowest position of each, and `which` the index
    into `ids` of every token.
    """

    def __init__(
        self,
        positions: Iterable[SupportsIndex],
        sequences: Iterable[SupportsIndex],
        multimodal: Iterable[SupportsIndex] = (),
    ) -> None:
        pos, seq = as_ints("positions", positions), as_ints("sequences", sequences)
        if pos.size != seq.size:
            message = f"{pos.size} positions, but {seq.size} sequences"
            raise CacheValueError(message, "sequences", seq.size, pos.size)
        self.positions = pos.astype(np.int32)
        self.multimodal = self.rows("multimodal", as_ints("multimodal", multimodal))
        low, high = int(pos.min(initial=0)), int(pos.max(initial=0))
        if low < 0 or high > MAX_POSITION:
            wrong = low if low < 0 else high
            message = f"position {wrong} is outside [0, {MAX_POSITION}]"
            raise PositionError(message, p0=wrong, value=wrong, limit=MAX_POSITION)
        if (first := int(seq.min(initial=0))) < 0:
            raise CacheValueError(f"sequence id {first} is negative", "sequences", first, 0)
        if pos.size and (seq == seq[0]).all():
            self.ids, self.which = [int(seq[0])], np.zeros(pos.size, np.intp)
            self.lowest = np.array([pos.min()], np.int64)
        else:
            ids, which = np.unique(seq, return_inverse=True)
            self.ids, self.which = ids.tolist(), which.reshape(-1)
            self.lowest = np.full(len(self.ids), UNLIMITED, np.int64)
            np.minimum.at(self.lowest, self.which, pos)

    @property
    def sequences(self) -> NDArray[np.int64]:
        """Sequence id of every token."""
        return np.array(self.ids, np.int64)[self.which]

    def __len__(self) -> int:
        return len(self.positions)

    def check_size(self, most: int) -> Batch:
        """Return the batch; raise `CacheValueError` unless it has 1 to `most` tokens."""
        if not 0 < len(self) <= most:
            message = f"the batch has {len(self)} tokens; it must have 1 to {most}"
            raise CacheValueError(message, "tokens", len(self), most)
        return self

    def rows(self, name: str, found: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return batch indices; raise `CacheValueError` for one outside the batch."""
        if found.size and not (found.min() >= 0 and found.max() < len(self)):
            message = (
                f"{name} holds {shown(found.tolist())}; the batch has rows 0 to {len(self) - 1}"
            )
            raise CacheValueError(message, name, found.tolist(), len(self) - 1)
        return found
