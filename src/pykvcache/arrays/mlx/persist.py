"""Prompt caches in safetensors files, laid out as mlx-lm does."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from pykvcache._paths import as_file_name
from pykvcache.arrays.mlx._base import BaseCache, as_caches
from pykvcache.arrays.mlx._files import flattened, is_newer, mamba_keys, plain_values
from pykvcache.arrays.mlx.arrays_cache import ArraysCache
from pykvcache.arrays.mlx.kinds import KvCacheKind, from_newer_state, from_state, newer_state
from pykvcache.errors import ArgumentError, CacheDTypeError, CacheValueError
from pykvcache.errors._shown import shown

__all__ = ["PromptCacheLayout", "load_prompt_cache", "prompt_cache_layout", "save_prompt_cache"]

#: Layouts of prompt cache files, by the first (0.32) or last (0.31) mlx-lm that has them.
# Stubtest takes a Literal of several for no union.
PromptCacheLayout: TypeAlias = Literal["0.31"] | Literal["0.32"]

# Dotted keys of a file as a tree: numbered branches, arrays or texts as leaves.
_Node: TypeAlias = Any
_MAX_DEPTH = 16


def save_prompt_cache(
    file_name: str | os.PathLike[str],
    cache: Sequence[BaseCache],
    metadata: Mapping[str, str] | None = None,
    *,
    layout: PromptCacheLayout = "0.32",
) -> None:
    """Save the caches of all layers in a file that mlx-lm reads.

    The file appears under its name when it is complete; one that was there before stays until
    then.

    Parameters
    ----------
    file_name : path
        Used as it is; no suffix is added.
    cache : sequence of cache
        One for each layer.
    metadata : mapping of str to str, optional
        Anything that shall come back with the cache.
    layout : "0.32" or "0.31"
        The version of mlx-lm that shall read the file: "0.32" is for 0.32 and later, which read
        no other one; "0.31" for those before. `load_prompt_cache` reads both, and
        `prompt_cache_layout` says which one a file has. To mlx-lm 0.32, which has no other
        class for it, a `MambaCache` is an `ArraysCache` of two slots.

    Raises
    ------
    OSError
        The file cannot be written.
    CacheValueError
        `layout` is neither; or a `CacheList` or an `ArraysCache` of no members, for which
        "0.32" has no place.
    CacheDTypeError
        A dtype that the format does not have, or metadata that is not text.
    CacheOrderError
        A batch waits for ``finalize``.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    if not isinstance(layout, str) or layout not in ("0.31", "0.32"):
        raise CacheValueError(
            f"layout is {shown(layout)}; expected '0.32' or '0.31'",
            "layout",
            layout,
            ("0.32", "0.31"),
        )
    layers = as_caches("cache", cache)
    if metadata is not None and not isinstance(metadata, Mapping):
        raise TypeError(f"metadata must be a mapping, not {type(metadata).__name__}")
    for key, text in (metadata or {}).items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise CacheDTypeError(
                f"metadata is text under text; got {shown(key)}: {shown(text)}",
                "metadata",
                (key, text),
                "text",
            )
    arrays, texts = (_current if layout == "0.32" else _older)(layers, metadata or {})
    path = _path(file_name)
    if not path.name:
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not path.parent.exists():
        raise FileNotFoundError(errno.ENOENT, f"there is no folder {path.parent}", str(path))
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.touch()  # where nothing can be written, this says so with an OSError
        save_file({key: _plain(array) for key, array in arrays.items()}, part, texts or None)
        os.replace(part, path)
    except SafetensorError as error:
        if "I/O error" in str(error):
            raise OSError(f"{path}: {error}") from error
        raise CacheDTypeError(
            f"{path}: an array cannot be saved: {error}", "cache", str(path)
        ) from error
    finally:
        part.unlink(missing_ok=True)


