"""Generated together, every request ends with the tokens that it would have had alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memory.kit import Make, words
from pykvcache import BatchGenerator, LlamaContext, LlamaModel, LlamaSequence, Sampler
from pykvcache._native import lib
from pykvcache.errors import InvalidBatch
from support import attention_models, vocab
from support.models import EXACT, Sizes, write_gguf


def sampler(i: int) -> Sampler:
    return Sampler(temperature=0) if i % 2 else Sampler(temperature=0.7, seed=i)


def alone(ctx: LlamaContext, prompt: list[int], n: int, chosen: Sampler) -> list[int]:
    with LlamaSequence(ctx, prompt) as sequence:
        return list(sequence.generate(n, chosen))


def test_samples_of_one_prompt_share_its_evaluation(make_context: Make) -> None:
    ctx = make_context("llama", n_ctx=512, n_seq_max=4)
    prompt = words(1, 100)
    generator = BatchGenerator(ctx)
    handles = generator.submit(prompt, 6, Sampler(temperature=1, seed=5), n=7)
    assert isinstance(handles, list)
    generator.run()
    assert ctx.tokens_evaluated <= 100 + 7 * 5
    assert len({tuple(handle.tokens) for handle in handles}) > 3
    again = generator.submit(prompt, 6, Sampler(temperature=1, seed=5), n=7)
    generator.run()
    assert [h.tokens.tolist() for h in again] == [h.tokens.tolist() for h in handles]
    for i, handle in enumerate(handles):
        chosen = Sampler(temperature=1, seed=5 + i)
        assert handle.tokens.tolist() == alone(ctx, prompt, 6, chosen)


def test_others_continue_while_a_long_prompt_is_evaluated(make_context: Make) -> None:
    ctx = make_context("llama", n_ctx=1024, n_seq_max=3)
    generator = BatchGenerator(ctx, n_chunk=16)
    short = generator.submit(words(1, 4), 60, Sampler(temperature=1, seed=1))
    generator.step()
    long = generator.submit(words(2, 300), 3)
    steps = 0
    while not len(long.tokens):
        before = len(short.tokens)
        generator.step()
        steps += 1
        assert len(short.tokens) == before + 1 or short.finish_reason is not None
    assert steps >= 300 // 16


def test_the_newest_request_is_parked_when_cells_run_out_and_resumes_later(
    make_context: Make,
) -> None:
    ctx = make_context("llama", n_ctx=256, n_seq_max=4)
    lonely = make_context("llama", n_ctx=256, n_seq_max=1)
    prompts = [words(i, 60) for i in range(4)]
    generator = BatchGenerator(ctx)
    handles = [generator.submit(prompt, 100, sampler(i)) for i, prompt in enumerate(prompts)]
    most = 0
    while generator.n_running or generator.n_waiting:
        generator.step()
        most = max(most, generator.n_running)
    assert most > 1
    for i, handle in enumerate(handles):
        assert handle.tokens.tolist() == alone(lonely, prompts[i], 100, sampler(i))
    assert ctx.tokens_evaluated < 4 * 160 + 10, "nobody was evaluated twice"


def test_higher_priority_runs_first(make_context: Make) -> None:
    ctx = make_context("llama", n_seq_max=1)
    generator = BatchGenerator(ctx)
    low = generator.submit([5, 6], 10, Sampler(temperature=1, seed=1))
    generator.step()
    high = generator.submit([7, 8], 3, Sampler(temperature=1, seed=1), priority=1)
    while high.finish_reason is None:
        made = generator.step()
        assert all(handle is high for handle, _ in made)
    generator.run()
    assert low.finish_reason is not None


# Steps in one native call -------------------------------------------------------------------------


def endless(ctx: LlamaContext, seed: int) -> Sampler:
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
        handles = [generator.submit(words(i, 9), 40, endless(ctx, i)) for i in range(n)]
        for _ in range(3):
            generator.step()
        counts.append(python_calls(generator.step))
        assert [len(handle.tokens) for handle in handles] == [4] * n
    assert counts[0] == counts[1]


@pytest.mark.hazard("N73")
def test_nothing_is_decoded_if_cells_were_changed(make_context: Make) -> None:
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


@pytest.mark.parametrize("wrap", [list, np.int32, np.int64])
@pytest.mark.parametrize("wrong", [-1, 2**31 - 1, "n_vocab"])
def test_an_id_outside_of_the_vocabulary_is_named(
    wrong: int | str, wrap: Any, make_context: Make
) -> None:
    ctx = make_context("llama", n_ctx=256)
    generator, sequence = BatchGenerator(ctx), LlamaSequence(ctx)
    n_vocab = ctx.model.n_vocab
    value = n_vocab if isinstance(wrong, str) else wrong
    for at in (0, 8):
        prompt = words(1, 9)
        prompt[at] = value
        for call in (sequence.append, lambda given: generator.submit(given, 4)):
            with pytest.raises(InvalidBatch, match=rf"token {value} \(at {at}\)") as caught:
                call(wrap(prompt))
            assert caught.value.value == value
    assert (caught.value.index, caught.value.limit) == (8, n_vocab)
    assert (len(sequence), generator.n_waiting) == (0, 0)


# Large vocabularies: the threads that decode choose, too ------------------------------------------

N_VOCAB = 40_000
N_REQUESTS = 7


def wide_sampler(i: int) -> Sampler:
    bias = {int(t): 4.0 for t in np.random.default_rng(i).integers(0, N_VOCAB, 5)}
    return (
        Sampler(temperature=0),
        Sampler(temperature=1, top_k=0, top_p=0.9, seed=i),
        Sampler(temperature=0.8, top_k=40, seed=i, repeat_penalty=1.3, logit_bias=bias),
        Sampler(temperature=0, logit_bias=bias, presence_penalty=0.5),
    )[i % 4]


def test_texts_generated_in_a_batch_equal_those_generated_alone(tmp_path: Path) -> None:
    path = tmp_path / "wide.gguf"
    plan = attention_models.llama(Sizes(n_layer=1), N_VOCAB)
    write_gguf(path, plan, vocab.dummy(N_VOCAB), 0)
    rng = np.random.default_rng(0)
    prompts = rng.integers(5, N_VOCAB, (N_REQUESTS, 9)).tolist()
    options: dict[str, Any] = {"n_ctx": 512, "n_seq_max": 8, **EXACT}
    with LlamaModel(path) as model:
        alone = []
        with LlamaContext(model, **options) as ctx:
            for i, prompt in enumerate(prompts):
                with LlamaSequence(ctx, prompt) as sequence:
                    alone.append(list(sequence.generate(12, wide_sampler(i))))
        for n_threads in (1, 2, 5):
            with (
                LlamaContext(model, n_threads_batch=n_threads, **options) as ctx,
                BatchGenerator(ctx) as generator,
            ):
                handles = [generator.submit(p, 12, wide_sampler(i)) for i, p in enumerate(prompts)]
                generator.run()
                assert [list(handle.tokens) for handle in handles] == alone
    assert len({tuple(text) for text in alone}) == N_REQUESTS
