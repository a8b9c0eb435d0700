"""Make, trim, save and load the caches of a prompt, one per layer.

Files are safetensors files in mlx-lm's layout 0.31 or 0.32.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, SupportsIndex, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from pykvcache._arguments import as_file_name, check_regular, places
from pykvcache.arrays._checks import as_int
from pykvcache.arrays.mlx.arrays_cache import ArraysCache
from pykvcache.arrays.mlx.base import BaseCache, as_caches
from pykvcache.arrays.mlx.kinds import (
    KvCacheKind,
    Serialized,
    dense,
    from_state,
    parts_of_state,
    small_integers,
    state_of_parts,
)
from pykvcache.arrays.mlx.kv_cache import KVCache
from pykvcache.arrays.mlx.rotating import RotatingKVCache
from pykvcache.errors import CacheDTypeError, CacheValueError, shown

__all__ = [
    "ROTATING_DEFAULT_KEEP",
    "PromptCacheConfig",
    "PromptCacheLayout",
    "can_trim_prompt_cache",
    "load_prompt_cache",
    "make_prompt_cache",
    "prompt_cache_layout",
    "save_prompt_cache",
    "trim_prompt_cache",
]

#: Layouts of prompt cache files, named by mlx-lm versions.
# Written as a union for stubtest.
PromptCacheLayout: TypeAlias = Literal["0.31"] | Literal["0.32"]

#: Number of first tokens that the rings of `make_prompt_cache` keep.
ROTATING_DEFAULT_KEEP = 4

_MAX_LAYERS = 65_536


@dataclass(frozen=True)
class PromptCacheConfig:
    """Facts about a model for `make_prompt_cache`.

    Attributes
    ----------
    num_hidden_layers : int
        Number of layers, one cache each.
    sliding_window : int, optional
        Size of the rings; None for plain caches, negative counts as 0.
    """

    num_hidden_layers: int
    sliding_window: int | None = None


def make_prompt_cache(config: PromptCacheConfig) -> list[BaseCache]:
    """Return an empty cache for each layer.

    With a sliding window these are `RotatingKVCache`, keeping `ROTATING_DEFAULT_KEEP` tokens; else
    `KVCache`.
    """
    if not isinstance(config, PromptCacheConfig):
        raise TypeError(f"config must be a PromptCacheConfig, not {type(config).__name__}")
    layers = as_int("num_hidden_layers", config.num_hidden_layers, minimum=0, maximum=_MAX_LAYERS)
    if config.sliding_window is None:
        return [KVCache() for _ in range(layers)]
    size = max(as_int("sliding_window", config.sliding_window), 0)
    return [RotatingKVCache(size, ROTATING_DEFAULT_KEEP) for _ in range(layers)]


def can_trim_prompt_cache(cache: Sequence[BaseCache]) -> bool:
    """Return whether the caches of all layers can be trimmed."""
    return all(layer.is_trimmable() for layer in as_caches("cache", cache))


def trim_prompt_cache(cache: Sequence[BaseCache], num_tokens: SupportsIndex) -> int:
    """Drop the newest tokens of all layers; return the number that the first one dropped.

    Returns 0 and changes nothing if a layer cannot be trimmed, or without layers.
    """
    n = as_int("num_tokens", num_tokens, minimum=0)
    layers = as_caches("cache", cache)
    if not layers or not can_trim_prompt_cache(layers):
        return 0
    dropped = [layer.trim(n) for layer in layers]
    return dropped[0]


def save_prompt_cache(
    file_name: str | os.PathLike[str],
    cache: Sequence[BaseCache],
    metadata: Mapping[str, str] | None = None,
    *,
    layout: PromptCacheLayout = "0.32",
) -> None:
    """Save the caches of all layers in a file that mlx-lm reads.

    Written atomically: an old file stays until the new one is complete.

    Parameters
    ----------
    file_name : path
        Path of the file; no suffix is added.
    cache : sequence of cache
        One per layer.
    metadata : mapping of str to str, optional
        Texts that `load_prompt_cache` returns with the cache.
    layout : "0.32" or "0.31"
        The mlx-lm version that is to read the file: "0.32" for 0.32 and later, which read no
        other layout; "0.31" for earlier ones. `load_prompt_cache` reads both, and
        `prompt_cache_layout` tells them apart. mlx-lm 0.32 has no `MambaCache` and reads it as
        an `ArraysCache` of two slots.

    Raises
    ------
    OSError
        The file cannot be written.
    CacheValueError
        The `layout` is unknown, a cache could not be loaded again, or a `CacheList` or
        `ArraysCache` has no members, which "0.32" cannot store.
    CacheDTypeError
        A dtype is not supported by the format, or metadata is not text.
    CacheOrderError
        A batch is not finalized.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    if not isinstance(layout, str) or layout not in ("0.31", "0.32"):
        message = f"layout is {shown(layout)}; expected '0.32' or '0.31'"
        raise CacheValueError(message, "layout", layout, ("0.32", "0.31"))
    layers = as_caches("cache", cache)
    _check_metadata({} if metadata is None else metadata)
    write = _written if layout == "0.32" else _written_0_31
    arrays, texts = write(layers, metadata or {})
    _parsed(arrays, texts)  # refuse a cache that could not be loaded again
    path = _path(file_name)
    if not path.parent.exists():
        raise FileNotFoundError(errno.ENOENT, f"there is no folder {path.parent}", str(path))
    temporary, target, mode = places(str(path))
    try:
        made = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        own = stat.S_IMODE(os.fstat(made).st_mode) if mode is None else mode
        os.close(made)
        os.chmod(temporary, 0o600)  # safetensors reopens it, whatever the umask
        native = {
            key: np.ascontiguousarray(array, array.dtype.newbyteorder("="))
            for key, array in arrays.items()
        }
        save_file(native, temporary, texts or None)
        os.chmod(temporary, own)
        os.replace(temporary, target)
    except SafetensorError as error:
        if any(name in str(error) for name in ("I/O error", "IoError")):
            raise OSError(f"{path}: {error}") from error
        if "header" in str(error):
            raise CacheValueError(f"{path}: {error}", "metadata", str(path)) from error
        message = f"{path}: an array cannot be saved: {error}"
        raise CacheDTypeError(message, "cache", str(path)) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def prompt_cache_layout(file_name: str | os.PathLike[str]) -> PromptCacheLayout:
    """Return the layout of a prompt cache file: "0.32" (mlx-lm 0.32 and later) or "0.31".

    Reads only the file's header. A file without layers and metadata is "0.31".

    Raises
    ------
    OSError
        The file is missing or cannot be read.
    CacheValueError
        It is damaged or not a prompt cache.
    """
    return "0.32" if _is_0_32(_read(_path(file_name), arrays=False)[1]) else "0.31"


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
    """Load a file of `save_prompt_cache`, or of mlx-lm in either layout.

    bfloat16 becomes float32.

    Returns
    -------
    list of cache, or (list of cache, dict of str to str) with `return_metadata`

    Raises
    ------
    OSError
        The file is missing or cannot be read.
    CacheValueError, CacheDTypeError
        It is damaged, not a prompt cache, or its parts are inconsistent.
    """
    layers, metadata = _parsed(*_read(_path(file_name)))
    caches = [from_state(*layer) for layer in layers]
    return (caches, metadata) if return_metadata else caches


