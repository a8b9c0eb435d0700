"""Ids, cells and parking: any number of sequences in a small context."""

from __future__ import annotations

import copy
import gc
import pickle
import threading

import numpy as np
import pytest

from memory.kit import Fresh, Make, apart
from pykvcache import BatchGenerator, LlamaSequence, PrefixCache, Sampler
from pykvcache.errors import ClosedError, UnsupportedOperation
from support.builds import PLAIN


def words(seed: int, n: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.random.default_rng(seed).integers(5, 200, n, dtype=np.int32)


def test_hundreds_of_requests_over_four_ids_in_512_cells(
    make_context: Make, fresh_logits: Fresh
) -> None:
    ctx = make_context("llama", n_ctx=512, n_seq_max=4)
    rng = np.random.default_rng(1)
    alive: list[tuple[LlamaSequence, list[int]]] = []
    for request in range(400):
        if len(alive) == 12:
            alive.pop(int(rng.integers(12)))
        if alive and rng.random() < 0.5:
            sequence, tokens = alive[int(rng.integers(len(alive)))]
            more = words(request, 3)
            sequence.append(more)
            tokens += more.tolist()
        else:
            tokens = words(request % 50, int(rng.integers(1, 60))).tolist()
            sequence = LlamaSequence(ctx, tokens)
            alive.append((sequence, tokens))
        sequence.evaluate()
        if request % 20 == 0:
            assert apart(sequence.logits(), fresh_logits("llama", tokens)) < 1e-3
        assert ctx.n_cells_used <= 512
    for sequence, tokens in alive:
        assert apart(sequence.logits(), fresh_logits("llama", tokens)) < 1e-3


def test_parking_spares_the_evaluation(make_context: Make) -> None:
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


def test_ids_that_are_used_by_hand_are_left_alone(make_context: Make) -> None:
    ctx = make_context("llama", n_seq_max=3)
    mine = words(1, 20)
    ctx.decode(mine, seq_id=2)
    ctx.decode(mine[:10], seq_id=0)
    some = [LlamaSequence(ctx, words(i, 30)) for i in range(4)]
    for sequence in some:
        sequence.evaluate()
        assert sequence.seq_id == 1
    assert ctx.kv_cache_seq_pos_max(2) == 19
    assert ctx.kv_cache_seq_pos_max(0) == 9


@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba", "mamba"])
def test_what_is_changed_by_hand_is_found_out(
    name: str, make_context: Make, fresh_logits: Fresh
) -> None:
    ctx = make_context(name, n_seq_max=2)
    tokens = words(1, 20)

    def clear(seq: int) -> None:
        ctx.clear_kv_cache()

    def remove(seq: int) -> None:
        ctx.clear_kv_cache_seq(seq)

    def replace(seq: int) -> None:
        ctx.clear_kv_cache_seq(seq)
        ctx.decode(words(2, 20), seq_id=seq)

    def extend(seq: int) -> None:
        ctx.decode(words(2, 3), seq_id=seq)

    for change in (clear, remove, replace, extend):
        sequence = LlamaSequence(ctx, tokens)
        sequence.evaluate()
        assert sequence.seq_id is not None
        change(sequence.seq_id)
        sequence.append([9])
        expected = fresh_logits(name, [*tokens.tolist(), 9])
        assert apart(sequence.logits(), expected) < 1e-2, change.__name__
        sequence.close()


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
def test_models_without_what_it_needs_are_refused(make_context: Make) -> None:
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


def test_idle_sequences_leave_when_staying_has_cost_as_much(make_context: Make) -> None:
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


def test_threads_share_a_context_and_a_sequence(make_context: Make, fresh_logits: Fresh) -> None:
    ctx = make_context("llama", n_ctx=512, n_seq_max=2)
    shared = LlamaSequence(ctx, [5])
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for i in range(15):
                own = words(100 * seed + i, 20)
                sequence = LlamaSequence(ctx, own)
                assert apart(sequence.logits(), fresh[seed, i]) < 1e-3
                shared.append([5 + seed])
                shared.evaluate()
        except BaseException as error:
            failures.append(error)

    fresh = {
        (seed, i): fresh_logits("llama", words(100 * seed + i, 20))
        for seed in range(3)
        for i in range(15)
    }
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert len(shared) == 46
    assert apart(shared.logits(), fresh_logits("llama", shared.tokens)) < 1e-3
