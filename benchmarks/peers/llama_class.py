"""llama-cpp-python's class `Llama`: its own prefix match and its RAM cache."""

from __future__ import annotations

import itertools
import time
from typing import Any

import llama_cpp
from llama_cpp.llama_cache import LlamaRAMCache

from benchmarks.peers.primitives import Answer, NotThereError
from benchmarks.peers.prompts import play
from benchmarks.peers.worker import Worker
from benchmarks.peers.workload import TEMPERATURE, TOP_K, workload


def reported(ctx: Any, params: Any) -> Answer:
    """Return a context's settings, and the parameters it was created with."""
    names = ("n_ctx", "n_seq_max", "n_batch", "n_ubatch")
    found = {name: int(getattr(llama_cpp, f"llama_{name}")(ctx)) for name in names}
    given = {name: int(getattr(params, name)) for name in ("type_k", "type_v")}
    flash, threads = int(params.flash_attn_type), int(llama_cpp.llama_n_threads(ctx))
    return {**found, **given, "flash_attn": flash, "threads": threads}


class LlamaClass(Worker):
    """The requests for `Llama`."""

    path: str
    options: dict[str, Any]

    def __init__(self) -> None:
        super().__init__()
        self.llm: Any = None
        self.caches: dict[int, Any] = {}
        self.evaluated = 0

    def llama(self) -> Any:
        """Return the object, which counts evaluated tokens and has one sequence."""
        if self.llm is None:
            asked = self.options
            names = ("n_ctx", "n_batch", "n_ubatch", "type_k", "type_v")
            self.llm = llama_cpp.Llama(
                self.path,
                **{name: asked[name] for name in names},
                n_threads=asked["threads"],
                n_threads_batch=asked["threads"],
                flash_attn=bool(asked["flash_attn"]),
                swa_full=True,
                verbose=False,
            )
            said = reported(self.llm.ctx, self.llm.context_params)
            other = {k: v for k, v in said.items() if k != "n_seq_max" and v != asked[k]}
            if other:
                raise ValueError(f"Llama is not on equal terms: {other}")
            inner = self.llm.eval

            def counted(tokens: list[int]) -> None:
                self.evaluated += len(tokens)
                inner(tokens)

            self.llm.eval = counted
        return self.llm

    def do_many(self, what: str, slots: int, alone: bool = False) -> Answer:
        """Generate for one request after the other, without end tokens."""
        llm, count = self.llama(), 0
        start = time.perf_counter()
        for i, one in enumerate(workload(what)):
            llm.set_seed(i + 1)
            made = llm.generate(
                self.tokens(one.start, one.length),
                top_k=TOP_K,
                top_p=1.0,
                min_p=0.0,
                temp=TEMPERATURE,
                repeat_penalty=1.0,
            )
            count += sum(1 for _ in itertools.islice(made, one.new))
        return {"seconds": time.perf_counter() - start, "tokens": count}

    def do_llama(self, n: int, how: str, tail: int = 16) -> Answer:
        """Time `Llama.generate` to its first token, with its RAM cache or its own prefix match."""
        llm, shared = self.llama(), self.tokens(0, n)
        mine, other = shared + self.tokens(n, tail), shared + self.tokens(n + 5, tail)
        # One per length, because a cache returns any state that shares a prefix.
        cache: Any = self.caches.get(n)
        if how == "cache" and cache is None:
            cache = self.caches[n] = LlamaRAMCache()
            llm.reset()
            llm.eval(shared)
            cache[shared] = llm.save_state()
        if how == "prefix":
            next(llm.generate(other, temp=0.0))
        else:
            llm.reset()
            llm.eval(self.tokens(9, 8))
        self.evaluated, start = 0, time.perf_counter()
        if how == "cache":
            llm.load_state(cache[mine])
        ready = time.perf_counter() - start
        next(llm.generate(mine, temp=0.0))
        first = time.perf_counter() - start
        return {"ready": ready, "first": first, "evaluated": self.evaluated}

    def do_reuse(self, work: str, ram_mib: int, quick: bool = False) -> Answer:
        """Play a workload with `Llama`, its prefix match and a RAM cache of limited size."""
        if ram_mib < 0:
            raise NotThereError("evaluation of everything is ours")
        llm = self.llama()
        llm.reset()
        cache = LlamaRAMCache(capacity_bytes=ram_mib << 20)
        llm.set_cache(cache)

        def ask(prompt: list[int], n: int) -> tuple[list[int], int]:
            self.evaluated = 0
            llm.create_completion(prompt, max_tokens=n, temperature=0.0)
            made = [int(token) for token in llm.input_ids[len(prompt) : llm.n_tokens]]
            return made, max(1, self.evaluated - len(made))

        answer = play(work, ask, quick)
        answer["bytes"] = sum(
            state.llama_state_size + state.scores.nbytes for state in cache.cache_state.values()
        )
        llm.set_cache(None)
        return answer
