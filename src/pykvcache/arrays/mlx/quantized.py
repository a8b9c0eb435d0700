"""QuantizedKVCache: keys and values with a few bits each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsIndex, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays._checks import as_int
from pykvcache.arrays.mlx.base import LARGEST, Arrays, meta_ints
from pykvcache.arrays.mlx.token_pair import PairCache, TokenPair, state_pair
from pykvcache.errors import CacheDTypeError, CacheValueError, shown

__all__ = ["QuantizedKVCache"]

#: Packed codes (uint32), scales and biases.
Triple: TypeAlias = tuple[NDArray[np.uint32], NDArray[Any], NDArray[Any]]

# Supported bits per code.
_BITS = (2, 3, 4, 6, 8)
_FLOATS = ("float16", "float32", "float64")
_META = ("offset", "group_size", "bits")


class QuantizedKVCache(PairCache):
    """All tokens of a sequence, quantized in groups along the head.

    Modelled on mlx-lm's ``QuantizedKVCache``: keys and values are triples of packed uint32 codes,
    scales and biases, `(batch, n_kv_heads, n_tokens, ...)` each. The scale of a group is
    ``(max - min) / (2**bits - 1)``, rounded up to the dtype. An element's error is at most half the
    scale, plus the rounding of the result: to the nearest float16, or four ``eps`` of the group's
    largest magnitude in float32 and float64. The state of an empty cache is `()`.

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
        super().__init__()  # its pair holds the words
        self._scales, self._biases = TokenPair(), TokenPair()

    @property
    def group_size(self) -> int:
        """Elements that share a scale."""
        return self._group_size

    @property
    def bits(self) -> int:
        """Bits per code."""
        return self._bits

    @property
    def _pairs(self) -> tuple[TokenPair, TokenPair, TokenPair]:
        return self._pair, self._scales, self._biases

    def update(self, keys: NDArray[Any], values: NDArray[Any]) -> Arrays:
        """Quantize and store new tokens; return all keys and values, dequantized.

        Every call dequantizes the whole history; `update_quantized` does not. Errors as in
        `KVCache.update`; also for head sizes that do not fit, for infinities and NaN, and for
        groups whose range overflows.
        """
        key_triple, value_triple = self.update_quantized(keys, values)
        return (
            dequantize(key_triple, self._group_size, self._bits),
            dequantize(value_triple, self._group_size, self._bits),
        )

    def update_quantized(self, keys: NDArray[Any], values: NDArray[Any]) -> tuple[Triple, Triple]:
        """Quantize and store new tokens; return all codes, scales and biases as views."""
        keys, values = TokenPair().check(keys, values)
        new_keys = quantize(keys, self._group_size, self._bits)
        new_values = quantize(values, self._group_size, self._bits)
        new = tuple(zip(self._pairs, new_keys, new_values, strict=True))
        for pair, key, value in new:
            pair.check(key, value)
        for pair, key, value in new:
            pair.append(key, value)
        return _triples(self._pairs)

    @property
    def quantized_state(self) -> tuple[Triple, Triple] | None:
        """The key and the value triple as views; None when empty."""
        return _triples(self._pairs) if self.offset else None

    @property
    def state(self) -> tuple[Any, ...]:
        """``((words, scales, biases), (words, scales, biases))``; ``()`` when empty."""
        return _triples(self._pairs) if self.offset else ()

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        words, scales, biases = TokenPair(), TokenPair(), TokenPair()
        if len(state):
            if len(state) != 2 or any(
                not isinstance(t, (tuple, list)) or len(t) != 3 for t in state
            ):
                message = "a quantized state has 2 triples of words, scales and biases"
                raise CacheValueError(message, "state", len(state), 2)
            words, scales, biases = (state_pair(part) for part in zip(*state, strict=True))
        if words.count:
            _check_widths(_triples((words, scales, biases)), self._group_size, self._bits)
        self._pair, self._scales, self._biases = words, scales, biases

    @property
    def meta_state(self) -> tuple[str, ...]:
        """``(offset, group_size, bits)`` as text."""
        return str(self.offset), str(self._group_size), str(self._bits)

    @meta_state.setter
    def meta_state(self, meta: Sequence[Any]) -> None:
        offset, group_size, bits = meta_ints("QuantizedKVCache", _META, meta)
        _checked(group_size, bits)
        if offset != self.offset:
            message = f"offset of a QuantizedKVCache is {offset}; {self.offset} tokens are stored"
            raise CacheValueError(message, "offset", offset, self.offset)
        if offset:
            _check_widths(_triples(self._pairs), group_size, bits)
        self._group_size, self._bits = group_size, bits

    def from_serialized(self, state: Sequence[Any], meta: Sequence[Any]) -> None:
        """Set state and meta state, or raise and change nothing."""
        _, group_size, bits = meta_ints("QuantizedKVCache", _META, meta)
        # The new meta state defines the state's layout.
        restored = QuantizedKVCache(group_size, bits)
        restored.state = state
        restored.meta_state = meta
        self.__dict__.update(restored.__dict__)


