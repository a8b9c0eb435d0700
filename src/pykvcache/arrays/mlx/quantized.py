"""A cache that stores keys and values with a few bits each."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays._checks import as_int
from pykvcache.arrays.mlx._base import Arrays, BaseCache, Mask, meta_ints, state_pair
from pykvcache.arrays.mlx._growth import TokenPair
from pykvcache.arrays.mlx._limits import LARGEST
from pykvcache.arrays.mlx._quantize import BITS, Triple, dequantize, quantize
from pykvcache.arrays.mlx.masks import history_mask
from pykvcache.errors import CacheDTypeError, CacheValueError
from pykvcache.errors._shown import shown

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["QuantizedKVCache"]

#: One pair each for words, scales and biases: (key part, value part).
_Parts: TypeAlias = tuple[TokenPair, TokenPair, TokenPair]


class QuantizedKVCache(BaseCache):
    """All tokens of a sequence, quantized in groups along the head.

    It follows mlx-lm's ``QuantizedKVCache``: each of keys and values is a triple of packed
    uint32 codes, scales and biases, `(batch, n_kv_heads, n_tokens, ...)` each. The scale is
    ``(max - min) / (2**bits - 1)`` of its group, rounded up to the dtype. No element is off
    by more than half of that and what is rounded: of float16 once, to the nearest; of float32
    and float64 four ``eps`` of the group's largest magnitude at most. An empty cache has a
    state (mlx-lm fails there).

    Parameters
    ----------
    group_size : int
        Elements that share a scale; head sizes must be multiples of it.
    bits : int
        2, 3, 4, 6 or 8; a head must fill whole 32-bit words.
    """

    def __init__(self, group_size: SupportsIndex = 64, bits: SupportsIndex = 8) -> None:
        self._group_size, self._bits = _checked(
            as_int("group_size", group_size), as_int("bits", bits)
        )
        self._parts: _Parts = (TokenPair(), TokenPair(), TokenPair())

    @property
    def group_size(self) -> int:
        """Elements that share a scale."""
        return self._group_size

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self._bits

    @property
    def offset(self) -> int:
        """Stored tokens, and the position of the next one."""
        return self._parts[0].length

    @property
    def nbytes(self) -> int:
        """Bytes of all six buffers, used or not."""
        return sum(part.nbytes for part in self._parts)

    def update(self, keys: NDArray[Any], values: NDArray[Any]) -> Arrays:
        """Quantize and store new tokens; return all keys and values, dequantized.

        Every call computes the whole history anew; `update_quantized` does not. Errors as
        in `KVCache.update`, for head sizes that do not fit, and for infinities and NaN.
        """
        parts = self._appended(keys, values)
        key_triple, value_triple = _triples(*parts)
        found = (
            dequantize(key_triple, self._group_size, self._bits),
            dequantize(value_triple, self._group_size, self._bits),
        )
        self._parts = parts
        return found

    def update_quantized(self, keys: NDArray[Any], values: NDArray[Any]) -> tuple[Triple, Triple]:
        """Quantize and store new tokens; return views of all codes, scales and biases."""
        parts = self._appended(keys, values)
        found = _triples(*parts)
        self._parts = parts
        return found

    def _appended(self, keys: NDArray[Any], values: NDArray[Any]) -> _Parts:
        """Return the parts with new tokens; those of this cache do not count them."""
        keys, values = TokenPair().check(keys, values)
        new_keys = quantize(keys, self._group_size, self._bits)
        new_values = quantize(values, self._group_size, self._bits)
        words, scales, biases = self._copied_parts()
        new = zip((words, scales, biases), new_keys, new_values, strict=True)
        for part, new_key, new_value in new:
            part.append(new_key, new_value)
        return words, scales, biases

    def _copied_parts(self) -> _Parts:
        # Copies of the pairs, not of the buffers: only lengths are their own.
        words, scales, biases = self._parts
        return copy.copy(words), copy.copy(scales), copy.copy(biases)

    @property
    def quantized_state(self) -> tuple[Triple, Triple] | None:
        """The key and the value triple as views; None when empty."""
        return _triples(*self._parts) if self.offset else None

    @property
    def state(self) -> tuple[Any, ...]:
        """``((words, scales, biases), (words, scales, biases))``; ``()`` when empty."""
        return _triples(*self._parts) if self.offset else ()

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        self._parts = _parts_of(state, self._group_size, self._bits)

    @property
    def meta_state(self) -> tuple[str, ...]:
        """``(offset, group_size, bits)`` as text."""
        return str(self.offset), str(self._group_size), str(self._bits)

    @meta_state.setter
    def meta_state(self, meta: Sequence[Any]) -> None:
        names = ("offset", "group_size", "bits")
        offset, group_size, bits = meta_ints("QuantizedKVCache", names, meta)
        _checked(group_size, bits)
        if offset != self.offset:
            raise CacheValueError(
                f"offset of a QuantizedKVCache is {offset}, but {self.offset} tokens are stored",
                "offset",
                offset,
                self.offset,
            )
        if offset:
            _check_widths(_triples(*self._parts), group_size, bits)
        self._group_size, self._bits = group_size, bits

    def from_serialized(self, state: Sequence[Any], meta: Sequence[Any]) -> None:
        """Take over a state and its meta state, or raise and keep everything as it was."""
        _, group_size, bits = meta_ints("QuantizedKVCache", ("offset", "group_size", "bits"), meta)
        # The state is laid out as the new meta state says, not as this cache is.
        beside = QuantizedKVCache(group_size, bits)
        beside.state = state
        beside.meta_state = meta
        self.__dict__.update(beside.__dict__)

    def is_trimmable(self) -> bool:
        """Return True."""
        return True

    def trim(self, n: SupportsIndex) -> int:
        """Drop the newest `n` tokens, or as many as there are; return how many."""
        dropped = min(as_int("n", n, minimum=0), self.offset)
        parts = self._copied_parts()
        for part in parts:
            part.length -= dropped
        self._parts = parts
        return dropped

    def make_mask(
        self,
        n: SupportsIndex,
        window_size: SupportsIndex | None = None,
        return_array: bool = False,
    ) -> Mask:
        """Return the mask for `n` new tokens, as `KVCache` does."""
        return history_mask(n, self.offset, window_size, return_array)

    def size(self) -> int:
        """Return how many tokens are stored."""
        return self.offset

    def is_empty(self) -> bool:
        """Tell whether no token is stored."""
        return self.offset == 0

    def _duplicate(self) -> Self:
        return self._copy_first(self.offset)

    def _copy_trimmed(self, n: int) -> Self | None:
        return self._copy_first(self.offset - n) if n <= self.offset else None

    def _copy_first(self, count: int) -> Self:
        twin = self._twin()
        views = [part.view() for part in self._parts]
        words, scales, biases = (
            TokenPair.copied(k[:, :, :count], v[:, :, :count]) for k, v in views
        )
        twin._parts = (words, scales, biases)
        return twin

    def _shadow(self) -> Self:
        twin = self._twin()
        twin._parts = self._copied_parts()
        return twin


def _checked(group_size: int, bits: int) -> tuple[int, int]:
    if bits not in BITS:
        raise CacheValueError(
            f"bits is {shown(bits)}; it must be one of {BITS}", "bits", bits, BITS
        )
    return as_int("group_size", group_size, minimum=1, maximum=LARGEST), bits


def _parts_of(state: Sequence[Any], group_size: int, bits: int) -> _Parts:
    if len(state) == 0:
        return TokenPair(), TokenPair(), TokenPair()
    if len(state) != 2 or any(not isinstance(t, (tuple, list)) or len(t) != 3 for t in state):
        raise CacheValueError(
            "a quantized state has 2 triples of words, scales and biases", "state", len(state), 2
        )
    words, scales, biases = (state_pair(part) for part in zip(*state, strict=True))
    if words.count:
        _check_widths(_triples(words, scales, biases), group_size, bits)
    return words, scales, biases


def _triples(words: TokenPair, scales: TokenPair, biases: TokenPair) -> tuple[Triple, Triple]:
    (kw, vw), (ks, vs), (kb, vb) = words.view(), scales.view(), biases.view()
    return (kw, ks, kb), (vw, vs, vb)


def _check_widths(triples: tuple[Triple, Triple], group_size: int, bits: int) -> None:
    for words, scales, biases in triples:
        floats = scales.dtype.newbyteorder("=") in (np.float16, np.float32, np.float64)
        if words.dtype != np.uint32 or not floats or biases.dtype != scales.dtype:
            raise CacheDTypeError(
                f"words, scales and biases are {words.dtype}, {scales.dtype}, {biases.dtype}; "
                "expected uint32 and one floating-point dtype",
                "dtypes of words, scales and biases",
                (str(words.dtype), str(scales.dtype), str(biases.dtype)),
                ("uint32", "floating point"),
            )
        expected = (*words.shape[:3], words.shape[3] * 32 // (bits * group_size))
        if scales.shape != expected or words.shape[3] * 32 % (bits * group_size):
            raise CacheValueError(
                f"words {words.shape} and scales {scales.shape} do not fit groups of "
                f"{group_size} and {bits} bits",
                "words and scales",
                (words.shape, scales.shape),
                {"group_size": group_size, "bits": bits},
            )
        if biases.shape != scales.shape:
            raise CacheValueError(
                f"scales {scales.shape} and biases {biases.shape} differ",
                "biases",
                biases.shape,
                scales.shape,
            )
