"""A random program is a state machine: how its calls are made, and what holds after each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import note
from hypothesis.stateful import RuleBasedStateMachine, invariant

from conftest import ENCODER_INPUT
from memory.kit import Case, Logits, apart, cleared_runs
from memory.reference import BROKEN, DONE, Reference, Verdict
from pykvcache import LlamaContext
from pykvcache.errors import (
    DecodeError,
    InvalidBatch,
    NoKvCacheSlot,
    PositionError,
    UnsupportedOperation,
)
from pykvcache.introspection import CellTable
from pykvcache.kv import SequenceKV
from support.models import make_model
from support.numpy_llama import LedgerLlama
from support.numpy_variants import LEDGERS, LedgerT5, make_ledger

N_SEQ = 4
BITS = 1 << np.arange(N_SEQ)


@dataclass
class World:
    """Environment and statistics of programs on one memory."""

    case: Case
    make_context: Callable[[], LlamaContext]
    fresh: Callable[[list[int]], Logits]
    ledger: LedgerLlama | None
    steps: int = 0
    """In which a method of the context was called."""
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)

    @classmethod
    def of(
        cls,
        case: Case,
        make_context: Callable[..., LlamaContext],
        fresh: Callable[[list[int]], Logits],
        model_folder: Path,
    ) -> World:
        """Return the world of a memory, with a NumPy ledger if its model has one."""
        ledger = None
        if case.info.arch in LEDGERS:
            ledger = make_ledger(make_model(case.name, model_folder))
            if isinstance(ledger, LedgerT5):
                ledger.encode(ENCODER_INPUT)
        runs = cleared_runs(make_context(case.name, n_seq_max=1)) if case.info.has_memory else fresh
        return cls(
            case,
            lambda: make_context(case.name, n_seq_max=N_SEQ, **case.options),
            lambda tokens: runs(tokens) if len(tokens) <= 256 else fresh(tokens),
            ledger,
        )


class ProgramBase(RuleBasedStateMachine):
    """A program: a new context and a plain reference."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world, self.case, self.ledger = world, world.case, world.ledger
        self.ctx = world.make_context()
        self.ref = Reference(self.case, N_SEQ, self.ctx.n_ctx_seq)
        self.called = False
        self.n_words = 0
        if self.ledger is not None:
            self.ledger.clear()

    def teardown(self) -> None:
        self.ctx.close()

    def words(self, n: int) -> list[int]:
        """New tokens; the same in every run of the same program."""
        span, first = self.case.n_vocab - 7, self.n_words
        self.n_words += n
        return [5 + (i * i * 7919 + i * 104_729) % span for i in range(first, first + n)]

    def do(self, name: str, verdict: Verdict, *arguments: Any, **named: Any) -> bool:
        """Call a method of the context; whether it was done. The reference follows."""
        self.called = True
        self.result = None
        try:
            self.result = getattr(self.ctx, name)(*arguments, **named)
            outcome = "False" if self.result is False else DONE
        except (InvalidBatch, NoKvCacheSlot, PositionError, UnsupportedOperation) as error:
            outcome = type(error).__name__
        except DecodeError:
            outcome = BROKEN
        note(Call(name, arguments, named, outcome))
        assert outcome in verdict.allowed, f"{outcome} instead of {sorted(verdict.allowed)}"
        self.world.outcomes[name, outcome] += 1
        if outcome == DONE:
            verdict.effect()
        return outcome == DONE

    def compare_logits(self, seq: int, tokens: list[int], row: int) -> None:
        """Check a decode's logits against the ledger or a fresh run."""
        given = self.ctx.logits(row) if self.case.info.has_memory else self.ctx.seq_embeddings(seq)
        known = self.ref.tokens[seq] if self.case.info.has_memory else tokens
        if self.ledger is not None:
            right: Any = self.ledger.append(seq, tokens)
        elif known is not None:
            right = self.world.fresh(known)
        else:
            return
        difference = apart(given, right)
        assert difference < self.case.tolerance, f"sequence {seq} is {difference:.3g} off"

    def keep_what_stayed(
        self, rows: list[tuple[int, int]], words: dict[int, list[int]], first: dict[int, int]
    ) -> None:
        """After a batch failed between its parts, its first tokens stay."""
        stayed = [first[seq] + i <= self.ctx.kv_cache_seq_pos_max(seq) for i, seq in rows]
        assert stayed == sorted(stayed, reverse=True), "a later token stays and an earlier is gone"
        for (i, seq), here in zip(rows, stayed, strict=True):
            if here:
                self.ref.decode(seq, words[seq][i : i + 1]).effect()
                if self.ledger is not None:
                    self.ledger.append(seq, words[seq][i : i + 1])

    @invariant()
    def positions_are_true(self) -> None:
        self.world.steps += self.called
        self.called = False
        ctx, ref = self.ctx, self.ref
        for seq in range(N_SEQ):
            held = ref.positions(seq)
            assert ctx.kv_cache_seq_pos_max(seq) == max(held, default=-1), f"highest of {seq}"
            lowest = ctx.kv_cache_seq_pos_min(seq)
            if not held or not (ref.whole_only or self.case.info.n_swa):
                assert lowest == min(held, default=-1), f"lowest of {seq}"
            else:
                assert held[0] <= lowest <= held[-1], f"lowest of {seq}"
        assert set(ctx.sequences()) == {seq for seq in range(N_SEQ) if ref.cells[seq]}

    @invariant()
    def cells_are_shared_as_they_should(self) -> None:
        """Check the context's cells and their sequences against the reference."""
        if self.case.info.has_recurrent_state:
            self._states_are_shared()
        if self.case.info.memory in ("none", "recurrent"):
            return
        wanted: dict[int, tuple[int, int]] = {}
        for seq, cells in self.ref.cells.items():
            for cell in cells:
                wanted[cell.key] = (cell.pos, wanted.get(cell.key, (0, 0))[1] | 1 << seq)
        table = self.ctx.cells("attention")
        found = sorted(zip(table.pos.tolist(), (table.members @ BITS).tolist(), strict=True))
        assert found == sorted(wanted.values()), "(position, bits of its sequences) of each cell"
        assert self.ctx.n_cells_used == len(wanted)
        if self.case.info.n_swa:
            self._window_is_a_part(table)

    def _states_are_shared(self) -> None:
        """Each sequence has one state, at its last position, and forks share theirs."""
        ref, table = self.ref, self.ctx.cells("recurrent")
        filled = [seq for seq in range(N_SEQ) if ref.cells[seq]]
        groups = {state: 0 for state in ref.state.values()}
        for seq in filled:
            groups[ref.state[seq]] |= 1 << seq
        assert sorted((table.members @ BITS).tolist()) == sorted(g for g in groups.values() if g)
        last = {seq: ref.positions(seq)[-1] for seq in filled}
        for pos, members in zip(table.pos.tolist(), table.members, strict=True):
            assert {last[seq] for seq in np.flatnonzero(members)} == {pos}

    def _window_is_a_part(self, held: CellTable) -> None:
        """Window cells are a subset; a sequence that lost some may refuse more."""
        window = self.ctx.cells("window")
        self.ref.dropped = set()
        for seq in range(N_SEQ):
            here = sorted(window.pos[window.members[:, seq]].tolist())
            there = sorted(held.pos[held.members[:, seq]].tolist())
            if here != there:
                extra = Counter(here)
                extra.subtract(there)
                assert max(extra.values()) <= 0, f"the window has what sequence {seq} does not hold"
                self.ref.dropped.add(seq)


class Call:
    """A call, formatted lazily when Hypothesis prints a shrunken program."""

    def __init__(self, name: str, arguments: tuple[Any, ...], named: dict[str, Any], end: str):
        self.name, self.arguments, self.named, self.end = name, arguments, named, end

    def __repr__(self) -> str:
        arguments = ", ".join(map(brief, self.arguments))
        return f"ctx.{self.name}({arguments}) {self.named or ''}  # {self.end}"


def brief(argument: Any) -> str:
    if isinstance(argument, SequenceKV | np.ndarray):
        return f"<{type(argument).__name__} of {len(argument)}>"
    return repr(argument)
