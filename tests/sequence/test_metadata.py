"""What is saved beside a sequence comes back with it; what is not there yet says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from memory.kit import Make
from pykvcache import LlamaModel, LlamaSequence
from pykvcache.errors import NoKvCacheSlot, StateModelMismatch, UnsupportedOperation

MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}


def test_a_loaded_sequence_has_its_metadata(make_context: Make, tmp_path: Path) -> None:
    ctx = make_context("llama")
    with LlamaSequence(ctx, [5, 6, 7]) as sequence:
        assert sequence.metadata is None
        sequence.save(tmp_path / "plain.kv")
        sequence.save(tmp_path / "with.kv", MESSAGES)
    assert LlamaSequence.load(ctx, tmp_path / "plain.kv").metadata is None
    loaded = LlamaSequence.load(ctx, tmp_path / "with.kv")
    assert loaded.metadata == MESSAGES
    assert loaded.fork().metadata is None


def test_a_file_of_another_model_is_named_so(
    stories: LlamaModel, make_context: Make, tmp_path: Path
) -> None:
    """Tokens that this model lacks are no damage."""
    one, other = make_context(stories), make_context("llama")
    assert other.model.n_vocab < one.model.n_vocab
    with LlamaSequence(one, [one.model.n_vocab - 1] * 4) as sequence:
        sequence.logits()
        sequence.append([one.model.n_vocab - 2])
        sequence.save(tmp_path / "a.kv")
    with pytest.raises(StateModelMismatch):
        LlamaSequence.load(other, tmp_path / "a.kv")
    assert one.fingerprint.model != other.fingerprint.model
    one.fingerprint.check(make_context(stories).fingerprint)


def test_arrays_of_what_was_not_evaluated_say_so(make_context: Make) -> None:
    ctx = make_context("llama")
    with LlamaSequence(ctx, [5, 6, 7]) as sequence:
        with pytest.raises(TypeError, match="evaluate"):
            ctx.kv(sequence.seq_id)  # type: ignore[call-overload]
        sequence.evaluate()
        assert sequence.seq_id is not None
        assert len(ctx.kv(sequence.seq_id)) == 3


def test_flash_attention_takes_flags(make_context: Make) -> None:
    assert make_context("llama", flash_attn=True).flash_attn
    assert not make_context("llama", flash_attn=False).flash_attn


def test_a_prompt_that_is_too_long_is_told_what_helps(make_context: Make) -> None:
    from pykvcache import BatchGenerator

    with BatchGenerator(make_context("llama", n_ctx=256)) as generator:
        with pytest.raises(NoKvCacheSlot, match="truncate or discard") as caught:
            generator.submit([5] * 300, 4)
        assert "generate with on_full" not in str(caught.value)


def test_discarding_names_what_helps(make_context: Make) -> None:
    """With a whole window the advice is not to make one."""
    ctx = make_context("gemma3", swa_full=True, n_ctx=512)
    with LlamaSequence(ctx, list(range(20, 120))) as sequence:
        sequence.logits()
        sequence.park()
        with pytest.raises(UnsupportedOperation, match="reevaluate=True") as caught:
            sequence.discard(4, 40)
        assert "swa_full" not in str(caught.value)
        sequence.discard(4, 30, reevaluate=True)
        sequence.logits()