# A file's arrays and texts, by their keys ------------------------------------------------------

_Arrays: TypeAlias = dict[str, NDArray[Any]]
_Texts: TypeAlias = dict[str, str]
#: A node of the keys' tree: a dict of numbered branches, or an array or text.
_Node: TypeAlias = Any

_MAX_DEPTH = 16
# mlx-lm 0.32 ignores the text "2.0", which was a class name in 0.31. We use it to list the keys of
# MambaCache class names, which mlx-lm 0.32 does not have.
_MAMBA = "MambaCache:"


def _is_0_32(texts: Mapping[str, str]) -> bool:
    text = texts.get("2.0")
    return text is not None and (not text or text.startswith(_MAMBA))


def _written(layers: Sequence[BaseCache], metadata: Mapping[str, str]) -> tuple[_Arrays, _Texts]:
    """Lay out 0.32: metadata under "0.", class names under "1."; every part is an array."""
    arrays: _Arrays = {}
    others: list[tuple[str, str]] = []  # keys and types of parts that are not arrays
    mambas: list[str] = []

    def named(key: str, name: str) -> str:
        if name != "MambaCache":
            return name
        mambas.append(key)
        return "ArraysCache"

    def put(key: str, part: Any) -> None:
        if isinstance(part, np.ndarray):
            arrays[key] = part
        elif isinstance(part, tuple):
            if not part:
                layer = key.partition(".")[0]
                message = (
                    f"layer {layer} has an ArraysCache without slots, or a CacheList without "
                    "caches: only a file of layout='0.31' can hold it"
                )
                raise CacheValueError(message, "layout", layer, "0.31")
            for i, inner in enumerate(part):
                put(f"{key}.{i}", inner)
        elif part is None:
            others.append((key, "none"))
            arrays[key] = np.empty(0, np.float32)
        elif isinstance(part, str):  # the class name of a member of a CacheList
            others.append((key, "string"))
            arrays[key] = small_integers([ord(c) for c in named(key, part)])
        else:
            others.append((key, "scalar"))
            arrays[key] = np.array(part) if isinstance(part, bool) else small_integers(part)

    texts = {f"0.{key}": text for key, text in metadata.items()}
    states = [parts_of_state(type(c).__name__, c.state, c.meta_state) for c in layers]
    for i, (_, parts) in enumerate(states):
        put(str(i), parts)
    texts |= {f"1.{i}": named(str(i), name) for i, (name, _) in enumerate(states)}
    texts["2.0"] = f"{_MAMBA} {' '.join(mambas)}" if mambas else ""
    for i, (key, what) in enumerate(others, 1):
        texts |= {f"2.{i}.0": key, f"2.{i}.1": what}
    return arrays, texts


