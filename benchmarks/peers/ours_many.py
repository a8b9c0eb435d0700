"""pykvcache: requests of the group *generate*."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.peers.primitives import Answer
from benchmarks.peers.worker import Worker
from benchmarks.peers.workload import TEMPERATURE, TOP_K, Request, workload
from pykvcache import BatchGenerator, LlamaContext, LlamaSequence, Sampler
from pykvcache.generate import GenerationHandle

Tokens = np.ndarray[Any, np.dtype[np.int32]]


class Many(Worker):
    """Sequences and batch generators."""

    @property
    def context(self) -> LlamaContext:
        """The open context."""
        raise NotImplementedError

    def array(self, start: int, n: int) -> Tokens:
        """Return the tokens of some places as an array."""
        raise NotImplementedError

    def sampler(self, seed: int) -> Sampler:
        """Return a sampler that never chooses an end token."""
        end = self.context.model.token_eos
        none = {} if end is None else {end: -1e6}
        return Sampler(
            temperature=TEMPERATURE, top_k=TOP_K, top_p=1, min_p=0, seed=seed, logit_bias=none
        )

    def do_many(self, what: str, slots: int, alone: bool = False) -> Answer:
        """Return the seconds of all requests, together or one after the other."""
        self.clear()
        requests = workload(what)
        start = time.perf_counter()
        n = self.one_by_one(requests) if alone else self.together(what, requests, slots)
        seconds = time.perf_counter() - start
        if n != sum(request.new for request in requests):
            raise ValueError(f"{n} tokens were generated")
        return {"seconds": seconds, "tokens": n}

    def one_by_one(self, requests: Sequence[Request]) -> int:
        """Generate one after the other; return the number of tokens."""
        n = 0
        for i, request in enumerate(requests):
            with LlamaSequence(self.context, self.array(request.start, request.length)) as sequence:
                n += sum(1 for _ in sequence.generate(request.new, self.sampler(i + 1)))
        return n

    def together(self, what: str, requests: Sequence[Request], slots: int) -> int:
        """Generate together, each request from its step on; return the number of tokens."""
        generator = BatchGenerator(self.context, slots)
        handles: list[GenerationHandle] = []
        if what == "best":
            prompt = self.array(requests[0].start, requests[0].length)
            n = len(requests)
            handles = [*generator.submit(prompt, requests[0].new, self.sampler(1), n=n)]
        left, step = [] if what == "best" else list(requests), 0
        while left or generator.n_running or generator.n_waiting:
            while left and left[0].arrival <= step:
                one = left.pop(0)
                prompt = self.array(one.start, one.length)
                handles.append(generator.submit(prompt, one.new, self.sampler(len(handles) + 1)))
            generator.step()
            step += 1
        return sum(len(handle.times.tokens) for handle in handles)

    def do_steps(self, parallel: int, steps: int = 32, depth: int = 32) -> Answer:
        """Return the seconds of the fastest step of greedy requests, like `do_decode`."""
        self.clear()
        best = float("inf")
        with BatchGenerator(self.context) as generator:
            # With the first step's token as long as those of `do_decode`.
            prompts = self.endless(parallel, steps + 3, depth - 1)
            kept = [generator.submit(prompt, steps + 3) for prompt in prompts]
            assert kept, "dropped handles would end their requests"
            for _ in range(2):
                generator.step()
            for _ in range(steps):
                start = time.perf_counter()
                made = generator.step()
                best = min(best, time.perf_counter() - start)
                if len(made) != parallel:
                    raise ValueError("a text ended by itself")
        return {"seconds": best, "tokens": parallel}

    def endless(self, n: int, steps: int, depth: int) -> list[Tokens]:
        """Return prompts that the greedy sampler continues for enough steps."""
        found: list[Tokens] = []
        with BatchGenerator(self.context) as generator:
            for start in range(0, 20_000, 100):
                prompt = self.array(start, depth)
                if len(generator.submit(prompt, steps).wait().tokens) == steps:
                    found.append(prompt)
                if len(found) == n:
                    return found
        raise ValueError("texts end by themselves everywhere")

    def do_idle(self, cells: int, steps: int = 40) -> Answer:
        """Return the seconds of a token alone, next to idle cells, and after they are parked."""
        self.clear()
        alone = self.tokens_of_one(steps, 0)[0]
        each = 500
        idle = [LlamaSequence(self.context, self.array(i, each)) for i in range(cells // each)]
        for sequence in idle:
            sequence.evaluate()
        # Evaluated last, so it has high cells.
        after, first = self.tokens_of_one(steps, 8)
        for sequence in idle:
            sequence.close()
        return {"alone": alone, "first": first, "seconds": after}

    def tokens_of_one(self, steps: int, n_first: int) -> tuple[float, float]:
        """Return the medians of a busy sequence's last and first steps."""
        times = []
        with LlamaSequence(self.context, self.array(0, 32)) as busy:
            for _ in busy.generate(32 + steps, self.sampler(1)):
                times.append(time.perf_counter())
        took = np.diff(times)
        first = statistics.median(took[1 : 1 + n_first]) if n_first else 0.0
        return statistics.median(took[-steps:]), first

    def do_sequence(self, what: str, n: int, slices: int = 7) -> Answer:
        """Return the best seconds of a fork, or of a `sync` without changes."""
        self.clear()
        tokens, best = self.array(0, n), float("inf")
        with LlamaSequence(self.context, tokens) as sequence:
            sequence.evaluate()
            for _ in range(slices):
                start = time.perf_counter()
                done = sequence.fork() if what == "fork" else sequence.sync(tokens)
                best = min(best, time.perf_counter() - start)
                if isinstance(done, LlamaSequence):
                    done.close()
        return {"seconds": best}
