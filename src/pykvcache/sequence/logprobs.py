"""Log-probabilities of tokens, generated or of a prompt: by id and as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pykvcache._native import lib
from pykvcache.errors import OutputNotFinite
from pykvcache.sequence.cells import Row

if TYPE_CHECKING:
    from pykvcache.model import LlamaModel
    from pykvcache.sequence.sequence import LlamaSequence

__all__ = ["TokenLogprob", "likeliest", "named", "prompt_logprobs"]

#: Maximum number of logits per decode: 64 MiB, which is 64 tokens of Gemma's vocabulary.
MOST_LOGITS = 1 << 24


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


def likeliest(row: Row, n: int, chosen: int) -> dict[int, float]:
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


def prompt_logprobs(sequence: LlamaSequence, n: int) -> list[dict[int, float]]:
    """Return log-probabilities for each token of a sequence after the first, by token id.

    Contains the n likeliest tokens at its position and the token itself. All tokens but the last
    are evaluated, even if the memory holds them; other sequences are evaluated in between.
    """
    cells, tokens = sequence._cells, sequence.tokens
    context, ledger = sequence.context, cells.ledger
    found: list[dict[int, float]] = [{}] * (len(tokens) - 1)
    most = max(1, min(context.n_ubatch, MOST_LOGITS // context.model.n_vocab))

    def decode() -> tuple[int, list[Row]]:
        begin = ledger.n_evaluated
        end = ledger.same_until(min(begin + most, len(found)))
        n_part, seq_id = end - begin, ledger.seq_id
        part = lib.Rows(n_part, 1)
        part.append(tokens[begin:end], seq_id, True, begin)
        shares: list[tuple[lib.Tokens, int, int, int]] = [
            (ledger, seq_id, end, i) for i in range(n_part)
        ]
        # None if the cells were changed outside: the next turn verifies them.
        rows = cells.pool.native.decode_shares(part, shares) or ()
        return begin, [row for row in rows if row is not None]

    with sequence._held():
        cells.pool.check_length(len(tokens))
        cells.attach()
        cells.rewind(0)
    while ledger.n_evaluated < len(found):
        with sequence._held():
            cells.attach()
            begin, rows = cells.with_room(decode)
        for i, row in enumerate(rows, begin):
            if (place := lib.first_not_finite(row, True)) >= 0:
                told = f"the logits after token {i} are not finite: place {place} is {row[place]}"
                raise OutputNotFinite(told, "logits", i - begin, place, float(row[place]))
            found[i] = likeliest(row, n, int(tokens[i + 1]))
    return found
