"""What cannot be done ends one request, or is refused when it is asked for; the others go on."""

from __future__ import annotations

import numpy as np
import pytest

from memory.kit import Fresh, Make, apart, words
from pykvcache import (
    BatchGenerator,
    LlamaContext,
    LlamaModel,
    LlamaSequence,
    Sampler,
    embedded_model_path,
)
from pykvcache.errors import (
    ArgumentError,
    InvalidBatch,
    NoKvCacheSlot,
    OutOfRangeError,
    PositionError,
)


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
def test_where_the_positions_of_the_model_end(
    name: str, make_context: Make, fresh_logits: Fresh
) -> None:
    """Long before the cells do: it counts as full, and ends one request."""
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


def test_text_that_is_read_at_every_token_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with LlamaModel(embedded_model_path()) as model, LlamaContext(model, n_threads=1) as ctx:
        generator = BatchGenerator(ctx)
        sampler = Sampler(temperature=5, top_k=0, top_p=1, min_p=0, seed=3)
        plain, stopped = generator.submit("One", 60, sampler), generator.submit("Two", 60, stop="Q")
        read = LlamaModel.token_to_piece
        pieces: list[int] = []
        monkeypatch.setattr(
            LlamaModel, "token_to_piece", lambda self, t: (pieces.append(t), read(self, t))[1]
        )
        before = ""
        for _ in plain:
            assert plain.text.startswith(before)
            before = plain.text
        generator.run(progress=False)
        texts = plain.text, stopped.text
        # The one with a stop string is read once more: to find the stop.
        assert len(pieces) <= len(plain.tokens) + 2 * len(stopped.tokens)
        whole = b"".join(read(model, t) for t in plain.tokens.tolist())
        assert texts[0] == whole.decode("utf-8", "replace")
    assert (plain.text, stopped.text) == texts, "also when the model is closed"


def test_a_request_for_no_tokens_leaves_nothing(make_context: Make) -> None:
    ctx = make_context("llama")
    sequence = LlamaSequence(ctx, [5, 6])
    generator = BatchGenerator(ctx)
    handles = [generator.submit([5], 0), *generator.submit(sequence, 0, n=2)]
    assert [handle.sequence.is_closed for handle in handles] == [True, False, True]
    assert {handle.finish_reason for handle in handles} == {"length"}


@pytest.mark.parametrize("at", [0, 5, 8])
@pytest.mark.parametrize("wrong", [-1, -(2**31), 2**31 - 1, None])
def test_a_token_outside_the_vocabulary_is_named(
    wrong: int | None, at: int, make_context: Make
) -> None:
    ctx = make_context("llama", n_seq_max=2)
    generator = BatchGenerator(ctx)
    bad = ctx.model.n_vocab if wrong is None else wrong
    prompt = words(1, 9)
    prompt[at] = bad
    sequence = LlamaSequence(ctx)
    for given in (prompt, np.array(prompt, np.int32), np.array(prompt, np.int64)):
        for call in (
            lambda one=given: generator.submit(one, 3),
            lambda one=given: sequence.append(one),
        ):
            with pytest.raises(InvalidBatch, match=rf"token {bad} \(at {at}\)") as caught:
                call()
            assert caught.value.value == bad
    assert (len(sequence), generator.n_waiting) == (0, 0)
    prompt[at] = ctx.model.n_vocab - 1
    assert len(generator.submit(prompt, 3, endless(ctx)).wait().tokens) == 3
