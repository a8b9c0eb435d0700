"""The file layout of mlx-lm 0.32 and later, which has no meta states.

``read_*`` take the parts of a layer's state in such a file and return our state and meta state;
``write_*`` do the reverse. `kinds` says which belong to which class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pykvcache.errors import CacheValueError
from pykvcache.errors._shown import shown

__all__ = [
    "Serialized",
    "flattened",
    "is_newer",
    "mamba_keys",
    "parts_of",
    "plain_values",
    "read_batch",
    "read_batch_ring",
    "read_chunked",
    "read_plain",
    "read_quantized",
    "read_ring",
    "read_slots",
    "write_batch",
    "write_batch_ring",
    "write_chunked",
    "write_plain",
    "write_quantized",
    "write_ring",
    "write_slots",
]

#: A state and a meta state, as `from_state` takes them.
Serialized: TypeAlias = tuple[tuple[Any, ...], tuple[Any, ...]]


# mlx-lm 0.32 has no MambaCache, but an ArraysCache for it. It skips the text that begins the
# list of what are no arrays, so that text says here where the class names are that were others.
_MAMBA = "MambaCache:"


def is_newer(texts: Mapping[str, str]) -> bool:
    """Tell the layout by its metadata: where there were class names is an empty text, or ours."""
    text = texts.get("2.0")
    return text is not None and (not text or text.startswith(_MAMBA))


def mamba_keys(texts: Mapping[str, str]) -> list[str]:
    """Return the keys of the class names that were ``MambaCache``."""
    return texts.get("2.0", "").removeprefix(_MAMBA).split()


def plain_values(arrays: Mapping[str, NDArray[Any]], texts: Mapping[str, str]) -> dict[str, Any]:
    """Return `arrays` with those made numbers, texts and None again that once were."""
    values: dict[str, Any] = dict(arrays)
    for key, place in texts.items():
        if not (key.startswith("2.") and key.endswith(".0") and key != "2.0"):
            continue
        what = texts.get(f"{key[:-2]}.1")
        array = arrays.get(place)
        if array is None or what not in ("scalar", "string", "none"):
            raise CacheValueError(
                f"{shown(place)} is said to be {shown(what)}, which it cannot be",
                place,
                what,
                ("scalar", "string", "none"),
            )
        if what == "none":
            values[place] = None
        elif what == "string":
            values[place] = _text(array)
        else:
            values[place] = array.item() if array.size == 1 else array
    return values


def _text(array: NDArray[Any]) -> str:
    if array.dtype.kind not in "iu" or array.size > 256 or (array.ravel() >> 16).any():
        raise CacheValueError("a text is not a list of characters", "text", array.shape)
    return "".join(chr(int(c)) for c in array.ravel())


def parts_of(node: Any) -> list[Any]:
    """Return numbered parts as a list."""
    if not isinstance(node, dict) or sorted(node) != list(range(len(node))):
        raise CacheValueError(
            "the parts of a state are not numbered from 0 on without a gap", "state"
        )
    return [node[i] for i in range(len(node))]


def _number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise CacheValueError(f"{shown(value)} should be a number", "number", value)
    return value


def _texts(*numbers: Any) -> tuple[str, ...]:
    return tuple(str(_number(number)) for number in numbers)


def _first(buffer: Any, n: int) -> Any:
    """Return the first `n` tokens; files hold whole buffers, spare room included."""
    if not isinstance(buffer, np.ndarray) or buffer.ndim != 4 or not 0 <= n <= buffer.shape[2]:
        raise CacheValueError(
            f"a buffer does not hold the {n} tokens that it should",
            "tokens of a buffer",
            np.shape(buffer),
            n,
        )
    return buffer[:, :, :n]


def _rows(counts: Any) -> list[int]:
    if not isinstance(counts, np.ndarray) or counts.ndim != 1 or counts.dtype.kind not in "iu":
        raise CacheValueError("counts of rows should be an array of numbers", "counts of rows")
    rows: list[int] = counts.tolist()
    return rows


def read_plain(keys: Any, values: Any, offset: Any = None) -> Serialized:
    """Return state and meta state of a `KVCache`."""
    if keys is None:
        return (), ()
    n = keys.shape[2] if offset is None and np.ndim(keys) == 4 else _number(offset)
    return (_first(keys, n), _first(values, n)), ()


def read_ring(k: Any, v: Any, offset: Any, keep: Any, max_size: Any, index: Any) -> Serialized:
    """Return state and meta state of a `RotatingKVCache`."""
    meta = _texts(keep, max_size, offset, index)
    if k is None:
        return (), meta
    n = min(np.shape(k)[2] if np.ndim(k) == 4 else 0, _number(offset))
    return (_first(k, n), _first(v, n)), meta


def read_chunked(k: Any, v: Any, offset: Any, chunk_size: Any, start: Any) -> Serialized:
    """Return state and meta state of a `ChunkedKVCache`."""
    n = _number(offset) - _number(start)
    return ((_first(k, n), _first(v, n)) if k is not None else ()), _texts(chunk_size, start)


def read_quantized(k: Any, v: Any, offset: Any, group_size: Any, bits: Any) -> Serialized:
    """Return state and meta state of a `QuantizedKVCache`."""
    meta = _texts(offset, group_size, bits)
    if k is None:
        return (), meta
    n = _number(offset)
    return tuple(tuple(_first(a, n) for a in parts_of(triple)) for triple in (k, v)), meta


def read_slots(slots: Any, padding: Any, lengths: Any) -> Serialized:
    """Return state and meta state of an `ArraysCache`."""
    counts = ("" if c is None else ",".join(map(str, _rows(c))) for c in (padding, lengths))
    arrays = parts_of(slots)
    return tuple(arrays), (str(len(arrays)), *counts)


def read_batch(k: Any, v: Any, offset: Any, padding: Any, columns: Any) -> Serialized:
    """Return state and meta state of a `BatchKVCache`."""
    if k is None:
        return (), tuple(map(str, _rows(padding)))
    n = _number(columns)
    return (_first(k, n), _first(v, n), offset, padding), ()


def read_batch_ring(
    k: Any, v: Any, offset: Any, padding: Any, max_size: Any, seen: Any, index: Any, rotated: Any
) -> Serialized:
    """Return state and meta state of a `BatchRotatingKVCache`."""
    if not isinstance(rotated, (bool, int)):
        raise CacheValueError(f"{shown(rotated)} should be a flag", "rotated", rotated)
    meta = (*_texts(max_size, seen, index), str(bool(rotated)))
    if k is None:
        return (), (*meta, *map(str, _rows(padding)))
    n = min(np.shape(k)[2] if np.ndim(k) == 4 else 0, _number(seen))
    return (_first(k, n), _first(v, n), offset, padding), meta


# Writers ------------------------------------------------------------------------------


def flattened(
    layers: Sequence[tuple[str, Any]], metadata: Mapping[str, str]
) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Return the arrays and texts of a file with these class names and states."""
    arrays: dict[str, NDArray[Any]] = {}
    others: list[tuple[str, str]] = []  # values that are not arrays, and their types
    mambas: list[str] = []

    def named(key: str, name: str) -> str:
        if name != "MambaCache":
            return name
        mambas.append(key)
        return "ArraysCache"

    def put(key: str, part: Any) -> None:
        if isinstance(part, np.ndarray):
            arrays[key] = part
            return
        if isinstance(part, (tuple, list)):
            if not part:
                raise CacheValueError(
                    f"layer {key.partition('.')[0]} has an ArraysCache without slots, or a "
                    "CacheList without caches: only a file of layout='0.31' can hold it",
                    "layout",
                    key.partition(".")[0],
                    "0.31",
                )
            for i, inner in enumerate(part):
                put(f"{key}.{i}", inner)
            return
        what = "none" if part is None else "string" if isinstance(part, str) else "scalar"
        others.append((key, what))
        if part is None:
            arrays[key] = np.empty(0, np.float32)
        elif isinstance(part, bool):
            arrays[key] = np.array(part)
        elif isinstance(part, str):  # all texts in a state are names of classes
            arrays[key] = _integers([ord(c) for c in named(key, part)])
        else:
            arrays[key] = _integers(part)

    for i, (_, state) in enumerate(layers):
        put(str(i), state)
    texts = {f"0.{key}": text for key, text in metadata.items()}
    texts |= {f"1.{i}": named(str(i), name) for i, (name, _) in enumerate(layers)}
    texts["2.0"] = f"{_MAMBA} {' '.join(mambas)}" if mambas else ""
    for i, (key, what) in enumerate(others, 1):
        texts |= {f"2.{i}.0": key, f"2.{i}.1": what}
    return arrays, texts


