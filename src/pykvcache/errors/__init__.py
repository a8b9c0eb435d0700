"""Every exception that pykvcache raises on purpose.

Each class is also the builtin that a reader would expect (``ValueError``,
``IndexError``, ...) and carries what it is about as attributes, so that a
program never has to read a message.
"""

from __future__ import annotations

from pykvcache.errors._arrays import (
    CacheDTypeError,
    CacheKeyError,
    CacheLayerError,
    CacheOrderError,
    CacheValueError,
    KvCacheFull,
    NoSlot,
    NotSupported,
    ReprocessInputs,
)
from pykvcache.errors._base import (
    ArgumentError,
    CacheFullError,
    DetailedError,
    KvCacheError,
    OutOfRangeError,
    UnsupportedError,
)
from pykvcache.errors._decode import (
    DecodeAborted,
    DecodeError,
    InvalidBatch,
    NoKvCacheSlot,
    OutputNotFinite,
)
from pykvcache.errors._making import ContextCreateError, DeviceLost, ModelLoadError
from pykvcache.errors._shown import shown
from pykvcache.errors._states import (
    PartialStateError,
    StateDamaged,
    StateError,
    StateFileError,
    StateFileNotFound,
    StateFormatError,
    StateLayoutMismatch,
    StateModelMismatch,
    StateTrailingBytes,
    StateTruncated,
    StateVersionError,
)

__all__ = [
    "ArgumentError",
    "CacheDTypeError",
    "CacheFullError",
    "CacheKeyError",
    "CacheLayerError",
    "CacheOrderError",
    "CacheValueError",
    "ChatParseError",
    "ChatTemplateError",
    "ClosedError",
    "ContextCreateError",
    "DecodeAborted",
    "DecodeError",
    "DetailedError",
    "DeviceLost",
    "GrammarError",
    "InternalError",
    "InvalidBatch",
    "KvCacheConversionError",
    "KvCacheError",
    "KvCacheFull",
    "ModelLoadError",
    "NoKvCacheSlot",
    "NoSlot",
    "NotSupported",
    "OutOfRangeError",
    "OutputNotFinite",
    "OvertakenError",
    "P0TooLarge",
    "P1TooLarge",
    "PartialStateError",
    "PositionError",
    "ReentryError",
    "ReprocessInputs",
    "SeqIdTooLarge",
    "SequenceIdError",
    "SharedCellsError",
    "StaleViewError",
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
    "StoreError",
    "UnsupportedError",
    "UnsupportedOperation",
]


# Users meet all of them in this module.
for _error in (
    KvCacheError,
    ArgumentError,
    CacheFullError,
    DetailedError,
    OutOfRangeError,
    UnsupportedError,
    CacheDTypeError,
    CacheKeyError,
    CacheLayerError,
    CacheOrderError,
    CacheValueError,
    KvCacheFull,
    NoSlot,
    NotSupported,
    ReprocessInputs,
    DecodeError,
    OutputNotFinite,
    NoKvCacheSlot,
    DecodeAborted,
    InvalidBatch,
    DeviceLost,
):
    _error.__module__ = __name__


# Conversion of Python integers to C, and what a memory cannot do -------------------


class KvCacheConversionError(KvCacheError, ValueError):
    """A value cannot be handed to the memory API."""


class _TooLarge(KvCacheConversionError, OverflowError):
    _what = "value"

    def __init__(self, value: int) -> None:
        super().__init__(f"Provided {self._what} is too large for a i32")
        #: The value that was given.
        self.value = value


class SeqIdTooLarge(_TooLarge):
    """A sequence id does not fit a C ``int32_t``."""

    _what = "sequence id"


class P0TooLarge(_TooLarge):
    """The start of a range does not fit a C ``int32_t``."""

    _what = "start position"


class P1TooLarge(_TooLarge):
    """The end of a range does not fit a C ``int32_t``."""

    _what = "end position"


