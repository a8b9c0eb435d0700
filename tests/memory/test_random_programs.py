"""Random programs: positions, cells and logits follow a plain reference, step by step.

Hypothesis draws the programs, and shrinks one that fails to the few calls that matter. After
every decode a NumPy ledger is asked, or a fresh run where there is none. ``make fuzz`` runs many
more of them; ``PYKVCACHE_FUZZ_SEED`` makes them others.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from memory.kit import EVERY_CASE, Case, Logits
from memory.program_base import World
from memory.programs import Program
from memory.reference import DONE
from pykvcache import LlamaContext
from support.examples import examples

ALL = (*EVERY_CASE, Case("bert"))
SEED = os.environ.get("PYKVCACHE_FUZZ_SEED", "1")
STEPS = examples(300)
"""On each memory."""
# Few programs a round: the last one ends soon after the steps asked for. Explaining a failure costs
# more programs than finding and shrinking it.
SETTINGS = settings(max_examples=4, stateful_step_count=60, phases=[Phase.generate, Phase.shrink])
WITHOUT_MEMORY = {"can_resume", "clear_kv_cache", "decode", "kv_cache_update"}
OPERATIONS = WITHOUT_MEMORY | {
    "clear_kv_cache_seq",
    "copy_cache",
    "copy_kv_cache_seq",
    "copy_prefix",
    "get_state",
    "kv",
    "kv_cache_seq_add",
    "kv_cache_seq_div",
    "kv_cache_seq_keep",
    "remove",
    "set_state",
    "state_size",
    "write_kv",
}


def possible(case: Case) -> set[str]:
    """Return the operations that a memory supports."""
    if not case.info.has_memory:
        return WITHOUT_MEMORY
    refused = {"kv_cache_seq_add", "kv_cache_seq_div"} if case.info.has_mrope else set()
    refused |= set() if case.has_states else {"get_state", "set_state", "state_size", "write_kv"}
    refused |= {"kv", "write_kv"} if case.info.bounded else set()
    return OPERATIONS - refused


@pytest.mark.hazard(
    "M7", "M12", "M13", "M14", "M21", "M22", "M23", "M24", "M25", "M32", "M33", "N262"
)
@pytest.mark.parametrize("case", ALL, ids=str)
def test_a_random_program_does_what_the_reference_says(
    case: Case,
    make_context: Callable[..., LlamaContext],
    fresh_logits: Callable[..., Logits],
    model_folder: Path,
) -> None:
    def fresh(tokens: list[int]) -> Logits:
        if case.info.has_memory:
            return fresh_logits(case.name, tokens)
        with make_context(case.name) as ctx:
            ctx.decode(tokens)
            return ctx.seq_embeddings()

    world = World.of(case, make_context, fresh, model_folder)
    # Programs may end early, so run rounds until the number of steps is enough.
    for part in range(STEPS):

        @seed(crc32(f"{case} {SEED} {part}".encode()))
        def program() -> Program:
            return Program(world)

        run_state_machine_as_test(program, settings=SETTINGS)
        tried = {name for name, _ in world.outcomes}
        done = {name for name, outcome in world.outcomes if outcome == DONE}
        if world.steps >= STEPS and tried == OPERATIONS and done >= possible(case):
            break
    assert (world.steps >= STEPS, tried, done) == (True, OPERATIONS, possible(case))
