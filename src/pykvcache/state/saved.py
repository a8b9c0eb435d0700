"""What a sequence's state and a context's have in common: bytes, files, descriptions."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy.typing as npt

from pykvcache._arguments import as_bool, as_path
from pykvcache.enums import GgmlType
from pykvcache.errors import ArgumentError, StateDamaged, StateFormatError
from pykvcache.state.atomic import write_atomically
from pykvcache.state.buffers import as_bytes
from pykvcache.state.checksums import best_checksum, find_checksum
from pykvcache.state.container import Container, Tensor, open_file, pack, parse
from pykvcache.state.facts import Fingerprint
from pykvcache.state.files import json_of, layouts_of
from pykvcache.state.layout import PartLayout
from pykvcache.state.naming import naming

if TYPE_CHECKING:
    from typing_extensions import Buffer, Self

__all__ = ["Saved", "StateInfo", "describe_state"]

Path = str | os.PathLike[str]
#: Of metadata. The JSON module stops at what is left of Python's recursion limit.
_MAX_DEPTH = 100


@dataclass(frozen=True)
class StateInfo:
    """What the header of a saved state says.

    Attributes
    ----------
    kind
        ``"sequence"`` or ``"context"``.
    n_tokens
        Tokens that it holds; of a context, summed over its sequences.
    has_tokens
        Whether token ids were saved with it.
    fingerprint
        The model and the settings it belongs to.
    types
        Types of K and V, as ``{"k": "f16", ...}``.
    metadata
        What the caller saved with it.
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
    """A state outside of any context; immutable."""

    kind: ClassVar[str]

    def __init__(self, fingerprint: Fingerprint, metadata: Mapping[str, Any] | None) -> None:
        self._fingerprint = fingerprint
        self._metadata = check_metadata(metadata)

    @property
    def fingerprint(self) -> Fingerprint:
        """The model and the settings it belongs to."""
        return self._fingerprint

    @property
    def metadata(self) -> dict[str, Any]:
        """What the caller saved with it; a copy."""
        copy: dict[str, Any] = json.loads(json.dumps(self._metadata))
        return copy

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, tuple[bytes]]:
        """Pickled as the bytes of its file: checked again, and read-only again."""
        return type(self).from_bytes, (self.to_bytes(),)

    @abstractmethod
    def _tensors(self) -> list[Tensor]:
        """Everything that is not text."""

    @abstractmethod
    def _text(self) -> dict[str, str]:
        """Further keys of the header."""

    @property
    @abstractmethod
    def n_tokens(self) -> int:
        """Tokens that it holds."""

    @abstractmethod
    def _layouts(self) -> tuple[PartLayout, ...]:
        """Return what its parts are made of."""

    @classmethod
    @abstractmethod
    def _parsed(cls, container: Container) -> Self:
        """Make one of what a file holds."""

    def _pieces(self, checksum: str | None) -> list[memoryview]:
        text = {
            "kind": self.kind,
            "n_tokens": str(self.n_tokens),
            "fingerprint": self._fingerprint.to_json(),
            "layout": json.dumps([layout.to_json() for layout in self._layouts()]),
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
        """Write a file; the name stands for the whole old file or the whole new one at any time.

        Parameters
        ----------
        path
            File name; what it names is replaced when the new file is complete, and keeps its
            permissions. A symbolic link stays, and what it leads to is replaced.
        sync
            Wait until the disk has it (``fsync``). ``False`` is faster: a crash of the process
            still leaves the old file or the new one, a crash of the machine may not.
        checksum
            ``"sha256"``, or ``"xxh3-128"`` which needs ``pykvcache[state]``, both to write and
            to read. Default: XXH3 where it is installed.

        Returns
        -------
        int
            Size of the file in bytes.

        Raises
        ------
        StateFileError
            The system refused: no permission, no space; or it is a directory, a pipe, a device.
            An older file of that name is as it was.
        ValueError
            The metadata is larger than a header may be (100 MB).
        """
        return write_atomically(as_path(path), self._pieces(checksum), sync=as_bool(sync, "sync"))

    @classmethod
    def from_bytes(cls, data: Buffer | npt.NDArray[Any]) -> Self:
        """Read what `to_bytes` gave; a read-only buffer is kept, one that may change is copied.

        Raises
        ------
        StateError
            See `load`.
        """
        given = as_bytes(data, "data")
        return cls._checked(parse(given.copy() if given.flags.writeable else given))

    @classmethod
    def load(cls, path: Path, *, mapped: bool = True) -> Self:
        """Read a file; every byte is checked against its checksum first.

        Parameters
        ----------
        path
            File name.
        mapped
            Let the system read the file as it is looked at (``mmap``), which costs no memory of
            its own. A mapped file may be replaced or deleted, but not be overwritten or cut in
            place. ``False`` reads it all into memory now.

        Raises
        ------
        StateFileError
            The system refused to read it; `StateFileNotFound` if it is not there.
        StateFormatError, StateVersionError
            It is not a state, or one of another version.
        StateTruncated, StateTrailingBytes, StateDamaged
            It is not what was written.
        """
        name, mapped = as_path(path), as_bool(mapped, "mapped")
        with naming(name):
            return cls._checked(parse(open_file(name, mapped=mapped)))

    @classmethod
    def _checked(cls, container: Container) -> Self:
        kind = container.metadata.get("kind")
        if kind != cls.kind:
            raise StateFormatError(
                f"this is the state of a {kind}, not of a {cls.kind}",
                what="kind",
                value=kind,
                limit=cls.kind,
            )
        state = cls._parsed(container)
        said = container.metadata.get("n_tokens")
        if said != str(state.n_tokens):
            raise StateDamaged(
                f"the state's header has no valid n_tokens: {said!r}, not {state.n_tokens}",
                what="n_tokens",
                value=said,
                limit=state.n_tokens,
            )
        return state


def check_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return metadata as JSON gives it back."""
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
    """Refuse keys that JSON would turn into text, and what a full stack could not read again."""
    if depth > _MAX_DEPTH:
        raise ArgumentError(
            f"it is nested deeper than {_MAX_DEPTH}", what="depth", limit=_MAX_DEPTH
        )
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"a key is {key!r}, which is not str")
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for each in value:
            _check_nested(each, depth + 1)


def read_metadata(container: Container) -> dict[str, Any]:
    """Return the caller's metadata of a file."""
    user = json_of(container, "user")
    if not isinstance(user, dict):
        raise StateDamaged("the state's header has no valid user", what="user")
    return user


def read_fingerprint(container: Container) -> Fingerprint:
    """Return what a file belongs to."""
    text = container.metadata
    found = Fingerprint.from_json(text.get("fingerprint", ""))
    return replace(found, model_name=text.get("model_name", ""))


def describe_state(path: Path) -> StateInfo:
    """Say what a saved state is, from its header alone.

    The header is checked against its checksum, the rest is not read.

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
            types.setdefault(rows.what, type_name(rows.type))
    count = text.get("n_tokens", "")
    is_kind = text.get("kind") in ("sequence", "context")
    if not (count.isdecimal() and len(count) < 20 and is_kind):
        what = "n_tokens" if is_kind else "kind"
        raise StateDamaged(
            f"the state's header has no valid {what}: {text.get(what)!r}",
            what=what,
            value=text.get(what),
        )
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


def type_name(kind: int) -> str:
    """Return the name of a ``ggml_type``."""
    return {int(t): t.name.lower() for t in GgmlType}.get(kind, f"type {kind}")
