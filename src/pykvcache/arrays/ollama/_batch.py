"""What a forward pass was started with, checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays._checks import as_int, as_ints
from pykvcache.errors import CacheLayerError, CacheValueError, PositionError
from pykvcache.errors._shown import shown

__all__ = [
    "MAX_POSITION",
    "UNLIMITED",
    "Batch",
    "as_copy",
    "as_layer",
    "as_position",
    "as_range",
    "as_sequence",
]

#: Largest position: one less than int32 holds, so that the position after it fits as well.
MAX_POSITION = 2**31 - 2
#: A window, a memory or an end of range that reaches over every position.
UNLIMITED = 2**31 - 1


def as_sequence(name: str, seq: SupportsIndex) -> int:
    """Return a sequence id in ``[0, 2**63)``."""
    return as_int(name, seq, minimum=0, maximum=2**63 - 1)


def as_position(name: str, pos: SupportsIndex) -> int:
    """Return a position in ``[0, 2**31)``."""
    number = as_int(name, pos)
    if not 0 <= number <= UNLIMITED:
        raise PositionError(
            f"{name} is {shown(number)}; it must be in [0, 2**31)",
            p0=number,
            value=number,
            limit=UNLIMITED,
            what=name,
        )
    return number


def as_layer(layer: SupportsIndex) -> int:
    """Return the index of a layer, at least 0."""
    index = as_int("layer", layer)
    if index < 0:
        raise CacheLayerError(f"layer is {shown(index)}; it must be at least 0", "layer", index, 0)
    return index


def as_range(begin: SupportsIndex, end: SupportsIndex | None) -> tuple[int, int]:
    """Return a range of positions, `UNLIMITED` for an open end.

    Raises
    ------
    PositionError
        A bound is negative or does not fit int32, or `begin` is over `end`.
    """
    first = as_position("begin", begin)
    last = UNLIMITED if end is None else as_position("end", end)
    if first > last:
        raise PositionError(f"begin is {first}, over end, which is {last}", p0=first, p1=last)
    return first, last


def as_copy(
    src_seq: SupportsIndex, dst_seq: SupportsIndex, n: SupportsIndex
) -> tuple[int, int, int]:
    """Return the arguments of ``copy_prefix``, `n` no larger than `UNLIMITED`."""
    src, dst = as_sequence("src_seq", src_seq), as_sequence("dst_seq", dst_seq)
    return src, dst, min(as_int("n", n, minimum=0), UNLIMITED)


class Batch:
    """Positions and sequences of a batch, and which of its tokens belong together.

    `max_batch` is asked when all else is converted: what the caller hands over may run code.

    Attributes
    ----------
    positions : ndarray of int32, shape (n_tokens,)
    ids : list of int
        The sequences of the batch, each once.
    which : ndarray of intp, shape (n_tokens,)
        Index into `ids` of every token.
    lowest : ndarray of int64, shape (len(ids),)
        Lowest position of each sequence in this batch.
    multimodal : ndarray of int64
        Batch indices of the multimodal items.
    """

    __slots__ = ("ids", "lowest", "multimodal", "positions", "which")

    def __init__(
        self,
        positions: Iterable[SupportsIndex],
        sequences: Iterable[SupportsIndex],
        multimodal: Iterable[SupportsIndex],
        max_batch: Callable[[], int],
    ) -> None:
        pos, seq = as_ints("positions", positions), as_ints("sequences", sequences)
        if pos.size != seq.size:
            raise CacheValueError(
                f"{pos.size} positions, but {seq.size} sequences", "sequences", seq.size, pos.size
            )
        marked = as_ints("multimodal", multimodal)
        most = max_batch()
        if not 0 < pos.size <= most:
            raise CacheValueError(
                f"a batch of {pos.size} tokens; 1 to {most} are possible",
                "tokens",
                pos.size,
                most,
            )
        low, high = int(pos.min()), int(pos.max())
        if low < 0 or high > MAX_POSITION:
            wrong = low if low < 0 else high
            raise PositionError(
                f"position {wrong} is outside [0, {MAX_POSITION}]",
                p0=wrong,
                value=wrong,
                limit=MAX_POSITION,
            )
        if seq.min() < 0:
            raise CacheValueError(
                f"sequence id {seq.min()} is negative", "sequences", int(seq.min()), 0
            )
        self.positions = pos.astype(np.int32)
        if (seq == seq[0]).all():
            self.ids, self.which = [int(seq[0])], np.zeros(pos.size, np.intp)
            self.lowest = np.array([low], np.int64)
        else:
            ids, which = np.unique(seq, return_inverse=True)
            self.ids, self.which = ids.tolist(), which.reshape(-1)
            self.lowest = np.full(len(self.ids), UNLIMITED, np.int64)
            np.minimum.at(self.lowest, self.which, pos)
        self.multimodal = self.rows("multimodal", marked)

    @property
    def sequences(self) -> NDArray[np.int64]:
        """Sequence id of every token."""
        return np.array(self.ids, np.int64)[self.which]

    def __len__(self) -> int:
        return len(self.positions)

    def rows(self, name: str, indices: Iterable[SupportsIndex]) -> NDArray[np.int64]:
        """Return `indices` as batch indices.

        Raises
        ------
        CacheValueError
            One is outside the batch.
        """
        found = as_ints(name, indices)
        if found.size and not (found.min() >= 0 and found.max() < len(self)):
            raise CacheValueError(
                f"{name} holds {shown(found.tolist())}; the batch has rows 0 to {len(self) - 1}",
                name,
                found.tolist(),
                len(self) - 1,
            )
        return found
