"""xllamacpp, from its wheel: llama.cpp's server inside the process, and nothing below it.

It has no context and no sequences to call, so memory operations, batches and states are not
there. Throughput and the time to the first token are those of its completions: sampling, JSON
and the server's queue included. Times are the server's own where it reports them.
"""

from __future__ import annotations

import importlib.metadata
import threading
import time
from typing import Any

import xllamacpp

from benchmarks.peers.worker import Answer, Worker, serve


class XLlamaCpp(Worker):
    """Its ``Server``."""

    def __init__(self) -> None:
        super().__init__()
        self.server: Any = None
        self.path = ""
        self.shared = 0
        self.turn = 0

    def facts(self) -> Answer:
        """Return versions."""
        return {"binding": "xllamacpp", "version": importlib.metadata.version("xllamacpp")}

    def open(self, **options: Any) -> None:
        """Start a server with one slot per sequence."""
        self.path = options.get("model", self.path)
        params = xllamacpp.CommonParams()
        params.model.path = self.path
        params.n_ctx = options["n_ctx"]
        params.n_parallel = options["n_seq_max"]
        params.kv_unified = True
        params.n_batch, params.n_ubatch = 2048, 512
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.get("threads", 1)
        params.cache_ram_mib = 0
        params.n_ctx_checkpoints = 0
        params.warmup = False
        self.server = None
        self.server = xllamacpp.Server(params)
        self.n_vocab = options.get("n_vocab", 800)

    def complete(self, tokens: list[int], n: int, **more: Any) -> dict[str, Any]:
        """Run one completion."""
        answer: dict[str, Any] = self.server.handle_completions(
            {
                "prompt": tokens,
                "max_tokens": n,
                "temperature": 0.0,
                "samplers": ["temperature"],
                "ignore_eos": True,
                **more,
            }
        )
        if "timings" not in answer:
            raise ValueError(f"no timings: {answer}")
        timings: dict[str, Any] = answer["timings"]
        return timings

    def together(self, parallel: int, length: int, n: int) -> list[dict[str, Any]]:
        """Run as many completions at once, each with a prompt of its own."""
        self.turn += 1
        found: list[dict[str, Any]] = []

        def one(s: int) -> None:
            start = 1 + 131 * s + 17 * self.turn
            found.append(self.complete(self.tokens(start, length), n, cache_prompt=False))

        threads = [threading.Thread(target=one, args=(s,)) for s in range(parallel)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def do_decode(self, parallel: int, steps: int = 16, depth: int = 32) -> Answer:
        """Seconds of generation: the longest of the completions that ran together."""
        timings = self.together(parallel, depth, steps)
        seconds = max(t["predicted_ms"] for t in timings) / 1e3
        return {"seconds": seconds, "tokens": sum(t["predicted_n"] for t in timings)}

    def do_prefill(self, parallel: int, tokens: int = 512) -> Answer:
        """Seconds of prompts that came together."""
        start = time.perf_counter()
        timings = self.together(parallel, tokens // parallel, 1)
        took = time.perf_counter() - start
        return {"seconds": took, "tokens": sum(t["prompt_n"] for t in timings)}

    def do_prefix(self, how: str, n: int, tail: int = 16, path: str = "") -> Answer:
        """Time one completion of one token; its slot may still hold the prefix."""
        cached = how == "prefix"
        if not cached and how != "cold":
            return {"error": f"not there: restoring from {how}"}
        self.turn += 1
        prompt = self.tokens(0 if cached else 7 * self.turn, n)
        if cached:
            self.complete(prompt + self.tokens(n + 99, tail), 1, id_slot=0, cache_prompt=True)
        start = time.perf_counter()
        timings = self.complete(prompt + self.tokens(n, tail), 1, id_slot=0, cache_prompt=cached)
        first = time.perf_counter() - start
        return {"ready": 0.0, "first": first, "evaluated": timings["prompt_n"]}


if __name__ == "__main__":
    serve(XLlamaCpp())
