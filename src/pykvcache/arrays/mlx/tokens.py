"""Token ids: as a list, and as a growing buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays._checks import as_ints
from pykvcache.arrays.mlx.rows import row_counts
from pykvcache.arrays.mlx.token_pair import grow, grown_capacity
from pykvcache.errors import CacheValueError

__all__ = ["TokenBuffer", "Tokens", "token_list"]

#: Token ids from a caller.
Tokens: TypeAlias = Sequence[int] | NDArray[Any]

_INT32 = np.iinfo(np.int32)


class TokenBuffer:
    """A growing row of int32 token ids, with a capacity in multiples of 256.

    Modelled on mlx-lm's ``TokenBuffer``; appending costs O(1) copies on average.

    Parameters
    ----------
    tokens : sequence of int, optional
        The first tokens.
    """

    def __init__(self, tokens: Tokens = ()) -> None:
        self._buffer = np.empty(0, np.int32)
        self._size = 0
        self.update(tokens)

    def __len__(self) -> int:
        return self._size

    def update(self, tokens: Tokens) -> NDArray[np.int32]:
        """Append `tokens`; return a read-only view of all tokens.

        Raises
        ------
        CacheDTypeError
            `tokens` are not integers.
        CacheValueError
            `tokens` is not one-dimensional, or an id does not fit int32.
        """
        new = row_counts("tokens", tokens, signed=True)
        if new.size and (new.min() < _INT32.min or new.max() > _INT32.max):
            found, message = (int(new.min()), int(new.max())), "a token id does not fit int32"
            raise CacheValueError(message, "tokens", found, (_INT32.min, _INT32.max))
        end = self._size + new.size
        if end > self._buffer.size:
            capacity = grown_capacity(self._buffer.size, end)
            self._buffer = grow(self._buffer, 0, self._size, capacity, axis=0)
        self._buffer[self._size : end] = new
        self._size = end
        return self.tokens

    def __copy__(self) -> TokenBuffer:
        # A shallow copy would share the buffer but not its length.
        return type(self)(self.tokens)

    @property
    def tokens(self) -> NDArray[np.int32]:
        """All tokens as a read-only view."""
        view = self._buffer[: self._size]
        view.flags.writeable = False
        return view

    @property
    def state(self) -> NDArray[np.int32]:
        """All tokens as a view (mlx-lm includes spare room)."""
        return self.tokens


def token_list(tokens: Tokens) -> list[int]:
    """Return token ids as a new list; raise `CacheDTypeError` unless all are integers."""
    if type(tokens) is list and {int}.issuperset(map(type, tokens)):
        return tokens.copy()
    found: list[int] = as_ints("tokens", tokens).tolist()
    return found