def _checked(group_size: int, bits: int) -> tuple[int, int]:
    if bits not in _BITS:
        message = f"bits is {shown(bits)}; it must be one of {_BITS}"
        raise CacheValueError(message, "bits", bits, _BITS)
    return as_int("group_size", group_size, minimum=1, maximum=LARGEST), bits


def _triples(parts: tuple[TokenPair, TokenPair, TokenPair]) -> tuple[Triple, Triple]:
    (kw, vw), (ks, vs), (kb, vb) = (part.view() for part in parts)
    return (kw, ks, kb), (vw, vs, vb)


def _check_widths(triples: tuple[Triple, Triple], group_size: int, bits: int) -> None:
    for words, scales, biases in triples:
        dtypes = str(words.dtype), str(scales.dtype), str(biases.dtype)
        is_float = scales.dtype.newbyteorder("=").name in _FLOATS
        if words.dtype != np.uint32 or not is_float or biases.dtype != scales.dtype:
            message = (
                f"words, scales and biases are {', '.join(dtypes)}; "
                "expected uint32 and one floating-point dtype"
            )
            what, expected = "dtypes of words, scales and biases", ("uint32", "floating point")
            raise CacheDTypeError(message, what, dtypes, expected)
        fitting = (*words.shape[:3], words.shape[3] * 32 // (bits * group_size))
        if scales.shape != fitting or words.shape[3] * 32 % (bits * group_size):
            message = (
                f"words {words.shape} and scales {scales.shape} do not fit groups of "
                f"{group_size} and {bits} bits"
            )
            limit = {"group_size": group_size, "bits": bits}
            raise CacheValueError(message, "words and scales", (words.shape, scales.shape), limit)
        if biases.shape != scales.shape:
            message = f"scales {scales.shape} and biases {biases.shape} differ"
            raise CacheValueError(message, "biases", biases.shape, scales.shape)


def quantize(x: NDArray[Any], group_size: int, bits: int) -> Triple:
    """Quantize groups of `group_size` along the last axis.

    ``x ~ code * scale + bias`` with ``bias = min`` and ``scale = (max - min) / (2**bits - 1)``
    of the group, both in the dtype of `x`, the scale rounded up. The error is at most half a
    scale plus the rounding of `dequantize`. (mlx shifts the grid so that 0 stays 0, and its error
    can be larger.) Words hold the codes as a little-endian stream of bits.
    """
    dtype = x.dtype.newbyteorder("=")
    if dtype.name not in _FLOATS:
        message = f"dtype {x.dtype} cannot be quantized; expected float16, float32 or float64"
        raise CacheDTypeError(message, "dtype", str(x.dtype), _FLOATS)
    dim = x.shape[-1]
    if dim % group_size or dim * bits % 32:
        message = (
            f"head_dim {dim} does not fit: it must be a multiple of the group size "
            f"{group_size}, and head_dim * {bits} bits must be a multiple of 32"
        )
        limit = {"group_size": group_size, "bits": bits}
        raise CacheValueError(message, "head_dim", dim, limit)
    levels = 2**bits - 1
    groups = x.reshape(*x.shape[:-1], dim // group_size, group_size)
    # The caller's np.seterr must not turn rounding into an error.
    with np.errstate(all="ignore"):
        low = groups.min(axis=-1)
        bottom = low.astype(np.float64)
        reach = groups.max(axis=-1) - bottom
        # `dequantize` computes numbers as large as the range, slightly more with rounding.
        if not np.isfinite((1.001 * reach).astype(_wide(dtype))).all():
            message = (
                "keys or values hold infinities or NaN, or their range overflows; "
                "they cannot be quantized"
            )
            raise CacheValueError(message, "keys or values")
        scales = (reach / levels).astype(dtype)
        # With a scale rounded down the maximum could be off by more than half a step.
        above = np.nextafter(scales, dtype.type("inf"))
        scales = np.where(scales.astype(np.float64) * levels < reach, above, scales)
        steps = np.where(scales > 0, scales, dtype.type(1)).astype(np.float64)
        # In place, because allocation would cost more than the arithmetic.
        codes = np.subtract(groups, bottom[..., None], dtype=np.float64)
        codes /= steps[..., None]
        np.rint(codes, out=codes)
        np.minimum(codes, levels, out=codes)
    return _pack(codes.astype(np.uint8).reshape(x.shape), bits), scales, low.astype(dtype)


def dequantize(triple: Triple, group_size: int, bits: int) -> NDArray[Any]:
    """Return ``code * scale + bias`` in the dtype of the scales.

    float16 is computed in float32 and rounded once. A result that exceeds the dtype's largest
    number, by rounding, is clipped.
    """
    words, scales, biases = triple
    codes = _unpack(words, bits)
    groups = codes.reshape(*codes.shape[:-1], codes.shape[-1] // group_size, group_size)
    dtype = scales.dtype
    with np.errstate(all="ignore"):
        x = groups.astype(_wide(dtype))
        x *= scales[..., None]
        x += biases[..., None]
        largest = np.finfo(dtype).max
        np.clip(x, -largest, largest, out=x)
        return x.astype(dtype, copy=False).reshape(codes.shape)


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which `dequantize` computes."""
    return np.dtype(np.float32) if dtype.itemsize < 4 else dtype


def _unit(bits: int) -> int:
    # Bytes after which codes are aligned to bytes again.
    return 3 if bits in (3, 6) else 1


def _pack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    if bits == 8:
        return codes.view("<u4").astype(np.uint32, copy=False)
    unit = _unit(bits)
    per_unit = 8 * unit // bits
    grouped = codes.reshape(*codes.shape[:-1], codes.shape[-1] // per_unit, per_unit)
    packed = np.zeros(grouped.shape[:-1], np.uint32)
    for i in range(per_unit):
        packed |= grouped[..., i].astype(np.uint32) << np.uint32(i * bits)
    stream = np.empty((*packed.shape, unit), np.uint8)
    for i in range(unit):
        stream[..., i] = (packed >> np.uint32(8 * i)) & np.uint32(255)
    flat = stream.reshape(*codes.shape[:-1], codes.shape[-1] * bits // 8)
    return flat.view("<u4").astype(np.uint32, copy=False)


def _unpack(words: NDArray[np.uint32], bits: int) -> NDArray[np.uint8]:
    stream = np.ascontiguousarray(words, "<u4").view(np.uint8)
    if bits == 8:
        return stream
    unit = _unit(bits)
    per_unit = 8 * unit // bits
    if unit == 1:
        packed: NDArray[Any] = stream
    else:
        thirds = stream.reshape(*stream.shape[:-1], stream.shape[-1] // 3, 3).astype(np.uint32)
        packed = thirds[..., 0] | thirds[..., 1] << np.uint32(8) | thirds[..., 2] << np.uint32(16)
    codes = np.empty((*packed.shape, per_unit), np.uint8)
    for i in range(per_unit):
        codes[..., i] = (packed >> packed.dtype.type(i * bits)) & packed.dtype.type(2**bits - 1)
    return codes.reshape(*words.shape[:-1], words.shape[-1] * 32 // bits)
