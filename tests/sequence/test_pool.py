"""Ids, cells, parking and checkpoints: any number of sequences in a small context."""

from __future__ import annotations

import copy
import gc
import pickle
from pathlib import Path

import numpy as np
import pytest

from memory.kit import Fresh, Make, apart
from pykvcache import (
    BatchGenerator,
    CheckpointPolicy,
    LlamaContext,
    LlamaSequence,
    PrefixCache,
    Sampler,
)
from pykvcache.errors import ClosedError, UnsupportedOperation
from pykvcache.sequence.checkpoints import total_bytes
from pykvcache.sequence.pool import pool_of
from support.builds import PLAIN


def words(seed: int, n: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.random.default_rng(seed).integers(5, 200, n, dtype=np.int32)


def test_parked_sequences_are_restored_not_evaluated(make_context: Make) -> None:
    ctx = make_context("llama", n_ctx=256, n_seq_max=2)
    some = [LlamaSequence(ctx, words(i, 40)) for i in range(6)]
    for sequence in some:
        sequence.evaluate()
    before = ctx.tokens_evaluated
    assert before == 240
    assert [s.is_parked for s in some] == [True] * 4 + [False] * 2
    for sequence in some:
        sequence.append([7])
        sequence.evaluate()
    assert ctx.tokens_evaluated == before + 6


def test_a_dropped_sequence_frees_its_cells(make_context: Make) -> None:
    ctx = make_context("llama", n_seq_max=2)
    sequence = LlamaSequence(ctx, words(1, 30))
    sequence.evaluate()
    fork = sequence.fork(10)
    assert ctx.n_cells_used == 30
    del sequence
    gc.collect()
    assert ctx.n_cells_used == 10
    fork.close()
    fork.close()
    assert ctx.n_cells_used == 0
    assert fork.is_closed
    assert len(fork) == 10
    for call in (fork.evaluate, fork.fork, fork.park, lambda: fork.append([5])):
        with pytest.raises(ClosedError):
            call()


def test_closing_the_context_closes_its_sequences(make_context: Make) -> None:
    ctx = make_context("llama", n_seq_max=1)
    some = [LlamaSequence(ctx, words(i, 10)) for i in range(3)]
    for sequence in some:
        sequence.evaluate()
    ctx.close()
    for sequence in some:
        assert sequence.is_closed
        with pytest.raises(ClosedError):
            sequence.logits()
        sequence.close()
        repr(sequence)
    with pytest.raises(ClosedError):
        LlamaSequence(ctx)


@pytest.mark.hazard("N143")
def test_unsupported_models_are_refused(make_context: Make) -> None:
    for name in ("bert", "t5"):
        with pytest.raises(UnsupportedOperation):
            LlamaSequence(make_context(name), [5])
    # Each token would change what is held of those before it.
    ctx = make_context("llama", attention_type="non_causal")
    for make in (LlamaSequence, BatchGenerator, PrefixCache):
        with pytest.raises(UnsupportedOperation, match="non-causal"):
            make(ctx)


def test_a_sequence_is_not_copied_by_accident(make_context: Make) -> None:
    sequence = LlamaSequence(make_context("llama"), [5, 6])
    for call in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="fork"):
            call(sequence)


def test_idle_sequences_are_parked_once_keeping_them_costs_as_much(make_context: Make) -> None:
    ctx = make_context("llama", n_ctx=2048, n_seq_max=4)
    idle = [LlamaSequence(ctx, words(i, 400)) for i in range(3)]
    for sequence in idle:
        sequence.evaluate()
    busy = LlamaSequence(ctx, words(9, 20))
    list(busy.generate(3, Sampler(temperature=1, seed=1)))
    assert not any(sequence.is_parked for sequence in idle)
    list(busy.generate(60, Sampler(temperature=1, seed=1)))
    assert all(sequence.is_parked for sequence in idle)
    if not PLAIN:  # no function of llama.cpp moves cells down
        assert int(ctx.cells().cell.max()) < 256
    before = ctx.tokens_evaluated
    for sequence in idle:
        sequence.logits()
    assert ctx.tokens_evaluated == before + 3


