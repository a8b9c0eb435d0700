"""Log-probabilities of chosen tokens and of the likeliest ones, by id and as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from pykvcache.model import LlamaModel

__all__ = ["TokenLogprob", "likeliest", "named"]


@dataclass(frozen=True)
class TokenLogprob:
    """A token, its text, and the logarithm of the probability that the model gave it.

    Attributes
    ----------
    token
        Token id.
    text
        Its text; bytes that do not form a character by themselves become U+FFFD.
    logprob
        Natural logarithm of the probability, before any stage of the sampler.
    top
        The likeliest tokens at its position, likeliest first; their own `top` is empty.
    """

    token: int
    text: str
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


def likeliest(row: npt.NDArray[np.float32], n: int, chosen: int) -> dict[int, float]:
    """Return log-probabilities of the n likeliest tokens, in that order, and of `chosen`."""
    n = min(n, len(row))
    top = np.argpartition(row, len(row) - n)[len(row) - n :]
    top = top[np.argsort(-row[top], kind="stable")]
    largest = row.max()
    total = float(largest) + np.log(np.exp(row - largest).sum(dtype=np.float64))
    found = {int(t): float(row[t] - total) for t in top}
    found.setdefault(chosen, float(row[chosen] - total))
    return found


def named(
    model: LlamaModel, tokens: Iterable[int], rows: Iterable[Mapping[int, float]], n: int
) -> list[TokenLogprob]:
    """Return tokens with their text, and the n likeliest of each row that `likeliest` returned."""

    def one(token: int, value: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        text = model.token_to_piece(token).decode("utf-8", "replace")
        return TokenLogprob(token, text, value, top)

    return [
        one(token, row[token], tuple(one(*pair) for pair in list(row.items())[:n]))
        for token, row in zip(tokens, rows, strict=False)
    ]
