"""A step over requests that just go on is one native call; whatever comes between is noticed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from memory.kit import CASES, Case, Make, words
from pykvcache import BatchGenerator, LlamaContext, LlamaSequence, Sampler
from pykvcache._native import lib
from pykvcache.errors import InvalidBatch

SERVED = tuple(case for case in CASES if case.name != "t5")


def sampler(ctx: LlamaContext, seed: int) -> Sampler:
    """Return one that never ends a generation by itself."""
    ends = {t: -1e6 for t in range(ctx.model.n_vocab) if ctx.native.is_eog(t)}
    return Sampler(temperature=1, top_k=20, repeat_penalty=1.1, seed=seed, logit_bias=ends)


def python_calls(call: Callable[[], object]) -> int:
    """Count the functions in Python that something calls."""
    calls = 0

    def look(frame: object, event: str, arg: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return calls


def test_a_step_runs_as_much_python_for_many_as_for_one(make_context: Make) -> None:
    counts = []
    for n in (1, 7):
        ctx = make_context("llama", n_ctx=512, n_seq_max=8)
        generator = BatchGenerator(ctx)
        handles = [generator.submit(words(i, 9), 40, sampler(ctx, i)) for i in range(n)]
        for _ in range(3):
            generator.step()
        counts.append(python_calls(generator.step))
        assert [len(handle.tokens) for handle in handles] == [4] * n
    assert counts[0] == counts[1]


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_changes_between_steps_are_noticed(case: Case, make_context: Make) -> None:
    """Cells that go by hand, edits, other sequences: each request goes on as if alone."""
    ctx = make_context(case.name, **(case.options | {"n_seq_max": 4}))
    lonely = make_context(case.name, **(case.options | {"n_seq_max": 1}))
    generator = BatchGenerator(ctx)
    sequences = [LlamaSequence(ctx, words(i, 12)) for i in range(3)]
    handles = [generator.submit(s, 16, sampler(ctx, i)) for i, s in enumerate(sequences)]
    changes: list[Callable[[], object]] = [
        lambda: ctx.clear_kv_cache_seq(sequences[0].seq_id),
        lambda: ctx.clear_kv_cache(),
        lambda: sequences[1].park(),
        lambda: LlamaSequence(ctx, words(8, 9)).logits(),
        lambda: sequences[2].logits(),
        lambda: sequences[0].fork().logits(),
        lambda: ctx.copy_kv_cache_seq(sequences[0].seq_id, sequences[1].seq_id),
    ]
    for change in changes:
        generator.step()
        generator.step()
        assert all(s.seq_id is not None for s in sequences)
        change()
    generator.run()
    for i, handle in enumerate(handles):
        with LlamaSequence(lonely, words(i, 12)) as alone:
            assert handle.tokens.tolist() == list(alone.generate(16, sampler(ctx, i))), i


@pytest.mark.hazard("N73")
def test_nothing_is_decoded_after_cells_that_changed(make_context: Make) -> None:
    ctx = make_context("llama", n_seq_max=2)
    native = ctx.native
    ledger = lib.Tokens(np.array(words(1, 12), np.int32))
    assert native.decode_pending(ledger, 1, 11, False) == (True, None)
    lane = lib.Lane(ledger, Sampler(temperature=0).native, 5, frozenset(), False, False)
    ledger.seq_id = 1
    rows = lib.Rows(4, 1)
    rows.add(ledger.token_at(11), 11, 1, True)
    looks: list[Any] = []
    ctx.copy_kv_cache_seq(1, 0)
    ctx.copy_kv_cache_seq(0, 1)
    before = ctx.tokens_evaluated
    assert native.decode_pending(ledger, 1, 12, True) == (False, None)
    assert native.decode_shares(rows, [(ledger, 1, 12, 0)]) is None
    assert native.step([lane], ["owner"], looks) is None
    assert native.not_ready([lane], ["owner"]) == ["owner"]
    assert (ctx.tokens_evaluated, len(ledger), lane.tokens) == (before, 12, [])
    ledger.version = native.prefix_version(1)
    made = native.step([lane], ["owner"], looks)
    assert made == ([("owner", lane.tokens[0])], [])
    assert ledger.tokens.tolist() == [*words(1, 12), *lane.tokens]
    assert ledger.n_evaluated == 12
    with pytest.raises(ValueError, match="pending"):
        native.decode_pending(ledger, 1, 14, False)


def test_who_waits_for_a_place_costs_those_that_run_nothing(make_context: Make) -> None:
    ctx = make_context("llama", n_ctx=512, n_seq_max=4)
    generator = BatchGenerator(ctx)
    running = [generator.submit(words(i, 9), 12, sampler(ctx, i)) for i in range(4)]
    for _ in range(3):
        generator.step()
    calls = python_calls(generator.step)
    waiting = generator.submit(words(9, 9), 3, sampler(ctx, 9))
    assert python_calls(generator.step) <= calls + 5
    assert python_calls(generator.step) == calls
    assert (generator.n_running, generator.n_waiting) == (4, 1)
    # Whoever ranks higher takes a place at once.
    first = generator.submit(words(10, 9), 3, sampler(ctx, 10), priority=1)
    generator.step()
    assert (len(first.tokens), generator.n_waiting) == (1, 2)
    generator.run()
    assert [len(handle.tokens) for handle in (*running, waiting, first)] == [12] * 4 + [3, 3]


@pytest.mark.parametrize("wrap", [list, tuple, np.array, np.int64, np.uint8])
def test_ids_of_any_kind_are_the_same_prompt(wrap: Any, make_context: Make) -> None:
    ctx = make_context("llama", n_ctx=256)
    generator = BatchGenerator(ctx)
    handle = generator.submit(wrap(words(1, 9)), 4)
    assert handle.sequence.tokens.tolist() == words(1, 9)
    assert handle.wait().tokens.tolist() == generator.submit(words(1, 9), 4).wait().tokens.tolist()


@pytest.mark.parametrize("wrap", [list, np.int32, np.int64])
@pytest.mark.parametrize("at", [0, 8])
@pytest.mark.parametrize("wrong", [-1, 2**31 - 1, "n_vocab"])
def test_an_id_outside_of_the_vocabulary_is_named(
    wrong: int | str, at: int, wrap: Any, make_context: Make
) -> None:
    ctx = make_context("llama", n_ctx=256)
    generator = BatchGenerator(ctx)
    n_vocab = ctx.model.n_vocab
    value = n_vocab if isinstance(wrong, str) else wrong
    prompt = words(1, 9)
    prompt[at] = value
    with pytest.raises(InvalidBatch, match=rf"token {value} \(at {at}\)") as caught:
        generator.submit(wrap(prompt), 4)
    assert (caught.value.index, caught.value.value, caught.value.limit) == (at, value, n_vocab)
    assert not generator.n_waiting
