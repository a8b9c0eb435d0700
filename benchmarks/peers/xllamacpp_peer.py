"""xllamacpp, from its wheel: llama.cpp's server inside the process.

It has no contexts or sequences. Throughput and time to first token are those of completions,
including sampling, JSON and the server's queue. States are files of its slots, saved and restored
over HTTP; their times are the server's.
"""

from __future__ import annotations

import importlib.metadata
import json
import struct
import tempfile
import threading
import time
import urllib.error
import urllib.request
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import xllamacpp

from benchmarks.peers.primitives import Answer, NotThereError
from benchmarks.peers.prompts import play
from benchmarks.peers.worker import Worker, serve
from benchmarks.peers.workload import TEMPERATURE, TOP_K, workload

#: Tokens at the start and end of concurrent completions that do not count.
MARGIN = 3
#: Offset of the number of cells in our raw sequence state.
CELLS = slice(12, 16)
N_TRAIN = {"stories.gguf": 1024}
SAMPLING = {"temperature": 0.0, "samplers": ["temperature"], "ignore_eos": True}

MIXED = {"temperature": TEMPERATURE, "top_k": TOP_K, "samplers": ["top_k", "temperature"]}


class XLlamaCpp(Worker):
    """Its ``Server``."""

    def __init__(self) -> None:
        super().__init__()
        self.server: Any = None
        self.cached: Any = None
        self.params: Any = None
        self.path = ""
        self.options: dict[str, Any] = {}
        self.turn = 0
        self.slots = Path(tempfile.mkdtemp(prefix="slots-"))

    def facts(self) -> Answer:
        """Return versions."""
        return {"binding": "xllamacpp", "version": importlib.metadata.version("xllamacpp")}

    def open(self, model: str | None, **options: Any) -> None:
        """Start a server with one slot per sequence."""
        if model is None:
            raise NotThereError("a server cannot be recreated without its model")
        self.path, self.options = model, options
        self.server = self.cached = None
        self.server = self.serve(options)

    def serve(self, asked: dict[str, Any], ram_mib: int = 0) -> Any:
        """Start a server with or without a cache for prompts that lost their slot."""
        params = xllamacpp.CommonParams()
        params.model.path = self.path
        params.n_ctx, params.n_parallel = asked["n_ctx"], asked["n_seq_max"]
        params.n_batch, params.n_ubatch = asked["n_batch"], asked["n_ubatch"]
        params.kv_unified = params.swa_full = True
        params.flash_attn_type = xllamacpp.llama_flash_attn_type(asked["flash_attn"])
        params.cache_type_k = xllamacpp.ggml_type(asked["type_k"])
        params.cache_type_v = xllamacpp.ggml_type(asked["type_v"])
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = asked["threads"]
        params.cache_ram_mib, params.n_ctx_checkpoints = ram_mib, 0
        params.slot_save_path, params.endpoint_slots = f"{self.slots}/", True
        params.warmup = False
        self.params = params
        return xllamacpp.Server(params)

    def reported(self) -> Answer:
        """Return the server's effective parameters."""
        params = self.params
        names = {"n_seq_max": "n_parallel", "type_k": "cache_type_k", "type_v": "cache_type_v"}
        same = {name: name for name in ("n_ctx", "n_batch", "n_ubatch")}
        names |= {"flash_attn": "flash_attn_type"} | same
        found = {key: int(getattr(params, name)) for key, name in names.items()}
        return {**found, "threads": int(params.cpuparams.n_threads)}

    # Completions --------------------------------------------------------------------------

    def complete(self, tokens: list[int], n: int, server: Any = None, **more: Any) -> Answer:
        """Run one completion; return the server's timings."""
        request = {"prompt": tokens, "max_tokens": n, **SAMPLING, **more}
        answer: Answer = (server or self.server).handle_completions(request)
        if "timings" not in answer:
            raise ValueError(f"no timings: {answer}")
        timings: Answer = answer["timings"]
        return timings

    def together(self, parallel: int, length: int, n: int) -> list[list[tuple[float, float]]]:
        """Run concurrent completions of one prompt.

        Returns
        -------
        list
            For each completion and token, its time and the server's seconds of generation.
        """
        came: list[list[tuple[float, float]]] = [[] for _ in range(parallel)]
        request = {"prompt": self.tokens(0, length), "max_tokens": n, "cache_prompt": False}
        request |= {"stream": True, "timings_per_token": True, **SAMPLING}

        def one(tokens: list[tuple[float, float]]) -> None:
            def note(chunk: Answer) -> None:
                if chunk["choices"][0]["finish_reason"] is None:
                    made = float(chunk["timings"]["predicted_ms"]) / 1e3
                    tokens.append((time.perf_counter(), made))

            self.server.handle_completions(request, note)

        threads = [threading.Thread(target=one, args=(tokens,)) for tokens in came]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return came

    def do_decode(self, parallel: int, steps: int = 16, depth: int = 32) -> Answer:
        """Return the seconds of the fastest step with all completions."""
        # They start at different times, and tokens arrive late: only steps well inside count.
        came = self.together(parallel, depth, steps + 8 + 2 * MARGIN)
        begin, end = max(c[0][0] for c in came), min(c[-1][0] for c in came)
        inside = [made for when, made in came[0] if begin <= when <= end][MARGIN:-MARGIN]
        if len(inside) < 2:
            raise ValueError("the completions did not run together")
        return {"seconds": min(b - a for a, b in pairwise(inside)), "tokens": parallel}

    def do_prefill(self, parallel: int, tokens: int = 512) -> Answer:
        """Return the seconds of concurrent prompts, up to the last one's first token."""
        each, start = tokens // parallel, time.perf_counter()
        came = self.together(parallel, each, 1)
        return {"seconds": max(c[-1][0] for c in came) - start, "tokens": each * parallel}

    def do_many(self, what: str, slots: int, alone: bool = False) -> Answer:
        """Run one client per slot; each takes the next request."""
        waiting = list(enumerate(workload(what)))
        waiting.reverse()
        counts: list[int] = []

        def work() -> None:
            while True:
                try:
                    i, one = waiting.pop()
                except IndexError:
                    return
                more = {"seed": i + 1, "cache_prompt": False, **MIXED}
                done = self.complete(self.tokens(one.start, one.length), one.new, **more)
                counts.append(int(done["predicted_n"]))

        threads = [threading.Thread(target=work) for _ in range(slots)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {"seconds": time.perf_counter() - start, "tokens": sum(counts)}

    def do_prefix(self, how: str, n: int, tail: int = 16, path: str = "") -> Answer:
        """Time a completion of one token, with the prefix cached or restored."""
        self.turn += 1
        shared, server, first = self.tokens(0, n), self.server, self.turn * 5 * tail + n
        slot: Answer = {"id_slot": 0, "cache_prompt": how != "cold"}
        if how == "prefix":
            self.complete(shared + self.tokens(first, tail), 1, **slot)
        elif how == "cache":
            server, slot = self.with_cache(n), {"cache_prompt": True}
            # Another prompt takes the slot, so that the server stores the state.
            self.complete(self.tokens(7 * self.turn, 8), 1, server, **slot)
        elif how == "file":
            self.action("erase")
        elif how != "cold":
            raise NotThereError("no sequences to copy and no states to hold: a server")
        start = time.perf_counter()
        if how == "file":
            self.action("restore", Path(path).name)
        timings = self.complete(shared + self.tokens(first + tail, tail), 1, server, **slot)
        took = time.perf_counter() - start
        if timings["prompt_n"] != tail + (n if how == "cold" else 0):
            raise ValueError(f"evaluated {timings['prompt_n']} tokens")
        return {"ready": 0.0, "first": took, "evaluated": timings["prompt_n"]}

    def with_cache(self, n: int) -> Any:
        """Return a server with one slot and a cache for the shared tokens."""
        if self.cached is None or self.cached[0] != n:
            self.cached = None  # ends the server
            self.cached = (n, self.serve({**self.options, "n_seq_max": 1}, ram_mib=1024))
            self.complete(self.tokens(0, n), 1, self.cached[1], cache_prompt=True)
        return self.cached[1]

    def do_reuse(self, work: str, ram_mib: int, quick: bool = False) -> Answer:
        """Play a workload on a new server with limited RAM for prompts that lost their slot."""
        if ram_mib < 0:
            raise NotThereError("evaluation of everything is ours")
        server = self.serve(self.options, ram_mib=ram_mib)

        def ask(prompt: list[int], n: int) -> tuple[list[int], int]:
            request = {"prompt": prompt, "max_tokens": n, "cache_prompt": True, **SAMPLING}
            request["ignore_eos"] = False  # as for all contestants
            # Its answers contain token ids only with log probabilities.
            answer = server.handle_completions({**request, "logprobs": 1})
            if "timings" not in answer:
                raise ValueError(f"no timings: {answer}")
            made = [int(one["id"]) for one in answer["choices"][0]["logprobs"]["content"]]
            return made, int(answer["timings"]["prompt_n"])

        return play(work, ask, quick)

    # States -------------------------------------------------------------------------------

    def action(self, what: str, name: str = "") -> Answer:
        """Let the server save, restore or erase slot 0."""
        request = urllib.request.Request(
            f"{self.server.listening_address}/slots/0?action={what}",
            json.dumps({"filename": name}).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                found: Answer = json.loads(answer.read())
        except urllib.error.HTTPError as error:
            why = json.loads(error.read())["error"]["message"]
            raise ValueError(f"{what}: {why}") from None
        return found

    def do_load_blob(self, path: str) -> Answer:
        """Evaluate as many tokens in slot 0, because its files have another layout."""
        n = struct.unpack("<I", Path(path).read_bytes()[CELLS])[0]
        if n > min(self.options["n_ctx"], N_TRAIN.get(Path(self.path).name, n)):
            raise NotThereError("its server cuts contexts to what the model was trained for")
        self.complete(self.tokens(0, n), 1, id_slot=0)
        return {"bytes": self.do_keep_state(n, "blob")["bytes"]}

    def do_keep_state(self, n: int, path: str = "") -> Answer:
        """Save slot 0."""
        return {"bytes": self.action("save", Path(path).name)["n_written"]}

    def do_state(self, what: str, slices: int = 5) -> Answer:
        """Refuse."""
        raise NotThereError("its states are files")

    def do_file(self, what: str, path: str, n: int, slices: int = 5) -> Answer:
        """Return the server's median seconds of a save or restore."""
        name, times = Path(path).name, []
        for _ in range(slices + 1):
            if what == "file_load":
                self.action("erase")
            elif what == "file_make":
                (self.slots / name).unlink(missing_ok=True)
            done = self.action("restore" if what == "file_load" else "save", name)["timings"]
            times.append(float(done.get("save_ms", done.get("restore_ms"))) / 1e3)
        return {"seconds": median(times[1:])}


if __name__ == "__main__":
    serve(XLlamaCpp())
