"""A ring that keeps the first and the newest tokens of one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays._checks import as_int
from pykvcache.arrays.mlx._base import Arrays, Mask, meta_ints, state_pair
from pykvcache.arrays.mlx._growth import TokenPair
from pykvcache.arrays.mlx._limits import LARGEST_SIZE
from pykvcache.arrays.mlx._merge import SingleCache
from pykvcache.arrays.mlx._ring import RingTrim, ordered, ring_mask
from pykvcache.errors import CacheValueError

__all__ = ["RotatingKVCache"]


class RotatingKVCache(RingTrim, SingleCache):
    """The first `keep` and the newest tokens, `max_size` in all.

    It follows mlx-lm's ``RotatingKVCache``: single tokens overwrite the oldest one after
    the kept ones, in the order of the ring; several at once put the ring in order, leave
    ``max_size - 1`` and add themselves, so that each of them finds its whole window. What
    was kept stays visible in every mask (mlx-lm's masks roll or window it away).

    A query sees the stored tokens among the newest ``window_size`` (default `max_size`),
    its own included, and the kept ones.

    Parameters
    ----------
    max_size : int
        Tokens to keep; an `update` of a ring of size 0 raises.
    keep : int
        How many of them are the first of the sequence. At most ``max_size - 1`` take
        effect: the newest token always has a place.
    """

    def __init__(self, max_size: SupportsIndex, keep: SupportsIndex = 0) -> None:
        super().__init__()
        self._max_size = as_int("max_size", max_size, minimum=0, maximum=LARGEST_SIZE)
        self._keep = as_int("keep", keep, minimum=0, maximum=LARGEST_SIZE)
        self._offset = 0
        self._index = 0  # next row to write; `rows stored` unless rotated

    @property
    def offset(self) -> int:
        """Tokens seen so far, and the position of the next one."""
        return self._offset

    @property
    def max_size(self) -> int:
        """Tokens that are kept."""
        return self._max_size

    @property
    def keep(self) -> int:
        """First tokens that are never overwritten."""
        return self._keep

    @property
    def rotated(self) -> bool:
        """Whether the oldest token after the kept ones is not the first row after them."""
        return self._index < self._pair.length

    @property
    def _kept(self) -> int:
        return min(self._keep, max(self._max_size - 1, 0))

    def update(self, keys: NDArray[Any], values: NDArray[Any]) -> Arrays:
        """Store new tokens; return views of what they may attend to.

        After a single token that is the ring as it lies; after several it is from old to
        new, up to ``max_size - 1`` tokens and the new ones. Errors as in `KVCache.update`,
        and ``CacheValueError`` for a ring of size 0.
        """
        if self._max_size == 0:
            raise CacheValueError(
                "a RotatingKVCache of max_size 0 cannot hold a token", "max_size", 0, 1
            )
        pair, limit = self._pair, self._max_size
        keys, values = pair.check(keys, values)
        n = keys.shape[2]
        surplus = pair.length + 1 - limit
        if surplus <= 0:
            end = pair.put(keys, values, limit, exact=n > 1)
            found = pair.view(end)
            # Without a call between, no interrupt comes between.
            pair.length = self._index = end
            self._offset += n
            return found
        if n > 1:
            pair = ordered(pair, self._index, self._kept, surplus, (keys, values))
            found = pair.view()
            changed = {"_pair": pair, "_index": pair.length, "_offset": self._offset + n}
            self.__dict__.update(changed)
            return found
        if surplus > 1:
            pair = ordered(pair, self._index, self._kept, surplus - 1)
        row = self._kept if surplus > 1 or self._index == limit else self._index
        if values.base is not None:
            values = values.copy()  # they may lie where the keys go
        found = pair.view()
        # As above; the buffers take what `check` took without a conversion.
        pair.k_rows[row] = keys
        pair.v_rows[row] = values
        self._pair = pair
        self._index = row + 1
        self._offset += 1
        return found

    def is_trimmable(self) -> bool:
        """Tell whether nothing was dropped yet: fewer than `max_size` tokens were seen."""
        return self._offset < self._max_size

    def make_mask(
        self,
        n: SupportsIndex,
        window_size: SupportsIndex | None = None,
        return_array: bool = False,
    ) -> Mask:
        """Return the mask for `n` new tokens.

        Several: `(n, columns)` from old to new, or ``"causal"`` if that says it all. One:
        None, unless the window is shorter than the ring and than what was seen; then a row
        `(columns,)` in the order of the ring.
        """
        n = as_int("n", n, minimum=1)
        window = None if window_size is None else as_int("window_size", window_size, minimum=1)
        stored, limit = self._pair.length, self._max_size
        if n > 1:
            fits = min(stored, limit - 1) + n <= (limit if window is None else window)
            if fits and not return_array:
                return "causal"
            return ring_mask(n, stored, limit, window, self._kept)
        if window is None or window >= limit or self._offset < window:
            return None
        mask: NDArray[np.bool_] = ring_mask(1, stored, limit, window, self._kept)[0]
        if stored >= limit:
            # The new token takes the row of the oldest one after the kept ones.
            row = self._index if self._index < limit else self._kept
            ring = mask[self._kept :]
            mask[self._kept :] = np.roll(ring, row - self._kept + 1)
        return mask

    @property
    def state(self) -> tuple[Any, ...]:
        """``(keys, values)`` as views, in the order of the ring; ``()`` when empty.

        Setting it takes the tokens as from old to new; `meta_state` says otherwise.
        """
        return super().state

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        self._pair = state_pair(state, self._max_size)
        self._offset = self._index = self._pair.length

    @property
    def meta_state(self) -> tuple[str, ...]:
        """``(keep, max_size, offset, index)`` as text; the ring is written at `index`."""
        return str(self._keep), str(self._max_size), str(self._offset), str(self._index)

    @meta_state.setter
    def meta_state(self, meta: Sequence[Any]) -> None:
        names = ("keep", "max_size", "offset", "index")
        keep, max_size, offset, index = meta_ints("RotatingKVCache", names, meta)
        rows = self._pair.length
        kept = min(keep, max_size - 1)
        given = {**dict(zip(names, (keep, max_size, offset, index), strict=True)), "tokens": rows}
        if rows == 0 and (offset or index):
            raise CacheValueError(
                f"an empty ring has offset 0 and index 0; got {given}", "meta_state", given
            )
        if rows and max_size == 0:
            raise CacheValueError(
                f"a ring that holds tokens has a max_size of 1 or more; got {given}",
                "meta_state",
                given,
            )
        if index > rows or rows > offset or (offset < max_size and rows < offset):
            raise CacheValueError(
                f"index, tokens and offset of a ring do not fit: {given}", "meta_state", given
            )
        if index < rows and (rows != max_size or index < kept):
            raise CacheValueError(
                f"a rotated ring is full and written after its head: {given}", "meta_state", given
            )
        self._keep, self._max_size, self._offset, self._index = keep, max_size, offset, index

    def size(self) -> int:
        """Return how many of the stored tokens count: at most `max_size`."""
        return min(self._pair.length, self._max_size)

    def _newest(self) -> TokenPair:
        """Return the newest `max_size` tokens from old to new."""
        surplus = max(self._pair.length - self._max_size, 0)
        return ordered(self._pair, self._index, self._kept, surplus)
