"""Prompt caches in safetensors files, laid out as mlx-lm does."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from pykvcache._paths import as_file_name, check_regular, open_into, places
from pykvcache.arrays.mlx._base import BaseCache, as_caches
from pykvcache.arrays.mlx._files import flattened, is_newer
from pykvcache.arrays.mlx._limits import LARGEST
from pykvcache.arrays.mlx._parsing import parsed
from pykvcache.arrays.mlx.kinds import from_state, newer_state
from pykvcache.errors import ArgumentError, CacheDTypeError, CacheValueError
from pykvcache.errors._shown import shown

__all__ = ["PromptCacheLayout", "load_prompt_cache", "prompt_cache_layout", "save_prompt_cache"]

#: Layouts of prompt cache files, by the first (0.32) or last (0.31) mlx-lm that has them.
# Stubtest takes a Literal of several for no union.
PromptCacheLayout: TypeAlias = Literal["0.31"] | Literal["0.32"]


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
        try:
            (key + text).encode()
        except UnicodeEncodeError:
            raise CacheValueError(
                f"metadata hold {shown(key)}: {shown(text)}, which UTF-8 cannot hold",
                "metadata",
                (key, text),
                "UTF-8",
            ) from None
    arrays, texts = (_current if layout == "0.32" else _older)(layers, metadata or {})
    parsed(arrays, texts)  # what could not be loaded is not saved
    _check_offsets(layers)
    path = _path(file_name)
    if not path.name:
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not path.parent.exists():
        raise FileNotFoundError(errno.ENOENT, f"there is no folder {path.parent}", str(path))
    temporary, target, mode = places(str(path))
    try:
        own = _made(temporary, mode)  # where nothing can be written, this is an OSError
        save_file({key: _plain(array) for key, array in arrays.items()}, temporary, texts or None)
        os.chmod(temporary, own)
        _check_header(path, temporary)
        os.replace(temporary, target)
    except SafetensorError as error:
        if any(name in str(error) for name in ("I/O error", "IoError")):
            raise OSError(f"{path}: {error}") from error
        if "header" in str(error):
            raise CacheValueError(f"{path}: {error}", "metadata", str(path)) from error
        raise CacheDTypeError(
            f"{path}: an array cannot be saved: {error}", "cache", str(path)
        ) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _made(path: str, mode: int | None) -> int:
    """Make an empty file that its owner may write; return `mode`, or that of new files."""
    opened: list[int] = []
    try:
        first = 0o666 if mode is None else 0o600
        made = open_into(opened, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, first)
        own = stat.S_IMODE(os.fstat(made).st_mode) if mode is None else mode
        os.chmod(path, 0o600)  # whatever the umask: safetensors opens it again
        return own
    finally:
        if opened:
            os.close(*opened)


def _check_header(path: Path, temporary: str) -> None:
    try:
        _read(Path(temporary), arrays=False)
    except CacheValueError as error:  # it is too long, for instance
        raise CacheValueError(
            f"{path}: the file could not be loaded: {error.__cause__ or error}", "file", str(path)
        ) from None


def _check_offsets(layers: Sequence[BaseCache]) -> None:
    for leaf in (leaf for layer in layers for leaf in layer._leaves()):
        if leaf.offset > LARGEST:
            raise CacheValueError(
                f"offset is {leaf.offset}; a file holds {LARGEST} at most",
                "offset",
                leaf.offset,
                LARGEST,
            )


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
    layers, metadata = parsed(*_read(_path(file_name)))
    caches = [from_state(*layer) for layer in layers]
    return (caches, metadata) if return_metadata else caches


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

    check_regular(str(path))  # a pipe would wait
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
