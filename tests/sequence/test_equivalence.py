"""What sequences need not evaluate again, and what a discard leaves: on every kind of memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from memory.kit import CASES, Case, Logits, Make, apart
from pykvcache import LlamaSequence
from pykvcache.errors import UnsupportedOperation

SERVED = tuple(case for case in CASES if case.name != "t5")
"""An encoder's input belongs to what the cells of t5 hold: LlamaSequence refuses it."""


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
