"""Ring buffers of keys and values: of one sequence, and of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays._checks import as_int, as_kind, check_size
from pykvcache.arrays.mlx.base import (
    LARGEST_SIZE,
    Arrays,
    Counts,
    Mask,
    Rows,
    announced,
    meta_ints,
    parse_padding,
    row_counts,
    row_indices,
    summed,
)
from pykvcache.arrays.mlx.masks import create_causal_mask
from pykvcache.arrays.mlx.token_pair import (
    BatchCache,
    PairCache,
    TokenPair,
    joined,
    right_justified,
    state_pair,
)
from pykvcache.errors import CacheValueError, NotSupported, shown

if TYPE_CHECKING:
    pass

__all__ = ["BatchRotatingKVCache", "RotatingKVCache"]


class _RingCache(PairCache):
    """A cache of `max_size` columns; a single new column replaces the oldest."""

    def __init__(self, max_size: SupportsIndex) -> None:
        super().__init__()
        self._max_size = as_int("max_size", max_size, minimum=0, maximum=LARGEST_SIZE)
        self._dropped = 0  # columns that have left the ring
        self._head = 0  # next column to overwrite once the ring is rotated, else 0

    @property
    def offset(self) -> int:
        """Number of columns seen so far, which is the position of the next one."""
        return self._dropped + self._pair.length

    @property
    def max_size(self) -> int:
        """Maximum number of columns."""
        return self._max_size

    @property
    def rotated(self) -> bool:
        """Whether the columns are not in order of age."""
        return self._head > 0

    @property
    def _index(self) -> int:
        """Next column to write, as in mlx-lm: the number of columns unless rotated."""
        return self._head or self._pair.length

    def size(self) -> int:
        """Return the number of valid columns, at most `max_size`."""
        return min(self._pair.length, self._max_size)

    def is_trimmable(self) -> bool:
        """Return whether nothing was dropped yet."""
        return self.offset < self._max_size

    @property
    def _kept(self) -> int:
        """Number of first columns that are never overwritten."""
        return 0

    @property
    def _columns_kept(self) -> int:
        """Number of columns that stay if several are added."""
        return max(self._max_size - 1, 0)

    def _put(self, keys: NDArray[Any], values: NDArray[Any]) -> Arrays:
        """Store checked arrays; return views of the columns that they attend to."""
        pair, limit, n = self._pair, self._max_size, keys.shape[2]
        if limit == 0:
            message = f"a {type(self).__name__} of max_size 0 cannot hold a token"
            raise CacheValueError(message, "max_size", 0, 1)
        if n == 1 and pair.length >= limit:
            surplus = pair.length - limit
            if surplus:
                self._pair = pair = self._ordered(surplus)
            if values.base is not None:
                values = values.copy()  # may be a view of the keys, which are written first
            column = self._head or self._kept
            # The column already has the arrays' dtype and shape.
            pair.k_rows[column] = keys
            pair.v_rows[column] = values
            self._head = (column + 1) % limit
            self._dropped += surplus + 1
            return pair.view()
        surplus = pair.length - self._columns_kept if n > 1 else 0
        if surplus > 0:
            self._pair = pair = self._ordered(surplus, (keys, values))
            self._dropped, self._head = self._dropped + surplus, 0
        else:
            pair.put(keys, values, limit, exact=n > 1)
        return pair.view()

    def _ordered(self, drop: int = 0, more: Arrays | None = None) -> TokenPair:
        """Return the columns in order of age, in buffers without spare room.

        Omits the `drop` oldest ones after those that the ring keeps, and appends `more`, keys
        and values.
        """
        pair, index, rows = self._pair, self._index, self._pair.length
        keep = min(self._kept, rows)
        in_old = min(drop, rows - index)
        pieces = (0, keep), (index + in_old, rows), (keep + drop - in_old, index)
        made = []
        for i, buffer in enumerate((pair.keys, pair.values)):
            parts = [buffer[:, :, a:b] for a, b in pieces if a < b]
            if more is not None:
                parts.append(more[i])
            made.append(joined(parts) if parts else buffer[:, :, :0].copy())
        return TokenPair(*made)


class RotatingKVCache(_RingCache):
    """The first `keep` tokens and the newest ones, `max_size` in total.

    Modelled on mlx-lm's ``RotatingKVCache``. A single token overwrites the oldest one after the
    kept ones. For several tokens at once, the ring is put in order of age, ``max_size - 1`` old
    tokens are kept and the new ones appended, so that each sees its whole window. Kept tokens are
    visible in every mask.

    A query sees the stored tokens among the newest ``window_size`` (default `max_size`),
    including its own, and the kept ones.

    Parameters
    ----------
    max_size : int
        Maximum number of tokens; `update` raises for a ring of size 0.
    keep : int
        Number of first tokens that are never overwritten. At most ``max_size - 1`` take effect,
        so that the newest token has a place.
    """

    def __init__(self, max_size: SupportsIndex, keep: SupportsIndex = 0) -> None:
        super().__init__(max_size)
        self._keep = as_int("keep", keep, minimum=0, maximum=LARGEST_SIZE)

    @property
    def keep(self) -> int:
        """Number of first tokens that are never overwritten."""
        return self._keep

    @property
    def _kept(self) -> int:
        return min(self._keep, self._columns_kept)

    def update(self, keys: NDArray[Any], values: NDArray[Any]) -> Arrays:
        """Store new tokens; return views of the tokens that they attend to.

        After a single token, the views are in ring order. After several, they are in order of
        age: up to ``max_size - 1`` old tokens and the new ones. Errors as in `KVCache.update`,
        and ``CacheValueError`` for a ring of size 0.
        """
        keys, values = self._pair.check(keys, values)
        return self._put(keys, values)

    def make_mask(
        self, n: SupportsIndex, window_size: SupportsIndex | None = None, return_array: bool = False
    ) -> Mask:
        """Return the mask for `n` new tokens.

        For several tokens, `(n, columns)` in order of age, or ``"causal"`` if that is enough.
        For one token, None, or `(columns,)` in ring order if the window is shorter than the
        ring and the sequence.
        """
        n = as_int("n", n, minimum=1)
        window = None if window_size is None else as_int("window_size", window_size, minimum=1)
        limit = self._max_size
        before = min(self._pair.length, self._columns_kept)
        if n > 1 and not return_array and before + n <= (limit if window is None else window):
            return "causal"
        if n == 1 and (window is None or window >= limit or self.offset < window):
            return None
        # The ring makes room for one token; the others are added.
        mask = create_causal_mask(n, before, max(limit, 1) if window is None else window)
        kept = mask[:, : self._kept]
        kept |= np.arange(kept.shape[1]) <= np.arange(before, before + n)[:, None]
        if n > 1:
            return mask
        row: NDArray[np.bool_] = mask[0]
        if self._pair.length >= limit:
            # The new token replaces the oldest one after the kept ones.
            place = self._head or self._kept
            row[self._kept :] = np.roll(row[self._kept :], place - self._kept + 1)
        return row

    @classmethod
    def merge(cls, caches: Iterable[RotatingKVCache]) -> BatchRotatingKVCache:
        """Return a `BatchRotatingKVCache` of `caches`, one row each."""
        return BatchRotatingKVCache.merge(caches)

    @property
    def state(self) -> tuple[Any, ...]:
        """``(keys, values)`` as views in ring order; ``()`` when empty.

        Setting it assumes order of age; `meta_state` sets another index.
        """
        return super().state

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        self._pair = state_pair(state, self._max_size)
        self._dropped = self._head = 0

    @property
    def meta_state(self) -> tuple[str, ...]:
        """``(keep, max_size, offset, index)`` as text; `index` is the next column to write."""
        return str(self._keep), str(self._max_size), str(self.offset), str(self._index)

    @meta_state.setter
    def meta_state(self, meta: Sequence[Any]) -> None:
        names = ("keep", "max_size", "offset", "index")
        keep, max_size, offset, index = meta_ints("RotatingKVCache", names, meta)
        rows, why = self._pair.length, ""
        if rows == 0 and (offset or index):
            why = "an empty ring has offset 0 and index 0"
        elif rows and max_size == 0:
            why = "a ring that holds tokens has a max_size of 1 or more"
        elif index > rows or rows > offset or (offset < max_size and rows < offset):
            why = "index, tokens and offset of a ring do not match"
        elif index < rows and (rows != max_size or index < min(keep, max_size - 1)):
            why = "a rotated ring is full and written after its head"
        if why:
            given = dict(zip(names, (keep, max_size, offset, index), strict=True), tokens=rows)
            raise CacheValueError(f"{why}; got {given}", "meta_state", given)
        self._keep, self._max_size = keep, max_size
        self._dropped, self._head = offset - rows, index if index < rows else 0

    def _newest(self) -> TokenPair:
        """Return the newest `max_size` tokens in order of age."""
        if self.is_empty():
            return TokenPair()
        return self._ordered(max(self._pair.length - self._max_size, 0))


class BatchRotatingKVCache(BatchCache, _RingCache):
    """A batch in a ring of `max_size` columns: one row per sequence, padded on the left.

    Modelled on mlx-lm's ``BatchRotatingKVCache``.

    Parameters
    ----------
    max_size : int
        Maximum number of columns; `update` raises for a ring of size 0.
    left_padding : sequence of int, shape (batch,)
        Columns of each row that hold no token.
    """

    _signed = True  # mlx-lm's padding becomes negative after it has left the ring

    def __init__(self, max_size: SupportsIndex, left_padding: Counts) -> None:
        super().__init__(max_size)
        padding = row_counts("left_padding", left_padding)
        self._set_rows(padding, -padding)

    def _set_rows(self, padding: Rows, row_offset: Rows) -> None:
        # Stored relative to the columns seen, so that a new one changes no array.
        self._padding = padding + self._dropped
        self._shift: Rows = row_offset - self.offset

    @property
    def rope_offset(self) -> Rows:
        """Position of each row's next token; negative within left padding."""
        return np.add(self._shift, self.offset)

    def update(self, keys: NDArray[Any], values: NDArray[Any]) -> Arrays:
        """Store new columns; return views of the columns that they attend to.

        After a single column, the views are in ring order. After several, they are in order of
        age: up to ``max_size - 1`` old columns and the new ones.

        Raises
        ------
        CacheValueError, CacheDTypeError
            As in `KVCache.update`; or `max_size` is 0.
        CacheOrderError
            A single column while right padding is not finalized.
        """
        keys, values = self._pair.check(keys, values)
        # `check` has already compared the number of rows with stored columns.
        if not self._pair.length:
            check_size("rows of keys", keys.shape[0], self.batch_size)
        if self._pending is not None:
            if keys.shape[2] == 1:
                self._refuse_pending("decoding with a BatchRotatingKVCache")
            # Right padding of earlier updates moves to the left, to be dropped before tokens.
            self._roll_padding()
        return self._put(keys, values)

    @property
    def _columns_kept(self) -> int:
        # In a ring of size 1, a row that gets only padding must keep its last token.
        return max(self._max_size - 1, 0 if self._pending is None else 1)

    def _overrun(self) -> Rows:
        """Return the columns of announced padding at the end of each row."""
        if self._pending is None:
            return np.zeros_like(self._padding)
        over: Rows = np.maximum(self.rope_offset - self._pending, 0)
        return over

    def _roll_padding(self) -> None:
        over = self._overrun()
        if over.any():
            # In order of age, because only updates of several columns can bring padding.
            self._pair = self._pair.rolled(over)
            self._set_rows(self.left_padding + over, self.rope_offset - over)

    def prepare(
        self,
        *,
        left_padding: Counts | None = None,
        lengths: Counts | None = None,
        right_padding: Counts | None = None,
    ) -> None:
        """Announce padding of the coming columns, as in `BatchKVCache.prepare`.

        With `right_padding`, `lengths` must be the number of coming tokens of each row.
        """
        left, real, right = announced(self, self.batch_size, left_padding, lengths, right_padding)
        padded = right is not None and bool(right.any())
        if padded and real is None:
            raise CacheValueError("right_padding needs lengths: the tokens of each row", "lengths")
        self._refuse_pending("prepare")
        if left is not None:
            padding = summed("left_padding", self.left_padding, left)
            self._set_rows(padding, self.rope_offset - left)
        if padded and real is not None:
            self._pending = self.rope_offset + real  # where the tokens end

    def finalize(self) -> None:
        """Move announced right padding to the left, so that all rows end together."""
        self._roll_padding()
        self._pending = None

    def make_mask(
        self, n: SupportsIndex, window_size: SupportsIndex | None = None, return_array: bool = False
    ) -> NDArray[np.bool_]:
        """Return the mask for `n` new columns, always `(batch, 1, n, columns)`.

        Its columns are those that `update` will return: in order of age for several new columns,
        in ring order for one.
        """
        n = as_int("n", n, minimum=1)
        limit = max(self._max_size, 1)
        window = limit if window_size is None else window_size
        before = min(self._pair.count, self._columns_kept if n > 1 else limit - 1)
        padding = np.maximum(self.left_padding + self._overrun() - (self._pair.count - before), 0)
        mask = create_causal_mask(n, before, window, left_padding=padding)
        if n == 1 and self._pair.count >= limit:
            mask = np.roll(mask, self._head + 1, axis=-1)
        return mask

    def filter(self, batch_indices: Counts) -> None:
        """Keep the given rows, in that order."""
        rows = row_indices(batch_indices, self.batch_size)
        if self._pair.count:
            self._pair = self._pair.take(rows)
        self._padding, self._shift = self._padding[rows], self._shift[rows]
        if self._pending is not None:
            self._pending = self._pending[rows]

    def extend(self, other: BatchRotatingKVCache) -> None:
        """Append the rows of `other`, aligned at the newest column."""
        as_kind("other", other, BatchRotatingKVCache)
        _refuse_sizes([self._max_size, other._max_size])
        self._append_rows(other)

    def _aged(self) -> TokenPair:
        return self._ordered() if self.rotated else self._pair

    def extract(self, index: SupportsIndex) -> RotatingKVCache:
        """Return row `index` as a `RotatingKVCache`, without padding."""
        row = as_int("index", index, minimum=0, maximum=self.batch_size - 1)
        self._refuse_pending("extract")
        alone, first = RotatingKVCache(self._max_size), int(self.left_padding[row])
        if first < self._pair.count:
            alone._pair = self._aged().take(np.array([row]), first)
            alone._dropped = int(self.rope_offset[row]) - alone._pair.length
        return alone

    @classmethod
    def merge(cls, caches: Iterable[RotatingKVCache]) -> BatchRotatingKVCache:
        """Return a batch of `caches` with one row each.

        Raises
        ------
        CacheValueError
            The caches differ in `max_size` or layout, one has several rows, or none is given.
        NotSupported
            A cache has `keep` above 0, which a batch does not support.
        """
        caches = [as_kind("caches", cache, RotatingKVCache) for cache in caches]
        _refuse_sizes([cache.max_size for cache in caches])
        keep = max(cache.keep for cache in caches)
        if keep:
            raise NotSupported("a batch cannot keep the first tokens of its rows", "keep", keep, 0)
        newest = [cache._newest() for cache in caches]
        together = right_justified([(1, pair) for pair in newest])
        padding = np.array([together.count - pair.count for pair in newest], np.int64)
        batch = cls(caches[0].max_size, padding)
        row_offset = np.array([cache.offset for cache in caches], np.int64)
        batch._set_state(together, padding, row_offset, int(row_offset.max()))
        return batch

    def _set_state(self, pair: TokenPair, padding: Rows, row_offset: Rows, offset: int) -> None:
        self._pair, self._dropped, self._head = pair, offset - pair.length, 0
        self._set_rows(np.maximum(padding, 0), row_offset)

    @property
    def meta_state(self) -> tuple[str, ...]:
        """``(max_size, offset, index, rotated)`` as text, plus the padding of an empty batch."""
        numbers = str(self._max_size), str(self.offset), str(self._index), str(self.rotated)
        return numbers if self._pair.count else (*numbers, *(str(p) for p in self.left_padding))

    @meta_state.setter
    def meta_state(self, meta: Sequence[Any]) -> None:
        padding, row_offset = self.left_padding, self.rope_offset
        meta = tuple(meta)  # slicing a scalar of NumPy's raises an IndexError
        max_size, offset, index, columns = self._parsed_meta(meta)
        if columns == 0:
            padding = parse_padding(meta[4:]) if meta[4:] else padding
            row_offset = -padding
        else:
            if offset >= max_size:  # mlx-lm's merge counts columns; rows may have seen more
                offset = int(row_offset.max(initial=offset))
            # A row has at most as many tokens as columns seen, at least as many as visible.
            if ((row_offset > offset) | (row_offset < columns - padding)).any():
                rows = row_offset.tolist(), padding.tolist()
                message = (
                    f"rope_offset {shown(rows[0])} and left_padding {shown(rows[1])} "
                    f"do not fit the newest {columns} of {offset} columns"
                )
                raise CacheValueError(message, "rope_offset", rows, (columns, offset))
            if columns < self._pair.length:  # the rest was trimmed
                self._pair = self._pair.first(columns, max_size)
        self._max_size, self._dropped = max_size, offset - columns
        self._head = index if index < columns else 0
        self._set_rows(padding, row_offset)

    def _parsed_meta(self, meta: tuple[Any, ...]) -> tuple[int, int, int, int]:
        """Parse max_size, offset, index and the number of valid columns."""
        names, rows = ("max_size", "offset", "index"), self._pair.length
        max_size, offset, index = meta_ints("BatchRotatingKVCache", names, meta[:3])
        if len(meta) < 4 or meta[3] not in ("True", "False"):
            message = f"rotated of a BatchRotatingKVCache must be a flag; got {shown(meta[3:4])}"
            raise CacheValueError(message, "rotated", meta[3:4], ("True", "False"))
        rotated, why = meta[3] == "True", ""
        if rows == 0:
            why = "an empty ring has offset 0 and index 0" if offset or index or rotated else ""
        elif len(meta) > 4 or max_size == 0 or index > rows or rows > offset:
            why = "columns, index and offset of a ring do not match"
        elif rotated and rows != max_size:
            why = "a rotated ring is full"
        elif not rotated and (index == 0 or (offset < max_size and index != offset)):
            why = "a ring that is not rotated holds `index` columns"
        if why:
            given = {**dict(zip(names, (max_size, offset, index), strict=True)), "rotated": rotated}
            given["columns"] = rows
            raise CacheValueError(f"{why}; got {given}", "meta_state", given)
        return max_size, offset, index, rows if rotated else index


def _refuse_sizes(sizes: list[int]) -> None:
    """Raise `CacheValueError` unless all rings have the same size."""
    if len(set(sizes)) != 1:
        found = sorted(set(sizes))
        message = f"rings of max_size {shown(found)} cannot share a batch; expected one size"
        raise CacheValueError(message, "max_size", found)
