"""Random programs with partial states: each is refused, or right, and never without reason."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import Phase, seed, settings
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from memory.kit import EVERY_CASE, Case, Logits
from memory.program_base import N_SEQ, World
from memory.programs import SEQ, Program
from memory.reference import DONE, FULL, UNSUPPORTED, Cell, Verdict
from pykvcache import LlamaContext
from pykvcache.errors import PartialStateError
from pykvcache.state import PartialState
from state.kit import is_forgetful
from support.examples import examples


def replaced(name: str, arguments: tuple[Any, ...]) -> Collection[int]:
    """Sequences of which a call may put cells in place of themselves."""
    if name == "set_state":
        return arguments[1:] or range(N_SEQ)
    if name in ("copy_cache", "copy_kv_cache_seq", "copy_prefix"):
        return arguments[1:2]
    return arguments[:1] if name == "kv_cache_seq_div" else ()


@dataclass(eq=False)
class Kept:
    """A partial state, and its sequence's tokens."""

    state: PartialState
    cells: list[Cell]
    tokens: list[int] | None
    ledger: Any
    unchanged: bool = True
    """Whether the cells up to its position were the same ones after each step since."""
    replaced: bool = False
    """Whether the same cells may have been put in place of themselves."""


class PartialProgram(Program):
    """All rules of `Program`, and two more."""

    kept: Bundle[Kept] = Bundle("kept")

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.all_kept: list[Kept] = []

    def do(self, name: str, verdict: Verdict, *arguments: Any, **named: Any) -> bool:
        done = super().do(name, verdict, *arguments, **named)
        for kept in self.all_kept if done else ():
            kept.replaced |= kept.state.seq_id in replaced(name, arguments)
        return done

    @rule(target=kept, seq=SEQ)
    def take_partial(self, seq: int) -> Kept | MultipleResults[Kept]:
        # After a full window a sequence may be unusable.
        broken = self.ref._window_may_refuse()
        verdict = Verdict(frozenset({DONE, UNSUPPORTED} if broken else {DONE}), lambda: None)
        if not self.do("get_partial_state", verdict, seq):
            return multiple()
        ref, state = self.ref, self.result
        assert (state.seq_id, state.pos) == (seq, max(ref.positions(seq), default=-1))
        known = ref.tokens[seq]
        kept = Kept(
            state,
            [*ref.cells[seq]],
            None if known is None else [*known],
            self.ledger.cells(seq) if self.ledger else None,
        )
        self.all_kept.append(kept)
        return kept

    @rule(kept=kept)
    def put_partial(self, kept: Kept) -> None:
        seq = kept.state.seq_id

        def effect() -> None:
            ref = self.ref
            ref.cells[seq] = [*kept.cells]
            ref.tokens[seq] = None if kept.tokens is None else [*kept.tokens]
            ref.state[seq] = next(ref._keys)
            ref._apply_pending(seq)

        if not kept.state.is_valid:
            before = self.ctx.sequences()
            try:
                self.ctx.set_partial_state(kept.state)
            except PartialStateError:
                assert self.ctx.sequences() == before
            else:
                raise AssertionError("a state was put back that is not valid")
            return
        full = {FULL} & {*self.ref._window_may_refuse()}
        if self.do("set_partial_state", Verdict(frozenset({DONE, *full}), effect), kept.state):
            if self.ledger:
                self.ledger.sequences[seq] = kept.ledger
            self.append(seq, 1)

    @invariant()
    def they_are_valid_as_long_as_they_should(self) -> None:
        for kept in self.all_kept:
            state = kept.state
            if self.case.info.memory == "recurrent" or state.pos < 0:
                assert state.is_valid
                continue
            here = [c for c in self.ref.cells[state.seq_id] if c.pos <= state.pos]
            kept.unchanged = kept.unchanged and sorted(here) == sorted(kept.cells)
            if state.is_valid:
                assert kept.unchanged, f"{state!r} is wrong"
            else:
                assert not kept.unchanged or kept.replaced, f"{state!r} would be right"


STEPS = examples(100)
SETTINGS = settings(max_examples=4, stateful_step_count=60, phases=[Phase.generate, Phase.shrink])


@pytest.mark.parametrize("case", [*filter(is_forgetful, EVERY_CASE)], ids=str)
def test_partial_states_in_random_programs(
    case: Case,
    make_context: Callable[..., LlamaContext],
    fresh_logits: Callable[..., Logits],
    model_folder: Path,
) -> None:
    world = World.of(
        case, make_context, lambda tokens: fresh_logits(case.name, tokens), model_folder
    )
    for part in range(STEPS):

        @seed(crc32(f"partial {case} {part}".encode()))
        def program() -> PartialProgram:
            return PartialProgram(world)

        run_state_machine_as_test(program, settings=SETTINGS)
        done = {name for name, outcome in world.outcomes if outcome == DONE}
        if world.steps >= STEPS and {"get_partial_state", "set_partial_state"} <= done:
            return
    raise AssertionError(f"{world.steps} steps and {sorted(done)} are too few")
