"""Generated together, every request ends with the tokens that it would have had alone."""

from __future__ import annotations

import numpy as np
import pytest

from memory.kit import CASES, Case, Make
from pykvcache import BatchGenerator, LlamaContext, LlamaSequence, Sampler
from pykvcache.generate import GenerationHandle

SERVED = tuple(case for case in CASES if case.name != "t5")


def words(rng: np.random.Generator, n: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return rng.integers(5, 56, n, dtype=np.int32)


def sampler(i: int) -> Sampler:
    return Sampler(temperature=0) if i % 2 else Sampler(temperature=0.7, seed=i)


def alone(ctx: LlamaContext, prompt: object, n: int, chosen: Sampler) -> list[int]:
    with LlamaSequence(ctx, prompt) as sequence:  # type: ignore[arg-type]
        return list(sequence.generate(n, chosen))


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_on_every_memory(case: Case, make_context: Make) -> None:
    rng = np.random.default_rng(7)
    ctx = make_context(case.name, **(case.options | {"n_seq_max": 3}))
    lonely = make_context(case.name, **(case.options | {"n_seq_max": 1}))
    generator = BatchGenerator(ctx, n_chunk=9)
    requests = [(words(rng, int(rng.integers(1, 30))), int(rng.integers(0, 12))) for _ in range(8)]
    handles = []
    for i, (prompt, n) in enumerate(requests):
        handles.append(generator.submit(prompt, n, sampler(i)))
        generator.step()
    generator.run()
    for i, (prompt, n) in enumerate(requests):
        assert handles[i].tokens.tolist() == alone(lonely, prompt, n, sampler(i)), i
        assert handles[i].finish_reason in ("length", "stop")
    assert not generator.n_running
    assert not generator.n_waiting
    assert not ctx.sequences()


def test_hundreds_of_requests_over_four_ids_in_512_cells(make_context: Make) -> None:
    ctx = make_context("llama", n_ctx=512, n_seq_max=4)
    lonely = make_context("llama", n_ctx=512, n_seq_max=1)
    rng = np.random.default_rng(8)
    # Short ones, that come and go, and some that need half of the cells.
    prompts = [words(rng, n) for n in (*rng.integers(1, 25, 18).tolist(), 180, 230)]
    lengths = [int(rng.integers(1, 12)) for _ in range(20)]
    wanted = [
        alone(lonely, prompt, n, sampler(i))
        for i, (prompt, n) in enumerate(zip(prompts, lengths, strict=True))
    ]
    generator = BatchGenerator(ctx)
    handles: list[GenerationHandle] = []
    while len(handles) < 400 or generator.n_running or generator.n_waiting:
        if len(handles) < 400:
            which = len(handles) % 20
            handles.append(
                generator.submit(
                    prompts[which], lengths[which], sampler(which), priority=int(rng.integers(3))
                )
            )
        generator.step()
        assert ctx.n_cells_used <= 512
    for i, handle in enumerate(handles):
        assert handle.tokens.tolist() == wanted[i % 20]
    assert not ctx.n_cells_used


def test_samples_of_one_prompt_share_its_evaluation(make_context: Make) -> None:
    ctx = make_context("llama", n_ctx=512, n_seq_max=4)
    prompt = words(np.random.default_rng(1), 100)
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
    rng = np.random.default_rng(2)
    generator = BatchGenerator(ctx, n_chunk=16)
    short = generator.submit(words(rng, 4), 60, Sampler(temperature=1, seed=1))
    generator.step()
    long = generator.submit(words(rng, 300), 3)
    steps = 0
    while not len(long.tokens):
        before = len(short.tokens)
        generator.step()
        steps += 1
        assert len(short.tokens) == before + 1 or short.finish_reason is not None
    assert steps >= 300 // 16


def test_who_comes_last_leaves_when_cells_run_out_and_goes_on_later(make_context: Make) -> None:
    ctx = make_context("llama", n_ctx=256, n_seq_max=4)
    lonely = make_context("llama", n_ctx=256, n_seq_max=1)
    rng = np.random.default_rng(3)
    prompts = [words(rng, 60) for _ in range(4)]
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


def test_larger_priority_goes_first(make_context: Make) -> None:
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
