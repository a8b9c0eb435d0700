"""All exceptions that pykvcache raises on purpose.

Each class is also a subclass of the matching builtin (``ValueError``, ``IndexError``, ...)
and has its details as attributes, so that programs need not parse messages.
"""

from __future__ import annotations

import reprlib
from typing import Any

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


class KvCacheError(Exception):
    """Base class of all errors of this package."""

    def __reduce__(self) -> Any:
        if isinstance(self, OSError):
            return super().__reduce__()
        return _remade, (type(self), self.args), vars(self)


def _remade(kind: type[KvCacheError], args: tuple[object, ...]) -> KvCacheError:
    """Return an unpickled error; `__init__`, whose parameters differ by class, is not called."""
    return kind.__new__(kind, *args)


class CacheFullError(KvCacheError, RuntimeError):
    """No room: a `NoKvCacheSlot` (context), `KvCacheFull` or `NoSlot` (array caches)."""


class UnsupportedError(KvCacheError, RuntimeError):
    """Not supported: an `UnsupportedOperation` (context) or `NotSupported` (array caches)."""


class DetailedError(KvCacheError):
    """Base class of errors about one value, which they describe in attributes.

    Attributes
    ----------
    what : str or None
        Name of the invalid argument or part, if it has one.
    value : object
        The invalid value; a dtype or class by its name; a tuple or dict if there are several.
    limit : object
        The allowed maximum, minimum, value or values.
    """

    # Class defaults, for subclasses that use OSError's __init__ and do not set them.
    what: str | None = None
    value: object = None
    limit: object = None

    def __init__(
        self,
        message: str,
        what: str | None = None,
        value: object = None,
        limit: object = None,
    ) -> None:
        super().__init__(message)
        self.what = what
        self.value = value
        self.limit = limit


class ArgumentError(DetailedError, ValueError):
    """An argument has an invalid value; nothing was changed."""


class OutOfRangeError(DetailedError, IndexError):
    """A token, an output or an element with this index does not exist."""


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80

_MAX_BITS = 256  # larger integers are not printed; Python refuses 4300 digits


def shown(value: object) -> str:
    """Return a value's repr, shortened in the middle."""
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return f"<int of {value.bit_length()} bits>"
    try:
        return _SHORT.repr(value)
    except Exception:  # its repr fails
        return f"<{type(value).__name__}>"


def how_to_install(extra: str) -> str:
    """Return how to install an extra. PyPI has no release, so the command is for a clone."""
    return f"install the extra {extra} (in a clone: pip install '.[{extra}]')"


# Conversion of Python integers to C, and unsupported operations --------------------


class KvCacheConversionError(KvCacheError, ValueError):
    """An integer does not fit a C ``int32_t``, or an operation is not supported."""


class _TooLarge(KvCacheConversionError, OverflowError):
    _what = "value"

    def __init__(self, value: int) -> None:
        # Fixed by tests/seed, "a i32" included.
        super().__init__(f"Provided {self._what} is too large for a i32")
        #: The given value, and the largest one that fits.
        self.value, self.limit = value, 2**31 - 1


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
    """The operation is not supported by this model, memory, context, sequence, state or build.

    Attributes
    ----------
    operation : str
        Name of the called method.
    reason : str
        Why it is not supported, and an alternative if there is one.
    subject : str
        The cause: ``"model"``; ``"memory"`` (its kind); ``"context"`` (its parameters);
        ``"sequence"`` (its present contents); ``"state"``; ``"build"``.
    """

    def __init__(self, operation: str, reason: str, subject: str = "model") -> None:
        super().__init__(f"operation not supported by this {subject}: {operation}: {reason}")
        self.operation = operation
        self.reason = reason
        self.subject = subject


# Wrong arguments --------------------------------------------------------------------


