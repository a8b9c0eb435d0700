"""What sequences need not evaluate again, and what edits leave: on every kind of memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from memory.kit import CASES, Case, Fresh, Logits, Make, apart, words
from pykvcache import CheckpointPolicy, LlamaSequence, PrefixCache
from pykvcache.errors import UnsupportedOperation

SERVED = tuple(case for case in CASES if case.name != "t5")
"""An encoder's input belongs to what the cells of t5 hold: LlamaSequence refuses it."""
SAVED = tuple(case for case in SERVED if case.has_states)


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


@pytest.mark.hazard("N64")
@pytest.mark.parametrize("case", SAVED, ids=str)
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
@pytest.mark.parametrize("case", SAVED, ids=str)
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
@pytest.mark.parametrize("case", [c for c in SAVED if c.info.can_shift], ids=str)
@pytest.mark.parametrize("parked", [False, True])
def test_shifted_cells_are_not_mistaken_for_cells_of_new_tokens(
    case: Case, parked: bool, make_context: Make, fresh_logits: Fresh
) -> None:
    ctx = make_context(case.name, **(case.options | {"n_seq_max": 3}))
    cache = PrefixCache(ctx, block_size=8)
    tokens = words(1, 40)
    rest = tokens[:10] + tokens[22:30] + tokens[32:]
    sequence = cache.sequence(tokens)
    sequence.evaluate()
    sequence.discard(30, 32, reevaluate=True)
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


def test_checkpoints_from_before_a_shift_are_not_restored(make_context: Make) -> None:
    options = {"swa_full": False, "n_ctx": 2048, "n_ubatch": 32}
    ctx, plain = make_context("gemma3", **options), make_context("gemma3", **options)
    old, new = words(1, 24), words(2, 500)
    sequence = LlamaSequence(ctx, old, checkpoints=CheckpointPolicy(spacing=8))
    sequence.evaluate()
    sequence.discard(4, 10)
    sequence.append(new)
    sequence.evaluate()  # the memory drops window cells of the first tokens
    plain.decode(old, seq_id=0)
    plain.remove(0, 4, 10)
    for begin, end in ((0, 2), (2, 132)):
        plain.decode(new[begin:end], seq_id=0)
        sequence.truncate(18 + end)
        assert apart(sequence.logits(), plain.logits()) < 1e-2
        sequence.append(new[end:])
        sequence.evaluate()


def test_a_refused_discard_loses_no_cells(make_context: Make) -> None:
    ctx = make_context("gemma3", n_ctx=2048, n_seq_max=2)
    sequence = LlamaSequence(ctx, words(1, 400))
    sequence.evaluate()
    fork = sequence.fork()
    assert sequence.seq_id is not None
    cells = ctx.native.window_range(sequence.seq_id)
    with pytest.raises(UnsupportedOperation):
        sequence.discard(4, 10)
    assert ctx.native.window_range(sequence.seq_id) == cells
    assert len(fork) == 400


def test_window_cells_come_from_checkpoints_and_the_memory(make_context: Make) -> None:
    ctx = make_context("gemma3", swa_full=False, n_ctx=2048, n_ubatch=32)
    sequence = LlamaSequence(ctx, words(1, 100), checkpoints=CheckpointPolicy(spacing=8))
    sequence.evaluate()
    assert sequence.seq_id is not None
    cells, layout = sequence._cells, ctx.native.block_layout("window")
    del cells.points.windows[-1], cells.points.windows[3:5]
    wanted = np.empty(94 * layout.cell_bytes, np.uint8)
    assert ctx.native.get_block(sequence.seq_id, 5, 94, wanted, "window")
    found, at = np.zeros_like(wanted), 0
    for data, _, used in cells.window_cells(5, 99):
        layout.copy_cells(data, 0, used, found, at)
        at += used
    assert at == 94
    assert found.tobytes() == wanted.tobytes()
