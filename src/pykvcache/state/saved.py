"""Common base of saved sequences and contexts: files, tensors and header, descriptions."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from pykvcache._arguments import IntArray, TokenInput, as_bool, as_bytes, as_path, as_token_array
from pykvcache.errors import ArgumentError, StateDamaged, StateFormatError
from pykvcache.state.atomic import write_atomically
from pykvcache.state.container import (
    SIZES,
    Container,
    Tensor,
    best_checksum,
    find_checksum,
    naming,
    open_file,
    pack,
    parse,
)
from pykvcache.state.facts import Fingerprint
from pykvcache.state.layout import Part, PartLayout

if TYPE_CHECKING:
    from typing_extensions import Buffer, Self

__all__ = [
    "Saved",
    "StateInfo",
    "check_tokens",
    "describe_state",
    "json_of",
    "layouts_of",
    "read_fingerprint",
    "read_ints",
    "read_metadata",
    "read_part",
    "write_ints",
    "write_part",
]

Path = str | os.PathLike[str]
#: Maximum nesting of metadata. The JSON module fails at what remains of Python's recursion limit.
_MAX_DEPTH = 100


@dataclass(frozen=True)
class StateInfo:
    """Header of a saved state.

    Attributes
    ----------
    kind
        ``"sequence"`` or ``"context"``.
    n_tokens
        Number of tokens; for a context, summed over its sequences.
    has_tokens
        Whether token ids were saved with it.
    fingerprint
        The model and the settings it belongs to.
    types
        Types of K and V, as ``{"k": "f16", ...}``.
    metadata
        The caller's metadata.
    checksum
        ``"xxh3-128"`` or ``"sha256"``.
    n_bytes
        Size of the file.
    """

    kind: str
    n_tokens: int
    has_tokens: bool
    fingerprint: Fingerprint
    types: Mapping[str, str]
    metadata: Mapping[str, Any]
    checksum: str
    n_bytes: int


class Saved(ABC):
    """A saved state, independent of any context; immutable."""

    kind: ClassVar[str]

    def __init__(
        self,
        layouts: Sequence[PartLayout],
        fingerprint: Fingerprint,
        metadata: Mapping[str, Any] | None,
    ) -> None:
        self._layouts = tuple(layouts)
        self._fingerprint = fingerprint
        self._metadata = check_metadata(metadata)

    @property
    def fingerprint(self) -> Fingerprint:
        """The model and the settings of the state."""
        return self._fingerprint

    @property
    def metadata(self) -> dict[str, Any]:
        """The caller's metadata; a copy."""
        copy: dict[str, Any] = json.loads(json.dumps(self._metadata))
        return copy

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, tuple[bytes]]:
        """Pickle as the bytes of a file: unpickling verifies them again."""
        return type(self).from_bytes, (self.to_bytes(),)

    @abstractmethod
    def _tensors(self) -> list[Tensor]:
        """Return the tensors of the file."""

    @abstractmethod
    def _text(self) -> dict[str, str]:
        """Return further metadata for the header."""

    @property
    @abstractmethod
    def n_tokens(self) -> int:
        """Number of tokens."""

    @classmethod
    @abstractmethod
    def _parsed(cls, container: Container) -> Self:
        """Build a state from a parsed file; a ValueError or TypeError says that it is damaged."""

    def _pieces(self, checksum: str | None) -> list[memoryview]:
        text = {
            "kind": self.kind,
            "n_tokens": str(self.n_tokens),
            "fingerprint": self._fingerprint.to_json(),
            "layout": json.dumps([layout.to_json() for layout in self._layouts]),
            "user": json.dumps(self._metadata),
            **self._text(),
        }
        if self._fingerprint.model_name:
            text["model_name"] = self._fingerprint.model_name
        return pack(
            text, self._tensors(), find_checksum(best_checksum() if checksum is None else checksum)
        )

    def to_bytes(self, *, checksum: str | None = None) -> bytes:
        """Return the file that `save` writes."""
        return b"".join(self._pieces(checksum))

    def save(self, path: Path, *, sync: bool = True, checksum: str | None = None) -> int:
        """Write a file atomically, and return its size in bytes.

        Parameters
        ----------
        path
            File name; it always refers to a complete file, old or new. An old file keeps its
            permissions. If it is a symbolic link, its target is replaced.
        sync
            Flush the file to disk (``fsync``). ``False`` is faster: a crash of the process
            still leaves the old or the new file, a crash of the machine may not.
        checksum
            ``"sha256"``, or ``"xxh3-128"``, which needs the extra ``state`` for writing and
            reading. Default: XXH3 if it is installed.

        Raises
        ------
        StateFileError
            The file cannot be written: no permission, no space, or the path is a directory, a pipe
            or a device. An older file of that name is unchanged.
        ValueError
            The metadata exceeds the largest header (100 MB).
        """
        return write_atomically(as_path(path), self._pieces(checksum), sync=as_bool(sync, "sync"))

    @classmethod
    def from_bytes(cls, data: Buffer | npt.NDArray[Any]) -> Self:
        """Parse the output of `to_bytes`; a read-only buffer is not copied.

        Raises
        ------
        StateError
            See `load`.
        """
        given = as_bytes(data, "data")
        return cls._checked(parse(given.copy() if given.flags.writeable else given))

    @classmethod
    def load(cls, path: Path, *, mapped: bool = True) -> Self:
        """Read a file and verify every byte.

        Parameters
        ----------
        path
            File name.
        mapped
            Map the file into memory (``mmap``) and read it on access, without a copy. A mapped
            file may be replaced or deleted, but must not be overwritten or truncated in place.
            ``False`` reads it all into memory now.

        Raises
        ------
        StateFileError
            The file cannot be read; `StateFileNotFound` if it does not exist.
        StateFormatError, StateVersionError
            The file is not a state, or its version is not supported.
        StateTruncated, StateTrailingBytes, StateDamaged
            The content is not what was written.
        """
        name, mapped = as_path(path), as_bool(mapped, "mapped")
        with naming(name):
            return cls._checked(parse(open_file(name, mapped=mapped)))

    @classmethod
    def _checked(cls, container: Container) -> Self:
        kind = container.metadata.get("kind")
        if kind != cls.kind:
            message = f"this is the state of a {kind}: expected a {cls.kind}"
            raise StateFormatError(message, "kind", kind, cls.kind)
        try:
            state = cls._parsed(container)
        except StateDamaged:
            raise
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise StateDamaged(f"the state is invalid: {error}", what="header") from None
        said = container.metadata.get("n_tokens")
        if said != str(state.n_tokens):
            message = f"the state's header has no valid n_tokens: {said!r}, not {state.n_tokens}"
            raise StateDamaged(message, "n_tokens", said, state.n_tokens)
        return state