class SequenceIdError(DetailedError, IndexError):
    """A sequence id is outside ``[0, n_seq_max)``, or not in a saved context."""

    def __init__(self, seq_id: int, n_seq_max: int, message: str | None = None) -> None:
        super().__init__(
            message
            or f"sequence id {shown(seq_id)} is outside [0, {n_seq_max}): n_seq_max is {n_seq_max}",
            "seq_id",
            seq_id,
            n_seq_max,
        )
        self.seq_id = seq_id
        self.n_seq_max = n_seq_max


class PositionError(DetailedError, ValueError):
    """A position or a range of positions is invalid.

    Attributes
    ----------
    p0, p1 : int or None
        The given range; ``None`` for an open end.
    value : int or None
        The invalid position, if it is a single one.
    limit : int or None
        The maximum if the position is too high (`LlamaContext.max_position`); 0 if it is negative.
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
    """The operation would also move cells of another sequence."""


class GrammarError(DetailedError, ValueError):
    """A grammar cannot be parsed or used.

    Attributes
    ----------
    line, column : int or None
        Place in the text, counted from 1; ``None`` if the error has no single place.
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


# Lifetime ----------------------------------------------------------------------------


class ClosedError(DetailedError, ValueError):
    """The object was closed, or was inherited from the parent process through ``os.fork()``."""


class StaleViewError(KvCacheError, ReferenceError):
    """A view of a live cache was read after a call that may have changed its cells."""


class OvertakenError(KvCacheError, RuntimeError):
    """A newer generation has continued the same sequence, so this one ends."""


class ReentryError(KvCacheError, RuntimeError):
    """A context, sequence or generator was called from within one of its own calls.

    The caller was a callback, a signal handler, a finalizer or a policy. Nothing was changed. Make
    the call after the outer one has returned.
    """


class InternalError(KvCacheError, RuntimeError):
    """llama.cpp hit an assertion or an exception that no check foresaw.

    The process continues; the context refuses further work until it is cleared.
    """


