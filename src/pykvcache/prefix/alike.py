"""A dictionary by tokens that finds the keys which begin most like others, without asking all."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import TypeVar

import numpy as np

__all__ = ["TokenKeys", "common_tokens"]

V = TypeVar("V")


class TokenKeys(dict[bytes, V]):
    """A dictionary whose keys are tokens as `token_bytes` gives them; changed by item only.

    In the order of their bytes, the keys that share most with a text are its neighbours. They are
    sorted when somebody first asks, and kept in order from then on.
    """

    __slots__ = ("_sorted",)

    def __init__(self) -> None:
        super().__init__()
        self._sorted: list[bytes] | None = None

    def __setitem__(self, key: bytes, value: V) -> None:
        # Nothing is in order meanwhile: an interrupt leaves what is sorted again.
        order, self._sorted = self._sorted, None
        if order is not None and key not in self:
            insort(order, key)
        super().__setitem__(key, value)
        self._sorted = order

    def __delitem__(self, key: bytes) -> None:
        order, self._sorted = self._sorted, None
        super().__delitem__(key)
        if order is not None:
            del order[bisect_left(order, key)]
        self._sorted = order

    def _order(self) -> list[bytes]:
        if self._sorted is None:
            self._sorted = sorted(self)
        return self._sorted

    def nearest(self, tokens: bytes) -> tuple[bytes, int]:
        """Return a key that shares most leading tokens with others, and how many; b"" of none.

        Rather one that goes on with others than one that ends there.
        """
        order = self._order()
        at = bisect_left(order, tokens)
        best, most = b"", -1
        for key in order[max(0, at - 1) : at + 1]:
            same = common_tokens(key, tokens)
            if same > most or (same == most and len(best) == 4 * same):
                best, most = key, same
        return best, max(most, 0)

    def alike(self, tokens: bytes, least: int) -> tuple[bytes, int]:
        """Return the key that shares most leading tokens with others, and how many; not the same.

        b"" and 0 where no key shares ``least`` of them.
        """
        order = self._order()
        at = bisect_left(order, tokens)
        best, most = b"", 0
        for key in order[max(0, at - 1) : at + 2]:  # before them, the same, or after them
            if key != tokens and key.startswith(tokens[: 4 * least]) and len(key) >= 4 * least:
                same = common_tokens(key, tokens)
                if same > most:
                    best, most = key, same
        return best, most

    def beginnings(self, tokens: bytes) -> list[bytes]:
        """Return the keys that the tokens begin with, the longest first."""
        order, found = self._order(), list[bytes]()
        at = bisect_right(order, tokens)
        while at:
            key = order[at - 1]
            if tokens.startswith(key):
                found.append(key)
                at -= 1
            else:
                # Whatever both begin with is in order before what they share.
                tokens = key[: 4 * common_tokens(key, tokens)]
                at = bisect_right(order, tokens, 0, at - 1)
        return found

    def continuation(self, tokens: bytes) -> bytes | None:
        """Return a longer key that begins with the tokens, None where there is none."""
        order = self._order()
        at = bisect_right(order, tokens)
        return order[at] if at < len(order) and order[at].startswith(tokens) else None


def common_tokens(a: bytes, b: bytes) -> int:
    """Return how many leading tokens are equal."""
    n = min(len(a), len(b)) // 4
    if a[:4] != b[:4]:
        return 0  # most often; NumPy's calls take longer
    if a[: 4 * n] == b[: 4 * n]:
        return n
    one, other = (np.frombuffer(x[: 4 * n], np.uint32) for x in (a, b))
    return int((one == other).argmin())
