"""Sequences go on after `LlamaContext.abort`, also where the memory cannot keep a part."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np
import pytest

from memory.kit import Logits, apart
from pykvcache import BatchGenerator, CheckpointPolicy, LlamaContext, LlamaSequence, PrefixCache
from pykvcache.errors import DecodeAborted
from support.models import MODELS, RIGHT

Make = Callable[..., LlamaContext]
NAMES = ["llama", "mamba", "lfm2_swa", "minimax_m3"]
TOKENS = (np.arange(240) % 50 + 5).tolist()


def stopped(ctx: LlamaContext, call: Callable[[], object], step: int = 30) -> None:
    """Stop a call's decode at a step of its graphs."""
    ctx.native.abort_at(step)
    with pytest.raises(DecodeAborted):
        call()


@pytest.mark.not_on_a_device(reason="a decode is stopped between its parts alone")
@pytest.mark.parametrize("name", NAMES)
def test_a_first_evaluation_that_was_stopped_is_made_again(
    name: str, make_context: Make, fresh_logits: Callable[..., Logits]
) -> None:
    unified = MODELS[name].can_unify
    ctx = make_context(name, n_ctx=512, n_seq_max=2, n_ubatch=16, kv_unified=unified)
    made: list[LlamaSequence] = []

    def begin() -> None:
        made.append(LlamaSequence(ctx, TOKENS))
        made[-1].evaluate()

    stopped(ctx, begin)
    assert apart(made[-1].logits(), fresh_logits(name, TOKENS)) < RIGHT
    for sequence in made:
        sequence.close()
    generator = BatchGenerator(ctx, n_chunk=240)
    alone = generator.submit(TOKENS, 3).wait().tokens.tolist()
    handles = []

    def step() -> None:
        handles.append(generator.submit(TOKENS, 3))
        generator.run(progress=False)

    stopped(ctx, step)
    generator.run(progress=False)
    assert [handle.tokens.tolist() for handle in handles] == [alone] * len(handles)


@pytest.mark.not_on_a_device(reason="a decode is stopped between its parts alone")
@pytest.mark.parametrize("use", ["fork", "park", "sync", "truncate"])
@pytest.mark.parametrize("name", NAMES)
def test_what_was_stopped_later_can_be_forked_parked_and_cut(
    name: str, use: str, make_context: Make, fresh_logits: Callable[..., Logits]
) -> None:
    unified = MODELS[name].can_unify
    ctx = make_context(name, n_ctx=1024, n_seq_max=3, n_ubatch=16, kv_unified=unified)
    policy = CheckpointPolicy(spacing=16)
    sequence = LlamaSequence(ctx, TOKENS[:60], checkpoints=policy)
    sequence.evaluate()

    sequence.append(TOKENS[60:])
    stopped(ctx, sequence.evaluate, 150)
    if use == "fork":
        with sequence.fork() as child:
            assert apart(child.logits(), fresh_logits(name, TOKENS)) < RIGHT
    elif use == "park":
        sequence.park()
    elif use == "sync":
        # The memory holds other tokens than those that are evaluated.
        sequence.sync(TOKENS[:70] + TOKENS[7:99])
    else:
        sequence.truncate(60)
    wanted = fresh_logits(name, sequence.tokens)
    assert apart(sequence.logits(), wanted) < RIGHT
    sequence.close()
    assert not ctx.sequences()


@pytest.mark.not_on_a_device(reason="a decode is stopped between its parts alone")
@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba", "lfm2_swa"])
def test_a_prompt_that_begins_like_one_that_was_stopped_is_right(
    name: str, make_context: Make, fresh_logits: Callable[..., Logits]
) -> None:
    unified = MODELS[name].can_unify
    ctx = make_context(name, n_ctx=1024, n_seq_max=3, n_ubatch=16, kv_unified=unified)
    cache = PrefixCache(ctx, block_size=8)
    first = cache.sequence(TOKENS[:60])
    first.evaluate()

    first.append(TOKENS[60:])
    stopped(ctx, first.evaluate)
    first.truncate(60)
    for n in (60, 70, 40):
        with cache.sequence(TOKENS[:n]) as second:
            assert apart(second.logits(), fresh_logits(name, TOKENS[:n])) < RIGHT, n
    assert apart(first.logits(), fresh_logits(name, TOKENS[:60])) < RIGHT
    cache.close()


def test_an_interrupt_just_after_an_id_was_taken_lets_it_go_on_and_close(
    make_context: Make, fresh_logits: Callable[..., Logits], monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = make_context("llama", n_seq_max=2)
    sequence = LlamaSequence(ctx, TOKENS[:9])

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(weakref, "finalize", interrupt)
        with pytest.raises(KeyboardInterrupt):
            sequence.evaluate()
    assert apart(sequence.logits(), fresh_logits("llama", TOKENS[:9])) < RIGHT
    sequence.park()
    sequence.close()
    assert not ctx.sequences()