def check_tokens(tokens: TokenInput, held: int, seq: int | None = None) -> IntArray:
    """Return a read-only copy of tokens, one for each position that a sequence holds."""
    given: IntArray = as_token_array(tokens).copy()
    if len(given) != held:
        holder = "the sequence" if seq is None else f"sequence {seq}"
        message = f"{len(given)} tokens given, but {holder} holds {held}"
        what = "tokens" if seq is None else f"tokens of {holder}"
        raise ArgumentError(message, what, len(given), held)
    given.flags.writeable = False
    return given


def check_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return metadata after a round trip through JSON."""
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata must be a mapping, not {type(metadata).__name__}")
    try:
        _check_nested(dict(metadata), 0)
        text = json.dumps(dict(metadata), allow_nan=False)
    except TypeError as error:
        raise TypeError(f"metadata must be JSON: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"metadata must be JSON: {error}", "metadata") from None
    copy: dict[str, Any] = json.loads(text)
    return copy


def _check_nested(value: object, depth: int) -> None:
    """Refuse keys that JSON would convert to str, and nesting too deep to be read again."""
    if depth > _MAX_DEPTH:
        raise ArgumentError(
            f"it is nested deeper than {_MAX_DEPTH} levels", what="depth", limit=_MAX_DEPTH
        )
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"a key is {key!r}: keys must be str")
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for each in value:
            _check_nested(each, depth + 1)


def read_metadata(container: Container) -> dict[str, Any]:
    """Return the caller's metadata from a file."""
    user = json_of(container, "user")
    if not isinstance(user, dict):
        raise StateDamaged("the state's header has no valid 'user'", what="user")
    return user


def read_fingerprint(container: Container) -> Fingerprint:
    """Return the fingerprint in a file."""
    text = container.metadata
    found = Fingerprint.from_json(text.get("fingerprint", ""))
    return replace(found, model_name=text.get("model_name", ""))


# Parts as tensors of a file, and back -------------------------------------------------------------

#: ``ggml_type`` to safetensors types; quantised blocks are stored as bytes.
_DTYPES = {0: "F32", 1: "F16", 30: "BF16"}


def json_of(container: Container, key: str) -> Any:
    """Parse a header value that is JSON."""
    try:
        return json.loads(container.metadata[key])
    except (KeyError, ValueError, RecursionError):
        raise StateDamaged(f"the state's header has no valid {key}", what=key) from None


def layouts_of(container: Container) -> tuple[PartLayout, ...]:
    """Parse the layouts of a state's parts."""
    try:
        return tuple(PartLayout.from_json(part) for part in json_of(container, "layout"))
    except (ValueError, TypeError, KeyError, IndexError):
        raise StateDamaged("the state's layout is invalid", what="layout") from None


