"""Decoding what can be decoded: parts, full caches, tokens of several sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from binding.kit import differ, lengths, words
from pykvcache import LlamaBatch
from pykvcache.errors import DecodeError, InvalidBatch, NoKvCacheSlot, UnsupportedOperation
from support.models import RIGHT, WRONG

CACHES = ["llama", "gemma3", "qwen2vl", "t5"]


# Parts --------------------------------------------------------------------------------


@pytest.mark.hazard("D1")
@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba", "jamba"])
def test_more_tokens_than_n_batch_are_decoded_in_parts(
    make_context: Any, fresh_logits: Any, name: str
) -> None:
    tokens = words(150)
    ctx = make_context(name, n_batch=32, n_ubatch=16)
    ctx.decode(tokens)
    assert lengths(ctx) == {0: 150}
    assert ctx.tokens_evaluated == 150
    assert differ(ctx.logits(), fresh_logits(name, tokens)) < RIGHT
    assert (ctx.logits(149) == ctx.logits(-1)).all()


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba"])
def test_a_batch_in_parts_gives_the_logits_of_one_whole(make_context: Any, name: str) -> None:
    asked = [0, 3, 15, 16, 31, 32, 33, 63, 99]
    tokens = words(100)
    flags = np.isin(np.arange(100), asked)
    batch = LlamaBatch.from_arrays(tokens, np.arange(100), 0, flags)
    parts, whole = make_context(name, n_batch=32, n_ubatch=16), make_context(name)
    parts.decode(batch)
    whole.decode(batch)
    for k, i in enumerate(asked):
        assert differ(parts.logits(i), whole.logits(i)) < RIGHT, i
        assert (parts.logits(i) == parts.logits(k - len(asked))).all()
    for i in (1, 14, 34, 98, 100):
        with pytest.raises(IndexError):
            parts.logits(i)


def test_parts_of_several_sequences_do_not_mix(make_context: Any, fresh_logits: Any) -> None:
    batch = LlamaBatch()
    texts = {seq: words(30 + 7 * seq, seq) for seq in range(4)}
    for seq, tokens in texts.items():
        batch.add_sequence(tokens, seq)
    ctx = make_context("llama", n_batch=16)
    ctx.decode(batch)
    assert lengths(ctx) == {seq: len(tokens) for seq, tokens in texts.items()}
    for seq, tokens in texts.items():
        assert differ(ctx.logits(seq - 4), fresh_logits("llama", tokens)) < RIGHT


# Full caches --------------------------------------------------------------------------


@pytest.mark.parametrize("name", CACHES)
def test_a_full_cache_refuses_what_does_not_fit_and_takes_what_does(
    make_context: Any, fresh_logits: Any, name: str
) -> None:
    ctx, tokens = make_context(name), words(256)
    ctx.decode(tokens[:250])
    with pytest.raises(NoKvCacheSlot) as error:
        ctx.decode(words(10))
    assert error.value.code == 1
    assert isinstance(error.value, RuntimeError)
    facts = error.value.n_tokens, error.value.n_free, error.value.n_cells, error.value.n_decoded
    assert facts == (10, 6, 256, 0)
    assert lengths(ctx) == {0: 250}
    ctx.logits()  # nothing was changed
    ctx.decode(tokens[250:])
    assert lengths(ctx) == {0: 256}
    if name != "t5":
        assert differ(ctx.logits(), fresh_logits(name, tokens)) < RIGHT


@pytest.mark.hazard("D21", "N45")
@pytest.mark.parametrize("as_batch", [False, True])
def test_a_long_call_that_does_not_fit_is_refused_before_any_of_it(
    make_context: Any, fresh_logits: Any, as_batch: bool
) -> None:
    ctx, tokens = make_context("llama", n_batch=32), words(300)
    batch = LlamaBatch.from_arrays(tokens, np.arange(300), 0, True)
    ctx.decode([5, 6], seq_id=1)
    row = ctx.logits()
    with pytest.raises(NoKvCacheSlot, match="300 more tokens: 254 of 256") as error:
        ctx.decode(batch if as_batch else tokens)
    assert error.value.n_decoded == 0
    assert lengths(ctx) == {1: 2}
    assert ctx.tokens_evaluated == 2
    assert (ctx.logits() == row).all()
    ctx.decode(tokens[:254])
    assert differ(ctx.logits(), fresh_logits("llama", tokens[:254])) < RIGHT


def test_tokens_that_fit_the_window_stay_and_are_counted(
    make_context: Any, fresh_logits: Any
) -> None:
    # Forks of a prefix keep cells of the window that no free cell of plain attention tells of.
    ctx = make_context("gemma3", swa_full=False, n_ctx=4096, n_ubatch=32, n_batch=32, n_seq_max=2)
    tokens = words(2000)
    ctx.decode(tokens[:200])
    ctx.copy_kv_cache_seq(0, 1)
    with pytest.raises(NoKvCacheSlot) as error:
        ctx.decode(tokens[200:])
    done = error.value.n_decoded
    assert 0 < done < 1800
    assert done % 32 == 0
    assert ctx.kv_cache_seq_pos_max(0) == 200 + done - 1
    with pytest.raises(IndexError):
        ctx.logits()
    ctx.clear_kv_cache_seq(1)
    ctx.decode(tokens[200 + done :])
    assert ctx.tokens_evaluated == 2000


def test_each_stream_is_counted_by_itself(make_context: Any) -> None:
    ctx = make_context("llama", kv_unified=False, n_seq_max=2, n_ctx=512, n_batch=32)
    ctx.decode(words(200), seq_id=0)
    both = LlamaBatch.from_arrays(
        words(120), np.r_[np.arange(60), np.arange(200, 260)], np.repeat([1, 0], 60), True
    )
    with pytest.raises(NoKvCacheSlot, match="60 more tokens of sequence 0: 56 of 256"):
        ctx.decode(both)
    assert lengths(ctx) == {0: 200}


def test_each_stream_has_its_own_room(make_context: Any) -> None:
    ctx = make_context("llama", kv_unified=False, n_seq_max=2, n_ctx=512)
    assert ctx.n_ctx_seq == 256
    ctx.decode(words(256), seq_id=0)
    with pytest.raises(NoKvCacheSlot):
        ctx.decode([5], seq_id=0)
    ctx.decode(words(256), seq_id=1)
    assert lengths(ctx) == {0: 256, 1: 256}


def test_a_recurrent_sequence_is_never_full(make_context: Any) -> None:
    ctx = make_context("mamba")
    ctx.decode(words(1000))
    assert lengths(ctx) == {0: 1000}


# Tokens of several sequences ----------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2vl"])
def test_a_prompt_of_several_sequences_is_computed_once(
    make_context: Any, fresh_logits: Any, name: str
) -> None:
    ctx, prompt, tails = make_context(name), words(20), {0: [7, 8], 1: [9], 3: [10, 11, 12]}
    batch = LlamaBatch()
    for pos, token in enumerate(prompt):
        batch.add(token, pos, list(tails), pos == 19)
    ctx.decode(batch)
    assert ctx.tokens_evaluated == 20
    assert lengths(ctx) == dict.fromkeys(tails, 20)
    assert differ(ctx.logits(), fresh_logits(name, prompt)) < RIGHT
    for seq, tail in tails.items():
        ctx.decode(tail, seq_id=seq)
        assert differ(ctx.logits(), fresh_logits(name, [*prompt, *tail])) < RIGHT


def test_sequences_that_share_cells_continue_together(make_context: Any, fresh_logits: Any) -> None:
    ctx, prompt = make_context("llama"), words(20)
    ctx.decode(prompt)
    ctx.copy_kv_cache_seq(0, 2)
    for ids in ([2, 0], [0, 2]):
        batch = LlamaBatch()
        batch.add(6, ctx.kv_cache_seq_pos_max(0) + 1, ids, True)
        ctx.decode(batch)
    assert differ(ctx.logits(), fresh_logits("llama", [*prompt, 6, 6])) < RIGHT


def diverged(ctx: Any) -> None:
    ctx.copy_kv_cache_seq(0, 1)
    ctx.decode([6], seq_id=0)
    ctx.decode([7], seq_id=1)


def of_equal_length(ctx: Any) -> None:
    ctx.decode(words(20), seq_id=1)


def shorter(ctx: Any) -> None:
    ctx.copy_kv_cache_seq(0, 1, 0, 10)


def with_a_hole(ctx: Any) -> None:
    ctx.copy_kv_cache_seq(0, 1)
    ctx.clear_kv_cache_seq(1, 5, 6)


def empty(ctx: Any) -> None:
    pass


@pytest.mark.parametrize("before", [diverged, of_equal_length, shorter, with_a_hole, empty])
def test_diverged_sequences_cannot_share_a_token(make_context: Any, before: Any) -> None:
    ctx, twin = make_context("llama"), make_context("llama")
    for each in (ctx, twin):
        each.decode(words(20))
        before(each)
    held = lengths(ctx)
    batch = LlamaBatch()
    batch.add(5, held[0], [0, 1], True)
    with pytest.raises(InvalidBatch):
        ctx.decode(batch)
    assert lengths(ctx) == held
    for each in (ctx, twin):
        each.decode([5], seq_id=0)
    assert differ(ctx.logits(), twin.logits()) < RIGHT


def test_sequences_that_diverge_inside_the_batch_cannot_share_again(make_context: Any) -> None:
    ctx = make_context("llama")
    batch = LlamaBatch()
    batch.add(5, 0, [0, 1])
    batch.add(6, 1, 0)
    batch.add(7, 1, 1)
    batch.add(8, 2, [0, 1], True)
    with pytest.raises(InvalidBatch, match="diverged"):
        ctx.decode(batch)
    assert lengths(ctx) == {}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"kv_unified": False}),
        ("gemma3", {"kv_unified": False}),
        ("mamba", {}),
        ("mamba", {"kv_unified": False}),
        ("jamba", {}),
        ("lfm2_swa", {}),
    ],
)
def test_memories_that_cannot_share_a_token_say_so(
    make_context: Any, name: str, options: Any
) -> None:
    ctx = make_context(name, **options)
    batch = LlamaBatch()
    batch.add(5, 0, [0, 1], True)
    with pytest.raises(UnsupportedOperation):
        ctx.decode(batch)
    assert lengths(ctx) == {}


def test_the_order_inside_a_batch_is_free_between_sequences(
    make_context: Any, fresh_logits: Any
) -> None:
    a, b = words(12, 1), words(12, 2)
    batch = LlamaBatch()
    for i in range(12):
        batch.add(a[i], i, 2, i == 11)
        batch.add(b[i], i, 0, i == 11)
    ctx = make_context("jamba")
    ctx.decode(batch)
    assert differ(ctx.logits(-2), fresh_logits("jamba", a)) < RIGHT
    assert differ(ctx.logits(-1), fresh_logits("jamba", b)) < RIGHT
    assert differ(ctx.logits(-1), ctx.logits(-2)) > WRONG


def test_errors_of_decoding_have_one_root() -> None:
    assert issubclass(NoKvCacheSlot, DecodeError)
    assert issubclass(InvalidBatch, DecodeError)
    assert issubclass(InvalidBatch, ValueError)
    assert issubclass(DecodeError, RuntimeError)
