"""Stepping recurrent states back (``n_rs_seq``): right after any order of calls, or refused.

llama.cpp keeps the states after the last tokens of a step, goes back to others as well, and leaves
a step back for the next decode, where copies, shared and saved states go wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
import pytest

from memory.kit import EVERY_CASE, Bench, Case, apart
from pykvcache import LlamaBatch, LlamaContext, LlamaModel, LlamaSequence
from pykvcache.errors import ContextCreateError, UnsupportedOperation
from support.models import MODELS

MakeBench = Callable[..., Bench]
BACK = 4
WHAT = ("feed", "feed", "batch", "even", "even", "copy", "remove", "back", "back", "back")
ROLLBACK = [
    *(case for case in EVERY_CASE if case.info.rollback),
    Case("nemotron_h"),
    Case("nemotron_h", unified=False),
]
rollback_case = pytest.mark.parametrize("case", ROLLBACK, ids=str)


def step_back(b: Bench, seq: int, n: int) -> None:
    """Take n tokens back, which must be possible."""
    end = len(b.held[seq]) - n
    assert b.ctx.can_resume(seq, end)
    assert b.ctx.clear_kv_cache_seq(seq, end) is True
    del b.held[seq][end:]
    b.positions()


def stays(b: Bench, seq: int, n: int) -> None:
    """Taking n tokens back is refused, and changes nothing."""
    end = len(b.held[seq]) - n
    assert not b.ctx.can_resume(seq, end)
    assert b.ctx.clear_kv_cache_seq(seq, end) is False
    with pytest.raises(UnsupportedOperation):
        b.ctx.remove(seq, end)
    b.positions()


@rollback_case
def test_the_last_tokens_of_a_decode_can_be_taken_back(case: Case, bench: MakeBench) -> None:
    b = bench(case, n_rs_seq=BACK)
    assert b.ctx.memory_info.max_rollback == BACK
    for n in range(1, BACK + 1):
        b.feed(n - 1, 12)
        b.feed(n - 1, 7)
        stays(b, n - 1, BACK + 1)
        step_back(b, n - 1, n)
    b.check(n=2)


@pytest.mark.hazard("N140")
@rollback_case
def test_rollbacks_without_a_valid_state_are_refused(case: Case, bench: MakeBench) -> None:
    """llama.cpp would go back to a state of other tokens and report success."""
    b = bench(case, n_rs_seq=BACK)
    b.feed(0, 12)
    b.feed(0, 1)
    stays(b, 0, 1)
    b.feed(0, 3)
    stays(b, 0, 3)
    assert b.ctx.clear_kv_cache_seq(0, 3, 5) is False  # not the end
    step_back(b, 0, 2)
    stays(b, 0, 1)  # it was the first token of its step
    b.check(n=2)


@pytest.mark.hazard("M15", "M18")
@rollback_case
def test_copies_and_steps_back_leave_each_other_alone(case: Case, bench: MakeBench) -> None:
    """A copy after a step back, and a step back of a state that is shared."""
    b = bench(case, n_rs_seq=BACK)
    b.feed(0, 14)
    step_back(b, 0, 1)
    b.ctx.copy_kv_cache_seq(0, 1)
    b.ctx.copy_kv_cache_seq(0, 2)
    b.held |= {1: b.held[0].copy(), 2: b.held[0].copy()}
    step_back(b, 1, 2)
    step_back(b, 0, 3)
    b.check(2, n=2)
    b.check(1, n=2)
    b.check(0, n=2)


@pytest.mark.hazard("S20")
@rollback_case
def test_states_after_steps_back_are_true(
    case: Case, bench: MakeBench, make_context: Callable[..., LlamaContext]
) -> None:
    """Sequences that shared a state, and went back by different numbers of tokens."""
    b = bench(case, n_rs_seq=BACK)
    b.feed(0, 14)
    b.ctx.copy_kv_cache_seq(0, 1)
    b.held[1] = b.held[0].copy()
    step_back(b, 0, 1)
    step_back(b, 1, 3)
    if case.has_states:
        everything, one = b.ctx.get_state(), b.ctx.get_state(1)
        for options in ({"n_rs_seq": BACK}, {"n_rs_seq": 1}, {}):
            other = Bench(case, make_context(case.name, **(case.options | options)), b._fresh)
            other.ctx.set_state(everything)
            other.held = {seq: tokens.copy() for seq, tokens in b.held.items()}
            for seq in (0, 1):
                stays(other, seq, 1)  # a state is of its last token
            other.check()
        b.ctx.set_state(one, seq_id=0)
        b.held[0] = b.held[1].copy()
        stays(b, 0, 1)
    b.check(n=2)


@rollback_case
def test_partial_states_end_what_can_be_taken_back(case: Case, bench: MakeBench) -> None:
    if case.info.bounded:
        pytest.skip("this memory has no partial states")
    b = bench(case, n_rs_seq=BACK)
    b.feed(0, 10)
    point = b.ctx.get_partial_state(0)
    b.feed(0, 6)
    b.ctx.set_partial_state(point)
    del b.held[0][10:]
    stays(b, 0, 1)
    b.check(n=2)


@rollback_case
def test_random_programs(case: Case, bench: MakeBench) -> None:
    """Batches of several sequences, copies, removals and steps back, each as far as it may go."""
    b = bench(case, n_rs_seq=BACK)
    rng = np.random.default_rng(1)
    steps = 0
    for turn in range(1, 81):
        seqs = [seq for seq in range(4) if b.held.get(seq)]
        what = rng.choice(WHAT)
        if what == "feed":
            b.feed(int(rng.integers(4)), int(rng.integers(1, 8)))
        elif what in ("batch", "even"):
            some = sorted(rng.choice(4, int(rng.integers(2, 5)), replace=False).tolist())
            batch, even = LlamaBatch(64), int(rng.integers(1, 6))
            for seq in some:
                tokens = b.prompt(even if what == "even" else int(rng.integers(1, 6)))
                begin = len(b.held.setdefault(seq, []))
                for i, token in enumerate(tokens.tolist()):
                    batch.add(token, begin + i, seq, logits=i == len(tokens) - 1)
                b.held[seq].extend(tokens.tolist())
            b.ctx.decode(batch)
        elif what == "copy" and seqs:
            src, dst = int(rng.choice(seqs)), int(rng.integers(4))
            b.ctx.copy_kv_cache_seq(src, dst)
            b.held[dst] = b.held[src].copy()
        elif what == "remove" and len(seqs) > 1:
            seq = int(rng.choice(seqs))
            b.ctx.clear_kv_cache_seq(seq)
            b.held[seq] = []
        elif what == "back" and seqs:
            seq = int(rng.choice(seqs))
            fits = [
                n for n in range(1, len(b.held[seq])) if b.ctx.can_resume(seq, len(b.held[seq]) - n)
            ]
            assert fits == list(range(1, len(fits) + 1))
            assert len(fits) <= BACK
            if fits:
                step_back(b, seq, int(rng.choice(fits)))
                steps += 1
        for seq, tokens in b.held.items():
            if len(tokens) > 40:
                b.ctx.clear_kv_cache_seq(seq)
                b.held[seq] = []
        if turn % 20 == 0:
            b.check()
    assert steps > 2


@pytest.mark.parametrize("case", [c for c in ROLLBACK if not c.info.bounded and c.unified], ids=str)
def test_a_sequence_goes_back_without_a_checkpoint(
    case: Case, bench: MakeBench, model: Callable[[str], LlamaModel]
) -> None:
    b = bench(case, n_rs_seq=BACK)
    seq = LlamaSequence(b.ctx, b.prompt(20))
    seq.evaluate()
    seq.append(b.prompt(5))
    seq.evaluate()
    before = b.ctx.tokens_evaluated
    seq.truncate(22)
    assert apart(seq.logits(), b.fresh(seq.tokens)) < case.tolerance
    assert b.ctx.tokens_evaluated == before + 1  # the last token, for its logits
    draft = b.prompt(5)
    seq.append(draft)
    seq.evaluate()
    seq.truncate(25)
    before = b.ctx.tokens_evaluated
    child = seq.fork(24)
    assert apart(child.logits(), b.fresh(child.tokens)) < case.tolerance
    assert b.ctx.tokens_evaluated == before + 1
    assert apart(seq.logits(), b.fresh(seq.tokens)) < case.tolerance


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba", "jamba", "deepseek4"])
def test_models_that_keep_no_earlier_states_are_refused(
    name: str, make_context: Callable[..., LlamaContext]
) -> None:
    with pytest.raises(ContextCreateError, match="n_rs_seq=2") as caught:
        make_context(name, n_rs_seq=2, kv_unified=MODELS[name].can_unify)
    assert (caught.value.parameter, caught.value.value, caught.value.limit) == ("n_rs_seq", 2, 0)


@pytest.mark.hazard("D31")
@rollback_case
def test_a_step_has_to_be_longer(case: Case, make_context: Callable[..., LlamaContext]) -> None:
    """ggml ends the process in the first decode."""
    options = case.options | {"n_ubatch": 6, "n_batch": 64}
    for n in (5, 6, 60):
        with pytest.raises(ContextCreateError, match="n_ubatch") as caught:
            make_context(case.name, **options, n_rs_seq=n)
        assert (caught.value.parameter, caught.value.limit) == ("n_rs_seq", 4)
    ctx = make_context(case.name, **options, n_rs_seq=4)
    ctx.decode(list(range(5, 35)))
    assert ctx.can_resume(0, 26)
    assert not ctx.can_resume(0, 25)


@rollback_case
def test_as_many_states_as_a_graph_has_room_for(
    case: Case, bench: MakeBench, make_context: Callable[..., LlamaContext]
) -> None:
    """Past that the first long decode would fail; where it is, the error says."""
    options = {"n_ubatch": 256, "n_batch": 256}
    n, error = 254, None
    try:
        b = bench(case, n_rs_seq=n, **options)
    except ContextCreateError as caught:
        error = caught
    if error is not None:
        assert (error.parameter, error.value) == ("n_rs_seq", 254)
        n = cast("int", error.limit)
        assert 8 < n < 254
        b = bench(case, n_rs_seq=n, **options)
    b.feed(0, n + 2)
    step_back(b, 0, n)
    b.check(0, n=2)


@pytest.mark.parametrize("wrong", [-1, 2**16 + 1, 2**31, 2**70])
def test_numbers_out_of_range(wrong: int, make_context: Callable[..., LlamaContext]) -> None:
    with pytest.raises(ValueError, match="n_rs_seq"):
        make_context("lfm2", n_rs_seq=wrong)
