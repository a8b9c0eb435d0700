"""How a random program is drawn, run and compared; its steps are in `programs`."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from memory.kit import Case, Logits, apart
from memory.reference import BROKEN, DONE, END, Reference, Verdict
from pykvcache import (
    DecodeError,
    LlamaContext,
    NoKvCacheSlot,
    PositionError,
    UnsupportedOperation,
)
from support.numpy_llama import LedgerLlama

N_SEQ = 4


class Runner:
    """Draws steps from a seed; `log` is what to replay by hand when one fails."""

    operations: Mapping[str, float]

    def __init__(
        self,
        case: Case,
        ctx: LlamaContext,
        fresh: Callable[..., Logits],
        ledger: LedgerLlama | None,
        seed: int,
    ) -> None:
        self.case, self.ctx, self.fresh, self.ledger = case, ctx, fresh, ledger
        self.ref = Reference(case, N_SEQ, ctx.n_ctx_seq)
        self.random = random.Random(f"{case} {seed}")
        self.log: list[str] = []
        self.outcomes: dict[tuple[str, str], int] = {}

    def run(self, steps: int) -> None:
        """Take steps; an error names the program so far."""
        names, weights = [*self.operations], [*self.operations.values()]
        try:
            for _ in range(steps):
                if self.case.info.n_swa:
                    kept, held = self.ctx.cells("window"), self.ctx.cells("attention")
                    self.ref.may_refuse = len(kept) != len(held)
                getattr(self, self.random.choices(names, weights)[0])()
                self.compare()
        except Exception as error:
            raise AssertionError(
                "after\n  " + "\n  ".join([*self.log[-40:], repr(error)])
            ) from error

    def seq(self) -> int:
        return self.random.randrange(N_SEQ)

    def span(self, seq: int) -> tuple[int | None, int | None]:
        """A range; often one that matters to what the sequence holds."""
        top = max(self.ref.positions(seq), default=0)
        low = min(self.ref.positions(seq), default=0)
        kind = self.random.randrange(8)
        if kind == 0:
            return self.random.choice([None, 0]), self.random.choice([None, END])
        if kind == 1:
            return self.random.choice([0, low, None]), self.random.choice([top + 1, top + 9, END])
        if kind == 2:
            return self.random.randint(max(low, top - 20), top + 1), None
        if kind == 3:
            return self.random.choice([0, low, None]), self.random.randint(low, top + 1)
        return self.random.randint(0, top + 2), self.random.randint(0, top + 2)

    def words(self, n: int) -> list[int]:
        return [self.random.randrange(5, self.case.n_vocab - 2) for _ in range(n)]

    def do(self, name: str, verdict: Verdict, *arguments: Any, **named: Any) -> bool:
        """Call a method of the context; whether it was done. The reference follows."""
        self.log.append(f"ctx.{name}({', '.join(map(repr, arguments))}) {named or ''}")
        try:
            answer = getattr(self.ctx, name)(*arguments, **named)
            outcome = "False" if answer is False else DONE
        except (NoKvCacheSlot, PositionError, UnsupportedOperation) as error:
            outcome = type(error).__name__
        except DecodeError:
            outcome = BROKEN
        self.log[-1] += f"  # {outcome}"
        assert outcome in verdict.allowed, f"{outcome} instead of {sorted(verdict.allowed)}"
        self.outcomes[name, outcome] = self.outcomes.get((name, outcome), 0) + 1
        if outcome == DONE:
            verdict.effect()
        return outcome == DONE

    def compare_logits(self, seq: int, tokens: list[int], row: int) -> None:
        """The logits that a decode gave are those of the ledger, or of a fresh run."""
        known = self.ref.tokens[seq]
        if self.ledger is not None:
            self.ledger.decode(seq, tokens)
            right: Any = self.ledger.logits
        elif known is not None:
            right = self.fresh(self.case.name, known)
        else:
            return
        difference = apart(self.ctx.logits(row), right)
        assert difference < self.case.tolerance, f"sequence {seq} is {difference:.3g} off"

    def keep_what_stayed(
        self, rows: list[tuple[int, int]], words: dict[int, list[int]], first: dict[int, int]
    ) -> None:
        """A batch that is decoded in parts may fail after some: what is held is its beginning."""
        stayed = [first[seq] + i <= self.ctx.kv_cache_seq_pos_max(seq) for i, seq in rows]
        assert stayed == sorted(stayed, reverse=True), "a later token stays and an earlier is gone"
        for (i, seq), here in zip(rows, stayed, strict=True):
            if here:
                self.ref.decode(seq, words[seq][i : i + 1]).effect()
                if self.ledger is not None:
                    self.ledger.decode(seq, words[seq][i : i + 1])

    def compare(self) -> None:
        """Positions, cells and sharing are those of the reference."""
        ctx, ref = self.ctx, self.ref
        recurrent = self.case.info.memory == "recurrent"
        for seq in range(N_SEQ):
            held = ref.positions(seq)
            assert ctx.kv_cache_seq_pos_max(seq) == max(held, default=-1), f"highest of {seq}"
            lowest = ctx.kv_cache_seq_pos_min(seq)
            if not held or not (ref.whole_only or self.case.info.n_swa):
                assert lowest == min(held, default=-1), f"lowest of {seq}"
            else:
                assert held[0] <= lowest <= held[-1], f"lowest of {seq}"
        assert set(ctx.sequences()) == {seq for seq in range(N_SEQ) if ref.cells[seq]}
        if recurrent:
            return
        table = ctx.cells("attention")
        assert len(table) == ref.n_used()
        for seq in range(N_SEQ):
            np.testing.assert_array_equal(
                np.sort(table.pos[table.members[:, seq]]), ref.positions(seq)
            )


def in_turn(effects: list[Callable[[], None]]) -> None:
    for effect in effects:
        effect()


def plain(p0: int | None, p1: int | None) -> tuple[int, int]:
    """A range with both ends."""
    return (0 if p0 is None else p0, END if p1 is None else p1)