class ChatTemplateError(KvCacheError, ValueError):
    """A chat template refused the messages, or failed.

    Attributes
    ----------
    reason : str
        ``"refused"`` if the template called ``raise_exception``, whose text is in the message;
        ``"error"`` for any other failure of a template.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ChatParseError(KvCacheError, ValueError):
    """A text is not a message in the model's format, or calls a tool with invalid arguments.

    Attributes
    ----------
    text : str
        The text, without its end-of-generation token.
    tool : str or None
        The tool with invalid arguments.
    """

    def __init__(self, message: str, text: str, tool: str | None = None) -> None:
        super().__init__(message)
        self.text = text
        self.tool = tool


# Stores of blocks ---------------------------------------------------------------------


class StoreError(DetailedError, ValueError):
    """A store got an invalid argument, or cannot be opened (wrong password, missing bucket).

    Later failures of disks and servers raise nothing: they are misses.
    """


class ModelLoadError(KvCacheError, OSError):
    """A file is not a model that llama.cpp can load.

    Attributes
    ----------
    path : str or None
        The given path.
    reason : str or None
        What is wrong with it; for operating-system errors, see ``errno`` and ``strerror``.
    """

    def __init__(self, *facts: object, path: str | None = None, reason: str | None = None) -> None:
        super().__init__(*facts)
        self.path = self.filename if path is None else path
        self.reason = reason if reason is not None else self.strerror

    @classmethod
    def of(cls, path: str, reason: str) -> ModelLoadError:
        """Return the error for a file and a reason."""
        return cls(f"cannot load {path!r}: {reason}", path=path, reason=reason)


class ContextCreateError(DetailedError, RuntimeError):
    """A context cannot be created with these parameters, or cannot be created for this model.

    `what` is the invalid parameter, if it is a single one; `value` its value, and `limit` its
    maximum, minimum or only allowed value.
    """

    @property
    def parameter(self) -> str | None:
        """The invalid parameter: `what`."""
        return self.what


class DeviceLost(KvCacheError, ConnectionError):
    """An RPC server failed, timed out, sent an invalid reply or is unreachable.

    The server stays lost: every later call on its contexts but ``close()`` raises this. To
    continue, load the model again and restore saved states.

    Attributes
    ----------
    endpoint : str
        The server, ``"host:port"``.
    operation : str
        The operation: ``"connect"``, ``"load"``, ``"create"``, ``"decode"``, ...
    reason : str
        What happened, and during which message.
    """

    def __init__(self, endpoint: str, operation: str, reason: str) -> None:
        super().__init__(f"{operation}: the RPC server {endpoint} is lost: {reason}")
        self.endpoint = endpoint
        self.operation = operation
        self.reason = reason

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.endpoint, self.operation, self.reason)


class DecodeError(KvCacheError, RuntimeError):
    """``llama_decode`` or ``llama_encode`` failed.

    Attributes
    ----------
    code : int or None
        llama.cpp's return value; ``None`` if it was not called.
    n_decoded : int
        The first `n_decoded` tokens of this call were decoded and stay in the memory. To continue,
        decode the rest. After `DecodeAborted` more tokens may stay: continue after the last
        position of each sequence.
    needs_removal : tuple of int
        Sequences that must be removed completely before further use.
    """

    def __init__(
        self,
        message: str,
        code: int | None = None,
        *,
        n_decoded: int = 0,
        needs_removal: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message)
        self.code = code
        self.n_decoded = n_decoded
        self.needs_removal = needs_removal


class OutputNotFinite(DecodeError, ArithmeticError):
    """A decode computed NaN or infinity, so its outputs are invalid.

    Weights, a state, or written keys and values overflowed in the model's arithmetic. The tokens
    stay in the memory, and other sequences are not affected.

    Attributes
    ----------
    what : str
        ``"logits"`` or ``"embeddings"``.
    index : int or None
        Index of the token in the last decode, or id of the sequence for pooled embeddings;
        ``None`` in a generator's step, where the failed request identifies the row.
    place, value : int, float
        The first non-finite element of the row (for logits, a token of the vocabulary), and its
        value.
    """

    def __init__(
        self,
        message: str,
        what: str,
        index: int | None,
        place: int,
        value: float,
        *,
        n_decoded: int = 0,
    ) -> None:
        super().__init__(message, n_decoded=n_decoded)
        self.what = what
        self.index = index
        self.place = place
        self.value = value


class NoKvCacheSlot(DecodeError, CacheFullError):
    """The cache has too few free cells for tokens or a state (code 1).

    Nothing was decoded, with one exception: a sliding window's cache that is smaller than the
    context may become full in the middle of a long call, see ``n_decoded``.

    Attributes
    ----------
    n_tokens : int or None
        Number of tokens, or cells of a state, to be stored.
    n_free, n_cells : int or None
        Free cells, and all cells for this sequence; ``None`` if unknown.
    n_seq_max : int or None
        Number of sequence ids, if no id is free.
    """

    def __init__(
        self,
        message: str,
        code: int | None = None,
        *,
        n_tokens: int | None = None,
        n_free: int | None = None,
        n_cells: int | None = None,
        n_seq_max: int | None = None,
        **facts: Any,
    ) -> None:
        super().__init__(message, code, **facts)
        self.n_tokens = n_tokens
        self.n_free = n_free
        self.n_cells = n_cells
        self.n_seq_max = n_seq_max


class DecodeAborted(DecodeError):
    """``abort()`` stopped the decode (code 2); at least its first ``n_decoded`` tokens stay."""


class InvalidBatch(DecodeError, ValueError):
    """The batch cannot be decoded; raised before llama.cpp is called.

    Attributes
    ----------
    index : int or None
        The invalid token's index in the batch.
    value, limit : int or None
        The invalid value (a token id, a position, a number of sequences or tokens), and its limit
        or only valid value.
    """

    def __init__(
        self,
        message: str,
        code: int | None = None,
        *,
        index: int | None = None,
        value: int | None = None,
        limit: int | None = None,
        **facts: Any,
    ) -> None:
        super().__init__(message, code, **facts)
        self.index = index
        self.value = value
        self.limit = limit


#: Longer file names are shortened in messages; the system allows no longer paths.
_LONGEST = 4096


class StateError(DetailedError, ValueError):
    """A saved state, or arrays for one, cannot be used; the destination is unchanged.

    Attributes
    ----------
    what : str or None
        The invalid part, if it is a single one: ``"bytes"``, ``"version"``, a setting, a tensor.
    value, limit : object
        The state's value, and the allowed one or this context's; ``None`` if not applicable.
    """


class StateTruncated(StateError):
    """A state ends before it is complete."""


class StateTrailingBytes(StateError):
    """A state is followed by bytes that do not belong to it."""


class StateDamaged(StateError):
    """A checksum does not match, or the bytes are not a valid state."""


class StateFormatError(StateError):
    """A file is not a state of this package, or is empty."""


class StateVersionError(StateError):
    """A state has a format version that is not supported."""


class StateModelMismatch(StateError):
    """A state belongs to another model, or to another quantisation of the same one."""


class StateLayoutMismatch(StateError):
    """A state does not fit the memory of this context: other layers, types or streams."""


class PartialStateError(StateError):
    """A partial state belongs to another context, or its sequence has changed since.

    Attributes
    ----------
    seq_id, pos : int or None
        The target sequence, and the last position of the state.
    """

    def __init__(self, message: str, seq_id: int | None = None, pos: int | None = None) -> None:
        super().__init__(message)
        self.seq_id = seq_id
        self.pos = pos


class StateFileError(StateError, OSError):
    """The system failed to read or write a state's file; see ``errno`` and ``filename``."""

    # Otherwise DetailedError's and ValueError's come first, and leave errno and filename empty.
    __new__ = OSError.__new__  # type: ignore[assignment]
    __init__ = OSError.__init__

    def __str__(self) -> str:
        name = self.filename
        if isinstance(name, str) and len(name) > _LONGEST:
            return f"[Errno {self.errno}] {self.strerror}: {shown(name)}"
        return OSError.__str__(self)


