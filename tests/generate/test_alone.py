"""All sorts of requests at once, in too little room: each ends exactly as it does alone."""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np
import pytest

from memory.kit import EVERY_CASE, Case, Make
from pykvcache import BatchGenerator, LlamaContext, LlamaSequence, Sampler
from pykvcache.errors import DecodeError
from pykvcache.generate import GenerationHandle

SERVED = tuple(case for case in EVERY_CASE if case.name != "t5")
SEED = int(os.environ.get("PYKVCACHE_FUZZ_SEED", "1"))
N_REQUESTS = 12


class Request(NamedTuple):
    """What is asked for; `seed` is that of the first of `n` samples."""

    prompt: list[int]
    max_tokens: int
    seed: int
    n: int
    stop: tuple[str, ...]
    logprobs: int
    priority: int
    grammar: bool


def sampler(ctx: LlamaContext, request: Request, i: int) -> Sampler:
    settings: dict[str, object] = {"temperature": 0}
    if request.seed:
        settings = {"temperature": 1, "top_k": 30, "repeat_penalty": 1.1, "seed": request.seed + i}
    if request.grammar:
        # It allows no long text: some requests end with an error.
        settings |= {"grammar": 'root ::= [a-zA-Z0-9 ▁<>_|]{0,12} "\\x00"', "model": ctx.model}
    return Sampler(**settings)  # type: ignore[arg-type]


def alone(ctx: LlamaContext, request: Request, i: int) -> tuple[list[int], str]:
    """Generate with a sequence of its own; return its tokens and how it ended."""
    found: list[int] = []
    with LlamaSequence(ctx, request.prompt) as sequence:
        made = sequence.generate(request.max_tokens, sampler(ctx, request, i), stop=request.stop)
        try:
            found += made
        except DecodeError:
            return sequence.tokens[len(request.prompt) :].tolist(), "error"
        return found, str(made.finish_reason)


def requests(ctx: LlamaContext, case: Case, rng: np.random.Generator) -> list[Request]:
    """Draw requests; stop strings are taken out of what would be generated, across tokens."""
    drawn = []
    for i in range(N_REQUESTS):
        prompt = rng.integers(5, case.n_vocab - 2, int(rng.integers(1, 25))).tolist()
        one = Request(
            prompt,
            int(rng.integers(1, 14)),
            int(rng.integers(0, 2)) * (7 + i),
            int(rng.choice([1, 1, 3])),
            (),
            int(rng.choice([0, 0, 2])),
            int(rng.integers(0, 3)),
            bool(rng.random() < 0.2),
        )
        text = ctx.model.detokenize(alone(ctx, one, 0)[0])
        if len(text) > 6 and rng.random() < 0.5:
            at = int(rng.integers(1, len(text) - 4))
            one = one._replace(stop=("not there", text[at : at + 4]))
        drawn.append(one)
    return drawn


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_every_request_ends_as_it_does_alone(case: Case, make_context: Make) -> None:
    rng = np.random.default_rng([SEED, len(case.name)])
    ctx = make_context(case.name, **(case.options | {"n_seq_max": 4}))
    lonely = make_context(case.name, **(case.options | {"n_seq_max": 1}))
    generator = BatchGenerator(ctx, n_chunk=7)
    handles: list[tuple[Request, int, GenerationHandle]] = []
    for request in requests(lonely, case, rng):
        submitted = generator.submit(
            request.prompt,
            request.max_tokens,
            sampler(ctx, request, 0),
            n=request.n,
            stop=request.stop,
            logprobs=request.logprobs,
            priority=request.priority,
        )
        samples = [submitted] if isinstance(submitted, GenerationHandle) else submitted
        handles += [(request, i, handle) for i, handle in enumerate(samples)]
        for _ in range(int(rng.integers(0, 3))):
            generator.step()
        if rng.random() < 0.3:
            # Somebody needs an id in between, and room: one of those that run is parked.
            LlamaSequence(ctx, request.prompt).evaluate()
    generator.run(progress=False)
    ends = set()
    for request, i, handle in handles:
        seed = request if request.seed else request._replace(seed=0)
        tokens, reason = alone(lonely, seed, i)
        assert handle.tokens.tolist() == tokens, (request, i)
        assert handle.finish_reason == reason, (request, i)
        assert len(handle.logprobs) == (len(tokens) if request.logprobs else 0)
        if request.stop and handle.finish_reason == "stop":
            assert not any(stop in handle.text for stop in request.stop)
        ends.add(reason)
    assert len(ends) > 1
    assert not ctx.sequences()
