"""The plain cache: every token is kept, every token is visible."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, SupportsIndex

from numpy.typing import NDArray

from pykvcache.arrays._checks import as_int
from pykvcache.arrays.mlx._base import Arrays, Mask
from pykvcache.arrays.mlx._growth import TokenPair, joined
from pykvcache.arrays.mlx._merge import SingleCache
from pykvcache.arrays.mlx.masks import history_mask
from pykvcache.arrays.mlx.quantized import QuantizedKVCache

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ConcatenateKVCache", "KVCache"]


class KVCache(SingleCache):
    """All tokens of a sequence, in buffers that grow by steps of 256 tokens.

    It follows mlx-lm's ``KVCache``. Storing one token costs O(1) copies on average (mlx-lm
    copies everything every 256 tokens), `state` is ``()`` when empty (mlx-lm fails there),
    and a cache that was trimmed to nothing is empty again.

    Arrays are `(batch, n_kv_heads, n_tokens, head_dim)` of any numeric dtype; keys and
    values may differ in the last axis and in dtype. Not safe for several threads at once.
    """

    @property
    def offset(self) -> int:
        """Stored tokens, and the position of the next one."""
        return self._pair.length

    def update(self, keys: NDArray[Any], values: NDArray[Any]) -> Arrays:
        """Store new tokens; return views of all keys and values.

        Raises
        ------
        CacheValueError
            A shape does not fit what is stored, or there is no token.
        CacheDTypeError
            Not NumPy arrays of numbers, or of another dtype than what is stored.
        """
        return self._pair.append(keys, values)

    def is_trimmable(self) -> bool:
        """Return True."""
        return True

    def trim(self, n: SupportsIndex) -> int:
        """Drop the newest `n` tokens, or as many as there are; return how many."""
        dropped = min(as_int("n", n, minimum=0), self._pair.length)
        self._pair.length -= dropped
        return dropped

    def make_mask(
        self,
        n: SupportsIndex,
        window_size: SupportsIndex | None = None,
        return_array: bool = False,
    ) -> Mask:
        """Return the mask for `n` new tokens, `(n, offset + n)` if it is an array.

        A window always gives an array; without one a single token needs no mask.
        """
        return history_mask(n, self._pair.length, window_size, return_array)

    def to_quantized(
        self, group_size: SupportsIndex = 64, bits: SupportsIndex = 4
    ) -> QuantizedKVCache:
        """Return a `QuantizedKVCache` that holds the same tokens.

        Raises
        ------
        CacheValueError
            `bits` or `group_size` cannot be, or do not fit the head sizes.
        """
        quantized = QuantizedKVCache(group_size=group_size, bits=bits)
        if self._pair.count:
            quantized.update_quantized(*self._pair.view())
        return quantized

    def _copy_trimmed(self, n: int) -> Self | None:
        return self._copy_first(self._pair.count - n) if n <= self._pair.count else None


class ConcatenateKVCache(KVCache):
    """A `KVCache` without spare room: every update concatenates.

    It follows mlx-lm's class of this name, good for a few large blocks or as a reference:
    a token costs a copy of everything stored. There `trim` only moves the offset, so the
    next update lands after the tokens that were trimmed; here they are gone. Saved files
    load as `KVCache`.
    """

    def update(self, keys: NDArray[Any], values: NDArray[Any]) -> Arrays:
        """Store new tokens; return views of all keys and values. Errors as in `KVCache`."""
        keys, values = self._pair.check(keys, values)
        if self._pair.count:
            old_keys, old_values = self._pair.view()
            keys, values = joined([old_keys, keys]), joined([old_values, values])
        else:
            keys, values = keys.copy(), values.copy()
        pair = TokenPair(keys, values)
        found = pair.view()
        self._pair = pair
        return found
