"""Requests that others end, stop or share with: what is theirs stays theirs."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest

from memory.kit import Make, apart, words
from pykvcache import BatchGenerator, LlamaSequence, PrefixCache, Sampler


@pytest.mark.hazard("N67")
@pytest.mark.parametrize("how", ["aborted", "error"])
def test_the_first_sample_that_ends_early_leaves_the_others(how: str, make_context: Make) -> None:
    ctx = make_context("llama")
    generator = BatchGenerator(ctx, n_chunk=8)
    prompt = LlamaSequence(ctx, words(1, 30))
    samples = generator.submit(prompt, 4, n=4)
    assert isinstance(samples, list)
    generator.step()
    if how == "aborted":
        samples[0].abort()
        samples[2].abort()
    else:
        prompt.close()
    generator.run()
    assert [len(sample.tokens) for sample in samples[1::2]] == [4, 4]
    assert samples[0].finish_reason == how
    assert not len(samples[0].tokens)
    if how == "aborted":
        assert samples[2].finish_reason == how
        assert not len(samples[2].tokens)
    alone = list(LlamaSequence(make_context("llama"), words(1, 30)).generate(4))
    assert samples[1].tokens.tolist() == alone


def test_samples_of_a_shifted_sequence_are_its_forks(make_context: Make) -> None:
    """Also where the first one ends before its prompt is evaluated."""
    ctx = make_context("llama", n_seq_max=2)
    sequence = LlamaSequence(ctx, words(1, 60))
    sequence.evaluate()
    sequence.discard(5, 45)
    wanted = [
        list(sequence.fork().generate(12, Sampler(temperature=1, seed=1 + i))) for i in range(3)
    ]
    fresh = LlamaSequence(ctx, sequence.tokens)
    assert list(fresh.generate(12, Sampler(temperature=1, seed=2))) != wanted[1]
    generator = BatchGenerator(ctx)
    samples = generator.submit(sequence, 12, Sampler(temperature=1, seed=1), n=3)
    samples[0].abort()
    generator.run(progress=False)
    assert [sample.tokens.tolist() for sample in samples] == [[], *wanted[1:]]


@pytest.mark.hazard("N67")
def test_samples_stay_in_the_namespace_of_their_prompt(make_context: Make) -> None:
    ctx = make_context("llama")
    cache = PrefixCache(ctx, block_size=8)
    generator = BatchGenerator(cache)
    prompt = words(1, 40)
    theirs = cache.sequence(prompt, namespace="theirs")
    samples = generator.submit(theirs, 3, n=3)
    assert isinstance(samples, list)
    generator.run()
    assert cache.sequence(prompt).reuse.evaluated == 40
    mine = LlamaSequence(ctx, words(2, 40))
    forks = generator.submit(mine, 3, n=3)
    generator.run()
    del forks
    assert cache.sequence(words(2, 40)).reuse.evaluated == 40


@pytest.mark.hazard("N68")
@pytest.mark.parametrize("unified", [True, False])
def test_a_generator_between_steps_makes_room(
    unified: bool, make_context: Make, fresh_logits: Callable[..., np.ndarray]
) -> None:
    """Requests that run are idle between two steps: a sequence or another generator may go on."""
    ctx = make_context("llama", n_ctx=256, n_seq_max=2, kv_unified=unified)
    one, other = BatchGenerator(ctx), BatchGenerator(ctx)
    first = [one.submit(words(i, 40), 30) for i in range(2)]
    second = [other.submit(words(9 + i, 40), 30) for i in range(2)]
    sequence = LlamaSequence(ctx, words(5, 50))
    for _ in range(3):
        one.step()
        other.step()
        wanted = fresh_logits("llama", sequence.tokens)
        assert apart(sequence.logits(), wanted) < 1e-3
        sequence.append(words(7, 1))
    one.run()
    other.run()
    with make_context("llama", n_seq_max=1) as lonely:
        for i, handle in [*enumerate(first), *enumerate(second, 9)]:
            alone = LlamaSequence(lonely, words(i, 40))
            assert handle.finish_reason == "length"
            assert handle.tokens.tolist() == list(alone.generate(30))
            alone.close()


@pytest.mark.hazard("N68")
def test_a_dropped_generator_holds_no_sequence(make_context: Make) -> None:
    ctx = make_context("llama", n_seq_max=1)
    sequence = LlamaSequence(ctx, words(1, 20))
    generator = BatchGenerator(ctx)
    generator.submit(sequence, 100)
    generator.step()
    del generator
    gc.collect()
    LlamaSequence(ctx, words(2, 20)).evaluate()
    assert sequence.is_parked


def test_a_sequence_whose_request_ended_frees_its_cells_when_it_is_dropped(
    make_context: Make,
) -> None:
    ctx = make_context("llama")
    generator = BatchGenerator(ctx)
    for n in (1, 2):
        handles = [generator.submit(LlamaSequence(ctx, words(i, 9)), 50) for i in range(n)]
        for _ in range(3):
            generator.step()
        for handle in handles:
            handle.abort()
        generator.run()
        assert len(ctx.sequences()) == n
        del handles, handle
        assert not ctx.sequences()


def test_a_prompt_that_lost_its_tokens_ends_its_request_alone(make_context: Make) -> None:
    ctx = make_context("llama")
    generator = BatchGenerator(ctx)
    sequence = LlamaSequence(ctx, words(1, 20))
    bad, good = generator.submit(sequence, 5), generator.submit(words(2, 20), 5)
    generator.step()
    sequence.truncate(0)
    generator.run()
    assert bad.finish_reason == "error"
    assert good.finish_reason == "length"
    with pytest.raises(ValueError, match="no tokens"):
        bad.wait()


def test_samplers_are_not_shared(make_context: Make) -> None:
    ctx = make_context("llama")
    generator = BatchGenerator(ctx)
    sampler = Sampler(temperature=1, seed=3)
    handles = [generator.submit(words(1, 20), 6, sampler) for _ in range(2)]
    generator.run()
    assert handles[0].tokens.tolist() == handles[1].tokens.tolist()
