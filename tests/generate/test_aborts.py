"""Decodes that are aborted at any step of their graphs: all goes on, and no logits are others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from generate.aborted import Aborted
from memory.kit import CASES, Case, Make

PROGRAMS = max(1, int(os.environ.get("PYKVCACHE_FUZZ_CALLS", "3000")) // 3000)
SEED = int(os.environ.get("PYKVCACHE_FUZZ_SEED", "1"))
SERVED = tuple(case for case in CASES if case.name != "t5")

pytestmark = pytest.mark.not_on_a_device(reason="a decode is stopped between its parts alone")


@pytest.mark.hazard("N183", "N242")
@pytest.mark.parametrize("case", SERVED, ids=str)
def test_programs_whose_decodes_are_aborted(case: Case, make_context: Make, tmp_path: Path) -> None:
    n_aborted = 0
    for program in range(PROGRAMS):
        options = case.options | {"n_ubatch": 16, "n_threads": 1, "n_threads_batch": 1}
        options |= {"n_ctx": 1024 if case.unified else 2048, "n_seq_max": 4 - (SEED + program) % 3}
        ctx = make_context(case.name, **options)
        plain = make_context(case.name, **(options | {"n_seq_max": 1, "n_ctx": 512}))
        aborted = Aborted(case, ctx, plain, tmp_path, [SEED, program, len(case.name)])
        aborted.run(60)
        n_aborted += aborted.n_aborted
        ctx.close()
        plain.close()
    assert n_aborted
