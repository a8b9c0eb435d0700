"""Several sequences side by side, padded on the left to the same length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays._checks import as_int, as_kind, check_size
from pykvcache.arrays.mlx._base import Arrays, state_pair
from pykvcache.arrays.mlx._growth import TokenPair
from pykvcache.arrays.mlx._merge import BatchCache
from pykvcache.arrays.mlx._ring import roll_columns
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
from pykvcache.arrays.mlx.masks import create_causal_mask
from pykvcache.arrays.mlx.standard import KVCache
from pykvcache.errors import CacheOrderError, CacheValueError
from pykvcache.errors._shown import shown

__all__ = ["BatchKVCache"]


class BatchKVCache(BatchCache, row_class=KVCache):
    """One row per sequence; columns are shared, and each row begins with padding.

    Column `c` of row `i` holds a token if ``c >= left_padding[i]``. Prompts padded on the
    right are announced by `prepare` and moved by `finalize`, after which all rows end in
    the same column.

    It follows mlx-lm's ``BatchKVCache``. Here `filter` and `extract` also work on an empty
    batch (mlx-lm counts below zero, or fails), shapes that differ are refused by `merge`
    and `extend` (mlx-lm pads heads with zeros), and what would lose right padding raises.

    Parameters
    ----------
    left_padding : sequence of int, shape (batch,)
        Columns of each row that hold no token.
    """

    def __init__(self, left_padding: Counts) -> None:
        super().__init__()
        self._padding = row_counts("left_padding", left_padding)
        self._right: Rows | None = None
        self._right_from = 0

    @property
    def offset(self) -> int:
        """Columns that are stored."""
        return self._pair.count

    @property
    def rope_offset(self) -> Rows:
        """Position of the next token of each row: columns less padding, maybe negative."""
        offset: Rows = self._pair.count - self._padding
        return offset

    @property
    def left_padding(self) -> Rows:
        """Leading columns of each row without a token, as a copy."""
        return np.array(self._padding)

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return self._padding.size

    def _rows(self) -> int:
        return self.batch_size

    def update(self, keys: NDArray[Any], values: NDArray[Any]) -> Arrays:
        """Store new columns; return views of all of them. Errors as in `KVCache`."""
        if self._pair.length == 0:
            keys, values = self._pair.check(keys, values)
            check_size("rows of keys", keys.shape[0], self.batch_size)
        return self._pair.append(keys, values)

    def prepare(
        self,
        *,
        left_padding: Counts | None = None,
        lengths: Counts | None = None,
        right_padding: Counts | None = None,
    ) -> None:
        """Announce padding of the columns to come.

        Parameters
        ----------
        left_padding : sequence of int, optional
            Further columns without a token at the beginning; only while nothing is stored.
        lengths : sequence of int, optional
            Tokens to come for each row; what counts here is `right_padding`.
        right_padding : sequence of int, optional
            Columns at the end of the coming updates without a token; then call `finalize`.

        Raises
        ------
        CacheValueError
            Left padding after tokens, or not one number per row.
        CacheOrderError
            Right padding that was announced before is not finalized.
        """
        left, _, right = announced(self.batch_size, left_padding, lengths, right_padding)
        if left is not None and self._pair.count:
            raise CacheValueError(
                "left padding can only be added to an empty BatchKVCache", "left_padding"
            )
        self._refuse_pending("prepare")
        if left is not None:
            self._padding = summed("left_padding", self._padding, left)
        if right is not None and right.any():
            self._right, self._right_from = right, self._pair.count

    def finalize(self) -> None:
        """Move announced right padding to the left, so that all rows end together."""
        if self._right is None:
            return
        pair, padding = self._pair, self._padding
        appended = pair.count - self._right_from
        if appended:
            most = int(self._right.max(initial=0))  # 0 rows may be left
            if most > appended:
                raise CacheOrderError(
                    f"{most} columns of right padding were announced, "
                    f"but only {appended} columns came so far",
                    "right_padding",
                    most,
                    appended,
                )
            pair = roll_columns(pair, self._right)
            padding = summed("left_padding", padding, self._right)
        # Here and below: without a call between, no interrupt comes between.
        self._pair, self._padding, self._right = pair, padding, None

    def advance(self, n: SupportsIndex) -> None:
        """Do nothing: here `update` counts; recurrent caches in the same list need the call."""
        as_int("n", n, minimum=0)

    def is_trimmable(self) -> bool:
        """Tell whether no right padding waits for `finalize`."""
        return self._right is None

    def trim(self, n: SupportsIndex) -> int:
        """Drop the newest `n` columns of every row, or as many as there are; return how many.

        Padding stays where it is: a row that is left with padding alone goes on with it.
        """
        dropped = min(as_int("n", n, minimum=0), self._pair.count)
        if not self.is_trimmable():
            return 0
        self._pair.length -= dropped
        return dropped

    def make_mask(
        self,
        n: SupportsIndex,
        window_size: SupportsIndex | None = None,
        return_array: bool = False,
    ) -> NDArray[np.bool_]:
        """Return the mask for `n` new columns, always `(batch, 1, n, offset + n)`."""
        return create_causal_mask(n, self._pair.count, window_size, left_padding=self._padding)

    def filter(self, batch_indices: Counts) -> None:
        """Keep the given rows, in that order; columns that all of them pad are dropped."""
        rows = row_indices(batch_indices, self.batch_size)
        padding = self._padding[rows]
        pair, common = self._pair, 0
        if pair.count:
            common = min(int(padding.min()), pair.count) if rows.size else 0
            pair = take_rows(pair, rows, common)
        padding = padding - common
        right = None if self._right is None else self._right[rows]
        right_from = max(self._right_from - common, 0)
        self._pair, self._padding, self._right, self._right_from = pair, padding, right, right_from

    def extend(self, other: BatchKVCache) -> None:
        """Add the rows of `other` below, the newest columns of both together."""
        as_kind("other", other, BatchKVCache)
        self._refuse_pending("extend")
        other._refuse_pending("extend")
        columns = max(self._pair.count, other._pair.count)
        mine, others = columns - self._pair.count, columns - other._pair.count
        pair = right_justified([(self.batch_size, self._pair), (other.batch_size, other._pair)])
        padding = np.concatenate([self._padding + mine, other._padding + others])
        self._pair, self._padding = pair, row_counts("left_padding", padding)

    def extract(self, index: SupportsIndex) -> KVCache:
        """Return row `index` as a `KVCache` of its own, without padding."""
        row = as_int("index", index, minimum=0, maximum=self.batch_size - 1)
        self._refuse_pending("extract")
        alone = KVCache()
        first = int(self._padding[row])
        if first < self._pair.count:
            keys, values = self._pair.view()
            alone._pair = TokenPair.copied(
                keys[row : row + 1, :, first:], values[row : row + 1, :, first:]
            )
        return alone

    @classmethod
    def merge(cls, caches: Iterable[KVCache]) -> BatchKVCache:
        """Return a batch with one row for each of `caches`, whose own batch is 1."""
        caches = list(caches)
        for cache in caches:
            as_kind("caches", cache, KVCache)
            if cache.size():
                check_size("rows of a cache to merge", cache._pair.keys.shape[0], 1)
        columns = max((cache.size() for cache in caches), default=0)
        batch = cls([columns - cache.size() for cache in caches])
        batch._pair = right_justified([(1, cache._pair) for cache in caches])
        return batch

    def _refuse_pending(self, operation: str) -> None:
        if self._right is not None:
            raise CacheOrderError(
                f"finalize() should be called before {operation}", "finalize", operation
            )

    @property
    def state(self) -> tuple[Any, ...]:
        """``(keys, values, rope_offset, left_padding)``; ``()`` when empty.

        The padding of an empty batch is in `meta_state`; setting ``()`` keeps it.
        """
        self._refuse_pending("state")
        if self._pair.count == 0:
            return ()
        return (*self._pair.view(), self.rope_offset, self.left_padding)

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        padding = self._padding
        pair = TokenPair()
        if len(state):
            check_size("arrays of a BatchKVCache", len(state), 4)
            pair = state_pair(state[:2])
            batch = pair.keys.shape[0] if pair.count else None
            offset = row_counts("rope_offset", state[2], batch, signed=True)
            padding = row_counts("left_padding", state[3], offset.size)
            if not np.array_equal(offset, pair.count - padding):
                raise CacheValueError(
                    f"rope_offset {shown(offset.tolist())} is not {pair.count} columns less "
                    f"left_padding {shown(padding.tolist())}",
                    "rope_offset",
                    offset.tolist(),
                    (pair.count - padding).tolist(),
                )
        self._pair, self._padding, self._right = pair, padding, None

    @property
    def meta_state(self) -> tuple[str, ...]:
        """``()``, or the padding of an empty batch as text."""
        return () if self._pair.count else tuple(str(p) for p in self._padding)

    @meta_state.setter
    def meta_state(self, meta: Sequence[Any]) -> None:
        if len(meta) and self._pair.count:
            raise CacheValueError(
                f"a BatchKVCache with tokens has no meta state; got {len(meta)}",
                "meta_state",
                len(meta),
                0,
            )
        if len(meta):
            self._padding = parse_padding(meta)


def parse_padding(meta: Sequence[Any]) -> Rows:
    """Return the padding that the meta state of an empty batch holds."""
    if not all(isinstance(p, str) and p.isascii() and p.isdigit() and len(p) < 19 for p in meta):
        raise CacheValueError(
            f"left padding {shown(tuple(meta))} is not numbers as text", "left_padding", tuple(meta)
        )
    return row_counts("left_padding", [int(p) for p in meta])
