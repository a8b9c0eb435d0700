"""Random edits where the memory can shift: logits are those of a context that did the same."""

from __future__ import annotations

import os
from typing import Literal

import numpy as np
import pytest

from memory.kit import SHIFTABLE, Case, Logits, Make, apart
from pykvcache import LlamaContext, LlamaSequence, Sampler
from pykvcache.errors import NoKvCacheSlot

# Windows may have lost cells: what is evaluated again then is a fresh run.
SERVED = tuple(c for c in SHIFTABLE if c.info.memory == "attention" and not c.info.has_encoder)
PROGRAMS = max(1, int(os.environ.get("PYKVCACHE_FUZZ_CALLS", "3000")) // 3000)
SEED = int(os.environ.get("PYKVCACHE_FUZZ_SEED", "1"))

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


class Program:
    """Some sequences of a context, and their shadows."""

    def __init__(self, case: Case, ctx: LlamaContext, plain: LlamaContext, seed: object) -> None:
        self.case, self.ctx, self.plain = case, ctx, plain
        self.rng = np.random.default_rng(seed)  # type: ignore[call-overload]
        self.held: list[tuple[LlamaSequence, Shadow]] = []
        self.log: list[object] = []
        ends = {t: -1e6 for t in range(ctx.model.n_vocab) if ctx.native.is_eog(t)}
        self.bias = ends
        self.n_shifts = 0

    def words(self, most: int) -> list[int]:
        top = 8 if self.rng.random() < 0.5 else self.case.n_vocab - 2
        found: list[int] = self.rng.integers(5, top, int(self.rng.integers(most + 1))).tolist()
        return found

    def run(self, n_steps: int) -> None:
        names = ["append", "truncate", "sync", "discard", "fork", "park", "evaluate", "generate"]
        for _ in range(n_steps):
            if not self.held or (len(self.held) < 5 and self.rng.random() < 0.15):
                tokens = self.words(25)
                self.held.append((LlamaSequence(self.ctx, tokens), Shadow(tokens)))
            which = int(self.rng.integers(len(self.held)))
            name = str(self.rng.choice(names, p=[0.16, 0.16, 0.1, 0.22, 0.08, 0.06, 0.1, 0.12]))
            self.log.append((name, which))
            getattr(self, name)(*self.held[which])
            if self.rng.random() < 0.3:
                self.compare(*self.held[which])
        for sequence, shadow in self.held:
            self.compare(sequence, shadow)

    def compare(self, sequence: LlamaSequence, shadow: Shadow) -> None:
        assert sequence.tokens.tolist() == shadow.tokens, self.log
        if shadow.tokens:
            difference = apart(sequence.logits(), shadow.logits(self.plain))
            assert difference < self.case.tolerance, (difference, self.log)

    def append(self, sequence: LlamaSequence, shadow: Shadow) -> None:
        more = self.words(min(10, 60 - len(shadow.tokens)))
        sequence.append(more)
        shadow.tokens += more

    def truncate(self, sequence: LlamaSequence, shadow: Shadow) -> None:
        n = int(self.rng.integers(len(shadow.tokens) + 1))
        back = shadow.tokens[n:] if self.rng.random() < 0.6 else []
        sequence.truncate(n)
        shadow.become(n, [])
        sequence.append(back)  # what was dropped comes back
        shadow.tokens += back

    def sync(self, sequence: LlamaSequence, shadow: Shadow) -> None:
        tokens = shadow.tokens[: int(self.rng.integers(len(shadow.tokens) + 1))] + self.words(6)
        n = sequence.sync(tokens)
        shadow.become(n, tokens[n:])

    def discard(self, sequence: LlamaSequence, shadow: Shadow) -> None:
        begin, end = sorted(self.rng.integers(0, len(shadow.tokens) + 1, 2).tolist())
        n = sequence.n_evaluated
        sequence.discard(begin, end)
        self.discarded(shadow, begin, end, n)
        assert sequence.n_evaluated == n - (end - begin) or n <= end, self.log

    def discarded(self, shadow: Shadow, begin: int, end: int, n: int) -> None:
        if n > end > begin:
            shadow.evaluate(n)  # tokens that were dropped and came back count as held
            shadow.drop(begin, end)
            self.n_shifts += 1
        elif begin < end:
            shadow.become(begin, shadow.tokens[end:])

    def fork(self, sequence: LlamaSequence, shadow: Shadow) -> None:
        n = int(self.rng.integers(len(shadow.tokens) + 1))
        self.held.append((sequence.fork(n), shadow.fork(n)))
        if len(self.held) > 6:
            self.held.pop(0)[0].close()

    def park(self, sequence: LlamaSequence, shadow: Shadow) -> None:
        sequence.park()

    def evaluate(self, sequence: LlamaSequence, shadow: Shadow) -> None:
        sequence.evaluate()
        shadow.evaluate(len(shadow.tokens))

    def generate(self, sequence: LlamaSequence, shadow: Shadow) -> None:
        """Past the end of the context: half of what follows the first n_keep is dropped."""
        if not shadow.tokens:
            return
        room = self.ctx.n_ctx_seq
        if self.rng.random() < 0.3:
            more = self.words(1) + [7] * (room - len(shadow.tokens) - 4)
            sequence.append(more)
            shadow.tokens += more
        n_keep = int(self.rng.integers(0, 9))
        sampler = Sampler(temperature=0, logit_bias=self.bias)
        for token in sequence.generate(5, sampler, on_full="shift", n_keep=n_keep):
            n = len(shadow.tokens)
            if n > room:
                gone = (n - n_keep) // 2
                self.discarded(shadow, n_keep, n_keep + gone, n - 1)
            row = shadow.logits(self.plain).copy()
            row[list(self.bias)] = -np.inf
            assert row[token] > row.max() - 2 * self.case.tolerance, self.log
            shadow.tokens.append(token)
            assert sequence.tokens.tolist() == shadow.tokens, self.log
        if len(shadow.tokens) > 60:
            sequence.truncate(40)
            shadow.become(40, [])


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_random_programs_equal_contexts_that_shifted(case: Case, make_context: Make) -> None:
    n_shifts = 0
    for program in range(PROGRAMS):
        n_seq_max = 1 + (SEED + program) % 4
        n_ctx = 256 * (1 if case.unified else n_seq_max)
        ctx = make_context(case.name, **(case.options | {"n_seq_max": n_seq_max, "n_ctx": n_ctx}))
        plain = make_context(case.name, **(case.options | {"n_seq_max": 1, "n_ctx": 256}))
        one = Program(case, ctx, plain, [SEED, program, len(str(case))])
        one.run(40)
        n_shifts += one.n_shifts
        ctx.close()
        plain.close()
    assert n_shifts


def test_a_shift_that_keeps_everything_raises(make_context: Make) -> None:
    ctx = make_context("llama", n_seq_max=1)
    sequence = LlamaSequence(ctx, [5] * 257)
    with pytest.raises(NoKvCacheSlot, match="n_keep=256"):
        next(sequence.generate(1, on_full="shift", n_keep=256))
    assert len(sequence) == 257
