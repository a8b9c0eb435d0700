"""Sequences go on after `LlamaContext.abort`, also where the memory cannot keep a part."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np
import pytest

from memory.kit import Logits, apart
from pykvcache import BatchGenerator, LlamaContext, LlamaSequence
from pykvcache.errors import DecodeAborted
from support.models import MODELS, RIGHT
from support.stopping import stop_soon

Make = Callable[..., LlamaContext]
NAMES = ["llama", "mamba", "lfm2_swa", "minimax_m3"]
TOKENS = (np.arange(240) % 50 + 5).tolist()


def stopped(ctx: LlamaContext, call: Callable[[], object]) -> None:
    """Stop a call's decode."""
    for _ in range(50):
        thread = stop_soon(ctx, 0.0)
        try:
            call()
        except DecodeAborted:
            return
        finally:
            thread.join()
    raise AssertionError("no decode was stopped")


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
