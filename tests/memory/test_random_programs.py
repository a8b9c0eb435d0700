"""Random programs: positions, cells and logits follow a plain reference, step by step.

After every decode a NumPy ledger is asked, or a fresh run where there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import ENCODER_INPUT
from memory.kit import CASES, Case, Logits
from memory.program_runner import N_SEQ
from memory.programs import Program
from pykvcache import LlamaContext
from support.models import make_model
from support.numpy_variants import LEDGERS, LedgerT5, make_ledger

STEPS = 270
STEPS_OF_A_WINDOW = 150  # they hold more cells, which the ledger pays for
SEEDS = 3


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_random_program_does_what_the_reference_says(
    case: Case,
    seed: int,
    make_context: Callable[..., LlamaContext],
    fresh_logits: Callable[..., Logits],
    model_folder: Path,
) -> None:
    ledger = None
    if case.info.arch in LEDGERS:
        ledger = make_ledger(make_model(case.name, model_folder))
        if isinstance(ledger, LedgerT5):
            ledger.encode(ENCODER_INPUT)
    ctx = make_context(case.name, n_seq_max=N_SEQ, **case.options)
    steps = STEPS if case.swa_full else STEPS_OF_A_WINDOW
    Program(case, ctx, fresh_logits, ledger, seed).run(steps)
