"""Several sequences side by side in one ring."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays._checks import as_int, as_kind, check_size
from pykvcache.arrays.mlx._base import Arrays, state_pair
from pykvcache.arrays.mlx._growth import TokenPair
from pykvcache.arrays.mlx._limits import LARGEST_SIZE
from pykvcache.arrays.mlx._merge import BatchCache
from pykvcache.arrays.mlx._ring import RingTrim, ordered, refuse_sizes, ring_meta, roll_columns
from pykvcache.arrays.mlx._rows import (
    Counts,
    Rows,
    announced,
    right_justified,
    row_counts,
    row_indices,
    summed,
    take_rows,
)
from pykvcache.arrays.mlx.batch import parse_padding
from pykvcache.arrays.mlx.masks import create_causal_mask
from pykvcache.arrays.mlx.rotating import RotatingKVCache
from pykvcache.errors import CacheOrderError, CacheValueError, NotSupported
from pykvcache.errors._shown import shown

__all__ = ["BatchRotatingKVCache"]


class BatchRotatingKVCache(RingTrim, BatchCache, row_class=RotatingKVCache):
    """A ring of `max_size` columns, one row per sequence, padded on the left.

    It follows mlx-lm's ``BatchRotatingKVCache``, with its flaws put right: the flag
    `rotated` survives saving (there ``"False"`` reads as true), the mask hides no valid
    token after rotation, `filter` keeps announced lengths, `extend` leaves the other cache
    alone, and padding that left the ring is not counted again when rows are added.

    Parameters
    ----------
    max_size : int
        Columns to keep; an `update` of a ring of size 0 raises.
    left_padding : sequence of int, shape (batch,)
        Columns of each row that hold no token.
    """

    def __init__(self, max_size: SupportsIndex, left_padding: Counts) -> None:
        super().__init__()
        self._max_size = as_int("max_size", max_size, minimum=0, maximum=LARGEST_SIZE)
        padding = row_counts("left_padding", left_padding)
        self._offset = 0
        self._index = 0  # next column to write; `columns stored` unless rotated
        self._set_rows(padding, -padding)
        # Offset of each row at which its announced tokens end and its padding begins.
        self._ends: Rows | None = None

    def _set_rows(self, padding: Rows, row_offset: Rows) -> None:
        # Padding and offsets of all rows, less what `_gone` and `_offset` add to them:
        # a single column then costs two integers instead of two arrays.
        self._lead, self._gone = padding, 0
        self._shift: Rows = row_offset - self._offset

    @property
    def offset(self) -> int:
        """Columns seen so far."""
        return self._offset

    @property
    def rope_offset(self) -> Rows:
        """Position of the next token of each row, maybe negative within left padding."""
        return np.add(self._shift, self._offset)

    @property
    def max_size(self) -> int:
        """Columns that are kept."""
        return self._max_size

    @property
    def left_padding(self) -> Rows:
        """Columns of each row without a token, counted from the oldest one, as a copy."""
        return np.maximum(self._lead - self._gone, 0)

    @property
    def rotated(self) -> bool:
        """Whether the oldest column is not the first of the buffer."""
        return self._index < self._pair.length

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return self._lead.size

    def _rows(self) -> int:
        return self.batch_size

    def update(self, keys: NDArray[Any], values: NDArray[Any]) -> Arrays:
        """Store new columns; return views of what they may attend to.

        After a single column that is the ring as it lies; after several it is from old to
        new, up to ``max_size - 1`` columns and the new ones.

        Raises
        ------
        CacheValueError, CacheDTypeError
            As in `KVCache.update`; or `max_size` is 0.
        CacheOrderError
            A single column while right padding waits for `finalize`.
        """
        pair, limit = self._pair, self._max_size
        keys, values = pair.check(keys, values)
        # What is stored has the right number of rows, and `check` compared with it.
        if not pair.length:
            check_size("rows of keys", keys.shape[0], self.batch_size)
        if limit == 0:
            raise CacheValueError(
                "a BatchRotatingKVCache of max_size 0 cannot hold a token", "max_size", 0, 1
            )
        if keys.shape[2] > 1:
            beside = self._shadow()
            found = beside._put_several(keys, values)
            self._adopt(beside)
            return found
        if self._ends is not None:
            self._refuse_pending("decoding with a BatchRotatingKVCache")
        surplus = pair.length - limit
        if surplus < 0:
            end = pair.put(keys, values, limit)
            found = pair.view(end)
            # Without a call between, no interrupt comes between.
            pair.length = self._index = end
            self._offset += 1
            return found
        if surplus:
            pair = ordered(pair, self._index, drop=surplus)
        column = 0 if surplus or self._index == limit else self._index
        if values.base is not None:
            values = values.copy()  # they may lie where the keys go
        found = pair.view()
        # As above; the buffers take what `check` took without a conversion.
        pair.k_rows[column] = keys
        pair.v_rows[column] = values
        self._pair = pair
        self._index = column + 1
        self._gone += surplus + 1
        self._offset += 1
        return found

    def _put_several(self, keys: NDArray[Any], values: NDArray[Any]) -> Arrays:
        # Padding that earlier updates appended goes left first, so that it is dropped
        # before any token is.
        self._roll_padding()
        surplus = self._pair.length - self._room
        if surplus > 0:
            self._pair = ordered(self._pair, self._index, drop=surplus, more=(keys, values))
            self._gone += surplus
        else:
            self._pair.length = self._pair.put(keys, values, self._max_size, exact=True)
        self._index = self._pair.length
        self._offset += keys.shape[2]
        return self._pair.view()

    @property
    def _room(self) -> int:
        """Columns that stay when several come."""
        # In a ring of size 1 a row that gets only padding must not lose its last token.
        return max(self._max_size - 1, 0 if self._ends is None else 1)

    def _overrun(self) -> Rows:
        """Columns at the end of each row that are announced padding."""
        if self._ends is None:
            return np.zeros_like(self._lead)
        over: Rows = np.maximum(self.rope_offset - self._ends, 0)
        return over

    def _roll_padding(self) -> None:
        over = self._overrun()
        if not over.any():
            return
        self._pair = roll_columns(ordered(self._pair, self._index), over)
        self._index = self._pair.length
        self._set_rows(self.left_padding + over, self.rope_offset - over)

    def prepare(
        self,
        *,
        left_padding: Counts | None = None,
        lengths: Counts | None = None,
        right_padding: Counts | None = None,
    ) -> None:
        """Announce padding of the columns to come, as in `BatchKVCache.prepare`.

        With `right_padding`, `lengths` tells how many tokens each row will get.
        """
        left, real, right = announced(self.batch_size, left_padding, lengths, right_padding)
        if left is not None and self._pair.count:
            raise CacheValueError(
                "left padding can only be added to an empty BatchRotatingKVCache", "left_padding"
            )
        padded = right is not None and bool(right.any())
        if padded and real is None:
            raise CacheValueError("right_padding needs lengths: the tokens of each row", "lengths")
        self._refuse_pending("prepare")
        beside = self._shadow()
        if left is not None:
            padding = summed("left_padding", self.left_padding, left)
            beside._set_rows(padding, self.rope_offset - left)
        if padded and real is not None:
            beside._ends = beside.rope_offset + real
        self._adopt(beside)

    def finalize(self) -> None:
        """Move announced right padding to the left, so that all rows end together."""
        beside = self._shadow()
        beside._roll_padding()
        beside._ends = None
        self._adopt(beside)

    def advance(self, n: SupportsIndex) -> None:
        """Do nothing: here `update` counts; recurrent caches in the same list need the call."""
        as_int("n", n, minimum=0)

    def _refuse_pending(self, operation: str) -> None:
        if self._ends is not None:
            raise CacheOrderError(
                f"finalize() should be called before {operation}", "finalize", operation
            )

    def size(self) -> int:
        """Return how many of the stored columns count: at most `max_size`."""
        return min(self._pair.count, self._max_size)

    def is_trimmable(self) -> bool:
        """Tell whether nothing was dropped yet and no padding waits for `finalize`."""
        return self._offset < self._max_size and self._ends is None

    def make_mask(
        self,
        n: SupportsIndex,
        window_size: SupportsIndex | None = None,
        return_array: bool = False,
    ) -> NDArray[np.bool_]:
        """Return the mask for `n` new columns, always `(batch, 1, n, columns)`.

        Over what `update` will return: from old to new for several columns, in the order
        of the ring for one.
        """
        n = as_int("n", n, minimum=1)
        limit = max(self._max_size, 1)
        window = limit if window_size is None else window_size
        before = min(self._pair.count, self._room if n > 1 else limit - 1)
        padding = np.maximum(self.left_padding + self._overrun() - (self._pair.count - before), 0)
        mask = create_causal_mask(n, before, window, left_padding=padding)
        if n == 1 and self._pair.count >= limit:
            column = self._index if self._index < limit else 0
            mask = np.roll(mask, column + 1, axis=-1)
        return mask

    def filter(self, batch_indices: Counts) -> None:
        """Keep the given rows, in that order."""
        rows = row_indices(batch_indices, self.batch_size)
        beside = self._shadow()
        if self._pair.count:
            beside._pair = take_rows(self._pair, rows)
        beside._set_rows(self.left_padding[rows], self.rope_offset[rows])
        if self._ends is not None:
            beside._ends = self._ends[rows]
        self._adopt(beside)

    def extend(self, other: BatchRotatingKVCache) -> None:
        """Add the rows of `other` below, the newest columns of both together."""
        as_kind("other", other, BatchRotatingKVCache)
        refuse_sizes([self._max_size, other._max_size])
        self._refuse_pending("extend")
        other._refuse_pending("extend")
        parts = [
            (c.batch_size, ordered(c._pair, c._index) if c.rotated else c._pair)
            for c in (self, other)
        ]
        pair = right_justified(parts)
        mine, others = pair.count - self._pair.count, pair.count - other._pair.count
        padding = np.concatenate([self.left_padding + mine, other.left_padding + others])
        row_offset = np.concatenate([self.rope_offset, other.rope_offset])
        beside = self._shadow()
        beside._offset = max(self._offset, other._offset)
        beside._pair, beside._index = pair, pair.length
        beside._set_rows(padding, row_offset)
        self._adopt(beside)

    def extract(self, index: SupportsIndex) -> RotatingKVCache:
        """Return row `index` as a `RotatingKVCache` of its own, without padding."""
        row = as_int("index", index, minimum=0, maximum=self.batch_size - 1)
        self._refuse_pending("extract")
        alone = RotatingKVCache(self._max_size)
        first = int(self.left_padding[row])
        if first < self._pair.count:
            keys, values = ordered(self._pair, self._index).view()
            alone._pair = TokenPair.copied(
                keys[row : row + 1, :, first:], values[row : row + 1, :, first:], self._max_size
            )
            alone._offset, alone._index = int(self.rope_offset[row]), alone._pair.length
        return alone

    @classmethod
    def merge(cls, caches: Iterable[RotatingKVCache]) -> BatchRotatingKVCache:
        """Return a batch with one row for each of `caches`, whose own batch is 1.

        Raises
        ------
        CacheValueError
            Different `max_size`, layouts, or a cache of several rows; or no cache at all.
        NotSupported
            A cache keeps its first tokens: the batch has no place for them.
        """
        caches = list(caches)
        for cache in caches:
            as_kind("caches", cache, RotatingKVCache)
        refuse_sizes([cache.max_size for cache in caches])
        keep = max(cache.keep for cache in caches)
        if keep:
            raise NotSupported("a batch cannot keep the first tokens of its rows", "keep", keep, 0)
        newest = [cache._newest() if cache.size() else TokenPair() for cache in caches]
        for pair in newest:
            if pair.count:
                check_size("rows of a cache to merge", pair.keys.shape[0], 1)
        together = right_justified([(1, pair) for pair in newest])
        batch = cls(caches[0].max_size, [together.count - pair.count for pair in newest])
        batch._pair, batch._index = together, together.length
        row_offset = np.array([cache.offset for cache in caches], np.int64)
        batch._offset = int(row_offset.max())
        batch._set_rows(batch.left_padding, row_offset)
        return batch

    @property
    def state(self) -> tuple[Any, ...]:
        """``(keys, values, rope_offset, left_padding)``, as the ring lies; ``()`` when empty.

        The padding of an empty batch is in `meta_state`; setting ``()`` keeps it. Setting
        arrays takes the columns as from old to new; `meta_state` says otherwise.
        """
        self._refuse_pending("state")
        if self._pair.count == 0:
            return ()
        return (*self._pair.view(), self.rope_offset, self.left_padding)

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        padding, pair = self.left_padding, TokenPair()
        row_offset: Rows = -padding
        if len(state):
            check_size("arrays of a BatchRotatingKVCache", len(state), 4)
            pair = state_pair(state[:2], self._max_size)
            batch = pair.keys.shape[0] if pair.count else None
            row_offset = row_counts("rope_offset", state[2], batch, signed=True)
            # mlx-lm goes on counting below zero when padding has left the ring.
            padding = np.maximum(
                row_counts("left_padding", state[3], row_offset.size, signed=True), 0
            )
        beside = self._shadow()
        beside._pair, beside._ends = pair, None
        beside._offset = beside._index = pair.length
        beside._set_rows(padding, row_offset)
        self._adopt(beside)

    @property
    def meta_state(self) -> tuple[str, ...]:
        """``(max_size, offset, index, rotated)`` as text; then the padding of an empty batch."""
        numbers = str(self._max_size), str(self._offset), str(self._index), str(self.rotated)
        return numbers if self._pair.count else (*numbers, *(str(p) for p in self.left_padding))

    @meta_state.setter
    def meta_state(self, meta: Sequence[Any]) -> None:
        padding, row_offset = self.left_padding, self.rope_offset
        max_size, offset, index, columns, given = ring_meta(meta, self._pair.length)
        if columns == 0:
            padding = parse_padding(given) if given else padding
            row_offset = -padding
        else:
            if offset >= max_size:  # mlx-lm's merge counts columns: the rows have seen more
                offset = int(row_offset.max(initial=offset))
            # No row has more tokens than columns came, nor fewer than it still shows.
            if ((row_offset > offset) | (row_offset < columns - padding)).any():
                raise CacheValueError(
                    f"rope_offset {shown(row_offset.tolist())} and left_padding "
                    f"{shown(padding.tolist())} do not fit {columns} columns of {offset}",
                    "rope_offset",
                    (row_offset.tolist(), padding.tolist()),
                    (columns, offset),
                )
        beside = self._shadow()
        beside._pair.length = columns  # what comes after was trimmed
        beside._max_size, beside._offset, beside._index = max_size, offset, index
        beside._set_rows(padding, row_offset)
        self._adopt(beside)
