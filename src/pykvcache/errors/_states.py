"""What can be wrong with a state at rest."""

from __future__ import annotations

from pykvcache.errors._base import DetailedError
from pykvcache.errors._shown import shown

__all__ = [
    "PartialStateError",
    "StateDamaged",
    "StateError",
    "StateFileError",
    "StateFileNotFound",
    "StateFormatError",
    "StateLayoutMismatch",
    "StateModelMismatch",
    "StateTrailingBytes",
    "StateTruncated",
    "StateVersionError",
]


#: Names of files with more characters are shortened; of the system's no path has more.
_LONGEST = 4096


class StateError(DetailedError, ValueError):
    """A saved state, or arrays that become one, cannot be used; the destination is as it was.

    Attributes
    ----------
    what : str or None
        What of it is wrong, where it is one thing: ``"bytes"``, ``"version"``, a setting, a tensor.
    value, limit : object
        What the state has of that, and what it may have, or what this context has; ``None`` where
        there is no such number or word.
    """


class StateTruncated(StateError):
    """A state ends before it is complete."""


class StateTrailingBytes(StateError):
    """A state is followed by bytes that do not belong to it."""


class StateDamaged(StateError):
    """A checksum does not match, or the bytes are such as no memory writes."""


class StateFormatError(StateError):
    """A file is not a state of this package, or is empty."""


class StateVersionError(StateError):
    """A state was written by a version of the format that cannot be read here."""


class StateModelMismatch(StateError):
    """A state belongs to another model, or to the same one stored otherwise."""


class StateLayoutMismatch(StateError):
    """A state does not fit the memory of this context: other layers, types or streams."""


class PartialStateError(StateError):
    """A partial state is of another context, or its sequence has changed since it was taken.

    Attributes
    ----------
    seq_id, pos : int or None
        The sequence that it was to go into, and the last position that it was taken at.
    """

    def __init__(self, message: str, seq_id: int | None = None, pos: int | None = None) -> None:
        super().__init__(message)
        self.seq_id = seq_id
        self.pos = pos


class StateFileError(StateError, OSError):
    """The system refused to read or write a state's file; ``errno`` and ``filename`` say why."""

    # Those of ValueError come first otherwise, and leave errno and filename empty.
    __new__ = OSError.__new__  # type: ignore[assignment]
    __init__ = OSError.__init__

    def __str__(self) -> str:
        name = self.filename
        if isinstance(name, str) and len(name) > _LONGEST:
            return f"[Errno {self.errno}] {self.strerror}: {shown(name)}"
        return OSError.__str__(self)


class StateFileNotFound(StateFileError, FileNotFoundError):
    """There is no file of this name."""
