"""Decodes that llama.cpp answers with success, or takes back, wrongly."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest

from binding.kit import words
from memory.kit import Fresh, Load, Make, apart
from pykvcache import KvCacheError, LlamaBatch
from pykvcache.errors import (
    DecodeError,
    InvalidBatch,
    NoKvCacheSlot,
)
from support.models import RIGHT


def two(a: int, b: int) -> LlamaBatch:
    """Two sequences of different length in one batch."""
    batch = LlamaBatch()
    batch.add_sequence(words(a, 1), 0, True)
    batch.add_sequence(words(b, 2), 1, True)
    return batch


@pytest.mark.hazard("N4")
@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba", "jamba", "lfm2_swa"])
def test_pooled_embeddings_of_unequal_sequences(
    make_context: Make, name: str, pooling: str, unified: bool
) -> None:
    options: dict[str, Any] = {"embeddings": True, "pooling_type": pooling, "n_seq_max": 2}
    ctx = make_context(name, kv_unified=unified, **options)
    try:
        ctx.decode(two(9, 4))
    except InvalidBatch:
        assert ctx.sequences() == {}
        return
    for seq, n in ((0, 9), (1, 4)):
        alone = make_context(name, **options)
        alone.decode(words(n, seq + 1))
        assert apart(ctx.seq_embeddings(seq), alone.seq_embeddings()) < RIGHT


@pytest.mark.hazard("N4")
@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba", "lfm2_swa"])
def test_non_causal_sequences_of_unequal_length(
    make_context: Make, name: str, unified: bool
) -> None:
    options: dict[str, Any] = {"attention_type": "non_causal", "n_seq_max": 2}
    ctx = make_context(name, kv_unified=unified, **options)
    try:
        ctx.decode(two(9, 4))
    except InvalidBatch:
        assert ctx.sequences() == {}
        return
    alone = make_context(name, **options)
    one = LlamaBatch()
    one.add_sequence(words(9, 1), 0, True)
    alone.decode(one)
    for i in range(9):
        assert apart(ctx.logits(i), alone.logits(i)) < RIGHT


@pytest.mark.hazard("N8")
def test_resting_sequence_whose_window_cells_are_all_recycled(
    make_context: Make, fresh_logits: Fresh, model: Load
) -> None:
    # The window's cache alone would say that the sequence is empty (as with chunked windows).
    tiny = model("gemma3", n_swa=1)
    ctx = make_context(tiny, swa_full=False, n_ctx=1024, n_ubatch=32)
    ctx.decode(words(10, 1), seq_id=1)
    for k in range(40):
        ctx.decode(words(16, k), seq_id=0)
    assert ctx.kv_cache_seq_pos_max(1) == 9
    assert ctx.can_resume(1, 10)
    ctx.decode([7], seq_id=1)
    wanted = fresh_logits(tiny, [*words(10, 1), 7], swa_full=False)
    assert apart(ctx.logits(), wanted) < 5 * RIGHT


@pytest.mark.hazard("N3")
@pytest.mark.parametrize(
    ("name", "seed", "options"),
    [
        ("lfm2_swa", 5, {"swa_full": False, "n_seq_max": 3}),
        ("gemma3", 7, {"swa_full": False, "n_seq_max": 7}),
    ],
)
def test_unequal_sequences_in_one_batch_keep_their_windows(
    make_context: Make, fresh_logits: Fresh, name: str, seed: int, options: dict[str, Any]
) -> None:
    rng = random.Random(seed)
    room = 32
    ctx = make_context(name, n_ctx=2048, n_batch=256, n_ubatch=room, **options)
    held: dict[int, list[int]] = {seq: [] for seq in range(ctx.n_seq_max)}
    for _ in range(60):
        choice = rng.random()
        if choice < 0.85:
            batch, used = LlamaBatch(), []
            for seq in rng.sample(sorted(held), rng.randint(1, len(held))):
                n = rng.randint(1, max(1, room - len(batch)))
                if len(batch) + n > room or len(held[seq]) + n > 400:
                    continue
                tokens = words(n, rng.randrange(10**6))
                batch.add_sequence(tokens, seq, True, start=len(held[seq]))
                used.append((seq, tokens, len(batch) - 1))
            if not used:
                continue
            try:
                ctx.decode(batch)
            except DecodeError:
                # No room, or needs removal since: what is left is what the positions say.
                for seq, tokens, _ in used:
                    end = ctx.kv_cache_seq_pos_max(seq) + 1
                    held[seq] = [*held[seq], *tokens.tolist()][:end]
                continue
            for seq, tokens, last in used:
                held[seq] += tokens.tolist()
                assert apart(ctx.logits(last), fresh_logits(name, held[seq])) < 10 * RIGHT
        elif choice < 0.92:
            seq = rng.randrange(len(held))
            ctx.clear_kv_cache_seq(seq)
            held[seq] = []
        else:
            a, b = rng.sample(sorted(held), 2)
            ctx.copy_kv_cache_seq(a, b)
            held[b] = list(held[a])


def test_a_state_that_has_no_room_beside_forks_breaks_nothing(
    make_context: Make,
) -> None:
    """Cells that forks share stay taken when the sequence leaves them.

    So neither the state nor what was there before it found room in the window: the sequence was
    gone, and the context refused all work.
    """
    ctx = make_context("gemma3", swa_full=False, n_ctx=2048, n_ubatch=32)
    tokens = words(250)
    ctx.decode(tokens[:200])
    state = ctx.get_state(0)
    ctx.copy_kv_cache_seq(0, 1)
    ctx.copy_kv_cache_seq(0, 2)
    with contextlib.suppress(NoKvCacheSlot):
        for token in tokens[200:]:
            for seq in (0, 1, 2):
                ctx.decode([token], seq_id=seq)
    before = ctx.get_state().tobytes()
    with pytest.raises(NoKvCacheSlot, match="window"):
        ctx.set_state(state, 0)
    assert ctx.get_state().tobytes() == before
    ctx.clear_kv_cache_seq(2)
    ctx.set_state(state, 0)
    assert ctx.kv_cache_seq_pos_max(0) == 199


# Encoders ---------------------------------------------------------------------------


@pytest.mark.hazard("N5")
def test_copy_between_sequences_of_different_inputs_cannot_go_on(make_context: Make) -> None:
    ctx = make_context("t5")
    ctx.clear_kv_cache()
    batch = LlamaBatch()
    batch.add_sequence(words(6, 1), 0)
    batch.add_sequence(words(9, 2), 1)
    ctx.encode(batch)
    ctx.decode([0, 7, 8, 9])
    ctx.copy_kv_cache_seq(0, 1)
    with pytest.raises(KvCacheError):
        ctx.decode([11], seq_id=1)
    ctx.decode([11])


@pytest.mark.hazard("N7")
def test_encoding_leaves_no_logits(make_context: Make) -> None:
    ctx = make_context("t5")
    for _ in range(2):  # the second time the rows of a decode are still in the buffer
        with pytest.raises((IndexError, KvCacheError)):
            ctx.logits(0)
        ctx.decode([0, 7])
        ctx.logits()
        ctx.clear_kv_cache()
        ctx.encode(words(5))
