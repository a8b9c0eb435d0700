"""Sequences, streams and requests in one context of too little room: all as if each were alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from generate.mixed import Mixed
from memory.kit import CASES, Case, Make

PROGRAMS = max(1, int(os.environ.get("PYKVCACHE_FUZZ_CALLS", "3000")) // 3000)
SERVED = tuple(case for case in CASES if case.name != "t5")[:: 4 if PROGRAMS == 1 else 1]
SEED = int(os.environ.get("PYKVCACHE_FUZZ_SEED", "1"))


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_everything_at_once(case: Case, make_context: Make, tmp_path: Path) -> None:
    checked = other = 0
    for program in range(PROGRAMS):
        n_seq_max = 1 + (SEED + program) % 4
        options = case.options | {"n_seq_max": n_seq_max}
        if case.swa_full:
            options["n_ctx"] = 256 * (1 if case.unified else n_seq_max)
        ctx = make_context(case.name, **options)
        alone = {"n_seq_max": 1, "n_ctx": max(256, ctx.n_ctx_seq)}
        plain = make_context(case.name, **(case.options | alone))
        mixed = Mixed(case, ctx, plain, tmp_path, [SEED, program, len(case.name)])
        mixed.run(40 if PROGRAMS == 1 else 60)
        checked, other = checked + mixed.n_checked, other + mixed.n_other
        ctx.close()
        plain.close()
    assert other <= checked // 100, (other, checked)
