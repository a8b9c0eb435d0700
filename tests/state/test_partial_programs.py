"""Random programs with partial states: each is refused, or right, and never without reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from memory.kit import EVERY_CASE, Case, Logits
from memory.program_base import World
from memory.reference import DONE
from pykvcache import LlamaContext
from state.partial_kit import is_forgetful
from state.partial_programs import PartialProgram
from support.examples import examples

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
