"""Every exception that pykvcache raises on purpose.

Each class is also the builtin that a reader would expect (``ValueError``,
``IndexError``, ...) and carries what it is about as attributes, so that a
program never has to read a message.
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
    """Base class of every error of this package."""


class CacheFullError(KvCacheError, RuntimeError):
    """There is no room: a `NoKvCacheSlot` (context), `KvCacheFull` or `NoSlot` (array caches)."""


class UnsupportedError(KvCacheError, RuntimeError):
    """Not possible here: an `UnsupportedOperation` (context) or `NotSupported` (array caches)."""


class DetailedError(KvCacheError):
    """What errors about one thing carry: which thing, what it is, and what it may be.

    Attributes
    ----------
    what : str or None
        The argument or the part that is wrong, where it has a name.
    value : object
        What it is: a number, a shape, a dtype or class by name; several in a tuple or dict.
    limit : object
        What it may be, or what is there: the most, the least, the one value, or all of them.
    """

    # Of subclasses, too, whose facts are those of OSError.
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
    """An argument has a value that can never be meant; nothing was changed."""


class OutOfRangeError(DetailedError, IndexError):
    """A token, an output or an element with this index does not exist."""


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80

_MAX_BITS = 256  # of an integer that is written; Python refuses to write those of 4300 digits


def shown(value: object) -> str:
    """Return a value's text, of a long one the beginning and the end."""
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return f"<int of {value.bit_length()} bits>"
    try:
        return _SHORT.repr(value)
    except Exception:  # what it holds cannot be written
        return f"<{type(value).__name__}>"


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


class ModelLoadError(KvCacheError, OSError):
    """A file is not a model that llama.cpp can load.

    Attributes
    ----------
    path : str or None
        The file, as it was given.
    reason : str or None
        What is wrong with it; of what the system refused, ``errno`` and ``strerror`` tell.
    """

    def __init__(self, *facts: object, path: str | None = None, reason: str | None = None) -> None:
        super().__init__(*facts)
        self.path = self.filename if path is None else path
        self.reason = reason if reason is not None else self.strerror

    @classmethod
    def of(cls, path: str, reason: str) -> ModelLoadError:
        """Return the error that names a file and what is wrong with it."""
        return cls(f"cannot load {path!r}: {reason}", path=path, reason=reason)


class ContextCreateError(DetailedError, RuntimeError):
    """A context cannot have these parameters, or not with this model.

    `what` is the parameter that stands in the way, where it is one; `value` what it is, and
    `limit` what it may be: the most, the least, or the one word.
    """

    @property
    def parameter(self) -> str | None:
        """The parameter that stands in the way: `what`."""
        return self.what


class DeviceLost(KvCacheError, ConnectionError):
    """A server of a model failed, froze, answered what cannot be true, or cannot be reached.

    It stays lost: every later call of the contexts that lie on it raises this, but ``close()``.
    Load the model again to go on; what was saved before can be put back.

    Attributes
    ----------
    endpoint : str
        The server, ``"host:port"``.
    operation : str
        What was asked for: ``"connect"``, ``"load"``, ``"create"``, ``"decode"``, ...
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
        What llama.cpp returned; ``None`` when the call was not made.
    n_decoded : int
        Tokens of this call, from the first on, that were decoded before and stay in the memory.
        To go on, decode those after them.
    needs_removal : tuple of int
        Sequences that cannot go on: remove all of each.
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
    """What a decode computed is NaN or infinite: there is nothing true to hand out.

    The weights, a state or keys and values that were written overflow in the model's arithmetic.
    The tokens stay in the memory, and other sequences are unharmed.

    Attributes
    ----------
    what : str
        ``"logits"`` or ``"embeddings"``.
    index : int or None
        The token of the last decode, or the sequence of pooled embeddings; ``None`` where one
        step chose for many requests, and the request tells.
    place, value : int, float
        The first place of the row (a token of the vocabulary) that is not finite, and what it
        holds.
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

    def __reduce__(self) -> tuple[type, tuple[object, ...], dict[str, object]]:
        return type(self), (str(self), self.what, self.index, self.place, self.value), vars(self)


class NoKvCacheSlot(DecodeError, CacheFullError):
    """The cache has no free cells for the tokens, or for the cells of a state (code 1).

    Where the free cells tell, nothing was decoded. A sliding window's cache that is smaller than
    the context may find itself full in the middle of a long call: see ``n_decoded``.

    Attributes
    ----------
    n_tokens : int or None
        Tokens (of a state: cells) that were to be placed.
    n_free, n_cells : int or None
        Cells that are free, and that there are for this sequence; ``None`` where not known.
    n_seq_max : int or None
        Sequence ids that there are, where an id is what is not free.
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
    """``abort()`` stopped the decode (code 2); ``n_decoded`` tokens were decoded before."""


class InvalidBatch(DecodeError, ValueError):
    """The batch is not one that can be decoded; raised before the call.

    Attributes
    ----------
    index : int or None
        Which token of the batch is the reason.
    value, limit : int or None
        What it has that cannot be (a token id, a position, a number of sequences or tokens), and
        the limit, or the one value that could be.
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


class KvCacheFull(CacheFullError):
    """An array cache has no room for the batch; nothing was changed.

    Attributes
    ----------
    capacity : int or None
        Number of cells of the cache.
    batch : int or None
        Number of tokens that were to be stored.
    """

    def __init__(
        self, message: str, *, capacity: int | None = None, batch: int | None = None
    ) -> None:
        super().__init__(message)
        self.capacity = capacity
        self.batch = batch


class NotSupported(DetailedError, UnsupportedError):
    """An array cache of this kind cannot do what was asked; nothing was changed."""


class NoSlot(DetailedError, CacheFullError):
    """Every slot of an ``InputCache`` is in use; nothing was changed."""


class ReprocessInputs(KvCacheError, RuntimeError):
    """A slot could not be shifted and was emptied.

    Attributes
    ----------
    inputs : list
        What the slot would have held after the shift; evaluate it again from position 0.
    """

    def __init__(self, inputs: list[Any]) -> None:
        super().__init__(f"the cache cannot shift; {len(inputs)} inputs need reprocessing")
        self.inputs = inputs

    def __reduce__(self) -> tuple[type, tuple[list[Any]]]:
        return type(self), (self.inputs,)


class CacheValueError(DetailedError, ValueError):
    """A number, a shape or a saved state does not fit an array cache; nothing was changed."""


class CacheDTypeError(DetailedError, TypeError):
    """An array has a dtype that an array cache cannot store; nothing was changed."""


class CacheKeyError(DetailedError, KeyError):
    """Nothing is stored under this key."""

    # KeyError shows the repr of its argument, which suits keys and not sentences.
    __str__ = Exception.__str__


class CacheLayerError(DetailedError, IndexError):
    """A layer is not one of an array cache's; nothing was changed."""


class CacheOrderError(DetailedError, RuntimeError):
    """A method of an array cache was called before or after its turn; nothing was changed."""
