"""Sequences, streams and requests in one context: all as if each were alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from generate.mixed import Mixed
from memory.kit import CASES, EVERY_CASE, Case, Make

PROGRAMS = max(1, int(os.environ.get("PYKVCACHE_FUZZ_CALLS", "3000")) // 3000)
SERVED = tuple(case for case in EVERY_CASE if case.name != "t5")
SEED = int(os.environ.get("PYKVCACHE_FUZZ_SEED", "1"))


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_mixed_programs_with_too_few_cells(case: Case, make_context: Make, tmp_path: Path) -> None:
    checked = other = 0
    for program in range(PROGRAMS):
        n_seq_max = 1 + (SEED + program + SERVED.index(case)) % 4
        options = case.options | {"n_seq_max": n_seq_max}
        if case.swa_full:
            options["n_ctx"] = 256 * (1 if case.unified else n_seq_max)
        ctx = make_context(case.name, **options)
        alone = {"n_seq_max": 1, "n_ctx": max(256, ctx.n_ctx_seq)}
        plain = make_context(case.name, **(case.options | alone))
        mixed = Mixed(case, ctx, plain, tmp_path, [SEED, program, len(case.name)])
        mixed.run(60)
        checked, other = checked + mixed.n_checked, other + mixed.n_other
        ctx.close()
        plain.close()
    assert other <= checked // 100, (other, checked)


@pytest.mark.not_on_a_device(reason="a decode is stopped between its parts alone")
@pytest.mark.hazard("N183", "N242")
@pytest.mark.parametrize("case", [c for c in CASES if c.name != "t5"], ids=str)
def test_decodes_that_are_aborted_at_any_step(
    case: Case, make_context: Make, tmp_path: Path
) -> None:
    """All goes on, and no logits are others."""
    n_aborted = 0
    for program in range(PROGRAMS):
        options = case.options | {"n_ubatch": 16, "n_threads": 1, "n_threads_batch": 1}
        options |= {"n_ctx": 1024 if case.unified else 2048, "n_seq_max": 4 - (SEED + program) % 3}
        ctx = make_context(case.name, **options)
        plain = make_context(case.name, **(options | {"n_seq_max": 1, "n_ctx": 512}))
        seed = [SEED, program, len(case.name)]
        mixed = Mixed(case, ctx, plain, tmp_path, seed, aborts=True)
        mixed.run(60)
        n_aborted += mixed.n_aborted
        ctx.close()
        plain.close()
    assert n_aborted