class StateFileNotFound(StateFileError, FileNotFoundError):
    """A state's file does not exist."""


class KvCacheFull(CacheFullError):
    """An array cache has no room for the batch; nothing was changed.

    Attributes
    ----------
    capacity : int or None
        Capacity in cells.
    batch : int or None
        Number of tokens to store.
    """

    def __init__(
        self, message: str, *, capacity: int | None = None, batch: int | None = None
    ) -> None:
        super().__init__(message)
        self.capacity = capacity
        self.batch = batch


class NotSupported(DetailedError, UnsupportedError):
    """An array cache does not support the operation; nothing was changed."""


class NoSlot(DetailedError, CacheFullError):
    """Every slot of an ``InputCache`` is in use; nothing was changed."""


class ReprocessInputs(KvCacheError, RuntimeError):
    """A slot could not be shifted and was emptied.

    Attributes
    ----------
    inputs : list
        The slot's inputs after the shift; evaluate them again from position 0.
    """

    def __init__(self, inputs: list[Any]) -> None:
        super().__init__(f"the cache cannot shift; {len(inputs)} inputs need reprocessing")
        self.inputs = inputs


class CacheValueError(DetailedError, ValueError):
    """A number, a shape or a saved state does not fit an array cache; nothing was changed."""


class CacheDTypeError(DetailedError, TypeError):
    """An array has a dtype that an array cache cannot store; nothing was changed."""


class CacheKeyError(DetailedError, KeyError):
    """Nothing is stored under this key."""

    # KeyError shows its argument's repr, which does not suit sentences.
    __str__ = Exception.__str__


class CacheLayerError(DetailedError, IndexError):
    """An array cache has no such layer; nothing was changed."""


class CacheOrderError(DetailedError, RuntimeError):
    """Methods of an array cache were called out of order; nothing was changed."""
