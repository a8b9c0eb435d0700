"""Random programs over LlamaSequences, beside plain lists that say what each should hold."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from memory.kit import Case, Logits, apart
from pykvcache import CheckpointPolicy, LlamaContext, LlamaSequence, Sampler

Fresh = Callable[[list[int]], Logits]

MOST_TOKENS = 60


class Program:
    """Some sequences of one context, edited at random and compared with fresh runs."""

    def __init__(self, case: Case, ctx: LlamaContext, fresh: Fresh, seed: int) -> None:
        self.case, self.ctx, self.fresh = case, ctx, fresh
        self.rng = np.random.default_rng(seed)
        self.policy = CheckpointPolicy(
            max_bytes=int(self.rng.choice([0, 1 << 20, 1 << 28])),
            spacing=int(self.rng.choice([0, 8])),
        )
        self.held: list[tuple[LlamaSequence, list[int]]] = []
        self.log: list[str] = []

    def words(self, most: int) -> NDArray[np.int32]:
        """Tokens of a small alphabet, so that prefixes meet."""
        n = int(self.rng.integers(0, most + 1))
        return self.rng.integers(5, 8, n, dtype=np.int32)

    def run(self, n_steps: int) -> None:
        """Do n random operations."""
        for _ in range(n_steps):
            if not self.held or (len(self.held) < 6 and self.rng.random() < 0.15):
                tokens = self.words(20)
                self.log.append(f"new {len(tokens)}")
                sequence = LlamaSequence(self.ctx, tokens, checkpoints=self.policy)
                self.held.append((sequence, tokens.tolist()))
                continue
            which = int(self.rng.integers(len(self.held)))
            name = str(
                self.rng.choice(
                    ["append", "truncate", "sync", "discard", "fork", "park", "close"],
                    p=[0.25, 0.2, 0.15, 0.1, 0.15, 0.1, 0.05],
                )
            )
            self.log.append(f"{name} {which}")
            getattr(self, name)(which)
            if self.held:
                self.look(int(self.rng.integers(len(self.held))))
        for which in range(len(self.held)):
            self.compare(which)

    # Edits --------------------------------------------------------------------------------

    def append(self, which: int) -> None:
        sequence, tokens = self.held[which]
        more = self.words(min(12, MOST_TOKENS - len(tokens)))
        sequence.append(more)
        tokens += more.tolist()

    def truncate(self, which: int) -> None:
        sequence, tokens = self.held[which]
        n = int(self.rng.integers(0, len(tokens) + 1))
        sequence.truncate(n)
        del tokens[n:]

    def sync(self, which: int) -> None:
        sequence, tokens = self.held[which]
        wanted = tokens[: int(self.rng.integers(0, len(tokens) + 1))] + self.words(8).tolist()
        same = [a == b for a, b in zip(tokens, wanted, strict=False)]
        assert sequence.sync(wanted) == (same.index(False) if False in same else len(same))
        tokens[:] = wanted

    def discard(self, which: int) -> None:
        """By evaluating again: what a shift leaves has no fresh run."""
        sequence, tokens = self.held[which]
        if self.case.info.can_shift:
            return
        begin, end = sorted(int(n) for n in self.rng.integers(0, len(tokens) + 1, 2))
        sequence.discard(begin, end, reevaluate=True)
        del tokens[begin:end]

    def fork(self, which: int) -> None:
        sequence, tokens = self.held[which]
        n = int(self.rng.integers(0, len(tokens) + 1)) if self.rng.random() < 0.7 else None
        self.held.append((sequence.fork(n), tokens[:n]))
        if len(self.held) > 8:
            self.close(0)

    def park(self, which: int) -> None:
        self.held[which][0].park()

    def close(self, which: int) -> None:
        sequence, _ = self.held.pop(which)
        if self.rng.random() < 0.5:
            sequence.close()
        else:
            del sequence

    # Looks --------------------------------------------------------------------------------

    def look(self, which: int) -> None:
        """Compare one sequence, or generate with it."""
        sequence, tokens = self.held[which]
        assert sequence.tokens.tolist() == tokens, self.log
        assert 0 <= sequence.n_evaluated <= len(tokens)
        chance = self.rng.random()
        if chance < 0.3:
            self.compare(which)
        elif chance < 0.5 and 0 < len(tokens) < MOST_TOKENS - 4:
            found = list(sequence.generate(3, Sampler(temperature=1, seed=1)))
            tokens += found
            assert sequence.tokens.tolist() == tokens, self.log
        elif chance < 0.6:
            sequence.evaluate()
            assert sequence.n_evaluated == len(tokens), self.log

    def compare(self, which: int) -> None:
        """The logits of a sequence are those of a fresh run over its tokens."""
        sequence, tokens = self.held[which]
        assert sequence.tokens.tolist() == tokens, self.log
        if tokens:
            difference = apart(sequence.logits(), self.fresh(tokens))
            assert difference < self.case.tolerance, (difference, which, self.log)
            assert sequence.n_evaluated == len(tokens)
