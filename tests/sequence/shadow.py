"""What a sequence should hold, replayed by hand in a plain context: shifts included."""

from __future__ import annotations

from typing import Literal

from memory.kit import Logits
from pykvcache import LlamaContext

Step = tuple[Literal["decode"], list[int]] | tuple[Literal["cut", "drop"], tuple[int, int]]


class Shadow:
    """Tokens, and the calls of a context that lead to what is held of the first `n` of them."""

    def __init__(self, tokens: list[int], steps: tuple[Step, ...] = (), n: int = 0) -> None:
        self.tokens = list(tokens)
        self.steps = list(steps)
        self.n = n

    def fork(self, n: int) -> Shadow:
        """Return the first n tokens, and what is held of them."""
        child = Shadow(self.tokens[:n], tuple(self.steps), self.n)
        child._cut(n)
        return child

    def become(self, n: int, more: list[int]) -> None:
        """Keep n tokens and append others."""
        self.tokens[n:] = more
        self._cut(n)

    def evaluate(self, n: int) -> None:
        """Hold the first n tokens."""
        if n > self.n:
            self.steps.append(("decode", self.tokens[self.n : n]))
            self.n = n

    def drop(self, begin: int, end: int) -> None:
        """Drop tokens that are held, and move what follows down."""
        self.steps.append(("drop", (begin, end)))
        self.n -= end - begin
        del self.tokens[begin:end]

    def _cut(self, n: int) -> None:
        if n < self.n:
            self.steps.append(("cut", (n, self.n)))
            self.n = n

    def logits(self, plain: LlamaContext) -> Logits:
        """Decode the last token again, over what is held, in an empty context."""
        self._cut(len(self.tokens) - 1)
        self.evaluate(len(self.tokens))
        plain.clear_kv_cache()
        for what, given in self.steps:
            if what == "decode":
                plain.decode(given, seq_id=0)
            else:
                plain.remove(0, *given)
        row: Logits = plain.logits()
        return row
