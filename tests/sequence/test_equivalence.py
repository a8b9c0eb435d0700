"""After any edits of any sequences, logits are those of fresh runs: on every kind of memory."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest

from memory.kit import CASES, EVERY_CASE, Case, Logits, Make, apart
from pykvcache import LlamaSequence
from pykvcache.errors import UnsupportedOperation
from sequence.programs import Program

SERVED = tuple(case for case in CASES if case.name != "t5")
"""An encoder's input belongs to what the cells of t5 hold: LlamaSequence refuses it."""

PROGRAMS = max(1, 3 * int(os.environ.get("PYKVCACHE_FUZZ_CALLS", "3000")) // 3000)
SEED = int(os.environ.get("PYKVCACHE_FUZZ_SEED", "1"))


@pytest.mark.parametrize("case", [c for c in EVERY_CASE if c.name != "t5"], ids=str)
def test_random_programs_equal_fresh_runs(
    case: Case, make_context: Make, fresh_logits: Callable[..., Logits]
) -> None:
    for program in range(PROGRAMS):
        ctx = make_context(case.name, **(case.options | {"n_seq_max": 1 + program % 4}))
        Program(case, ctx, lambda tokens: fresh_logits(case.name, tokens), SEED + program).run(40)
        ctx.close()


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_forks_and_truncations_equal_fresh_runs_on_every_memory(
    case: Case, make_context: Make, fresh_logits: Callable[..., Logits]
) -> None:
    ctx = make_context(case.name, **(case.options | {"n_seq_max": 2}))
    tokens = np.random.default_rng(2).integers(5, case.n_vocab - 2, 100, dtype=np.int32)
    sequence = LlamaSequence(ctx, tokens[:70])
    sequence.evaluate()
    sequence.append(tokens[70:])
    sequence.evaluate()
    for n in (99, 70, 33, 1):
        child = sequence.fork(n)
        assert apart(child.logits(), fresh_logits(case.name, tokens[:n])) < case.tolerance
        child.close()
    for n in (100, 99, 70, 33, 1):
        sequence.truncate(n)
        assert apart(sequence.logits(), fresh_logits(case.name, tokens[:n])) < case.tolerance


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_tokens_before_a_checkpoint_are_not_evaluated_again(case: Case, make_context: Make) -> None:
    ctx = make_context(case.name, **(case.options | {"n_seq_max": 2}))
    tokens = np.random.default_rng(3).integers(5, case.n_vocab - 2, 90, dtype=np.int32)
    sequence = LlamaSequence(ctx, tokens[:80])
    sequence.evaluate()
    sequence.append(tokens[80:])
    sequence.evaluate()
    before = ctx.tokens_evaluated
    assert before == 90
    sequence.sync(tokens[:80])
    sequence.append(tokens[:1])
    sequence.evaluate()
    again = ctx.tokens_evaluated - before
    assert again == 1 if case.info.can_cache else again in (1, 81)


@pytest.mark.parametrize("forked", [False, True], ids=["alone", "forked"])
@pytest.mark.parametrize("case", SERVED, ids=str)
def test_discard_equals_dropping_and_shifting_in_a_context(
    case: Case, forked: bool, make_context: Make, fresh_logits: Callable[..., Logits]
) -> None:
    ctx = make_context(case.name, **(case.options | {"n_seq_max": 3}))
    tokens = np.random.default_rng(4).integers(5, case.n_vocab - 2, 40, dtype=np.int32)
    rest = np.concatenate([tokens[:10], tokens[22:]])
    sequence = LlamaSequence(ctx, tokens)
    sequence.evaluate()
    fork = sequence.fork() if forked else None  # shared cells cannot be moved
    expected = fresh_logits(case.name, rest)
    try:
        sequence.discard(10, 22)
    except UnsupportedOperation:
        # A window's state has not all of its cells.
        shiftable = case.info.can_shift and case.info.can_remove_partial and case.swa_full
        assert not shiftable or (forked and case.info.n_swa)
        assert sequence.tokens.tolist() == tokens.tolist()
        assert sequence.n_evaluated == 40
        sequence.discard(10, 22, reevaluate=True)
    else:
        assert sequence.n_evaluated == 28
        # By hand, in the context's words.
        ctx.decode(tokens, seq_id=0)
        ctx.remove(0, 10, 22)
        ctx.clear_kv_cache_seq(0, 27)
        ctx.decode(tokens[-1:], seq_id=0)
        expected = ctx.logits()
        assert apart(expected, fresh_logits(case.name, rest)) > 10 * case.tolerance
    assert sequence.tokens.tolist() == rest.tolist()
    assert apart(sequence.logits(), expected) < case.tolerance
    if fork is not None:
        assert apart(fork.logits(), fresh_logits(case.name, tokens)) < case.tolerance