@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba"])
@pytest.mark.parametrize("batched", [False, True])
def test_forks_after_evaluate_share_the_whole_prompt(
    name: str, batched: bool, make_context: Make
) -> None:
    with make_context(name, n_ctx=1024, n_seq_max=5) as ctx:
        prompt = LlamaSequence(ctx, [i % 50 + 1 for i in range(70)])
        prompt.evaluate()
        forks = [prompt.fork() for _ in range(4)]
        before = ctx.tokens_evaluated
        if batched:
            generator = BatchGenerator(ctx)
            for fork in forks:
                generator.submit(fork, 3)
            generator.run()
        else:
            for fork in forks:
                list(fork.generate(3))
        # Three tokens each, and on plain attention the last one of the prompt for each.
        assert ctx.tokens_evaluated - before <= 4 * 3 + (0 if ctx.native.has_rest else 4)


@pytest.mark.hazard("N144")
@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba", "jamba"])
def test_forks_without_an_id_share_one_state(
    name: str, make_context: Make, fresh_logits: Fresh, tmp_path: Path
) -> None:
    """As long as the parent holds the same, also if it was parked in between."""
    ctx = make_context(name, n_seq_max=1)
    tokens: list[int] = np.random.default_rng(1).integers(5, 56, 40).tolist()
    parent = LlamaSequence(ctx, tokens[:30])
    parent.evaluate()
    first = [parent.fork() for _ in range(3)] + [parent.fork(12)]
    parent.append(tokens[30:])
    parent.evaluate()
    second = [parent.fork(), parent.fork()]
    states = [fork._cells.state for fork in (*first, *second)]
    assert None not in states
    assert len(set(states)) == 2
    assert states[0] is not states[-1]
    parent.park()
    parent.save(tmp_path / "restored")
    assert parent.fork()._cells.state is states[-1]
    parent.truncate(30)
    parent.append([7])
    parent.evaluate()
    for fork in (*first, *second, parent):
        assert apart(fork.logits(), fresh_logits(name, fork.tokens)) < 1e-2


def n_bytes(ctx: LlamaContext) -> int:
    """Return the bytes of all checkpoints of a context."""
    return total_bytes(cells.points for cells in pool_of(ctx).members)


@pytest.mark.parametrize("name", ["mamba", "jamba", "gemma3"])
def test_checkpoints_keep_to_their_budget(
    name: str, make_context: Make, fresh_logits: Fresh
) -> None:
    """All sequences together; the last one of each stays longest, and going back stays right."""
    ctx = make_context(name, n_ctx=512, n_seq_max=2)
    tokens = np.random.default_rng(1).integers(5, 56, 100, dtype=np.int32)
    one = LlamaSequence(ctx, tokens, checkpoints=CheckpointPolicy(spacing=10))
    one.evaluate()
    whole = n_bytes(ctx)
    points = one._cells.points
    assert list(points.states) == ([] if name == "gemma3" else list(range(10, 101, 10)))
    assert points.covered() == ([(0, 100)] if name == "gemma3" else [])
    one.close()
    assert n_bytes(ctx) == 0
    # Three states, or three windows of 32 tokens in chunks of ten, fit, and not much more.
    most = whole * 3 // 2 if name == "gemma3" else whole // 2
    policy = CheckpointPolicy(max_bytes=most, spacing=10)
    some = [LlamaSequence(ctx, np.roll(tokens, i), checkpoints=policy) for i in range(3)]
    for sequence in some:
        sequence.evaluate()
        assert 0 < n_bytes(ctx) <= policy.max_bytes
    for sequence in some:
        points = sequence._cells.points
        if name == "gemma3":
            assert sum(chunk.used for chunk in points.windows) <= 100, "kept twice"
            first, last = points.covered()[-1]
            assert first <= 100 - ctx.model.n_swa
            assert last == 100
        else:
            assert 100 in points.states
    for i, sequence in enumerate(some):
        sequence.truncate(60)
        wanted = fresh_logits(name, np.roll(tokens, i)[:60])
        assert apart(sequence.logits(), wanted) < 1e-2
    none = LlamaSequence(ctx, tokens, checkpoints=CheckpointPolicy(max_bytes=0))
    none.evaluate()
    assert not list(none._cells.points)