class UnsupportedOperation(KvCacheConversionError, UnsupportedError):
    """What was asked cannot be done by this model, or as things are.

    Attributes
    ----------
    operation : str
        Name of the method that was called.
    reason : str
        Why it cannot be done, and what to do instead where there is something.
    subject : str
        What stands in the way: ``"model"``; ``"memory"``, its kind; ``"context"``, how it was
        created; ``"sequence"``, what it holds now; ``"state"``; ``"build"``.
    """

    def __init__(self, operation: str, reason: str, subject: str = "model") -> None:
        super().__init__(f"operation not supported by this {subject}: {operation}: {reason}")
        self.operation = operation
        self.reason = reason
        self.subject = subject

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.operation, self.reason, self.subject)


# Wrong arguments --------------------------------------------------------------------


class SequenceIdError(KvCacheError, IndexError):
    """A sequence id is outside ``[0, n_seq_max)``, or a saved context holds nothing of it."""

    def __init__(self, seq_id: int, n_seq_max: int, message: str | None = None) -> None:
        super().__init__(
            message
            or f"sequence id {shown(seq_id)} is outside [0, {n_seq_max}): n_seq_max is {n_seq_max}"
        )
        self.seq_id = seq_id
        self.n_seq_max = n_seq_max

    def __reduce__(self) -> tuple[type, tuple[int, int, str]]:
        return type(self), (self.seq_id, self.n_seq_max, str(self))


class PositionError(DetailedError, ValueError):
    """A position, or a range of positions, cannot be meant.

    Attributes
    ----------
    p0, p1 : int or None
        The range that was given; ``None`` for an open end.
    value : int or None
        The position that cannot be, where one position is the reason.
    limit : int or None
        The highest position that can be, where it is too high (`LlamaContext.max_position`); 0
        where it is negative.
    """

    value: int | None
    limit: int | None

    def __init__(
        self,
        message: str,
        p0: int | None = None,
        p1: int | None = None,
        *,
        what: str | None = None,
        value: int | None = None,
        limit: int | None = None,
    ) -> None:
        super().__init__(message, what, value, limit)
        self.p0 = p0
        self.p1 = p1


class SharedCellsError(DetailedError, RuntimeError):
    """Cells that another sequence shares would be moved with this one."""


class GrammarError(DetailedError, ValueError):
    """A grammar cannot be parsed or used.

    Attributes
    ----------
    line, column : int or None
        Where in the text, counted from 1; ``None`` where it is not one place.
    """

    def __init__(
        self,
        message: str,
        line: int | None = None,
        column: int | None = None,
        *,
        what: str | None = None,
        value: object = None,
        limit: object = None,
    ) -> None:
        super().__init__(message, what=what, value=value, limit=limit)
        self.line = line
        self.column = column


# Life cycle --------------------------------------------------------------------------


class ClosedError(DetailedError, ValueError):
    """The object was closed, or belongs to the process before a fork."""


class StaleViewError(KvCacheError, ReferenceError):
    """A view of a live cache was read after a call that may have changed the cells."""


class OvertakenError(KvCacheError, RuntimeError):
    """Another generation has gone on with the sequence of this one, which ends here."""


class ReentryError(KvCacheError, RuntimeError):
    """A context, a sequence or a generator was called from within one of their own calls.

    By a callback, a signal handler, a finalizer or a policy: nothing was changed. Note what is to
    be done, and do it once the call has returned.
    """


class InternalError(KvCacheError, RuntimeError):
    """llama.cpp hit an assertion or an exception that no check foresaw.

    The process lives on; the context refuses further work until it is cleared.
    """


class ChatTemplateError(KvCacheError, ValueError):
    """A chat template refused the messages, or failed.

    Attributes
    ----------
    reason : str
        ``"refused"`` where the template called ``raise_exception``: the message has its words.
        ``"error"`` for everything else that goes wrong in a template.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.reason, str(self))


class ChatParseError(KvCacheError, ValueError):
    """A text is no message of the model's format, or calls a tool with wrong arguments.

    Attributes
    ----------
    text : str
        The text, without what ends it.
    tool : str or None
        The tool whose arguments are wrong.
    """

    def __init__(self, message: str, text: str, tool: str | None = None) -> None:
        super().__init__(message)
        self.text = text
        self.tool = tool

    def __reduce__(self) -> tuple[type, tuple[str, str, str | None]]:
        return type(self), (str(self), self.text, self.tool)


# Stores of blocks ---------------------------------------------------------------------


class StoreError(DetailedError, ValueError):
    """A store of blocks cannot be made or asked so. What disks and servers do never raises."""