def write_ints(name: str, values: IntArray) -> Tensor:
    """Return int32 values as a tensor."""
    data = np.ascontiguousarray(values, "<i4")
    return Tensor(name, "I32", values.shape, data.reshape(-1).view(np.uint8))


def read_ints(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> IntArray:
    """Return a copy of an int32 tensor; -1 in `shape` matches any length.

    A copy, because another program may truncate a mapped file.
    """
    tensor = _find(tensors, name)
    fits = len(tensor.shape) == len(shape) and all(
        b in (-1, a) for a, b in zip(tensor.shape, shape, strict=True)
    )
    if tensor.dtype != "I32" or not fits:
        raise StateDamaged(f"the shape or type of {name} differs from its layout", what=name)
    values: IntArray = np.frombuffer(tensor.data, "<i4").reshape(tensor.shape)
    return values.astype(np.int32)


def _find(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    try:
        return tensors[name]
    except KeyError:
        raise StateDamaged(f"the state has no {name}", what=name) from None


def write_part(prefix: str, part: Part) -> Iterator[Tensor]:
    """Yield the tensors of one stream of a part."""
    yield write_ints(f"{prefix}.positions", part.positions)
    if part.ext is not None:
        yield write_ints(f"{prefix}.ext", part.ext)
    if part.members is not None:
        yield write_ints(f"{prefix}.offsets", part.members[0])
        yield write_ints(f"{prefix}.sequences", part.members[1])
    for i, (name, dtype, shape) in enumerate(_headers(prefix, part)):
        data = np.ascontiguousarray(part.tensors[i]).reshape(-1)
        yield Tensor(name, dtype, shape, data)


def _headers(prefix: str, part: Part) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield name, dtype and shape of each tensor of cells, as in the file."""
    for i, rows in enumerate(part.layout.rows):
        dtype = _DTYPES.get(rows.type, "U8")
        shape = part.shape(i)
        if dtype != "U8":
            if part.is_transposed(i):
                shape = shape[:2]
            elif rows.n_head:
                shape = (len(part), rows.n_head, rows.head_dim)
            else:
                shape = (len(part), rows.row_bytes // SIZES[dtype])
        yield f"{prefix}.layers.{rows.layer}.{rows.what}", dtype, shape


def read_part(
    tensors: Mapping[str, Tensor], prefix: str, layout: PartLayout, *, members: bool
) -> Part:
    """Read one stream of a part; check all sizes against the layout."""
    positions = read_ints(tensors, f"{prefix}.positions", (-1,))
    n = len(positions)
    ext = read_ints(tensors, f"{prefix}.ext", (n, 3)) if layout.extended else None
    pair = None
    if members:
        offsets = read_ints(tensors, f"{prefix}.offsets", (n + 1,))
        ids = read_ints(tensors, f"{prefix}.sequences", (-1,))
        if offsets[0] != 0 or offsets[-1] != len(ids) or (np.diff(offsets) < 1).any():
            raise StateDamaged(f"{prefix}.offsets are invalid", what=f"{prefix}.offsets")
        pair = offsets, ids
    part = Part(layout, positions, ext, (), pair)
    data = []
    for i, (name, dtype, shape) in enumerate(_headers(prefix, part)):
        tensor = _find(tensors, name)
        if (tensor.dtype, tensor.shape) != (dtype, shape):
            raise StateDamaged(f"the shape or type of {name} differs from its layout", what=name)
        wanted = part.shape(i)
        if tensor.data.nbytes != prod(wanted):
            raise StateDamaged(f"the size of {name} differs from its layout", what=name)
        data.append(tensor.data.reshape(wanted))
    return replace(part, tensors=tuple(data))


# Descriptions -------------------------------------------------------------------------------------


def describe_state(path: Path) -> StateInfo:
    """Describe a saved state from its header.

    The header is verified against its checksum; the rest of the file is not read.

    Raises
    ------
    StateError
        See `SequenceState.load`.
    """
    name = as_path(path)
    with naming(name):
        return _described(parse(open_file(name, mapped=True), verify=False))


def _described(container: Container) -> StateInfo:
    text = container.metadata
    types: dict[str, str] = {}
    for layout in layouts_of(container):
        for rows in layout.rows:
            types.setdefault(rows.what, rows.type_name)
    count = text.get("n_tokens", "")
    is_kind = text.get("kind") in ("sequence", "context")
    if not (count.isdecimal() and len(count) < 20 and is_kind):
        what = "n_tokens" if is_kind else "kind"
        message = f"the state's header has no valid {what}: {text.get(what)!r}"
        raise StateDamaged(message, what, text.get(what))
    return StateInfo(
        kind=text["kind"],
        n_tokens=int(count),
        has_tokens=any(name.startswith("tokens") for name in container.tensors),
        fingerprint=read_fingerprint(container),
        types=types,
        metadata=read_metadata(container),
        checksum=text["checksum"],
        n_bytes=container.n_bytes,
    )
