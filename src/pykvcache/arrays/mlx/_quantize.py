"""Affine group quantization: codes of a few bits in 32-bit words."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pykvcache.errors import CacheDTypeError, CacheValueError

__all__ = ["BITS", "Triple", "dequantize", "quantize"]

#: Packed codes (uint32), scales and biases.
Triple: TypeAlias = tuple[NDArray[np.uint32], NDArray[Any], NDArray[Any]]

#: Widths of a code.
BITS = (2, 3, 4, 6, 8)


def quantize(x: NDArray[Any], group_size: int, bits: int) -> Triple:
    """Quantize groups of `group_size` along the last axis.

    ``x ~ code * scale + bias`` with ``bias = min`` and ``scale = (max - min) / (2**bits - 1)``
    of the group, both in the dtype of `x`, the scale rounded up. So no element is off by more
    than half a scale, and what `dequantize` rounds. (mlx shifts the grid so that 0 stays 0,
    and can be off by more.)

    Parameters
    ----------
    x : ndarray of float16, float32 or float64
        Last axis a multiple of `group_size` and, in bits, of 32.
    group_size, bits : int
        Elements that share a scale, and the width of a code, one of `BITS`.

    Returns
    -------
    words : ndarray of uint32, last axis ``x.shape[-1] * bits // 32``
        The codes as a little-endian stream of bits.
    scales, biases : ndarray, last axis ``x.shape[-1] // group_size``
    """
    dtype = x.dtype.newbyteorder("=")
    if dtype not in (np.float16, np.float32, np.float64):
        raise CacheDTypeError(
            f"dtype {x.dtype} cannot be quantized; expected float16, float32 or float64",
            "dtype",
            str(x.dtype),
            ("float16", "float32", "float64"),
        )
    dim = x.shape[-1]
    if dim % group_size or dim * bits % 32:
        raise CacheValueError(
            f"head_dim {dim} does not fit: it must be a multiple of the group size "
            f"{group_size}, and head_dim * {bits} bits one of 32",
            "head_dim",
            dim,
            {"group_size": group_size, "bits": bits},
        )
    levels = 2**bits - 1
    groups = x.reshape(*x.shape[:-1], dim // group_size, group_size)
    # A caller's np.seterr must not make an error of a scale that is rounded to 0 or up.
    with np.errstate(all="ignore"):  # what is not finite is refused below
        low, high = groups.min(axis=-1), groups.max(axis=-1)
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            raise CacheValueError(
                "keys or values hold infinities or NaN; they cannot be quantized", "keys or values"
            )
        part = np.float64(1)
        if dtype == np.float64 and not np.isfinite(high - low).all():
            # A group may reach over more than the largest float64: its quarter does not.
            part = np.where(np.isfinite(high - low), 1, 0.25)
            groups = groups * part[..., None]
        bottom = low.astype(np.float64) * part
        reach = high.astype(np.float64) * part - bottom
        scales = (reach / levels / part).astype(dtype)
        # A scale rounded down would leave the maximum more than half a step beyond the grid.
        above = np.nextafter(scales, dtype.type("inf"))
        scales = np.where(scales.astype(np.float64) * part * levels < reach, above, scales)
        steps = np.where(scales > 0, scales, dtype.type(1)).astype(np.float64) * part
        # In one float64 array: fresh memory for each step would cost more than the steps.
        codes = np.subtract(groups, bottom[..., None], dtype=np.float64)
        codes /= steps[..., None]
        np.rint(codes, out=codes)
        np.minimum(codes, levels, out=codes)  # not below 0: nothing is below the minimum
    return _pack(codes.astype(np.uint8).reshape(x.shape), bits), scales, low.astype(dtype)


def dequantize(triple: Triple, group_size: int, bits: int) -> NDArray[Any]:
    """Return ``code * scale + bias`` in the dtype of the scales.

    Of float16 the two steps are computed in float32 and rounded once. What lies beyond the
    largest number of the dtype, by half a step at most, becomes that number.
    """
    words, scales, biases = triple
    codes = _unpack(words, bits)
    groups = codes.reshape(*codes.shape[:-1], codes.shape[-1] // group_size, group_size)
    dtype = scales.dtype
    wide = np.dtype(np.float32) if dtype.itemsize < 4 else dtype
    largest = wide.type(np.finfo(dtype).max)
    with np.errstate(all="ignore"):
        x = _expanded(groups, scales, biases, wide)
        if wide != dtype:
            np.clip(x, -largest, largest, out=x)
        elif (beyond := ~np.isfinite(x).all(axis=-1)).any():
            # `code * scale` alone can be beyond it. A quarter of it is not.
            quarter = wide.type(0.25)
            parts = scales[beyond] * quarter, biases[beyond] * quarter
            quarters = _expanded(groups[beyond], *parts, wide)
            np.clip(quarters, -largest * quarter, largest * quarter, out=quarters)
            x[beyond] = quarters * wide.type(4)
        return x.astype(dtype, copy=False).reshape(codes.shape)


def _expanded(
    codes: NDArray[np.uint8], scales: NDArray[Any], biases: NDArray[Any], dtype: np.dtype[Any]
) -> NDArray[Any]:
    x = codes.astype(dtype)
    x *= scales[..., None]
    x += biases[..., None]
    return x


def _unit(bits: int) -> int:
    # Bytes after which codes and bytes line up again.
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
