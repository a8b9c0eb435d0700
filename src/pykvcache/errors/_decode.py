"""What can go wrong in a decode and its outputs; users import it from `pykvcache.errors`."""

from __future__ import annotations

from typing import Any

from pykvcache.errors._base import CacheFullError, KvCacheError

__all__ = ["DecodeAborted", "DecodeError", "InvalidBatch", "NoKvCacheSlot", "OutputNotFinite"]


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
