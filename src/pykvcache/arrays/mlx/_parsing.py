"""The keys of a prompt cache's file as a tree, and the layers that they say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from numpy.typing import NDArray

from pykvcache.arrays.mlx._files import is_newer, mamba_keys, plain_values
from pykvcache.arrays.mlx.arrays_cache import ArraysCache
from pykvcache.arrays.mlx.kinds import KvCacheKind, serialized
from pykvcache.errors import CacheValueError
from pykvcache.errors._shown import shown

__all__ = ["Serialized", "parsed"]

# Dotted keys of a file as a tree: numbered branches, arrays or texts as leaves.
_Node: TypeAlias = Any
#: Kind, state and meta state.
Serialized: TypeAlias = tuple[KvCacheKind, Sequence[Any], Sequence[Any]]
_MAX_DEPTH = 16


def parsed(
    arrays: Mapping[str, NDArray[Any]], texts: Mapping[str, str]
) -> tuple[list[Serialized], dict[str, str]]:
    """Return kind, state and meta state of each layer, and the caller's metadata."""
    parts: dict[str, dict[str, str]] = {"0": {}, "1": {}, "2": {}}
    for key, text in texts.items():
        head, _, rest = key.partition(".")
        if head in parts:
            parts[head][rest] = text
    if is_newer(texts):
        return _newer(arrays, texts, parts["1"]), parts["0"]
    info, states = _tree(parts["0"]), _tree(arrays)
    names = _dense(_tree(parts["2"]), "class names")
    extra = (set(states) | set(info)) - set(range(len(names)))
    if extra:
        raise CacheValueError(
            f"layers {sorted(extra)[:8]} have no class name", "layers", sorted(extra)
        )
    layers: list[Serialized] = []
    for i, name in enumerate(names):
        if not isinstance(name, str):
            raise CacheValueError(
                f"the class name of layer {i} is not text", "class name of a layer", i
            )
        kind = KvCacheKind.parse(name)
        meta = _meta(kind, info.get(i, ""))
        layers.append((kind, _state(kind, states.get(i, {}), meta), meta))
    return layers, parts["1"]


def _newer(
    arrays: Mapping[str, NDArray[Any]], texts: Mapping[str, str], classes: Mapping[str, str]
) -> list[Serialized]:
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
    return [serialized(*pair) for pair in zip(names, states, strict=True)]


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
                f"a CacheList of {len(meta[0])} caches has states {shown(sorted(node))}",
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
