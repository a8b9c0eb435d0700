"""Sequences in files: tokens, pending ones, what was evaluated, and metadata."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from memory.kit import CASES, Case, Logits, Make, apart
from pykvcache import LlamaModel, LlamaSequence, SequenceState
from pykvcache.errors import (
    StateError,
    StateLayoutMismatch,
    StateModelMismatch,
    UnsupportedOperation,
)

SAVED = tuple(c for c in CASES if c.has_states and c.name != "t5")


@pytest.mark.parametrize("case", SAVED, ids=str)
def test_a_loaded_sequence_continues_where_it_was_saved(
    case: Case, make_context: Make, fresh_logits: Callable[..., Logits], tmp_path: Path
) -> None:
    path = tmp_path / "sequence"
    tokens = np.random.default_rng(5).integers(5, case.n_vocab - 2, 50, dtype=np.int32)
    ctx = make_context(case.name, **case.options)
    sequence = LlamaSequence(ctx, tokens[:40])
    sequence.evaluate()
    sequence.truncate(35)
    sequence.append(tokens[35:50])
    assert sequence.save(path, {"title": "a"}) == path.stat().st_size
    other = make_context(case.name, **(case.options | {"n_seq_max": 1}))
    loaded = LlamaSequence.load(other, path)
    assert loaded.tokens.tolist() == tokens.tolist()
    assert loaded.n_evaluated == sequence.n_evaluated
    assert apart(loaded.logits(), fresh_logits(case.name, tokens)) < case.tolerance
    assert other.tokens_evaluated == 50 - sequence.n_evaluated or sequence.n_evaluated == 50
    again = LlamaSequence.load(other, path)  # the first one is parked
    assert apart(again.logits(), fresh_logits(case.name, tokens)) < case.tolerance


def test_invalid_files_raise(make_context: Make, tmp_path: Path) -> None:
    ctx = make_context("llama", n_seq_max=2)
    sequence = LlamaSequence(ctx, [5, 6, 7])
    sequence.evaluate()
    sequence.save(tmp_path / "good")
    used = ctx.n_cells_used
    with pytest.raises(FileNotFoundError):
        LlamaSequence.load(ctx, tmp_path / "none")
    (tmp_path / "bad").write_bytes((tmp_path / "good").read_bytes()[:-1])
    with pytest.raises(StateError):
        LlamaSequence.load(ctx, tmp_path / "bad")
    with pytest.raises(StateModelMismatch):
        LlamaSequence.load(make_context("gemma3"), tmp_path / "good")
    ctx.sequence_state(sequence.seq_id).save(tmp_path / "no tokens")  # type: ignore[arg-type]
    with pytest.raises(StateError, match="tokens"):
        LlamaSequence.load(ctx, tmp_path / "no tokens")
    state = ctx.sequence_state(sequence.seq_id, [5, 6, 7], {"pending": [10**6]})  # type: ignore[arg-type]
    state.save(tmp_path / "forged")
    with pytest.raises(StateError, match="pending"):
        LlamaSequence.load(ctx, tmp_path / "forged")
    for wrong in (-6, 10**6):
        state = ctx.sequence_state(sequence.seq_id, [5, wrong, 7])  # type: ignore[arg-type]
        state.save(tmp_path / "forged")
        with pytest.raises(StateError, match=str(wrong)):
            LlamaSequence.load(ctx, tmp_path / "forged")
    assert ctx.n_cells_used == used
    assert SequenceState.load(tmp_path / "good").tokens.tolist() == [5, 6, 7]  # type: ignore[union-attr]


def test_other_types_are_converted_on_request(
    make_context: Make, fresh_logits: Callable[..., Logits], tmp_path: Path
) -> None:
    tokens = [5, 6, 7, 8, 9, 10]
    sequence = LlamaSequence(make_context("llama"), tokens)
    sequence.evaluate()
    sequence.save(tmp_path / "s")
    other = make_context("llama", type_k="f16", type_v="f16")
    with pytest.raises(StateLayoutMismatch, match="convert=True"):
        LlamaSequence.load(other, tmp_path / "s")
    with pytest.raises(TypeError, match="convert"):
        LlamaSequence.load(other, tmp_path / "s", convert=1)  # type: ignore[arg-type]
    assert other.n_cells_used == 0
    loaded = LlamaSequence.load(other, tmp_path / "s", convert=True)
    assert (loaded.n_evaluated, other.tokens_evaluated) == (6, 0)
    assert apart(loaded.logits(), fresh_logits("llama", tokens)) < 0.01


def test_memories_without_states_cannot_be_saved(make_context: Make, tmp_path: Path) -> None:
    ctx = make_context("deepseek4", kv_unified=False)
    sequence = LlamaSequence(ctx, [5, 6, 7])
    sequence.evaluate()
    with pytest.raises(UnsupportedOperation):
        sequence.save(tmp_path / "s")


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


def test_a_file_of_another_model_is_a_mismatch_not_damage(
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
