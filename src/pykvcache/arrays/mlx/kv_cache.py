"""Caches with one pair of buffers, ordered by age: plain, concatenating, chunked, batched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays._checks import as_int, as_kind, check_size
from pykvcache.arrays.mlx.base import (
    LARGEST_SIZE,
    Arrays,
    Counts,
    Rows,
    announced,
    meta_ints,
    parse_padding,
    row_counts,
    row_indices,
    summed,
)
from pykvcache.arrays.mlx.masks import create_causal_mask
from pykvcache.arrays.mlx.quantized import QuantizedKVCache
from pykvcache.arrays.mlx.token_pair import (
    BatchCache,
    PairCache,
    TokenPair,
    joined,
    right_justified,
    state_pair,
)
from pykvcache.errors import CacheOrderError, CacheValueError, shown

__all__ = [
    "BatchKVCache",
    "ChunkedKVCache",
    "ConcatenateKVCache",
    "KVCache",
]


class KVCache(PairCache):
    """All tokens of a sequence, in growing buffers.

    Modelled on mlx-lm's ``KVCache``. Storing one token costs O(1) copies on average.

    Arrays are `(batch, n_kv_heads, n_tokens, head_dim)` of any numeric dtype; keys and
    values may differ in the last axis and in dtype. Not thread-safe.
    """

    def to_quantized(
        self, group_size: SupportsIndex = 64, bits: SupportsIndex = 4
    ) -> QuantizedKVCache:
        """Return a `QuantizedKVCache` with the same tokens.

        Raises
        ------
        CacheValueError
            `bits` or `group_size` is invalid or does not fit the head sizes.
        """
        quantized = QuantizedKVCache(group_size=group_size, bits=bits)
        if self._pair.count:
            quantized.update_quantized(*self._pair.view())
        return quantized

    @classmethod
    def merge(cls, caches: Iterable[KVCache]) -> BatchKVCache:
        """Return a `BatchKVCache` of `caches`, one row each, padded on the left."""
        return BatchKVCache.merge(caches)


class ConcatenateKVCache(KVCache):
    """A `KVCache` without spare room: every update concatenates.

    Modelled on mlx-lm's ``ConcatenateKVCache``, for a few large blocks or as a reference: each
    token costs a copy of all stored tokens. Files load as `KVCache`.
    """

    def update(self, keys: NDArray[Any], values: NDArray[Any]) -> Arrays:
        """Store new tokens; return views of all keys and values. Errors as in `KVCache`."""
        keys, values = self._pair.check(keys, values)
        if self._pair.count:
            old_keys, old_values = self._pair.view()
            self._pair = TokenPair(joined([old_keys, keys]), joined([old_values, values]))
        else:
            self._pair = TokenPair(keys.copy(), values.copy())
        return self._pair.view()


class ChunkedKVCache(PairCache):
    """All tokens since `start_position`, which `maybe_trim_front` advances.

    Modelled on mlx-lm's ``ChunkedKVCache``; a cache whose front was dropped keeps its offset.
    Trimming stops at `start_position`.

    Parameters
    ----------
    chunk_size : int
        Maximum number of tokens after `maybe_trim_front`, at least 1.
    """

    def __init__(self, chunk_size: SupportsIndex) -> None:
        super().__init__()
        self._chunk_size = as_int("chunk_size", chunk_size, minimum=1, maximum=LARGEST_SIZE)
        self._start_position = 0

    @property
    def chunk_size(self) -> int:
        """Maximum number of tokens after `maybe_trim_front`."""
        return self._chunk_size

    @property
    def start_position(self) -> int:
        """Position of the oldest stored token: the number of dropped tokens."""
        return self._start_position

    @property
    def offset(self) -> int:
        """Position of the next token, including dropped tokens."""
        return self._start_position + self._pair.count

    def maybe_trim_front(self) -> None:
        """Drop the oldest tokens until at most `chunk_size` are left, without copying."""
        surplus = self._pair.count - self._chunk_size
        if surplus > 0:
            self._pair.start += surplus
            self._start_position += surplus

    @property
    def state(self) -> tuple[Any, ...]:
        """``(keys, values)`` as views of the stored tokens; ``()`` when empty.

        Setting it stores the tokens at position 0; `meta_state` moves them.
        """
        return super().state

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        self._pair, self._start_position = state_pair(state), 0

    @property
    def meta_state(self) -> tuple[str, ...]:
        """``(chunk_size, start_position)`` as text."""
        return str(self._chunk_size), str(self._start_position)

    @meta_state.setter
    def meta_state(self, meta: Sequence[Any]) -> None:
        chunk, start = meta_ints("ChunkedKVCache", ("chunk_size", "start_position"), meta)
        self._chunk_size = as_int("chunk_size", chunk, minimum=1)
        self._start_position = start


class BatchKVCache(BatchCache):
    """A batch: one row per sequence, padded on the left to common columns.

    Column `c` of row `i` holds a token if ``c >= left_padding[i]``. Right-padded prompts are
    announced with `prepare`; `finalize` then moves them, so that all rows end in the same
    column.

    Modelled on mlx-lm's ``BatchKVCache``. A call that would lose right padding raises.

    Parameters
    ----------
    left_padding : sequence of int, shape (batch,)
        Columns of each row that hold no token.
    """

    def __init__(self, left_padding: Counts) -> None:
        super().__init__()
        self._padding = row_counts("left_padding", left_padding)
        self._right_from = 0  # the column where the right padding `_pending` was announced

    @property
    def rope_offset(self) -> Rows:
        """Position of each row's next token: columns minus padding, possibly negative."""
        offset: Rows = self._pair.count - self._padding
        return offset

    def update(self, keys: NDArray[Any], values: NDArray[Any]) -> Arrays:
        """Store new columns; return views of all columns. Errors as in `KVCache`."""
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
        """Announce padding of the coming columns.

        Parameters
        ----------
        left_padding : sequence of int, optional
            More columns without a token at the beginning; only while the cache is empty.
        lengths : sequence of int, optional
            Number of upcoming tokens of each row; ignored, since `right_padding` is used instead.
        right_padding : sequence of int, optional
            Columns without a token at the end of the coming updates; call `finalize` after them.

        Raises
        ------
        CacheValueError
            Left padding on a cache with tokens, or not one number per row.
        CacheOrderError
            Earlier right padding is not finalized.
        """
        left, _, right = announced(self, self.batch_size, left_padding, lengths, right_padding)
        self._refuse_pending("prepare")
        if left is not None:
            self._padding = summed("left_padding", self._padding, left)
        if right is not None and right.any():
            self._pending, self._right_from = right, self._pair.count

    def finalize(self) -> None:
        """Move announced right padding to the left, so that all rows end together."""
        if self._pending is None:
            return
        columns = self._pair.count - self._right_from
        if columns:
            most = int(self._pending.max(initial=0))  # `filter` may have removed all rows
            if most > columns:
                message = (
                    f"{most} columns of right padding were announced, "
                    f"but only {columns} columns have been stored since"
                )
                raise CacheOrderError(message, "right_padding", most, columns)
            padding = summed("left_padding", self._padding, self._pending)
            self._pair, self._padding = self._pair.rolled(self._pending), padding
        self._pending = None

    def make_mask(
        self, n: SupportsIndex, window_size: SupportsIndex | None = None, return_array: bool = False
    ) -> NDArray[np.bool_]:
        """Return the mask for `n` new columns, always `(batch, 1, n, offset + n)`."""
        return create_causal_mask(n, self._pair.count, window_size, left_padding=self._padding)

    def filter(self, batch_indices: Counts) -> None:
        """Keep the given rows, in that order; drop columns that are padding in all of them."""
        rows = row_indices(batch_indices, self.batch_size)
        padding, common = self._padding[rows], 0
        if self._pair.count:
            common = min(int(padding.min()), self._pair.count) if rows.size else 0
            self._pair = self._pair.take(rows, common)
        self._padding = padding - common
        if self._pending is not None:
            self._pending = self._pending[rows]
        self._right_from = max(self._right_from - common, 0)

    def extend(self, other: BatchKVCache) -> None:
        """Append the rows of `other`, aligned at the newest column."""
        self._append_rows(as_kind("other", other, BatchKVCache))

    def extract(self, index: SupportsIndex) -> KVCache:
        """Return row `index` as a `KVCache`, without padding."""
        row = as_int("index", index, minimum=0, maximum=self.batch_size - 1)
        self._refuse_pending("extract")
        alone, first = KVCache(), int(self._padding[row])
        if first < self._pair.count:
            alone._pair = self._pair.take(np.array([row]), first)
        return alone

    @classmethod
    def merge(cls, caches: Iterable[KVCache]) -> BatchKVCache:
        """Return a batch of `caches` with one row each."""
        caches = [as_kind("caches", cache, KVCache) for cache in caches]
        columns = max((cache.size() for cache in caches), default=0)
        batch = cls([columns - cache.size() for cache in caches])
        batch._pair = right_justified([(1, cache._pair) for cache in caches])
        return batch

    def _set_state(self, pair: TokenPair, padding: Rows, row_offset: Rows, offset: int) -> None:
        expected = pair.count - padding
        if not np.array_equal(row_offset, expected):
            message = (
                f"rope_offset {shown(row_offset.tolist())} is not {pair.count} columns minus "
                f"left_padding {shown(padding.tolist())}"
            )
            raise CacheValueError(message, "rope_offset", row_offset.tolist(), expected.tolist())
        self._pair, self._padding = pair, padding

    @property
    def meta_state(self) -> tuple[str, ...]:
        """``()``; for an empty batch, its padding as text."""
        return () if self._pair.count else tuple(str(p) for p in self._padding)

    @meta_state.setter
    def meta_state(self, meta: Sequence[Any]) -> None:
        if len(meta) and self._pair.count:
            message = f"a BatchKVCache with tokens has no meta state; got {len(meta)}"
            raise CacheValueError(message, "meta_state", len(meta), 0)
        if len(meta):
            self._padding = parse_padding(meta)