def _written_0_31(
    layers: Sequence[BaseCache], metadata: Mapping[str, str]
) -> tuple[_Arrays, _Texts]:
    """Lay out 0.31: meta states under "0.", metadata under "1.", class names under "2."."""
    arrays: _Arrays = {}
    texts: dict[str, Any] = {f"1.{key}": text for key, text in metadata.items()}
    for i, layer in enumerate(layers):
        _flatten(str(i), layer.state, arrays)
        _flatten(f"0.{i}", layer.meta_state, texts, empty="")
        texts[f"2.{i}"] = type(layer).__name__
    return arrays, texts


def _flatten(key: str, tree: Any, out: dict[str, Any], empty: str | None = None) -> None:
    if isinstance(tree, tuple):
        for i, part in enumerate(tree):
            _flatten(f"{key}.{i}", part, out, empty)
        if not tree and empty is not None:
            out[key] = empty
    elif tree is not None:
        out[key] = tree


def _parsed(
    arrays: Mapping[str, NDArray[Any]], texts: Mapping[str, str]
) -> tuple[list[tuple[KvCacheKind, tuple[Any, ...], tuple[Any, ...]]], _Texts]:
    """Parse kind, state and meta state of each layer, and the caller's metadata."""
    groups: dict[str, _Texts] = {"0": {}, "1": {}, "2": {}}
    for key, text in texts.items():
        head, _, rest = key.partition(".")
        if head in groups:
            groups[head][rest] = text
    if _is_0_32(texts):
        values, names = _values(arrays, texts), groups["1"]
        for key in texts["2.0"].removeprefix(_MAMBA).split():
            place: dict[str, Any] = names if key in names else values
            if not isinstance(kind := place.get(key), str) or kind != "ArraysCache":
                message = f"{shown(key)} is not the class name of an ArraysCache"
                raise CacheValueError(message, "class name", key, "ArraysCache")
            place[key] = "MambaCache"
        classes, states = dense(_tree(names), "class names"), _tree(values)
        layers = [
            (KvCacheKind.parse(name), *state_of_parts(name, states.pop(i, None)))
            for i, name in enumerate(classes)
        ]
        metadata, left = groups["0"], {*states}
    else:
        states, infos = _tree(arrays), _tree(groups["0"])
        kinds = map(KvCacheKind.parse, dense(_tree(groups["2"]), "class names"))
        layers = [
            (kind, *_parts_0_31(kind, states.pop(i, {}), infos.pop(i, "")))
            for i, kind in enumerate(kinds)
        ]
        metadata, left = groups["1"], {*states, *infos}
    if left:
        message = f"layers {sorted(left)[:8]} have no class name"
        raise CacheValueError(message, "layers", sorted(left))
    return layers, metadata