def _integers(numbers: Any) -> NDArray[Any]:
    """Return int32, as mlx-lm keeps counts, or int64 where that is too small."""
    array = np.array(numbers, np.int64)
    small = array.astype(np.int32)
    return small if np.array_equal(small, array) else array


def write_plain(state: Any, meta: Any) -> Any:
    """Return the parts of the state of a `KVCache`."""
    return (*state, state[0].shape[2]) if state else (None, None, 0)


def write_ring(state: Any, meta: Any) -> Any:
    """Return the parts of the state of a `RotatingKVCache`."""
    keep, max_size, offset, index = map(int, meta)
    return (*(state or (None, None)), offset, keep, max_size, index)


def write_chunked(state: Any, meta: Any) -> Any:
    """Return the parts of the state of a `ChunkedKVCache`."""
    chunk_size, start = map(int, meta)
    n = state[0].shape[2] if state else 0
    return (*(state or (None, None)), start + n, chunk_size, start)


def write_quantized(state: Any, meta: Any) -> Any:
    """Return the parts of the state of a `QuantizedKVCache`."""
    return (*(state or (None, None)), *map(int, meta))


def write_slots(state: Any, meta: Any) -> Any:
    """Return the parts of the state of an `ArraysCache`."""
    n, padding, lengths = meta or (len(state), "", "")
    counts = (_integers([int(c) for c in text.split(",")]) if text else None
              for text in (padding, lengths))  # fmt: skip
    return (state or (None,) * int(n), *counts)


def write_batch(state: Any, meta: Any) -> Any:
    """Return the parts of the state of a `BatchKVCache`."""
    if not state:
        padding = _integers([int(text) for text in meta])
        return None, None, -padding, padding, 0
    keys, values, offset, padding = state
    return keys, values, _integers(offset), _integers(padding), keys.shape[2]


def write_batch_ring(state: Any, meta: Any) -> Any:
    """Return the parts of the state of a `BatchRotatingKVCache`."""
    max_size, seen, index = map(int, meta[:3])
    *batch, _ = write_batch(state, meta[4:])
    return (*batch, max_size, seen, index, meta[3] == "True")
