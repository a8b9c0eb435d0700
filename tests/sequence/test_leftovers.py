"""Programs by hand that once left something in place that did not belong there."""

from __future__ import annotations

import pytest

from memory.kit import CASES, Case, Fresh, Make, apart, words
from pykvcache import LlamaSequence, PrefixCache

SERVED = tuple(case for case in CASES if case.has_states)


@pytest.mark.hazard("N64")
@pytest.mark.parametrize("case", SERVED, ids=str)
def test_checkpoints_of_removed_tokens_are_not_restored(
    case: Case, make_context: Make, fresh_logits: Fresh
) -> None:
    ctx = make_context(case.name, **(case.options | {"n_seq_max": 2}))
    old, new = words(1, 64), words(2, 70)
    for how in ("rewound", "cleared"):
        sequence = LlamaSequence(ctx, old)
        sequence.evaluate()
        if how == "cleared":
            ctx.clear_kv_cache()
            sequence.truncate(63)
            sequence.logits()
        sequence.truncate(30)
        sequence.append(new)
        sequence.evaluate()
        for n in (80, 66, 64):
            sequence.truncate(n)
            wanted = fresh_logits(case.name, (old[:30] + new)[:n])
            assert apart(sequence.logits(), wanted) < case.tolerance, (how, n)
        sequence.close()


@pytest.mark.hazard("N65")
@pytest.mark.parametrize("case", SERVED, ids=str)
def test_cells_changed_by_hand_are_not_parked(
    case: Case, make_context: Make, fresh_logits: Fresh
) -> None:
    ctx = make_context(case.name, **(case.options | {"n_seq_max": 2}))
    tokens = words(1, 24)
    for how in ("cleared", "shorter", "same length"):
        for cut in (24, 15):
            sequence = LlamaSequence(ctx, tokens)
            sequence.evaluate()
            assert sequence.seq_id is not None
            ctx.clear_kv_cache_seq(sequence.seq_id)
            if how != "cleared":
                ctx.decode(words(7, 24 if how == "same length" else 11), seq_id=sequence.seq_id)
            sequence.truncate(cut)
            sequence.park()
            sequence.append(tokens[:1])
            wanted = fresh_logits(case.name, tokens[:cut] + tokens[:1])
            assert apart(sequence.logits(), wanted) < case.tolerance, (how, cut)
            sequence.close()


@pytest.mark.hazard("N66")
@pytest.mark.parametrize("case", [c for c in SERVED if c.info.can_shift], ids=str)
@pytest.mark.parametrize("parked", [False, True])
def test_shifted_cells_are_not_mistaken_for_cells_of_new_tokens(
    case: Case, parked: bool, make_context: Make, fresh_logits: Fresh
) -> None:
    ctx = make_context(case.name, **(case.options | {"n_seq_max": 3}))
    cache = PrefixCache(ctx, block_size=8)
    tokens = words(1, 40)
    rest = tokens[:10] + tokens[22:]
    sequence = cache.sequence(tokens)
    sequence.evaluate()
    sequence.discard(10, 22, reevaluate=True)
    if parked:
        sequence.park()
    wanted = fresh_logits(case.name, rest)
    for child in (cache.sequence(rest[:10]), cache.sequence(rest[:9]), sequence.fork(10)):
        child.append(rest[len(child) :])
        assert apart(child.logits(), wanted) < case.tolerance
    sequence.truncate(8)
    sequence.append(rest[8:])
    assert apart(sequence.logits(), wanted) < case.tolerance