def _current(
    layers: Sequence[BaseCache], metadata: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    states = [newer_state(type(c).__name__, c.state, c.meta_state) for c in layers]
    return flattened(states, metadata)


def _older(
    layers: Sequence[BaseCache], metadata: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    # Meta states under "0.", the caller's metadata under "1.", class names under "2.".
    texts: dict[str, Any] = {}
    for i, layer in enumerate(layers):
        _flatten(f"0.{i}", layer.meta_state, texts, empty="")
        texts[f"2.{i}"] = type(layer).__name__
    texts |= {f"1.{key}": text for key, text in metadata.items()}
    arrays: dict[str, Any] = {}
    for i, layer in enumerate(layers):
        _flatten(str(i), layer.state, arrays)
    return arrays, texts


def prompt_cache_layout(file_name: str | os.PathLike[str]) -> PromptCacheLayout:
    """Tell which mlx-lm wrote a prompt cache, or could have: "0.32" and later, or "0.31".

    Only the file's header is read. A file without any layer that has no metadata is "0.31".

    Raises
    ------
    OSError
        The file is missing or cannot be read.
    CacheValueError
        It is damaged, or no prompt cache.
    """
    texts = _read(_path(file_name), arrays=False)[1]
    return "0.32" if is_newer(texts) else "0.31"


@overload
def load_prompt_cache(
    file_name: str | os.PathLike[str], return_metadata: Literal[False] = False
) -> list[BaseCache]: ...
@overload
def load_prompt_cache(
    file_name: str | os.PathLike[str], return_metadata: Literal[True]
) -> tuple[list[BaseCache], dict[str, str]]: ...
def load_prompt_cache(
    file_name: str | os.PathLike[str], return_metadata: bool = False
) -> list[BaseCache] | tuple[list[BaseCache], dict[str, str]]:
    """Load what `save_prompt_cache`, or mlx-lm in either of its layouts, saved.

    bfloat16, which NumPy lacks, becomes float32.

    Returns
    -------
    list of cache, or (list of cache, dict of str to str) with `return_metadata`

    Raises
    ------
    OSError
        The file is missing or cannot be read.
    CacheValueError, CacheDTypeError
        It is damaged, no prompt cache, or its parts do not belong together.
    """
    arrays, texts = _read(_path(file_name))
    parts: dict[str, dict[str, str]] = {"0": {}, "1": {}, "2": {}}
    for key, text in texts.items():
        head, _, rest = key.partition(".")
        if head in parts:
            parts[head][rest] = text
    if is_newer(texts):
        found, metadata = _newer(arrays, texts, parts["1"]), parts["0"]
        return (found, metadata) if return_metadata else found
    info, states = _tree(parts["0"]), _tree(arrays)
    names = _dense(_tree(parts["2"]), "class names")
    extra = (set(states) | set(info)) - set(range(len(names)))
    if extra:
        raise CacheValueError(
            f"layers {sorted(extra)[:8]} have no class name", "layers", sorted(extra)
        )
    caches: list[BaseCache] = []
    for i, name in enumerate(names):
        if not isinstance(name, str):
            raise CacheValueError(
                f"the class name of layer {i} is not text", "class name of a layer", i
            )
        kind = KvCacheKind.parse(name)
        meta = _meta(kind, info.get(i, ""))
        caches.append(from_state(kind, _state(kind, states.get(i, {}), meta), meta))
    return (caches, parts["1"]) if return_metadata else caches


def _newer(
    arrays: Mapping[str, NDArray[Any]], texts: Mapping[str, str], classes: Mapping[str, str]
) -> list[BaseCache]:
    values, classes = plain_values(arrays, texts), dict(classes)
    for key in mamba_keys(texts):
        place: dict[str, Any] = classes if key in classes else values
        if place.get(key) != "ArraysCache":
            raise CacheValueError(
                f"{shown(key)} is not the class name of an ArraysCache",
                "class name",
                key,
                "ArraysCache",
            )
        place[key] = "MambaCache"
    names = _dense(_tree(classes), "class names")
    states = _dense(_tree(values), "states")
    if len(names) != len(states) or not all(isinstance(name, str) for name in names):
        raise CacheValueError(
            f"{len(states)} states have {len(names)} class names",
            "class names",
            len(names),
            len(states),
        )
    return [from_newer_state(*pair) for pair in zip(names, states, strict=True)]


def _plain(array: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(array, array.dtype.newbyteorder("="))


def _flatten(key: str, tree: Any, out: dict[str, Any], empty: str | None = None) -> None:
    if isinstance(tree, (tuple, list)):
        for i, part in enumerate(tree):
            _flatten(f"{key}.{i}", part, out, empty)
        if not tree and empty is not None:
            out[key] = empty
    elif tree is not None:
        out[key] = tree


def _path(file_name: str | os.PathLike[str]) -> Path:
    try:
        return Path(as_file_name(file_name, "file_name"))
    except ArgumentError as error:
        raise CacheValueError(str(error), error.what, error.value, error.limit) from None


def _read(path: Path, *, arrays: bool = True) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    with path.open("rb"):  # a missing or unreadable file is an OSError, whatever follows
        pass
    try:
        with safe_open(path, framework="np") as file:
            texts = file.metadata()
            names = list(file.keys())
            found = _load_arrays(path, file, names) if arrays else {}
    except (SafetensorError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise CacheValueError(
            f"{path}: damaged, or no safetensors file: {error}", "file", str(path)
        ) from error
    if names and not texts:
        raise CacheValueError(
            f"{path}: no prompt cache, its metadata are missing", "file", str(path)
        )
    foreign = [key for key in (*names, *(texts or ())) if not key[:1].isdigit()]
    if foreign:
        raise CacheValueError(
            f"{path}: no prompt cache, it has {shown(foreign[0])}", "key", foreign[0], str(path)
        )
    return found, texts or {}


def _load_arrays(path: Path, file: Any, names: list[str]) -> dict[str, NDArray[Any]]:
    halves = {name for name in names if file.get_slice(name).get_dtype() == "BF16"}
    found = {name: file.get_tensor(name) for name in names if name not in halves}
    return found | _widened(path, halves) if halves else found


def _widened(path: Path, names: set[str]) -> dict[str, NDArray[Any]]:
    import safetensors

    # Untyped in its own package.
    deserialize: Any = safetensors.deserialize
    arrays = {}
    for name, entry in deserialize(path.read_bytes()):
        if name in names:
            # bfloat16 is the upper half of a float32.
            upper = np.frombuffer(bytes(entry["data"]), "<u2").astype(np.uint32)
            arrays[name] = (upper << np.uint32(16)).view(np.float32).reshape(entry["shape"])
    return arrays


def _tree(leaves: Mapping[str, Any]) -> dict[int, _Node]:
    root: dict[int, _Node] = {}
    for key, leaf in leaves.items():
        steps = key.split(".")
        if len(steps) > _MAX_DEPTH or not all(
            s.isascii() and s.isdigit() and len(s) < 7 for s in steps
        ):
            raise CacheValueError(f"key {shown(key)} is not a path of numbers", "key", key)
        node = root
        for step in steps[:-1]:
            node = node.setdefault(int(step), {})
            if not isinstance(node, dict):
                raise CacheValueError(f"key {shown(key)} lies within another one", "key", key)
        if int(steps[-1]) in node:
            raise CacheValueError(
                f"key {shown(key)} comes twice, or another one lies within it", "key", key
            )
        node[int(steps[-1])] = leaf
    return root


def _dense(node: _Node, what: str) -> tuple[_Node, ...]:
    if isinstance(node, str) and not node:
        return ()
    if not isinstance(node, dict) or sorted(node) != list(range(len(node))):
        raise CacheValueError(
            f"{what} are not numbered from 0 on without a gap",
            what,
            sorted(node) if isinstance(node, dict) else None,
        )
    return tuple(node[i] for i in range(len(node)))


def _meta(kind: KvCacheKind, node: _Node) -> tuple[Any, ...]:
    parts = _dense(node, "values of a meta state")
    if kind is not KvCacheKind.CACHE_LIST:
        if not all(isinstance(part, str) for part in parts):
            raise CacheValueError(
                f"the meta state of a {kind} holds more than texts",
                "meta_state",
                str(kind),
                "texts",
            )
        return parts
    if not parts:
        return (), ()
    if len(parts) != 2:
        raise CacheValueError(
            f"the meta state of a CacheList has {len(parts)} parts, not 2",
            "meta_state",
            len(parts),
            2,
        )
    names, metas = _dense(parts[0], "names of caches"), _dense(parts[1], "meta states")
    if len(names) != len(metas) or not all(isinstance(name, str) for name in names):
        raise CacheValueError(
            f"a CacheList has {len(names)} names and {len(metas)} meta states",
            "meta_state",
            len(metas),
            len(names),
        )
    kinds = [KvCacheKind.parse(name) for name in names]
    return names, tuple(_meta(k, m) for k, m in zip(kinds, metas, strict=True))


def _state(kind: KvCacheKind, node: _Node, meta: tuple[Any, ...]) -> tuple[Any, ...]:
    if not isinstance(node, dict):
        raise CacheValueError(f"the state of a {kind} is a single array", "state", str(kind))
    if kind is KvCacheKind.CACHE_LIST:
        if set(node) - set(range(len(meta[0]))):
            raise CacheValueError(
                f"a CacheList of {len(meta[0])} caches has states {sorted(node)}",
                "states",
                sorted(node),
                len(meta[0]),
            )
        kinds = [KvCacheKind.parse(name) for name in meta[0]]
        return tuple(_state(k, node.get(i, {}), meta[1][i]) for i, k in enumerate(kinds))
    empty = kind.empty()
    if isinstance(empty, ArraysCache):  # empty slots have no array
        least = len(empty) if node else 0
        return tuple(node.get(i) for i in range(max(least, max(node, default=-1) + 1)))
    return _arrays(node, kind)


def _arrays(node: _Node, kind: KvCacheKind) -> tuple[Any, ...]:
    parts = _dense(node, f"arrays of a {kind}")
    return tuple(_arrays(part, kind) if isinstance(part, dict) else part for part in parts)