def _values(arrays: Mapping[str, NDArray[Any]], texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the parts of a 0.32 file: arrays, and numbers, texts and None."""
    values: dict[str, Any] = dict(arrays)
    for key, place in texts.items():
        if not (key.startswith("2.") and key.endswith(".0") and key != "2.0"):
            continue
        what, array = texts.get(f"{key[:-2]}.1"), arrays.get(place)
        if array is None or what not in ("scalar", "string", "none"):
            message = f"{shown(place)} is said to be {shown(what)}, which it cannot be"
            raise CacheValueError(message, place, what, ("scalar", "string", "none"))
        if what == "none":
            values[place] = None
        elif what == "scalar":
            values[place] = array.item() if array.size == 1 else array
        elif array.dtype.kind not in "iu" or array.size > 256 or (array.ravel() >> 16).any():
            raise CacheValueError("a text is not a list of characters", "text", array.shape)
        else:
            values[place] = "".join(chr(int(c)) for c in array.ravel())
    return values


def _tree(leaves: Mapping[str, Any]) -> dict[int, _Node]:
    """Convert dotted keys to a tree of dicts."""
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
            message = f"key {shown(key)} occurs twice, or another key lies within it"
            raise CacheValueError(message, "key", key)
        node[int(steps[-1])] = leaf
    return root


def _parts_0_31(kind: KvCacheKind, node: _Node, info: _Node) -> Serialized:
    """Parse the nodes of a state, which is missing from the file if empty, and of a meta state."""
    if not isinstance(node, dict):
        raise CacheValueError(f"the state of a {kind} is a single array", "state", str(kind))
    meta = dense(info, "values of a meta state")
    if kind is not KvCacheKind.CACHE_LIST:
        empty = kind.empty()
        if not isinstance(empty, ArraysCache):
            return _arrays_of(node, kind), meta
        least = len(empty) if node else 0  # empty slots have no array
        return tuple(node.get(i) for i in range(max(least, max(node, default=-1) + 1))), meta
    groups = [dense(part, "names and meta states") for part in meta or ("", "")]
    counts = list(map(len, groups))
    if len(groups) != 2 or counts[0] != counts[1]:
        message = f"a CacheList has names and as many meta states; got groups of {counts}"
        raise CacheValueError(message, "meta_state", counts, 2)
    names, infos = groups
    if set(node) - set(range(len(names))):
        message = f"a CacheList of {len(names)} caches has states {shown(sorted(node))}"
        raise CacheValueError(message, "states", sorted(node), len(names))
    nodes = (node.get(i, {}) for i in range(len(names)))
    members = [*map(_parts_0_31, map(KvCacheKind.parse, names), nodes, infos)]
    return tuple(state for state, _ in members), (names, tuple(meta for _, meta in members))


def _arrays_of(node: _Node, kind: KvCacheKind) -> tuple[Any, ...]:
    parts = dense(node, f"arrays of a {kind}")
    return tuple(_arrays_of(part, kind) if isinstance(part, dict) else part for part in parts)


# The file itself -------------------------------------------------------------------------------


def _check_metadata(metadata: object) -> None:
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata must be a mapping, not {type(metadata).__name__}")
    for key, text in metadata.items():
        pair = f"{shown(key)}: {shown(text)}"
        if not isinstance(key, str) or not isinstance(text, str):
            message = f"metadata must map text to text; got {pair}"
            raise CacheDTypeError(message, "metadata", (key, text), "text")
        try:
            (key + text).encode()
        except UnicodeEncodeError:
            message = f"metadata has {pair}, which cannot be encoded as UTF-8"
            raise CacheValueError(message, "metadata", (key, text), "UTF-8") from None


def _path(file_name: str | os.PathLike[str]) -> Path:
    return Path(as_file_name(file_name, "file_name", CacheValueError))


def _read(path: Path, *, arrays: bool = True) -> tuple[_Arrays, _Texts]:
    from safetensors import SafetensorError, safe_open

    check_regular(str(path))  # a pipe would block
    with path.open("rb"):  # raises OSError if it cannot be read
        pass
    try:
        with safe_open(path, framework="np") as file:
            texts = file.metadata()
            names = list(file.keys())
            found = _load_arrays(path, file, names) if arrays else {}
    except (SafetensorError, KeyError, ValueError, TypeError, AttributeError) as error:
        message = f"{path}: damaged, or not a safetensors file: {error}"
        raise CacheValueError(message, "file", str(path)) from error
    if names and not texts:
        message = f"{path}: not a prompt cache: its metadata is missing"
        raise CacheValueError(message, "file", str(path))
    foreign = [key for key in (*names, *(texts or ())) if not key[:1].isdigit()]
    if foreign:
        message = f"{path}: not a prompt cache: it has {shown(foreign[0])}"
        raise CacheValueError(message, "key", foreign[0], str(path))
    return found, texts or {}


def _load_arrays(path: Path, file: Any, names: list[str]) -> _Arrays:
    halves = {name for name in names if file.get_slice(name).get_dtype() == "BF16"}
    found = {name: file.get_tensor(name) for name in names if name not in halves}
    return found | _widened(path, halves) if halves else found


def _widened(path: Path, names: set[str]) -> _Arrays:
    """Load bfloat16 arrays as float32."""
    import safetensors

    # Untyped in safetensors.
    deserialize: Any = safetensors.deserialize
    arrays = {}
    for name, entry in deserialize(path.read_bytes()):
        if name in names:
            # bfloat16 is the upper half of float32.
            upper = np.frombuffer(bytes(entry["data"]), "<u2").astype(np.uint32)
            arrays[name] = (upper << np.uint32(16)).view(np.float32).reshape(entry["shape"])
    return arrays
