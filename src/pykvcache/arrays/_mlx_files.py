"""The file layout of mlx-lm 0.32 and later, which has no meta states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays.kinds import KvCacheKind
from pykvcache.errors import CacheValueError

__all__ = ["is_newer", "plain_values", "serialized"]

#: A state and a meta state, as `from_state` takes them.
Serialized: TypeAlias = tuple[tuple[Any, ...], tuple[Any, ...]]


def is_newer(texts: Mapping[str, str]) -> bool:
    """Tell the layout by its metadata: where there were class names is an empty text."""
    return texts.get("2.0") == ""


def plain_values(arrays: Mapping[str, NDArray[Any]], texts: Mapping[str, str]) -> dict[str, Any]:
    """Return `arrays` with those made numbers, texts and None again that once were."""
    values: dict[str, Any] = dict(arrays)
    for key, place in texts.items():
        if not (key.startswith("2.") and key.endswith(".0") and key != "2.0"):
            continue
        what = texts.get(f"{key[:-2]}.1")
        array = arrays.get(place)
        if array is None or what not in ("scalar", "string", "none"):
            raise CacheValueError(f"{place!r} is told to be {what!r}, which it cannot be")
        if what == "none":
            values[place] = None
        elif what == "string":
            values[place] = _text(array)
        else:
            values[place] = array.item() if array.size == 1 else array
    return values


def serialized(kind: KvCacheKind, state: Any) -> Serialized:
    """Return the state and the meta state that a newer state stands for."""
    parts = _parts(state)
    if kind not in _READERS:
        raise CacheValueError(f"a {kind} is not in files of this layout")
    try:
        return _READERS[kind](*parts)
    except TypeError as error:  # another number of parts, or parts of another type
        raise CacheValueError(f"the state of a {kind} is not as expected: {error}") from error


def _text(array: NDArray[Any]) -> str:
    if array.dtype.kind not in "iu" or array.size > 256 or (array.ravel() >> 16).any():
        raise CacheValueError("a text is no list of characters")
    return "".join(chr(int(c)) for c in array.ravel())


def _parts(node: Any) -> list[Any]:
    if not isinstance(node, dict) or sorted(node) != list(range(len(node))):
        raise CacheValueError("the parts of a state are not numbered from 0 on without a gap")
    return [node[i] for i in range(len(node))]


def _number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise CacheValueError(f"{value!r} should be a number")
    return value


def _texts(*numbers: Any) -> tuple[str, ...]:
    return tuple(str(_number(number)) for number in numbers)


def _first(buffer: Any, n: int) -> Any:
    """Return the first `n` tokens; files hold whole buffers, spare room included."""
    if not isinstance(buffer, np.ndarray) or buffer.ndim != 4 or not 0 <= n <= buffer.shape[2]:
        raise CacheValueError(f"a buffer does not hold the {n} tokens that it should")
    return buffer[:, :, :n]


def _rows(counts: Any) -> list[int]:
    if not isinstance(counts, np.ndarray) or counts.ndim != 1 or counts.dtype.kind not in "iu":
        raise CacheValueError("counts of rows should be an array of numbers")
    rows: list[int] = counts.tolist()
    return rows


def _plain(keys: Any, values: Any, offset: Any = None) -> Serialized:
    if keys is None:
        return (), ()
    n = keys.shape[2] if offset is None and np.ndim(keys) == 4 else _number(offset)
    return (_first(keys, n), _first(values, n)), ()


def _ring(k: Any, v: Any, offset: Any, keep: Any, max_size: Any, index: Any) -> Serialized:
    meta = _texts(keep, max_size, offset, index)
    if k is None:
        return (), meta
    n = min(np.shape(k)[2] if np.ndim(k) == 4 else 0, _number(offset))
    return (_first(k, n), _first(v, n)), meta


def _chunked(k: Any, v: Any, offset: Any, chunk_size: Any, start: Any) -> Serialized:
    n = _number(offset) - _number(start)
    return ((_first(k, n), _first(v, n)) if k is not None else ()), _texts(chunk_size, start)


def _quantized(k: Any, v: Any, offset: Any, group_size: Any, bits: Any) -> Serialized:
    meta = _texts(offset, group_size, bits)
    if k is None:
        return (), meta
    n = _number(offset)
    return tuple(tuple(_first(a, n) for a in _parts(triple)) for triple in (k, v)), meta


def _slots(slots: Any, padding: Any, lengths: Any) -> Serialized:
    counts = ("" if c is None else ",".join(map(str, _rows(c))) for c in (padding, lengths))
    arrays = _parts(slots)
    return tuple(arrays), (str(len(arrays)), *counts)


def _batch(k: Any, v: Any, offset: Any, padding: Any, columns: Any) -> Serialized:
    if k is None:
        return (), tuple(map(str, _rows(padding)))
    n = _number(columns)
    return (_first(k, n), _first(v, n), offset, padding), ()


def _batch_ring(
    k: Any, v: Any, offset: Any, padding: Any, max_size: Any, seen: Any, index: Any, rotated: Any
) -> Serialized:
    meta = (*_texts(max_size, seen, index), str(bool(rotated)))
    if k is None:
        return (), (*meta, *map(str, _rows(padding)))
    n = min(np.shape(k)[2] if np.ndim(k) == 4 else 0, _number(seen))
    return (_first(k, n), _first(v, n), offset, padding), meta


def _list(*members: Any) -> Serialized:
    names, states, metas = [], [], []
    for member in members:
        state, name = _parts(member)
        if not isinstance(name, str):
            raise CacheValueError("a member of a CacheList has no class name")
        plain, meta = serialized(KvCacheKind.parse(name), state)
        names.append(name)
        states.append(plain)
        metas.append(meta)
    return tuple(states), (tuple(names), tuple(metas))


_READERS: dict[KvCacheKind, Callable[..., Serialized]] = {
    KvCacheKind.KV_CACHE: _plain,
    KvCacheKind.ROTATING_KV_CACHE: _ring,
    KvCacheKind.CHUNKED_KV_CACHE: _chunked,
    KvCacheKind.QUANTIZED_KV_CACHE: _quantized,
    KvCacheKind.ARRAYS_CACHE: _slots,
    KvCacheKind.BATCH_KV_CACHE: _batch,
    KvCacheKind.BATCH_ROTATING_KV_CACHE: _batch_ring,
    KvCacheKind.CACHE_LIST: _list,
}
