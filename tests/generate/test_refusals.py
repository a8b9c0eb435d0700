"""What cannot be done ends one request, or is refused when it is asked for; others go on."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from memory.kit import Fresh, Make, apart, words
from pykvcache import (
    BatchGenerator,
    LlamaContext,
    LlamaModel,
    LlamaSequence,
    PrefixCache,
    Sampler,
)
from pykvcache.errors import (
    ArgumentError,
    ClosedError,
    NoKvCacheSlot,
    OutOfRangeError,
    PositionError,
)
from support.models import EXACT, make_model


def endless(ctx: LlamaContext) -> Sampler:
    """Return a greedy sampler that never ends a text."""
    ends = {t: -1e6 for t in range(ctx.model.n_vocab) if ctx.native.is_eog(t)}
    return Sampler(temperature=0, logit_bias=ends)


@pytest.mark.hazard("N147")
def test_a_sampler_for_another_model_is_refused_by_the_call(make_context: Make) -> None:
    """Only one token of the sequence is pending: the first step would have been one native call."""
    ctx = make_context("llama", n_seq_max=3)
    generator = BatchGenerator(ctx)
    generator.start()
    good = generator.submit(words(1, 9), 40, endless(ctx))
    sequence = LlamaSequence(ctx, words(2, 9))
    sequence.evaluate()
    sequence.append([7])
    other = make_context("gemma3").model
    for sampler, error in (
        (Sampler(logit_bias={10**6: 1.0}), OutOfRangeError),
        (Sampler(grammar='root ::= "a"', model=other), ArgumentError),
    ):
        for call in (generator.submit, LlamaSequence.generate, LlamaSequence.stream):
            with pytest.raises(error, match=r"logit_bias|another model"):
                call(sequence, 5, sampler)  # type: ignore[operator]
    assert len(good.wait().tokens) == 40
    generator.close()
    assert len(sequence) == 10


@pytest.mark.hazard("N148")
@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])
def test_reaching_the_last_position_ends_one_request_as_full(
    name: str, make_context: Make, fresh_logits: Fresh
) -> None:
    """The last position comes long before the last cell."""
    options = {"rope_freq_scale": 1e4}
    ctx = make_context(name, n_ctx=256, n_seq_max=2, **options)
    most = ctx.max_position + 1
    assert most < 50
    sequence = LlamaSequence(ctx, words(1, 30))
    list(sequence.generate(most - 30, endless(ctx)))
    assert len(sequence) == most
    wanted = fresh_logits(name, sequence.tokens, **options)
    assert apart(sequence.logits(), wanted) < 1e-2
    assert len(list(sequence.generate(1, endless(ctx)))) == 1
    for call in (sequence.logits, sequence.evaluate, lambda: next(sequence.generate(5))):
        with pytest.raises(PositionError) as raised:
            call()
        assert (raised.value.value, raised.value.limit) == (most, most - 1)
    stopped = sequence.generate(9, endless(ctx), on_full="stop")
    assert list(stopped) == []
    assert stopped.finish_reason == "full"
    assert len(list(sequence.generate(50, endless(ctx), on_full="shift"))) == 50

    generator = BatchGenerator(ctx)
    with pytest.raises(PositionError):
        generator.submit(words(3, most + 1), 5)
    long = generator.submit(words(1, 30), 99, endless(ctx))
    short = generator.submit(words(2, 9), 20, endless(ctx))
    generator.run(progress=False)
    assert (long.finish_reason, len(long.tokens)) == ("full", most - 30 + 1)
    assert (short.finish_reason, len(short.tokens)) == ("length", 20)


def test_ids_that_are_used_by_hand_are_an_error(make_context: Make) -> None:
    """A request for which there is no id has not filled anything."""
    ctx = make_context("llama", n_seq_max=2)
    for seq_id in range(2):
        ctx.decode(words(seq_id, 9), seq_id=seq_id)
    generator = BatchGenerator(ctx)
    handles = [generator.submit(words(i, 9), 4, endless(ctx)) for i in range(2)]
    generator.run(progress=False)
    for handle in handles:
        assert handle.finish_reason == "error"
        assert isinstance(handle.error, NoKvCacheSlot)
        with pytest.raises(NoKvCacheSlot, match="no sequence id is free"):
            handle.wait()
    ctx.clear_kv_cache_seq(0)
    assert len(generator.submit(words(1, 9), 4, endless(ctx)).wait().tokens) == 4


def test_cells_that_are_used_by_hand_end_a_request_as_full(make_context: Make) -> None:
    ctx = make_context("llama", n_ctx=256, n_seq_max=2)
    ctx.decode(words(1, 200), seq_id=0)
    handle = BatchGenerator(ctx).submit(words(2, 40), 60, endless(ctx)).wait()
    assert (handle.finish_reason, len(handle.tokens)) == ("full", 256 - 200 - 40 + 1)


@pytest.mark.hazard("N144")
def test_samples_without_an_id_share_one_state(make_context: Make) -> None:
    ctx = make_context("llama", n_ctx=512, n_seq_max=2)
    generator = BatchGenerator(ctx)
    samples = generator.submit(words(1, 100), 5, Sampler(temperature=1, seed=3), n=12)
    generator.step()
    states = [sample.sequence._cells.state for sample in samples]
    assert sum(state is not None for state in states) >= 10
    assert len(set(states) - {None}) == 1
    generator.run(progress=False)
    alone = LlamaSequence(ctx, words(1, 100))
    for i, sample in enumerate(samples):
        fork = alone.fork()
        assert sample.tokens.tolist() == list(fork.generate(5, Sampler(temperature=1, seed=3 + i)))


def test_a_request_for_no_tokens_leaves_nothing(make_context: Make) -> None:
    ctx = make_context("llama")
    sequence = LlamaSequence(ctx, [5, 6])
    generator = BatchGenerator(ctx)
    handles = [generator.submit([5], 0), *generator.submit(sequence, 0, n=2)]
    assert [handle.sequence.is_closed for handle in handles] == [True, False, True]
    assert {handle.finish_reason for handle in handles} == {"length"}


@pytest.mark.hazard("N67")
@pytest.mark.parametrize("how", ["aborted", "error"])
def test_a_first_sample_that_ends_early_does_not_end_the_others(
    how: str, make_context: Make
) -> None:
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


def test_a_sample_whose_watcher_raises_gets_its_token_once(make_context: Make) -> None:
    generator = BatchGenerator(make_context("llama"))
    samples = generator.submit(words(1, 30), 1, Sampler(temperature=1, seed=3), n=3)
    assert isinstance(samples, list)
    errors = [ZeroDivisionError()]

    def fail() -> None:
        if errors:
            raise errors.pop()

    samples[1].watch(fail)
    with pytest.raises(ZeroDivisionError):
        generator.run(progress=False)
    generator.run(progress=False)
    alone = LlamaSequence(make_context("llama"), words(1, 30))
    for i, sample in enumerate(samples):
        chosen = list(alone.fork().generate(1, Sampler(temperature=1, seed=3 + i)))
        assert (sample.tokens.tolist(), sample.finish_reason) == (chosen, "length")


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
    unified: bool, make_context: Make, fresh_logits: Fresh
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


def test_a_request_whose_model_is_closed_ends_alone(model_folder: Path) -> None:
    model = LlamaModel(make_model("llama", model_folder))
    with LlamaContext(model, n_ctx=256, n_threads=1, **EXACT) as context:
        alone = BatchGenerator(context).submit([7, 8], 6).wait().tokens.tolist()
        generator = BatchGenerator(context)
        stops, plain = generator.submit([5, 6], 6, stop=["?"]), generator.submit([7, 8], 6)
        aborted = generator.submit([9], 6, stop=["?"])
        generator.step()
        model.close()
        aborted.abort()
        generator.run(progress=False)
        assert plain.tokens.tolist() == alone
        assert aborted.finish_reason == "aborted"
        assert stops.finish_reason == "error"
        with pytest.raises(ClosedError, match="the model is closed"):
            stops.wait()
