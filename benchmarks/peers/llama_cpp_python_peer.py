"""llama-cpp-python, built from its source distribution: the same llama.cpp commit as ours."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any, ClassVar

import llama_cpp
import numpy as np
from llama_cpp import _internals as internals
from llama_cpp.llama_cache import LlamaRAMCache

from benchmarks.peers.worker import Answer, NotThereError, Worker, serve


class LlamaCppPython(Worker):
    """The fastest way to each thing: its ctypes functions; `Llama` where that is the subject."""

    STATEMENTS: ClassVar[dict[str, str]] = {
        "pos_max": "llama_cpp.llama_memory_seq_pos_max(mem, 0)",
        "pos_min": "llama_cpp.llama_memory_seq_pos_min(mem, 0)",
        "can_shift": "llama_cpp.llama_memory_can_shift(mem)",
        "copy": "llama_cpp.llama_memory_seq_cp(mem, 0, s, -1, -1)",
        "copy_part": "llama_cpp.llama_memory_seq_cp(mem, 0, s, 0, 8)",
        "copy_over": "llama_cpp.llama_memory_seq_rm(mem, s, -1, -1)\n"
        "llama_cpp.llama_memory_seq_cp(mem, 0, s, -1, -1)",
        "remove": "llama_cpp.llama_memory_seq_rm(mem, s, -1, -1)",
        "remove_part": "llama_cpp.llama_memory_seq_rm(mem, s, 8, 16)",
        "keep": "llama_cpp.llama_memory_seq_keep(mem, 0)",
        "add": "llama_cpp.llama_memory_seq_add(mem, s, -1, -1, 1)",
        "div": "llama_cpp.llama_memory_seq_div(mem, s, -1, -1, 2)",
        "logits": "row = llama_cpp.llama_get_logits_ith(ctx, -1)\n"
        "np.ctypeslib.as_array(row, (n_vocab,)).copy()",
        "batch1": "batch.set_batch(array1, 0, False)",
        "batch1_list": "batch.set_batch(list1, 0, False)",
        "batch512": "batch.set_batch(array512, 0, False)",
        "batch512_list": "batch.set_batch(list512, 0, False)",
        "decode1": "for i, token in steps:\n"
        "    one.set_batch(token, i, False)\n    context.decode(one)",
    }

    def __init__(self) -> None:
        super().__init__()
        self.path = ""
        self.model: Any = None
        self.context: Any = None
        self.llm: Any = None
        self.batch: Any = None
        self.options: dict[str, Any] = {}
        self.n_batch = 512
        self.blob: Any = None
        self.caches: dict[int, Any] = {}
        self.evaluated = 0

    def facts(self) -> Answer:
        """Return versions."""
        system = llama_cpp.llama_print_system_info().decode()
        return {
            "binding": "llama-cpp-python",
            "version": llama_cpp.__version__,
            "system": system,
        }

    def open(self, **options: Any) -> None:
        """Open a context through its internal classes, which take several sequences."""
        if self.context is not None:
            self.batch.close()
            self.context.close()
        if self.llm is not None:
            self.llm.close()
            self.llm = None
        self.path, threads = options.pop("model", self.path), options.pop("threads", 1)
        self.options = {**options, "threads": threads}
        if self.model is None or self.model.path_model != self.path:
            params = llama_cpp.llama_model_default_params()
            self.model = internals.LlamaModel(path_model=self.path, params=params, verbose=False)
        params = llama_cpp.llama_context_default_params()
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        params.swa_full = True
        self.n_batch = options.pop("n_batch", 512)
        params.n_batch, params.n_ubatch = self.n_batch, min(512, self.n_batch)
        for name, value in options.items():
            setattr(params, name, value)
        self.context = internals.LlamaContext(model=self.model, params=params, verbose=False)
        self.mem = self.context.memory
        self.n_vocab = self.model.n_vocab()
        self.batch = internals.LlamaBatch(n_tokens=self.n_batch, embd=0, n_seq_max=1, verbose=False)
        tokens = self.tokens(0, 512)
        self.names = {
            "llama_cpp": llama_cpp,
            "np": np,
            "mem": self.mem,
            "ctx": self.context.ctx,
            "context": self.context,
            "n_vocab": self.n_vocab,
            "batch": internals.LlamaBatch(n_tokens=512, embd=0, n_seq_max=1, verbose=False),
            "one": internals.LlamaBatch(n_tokens=1, embd=0, n_seq_max=1, verbose=False),
            "list1": tokens[:1],
            "array1": np.array(tokens[:1], np.int32),
            "list512": tokens,
            "array512": np.array(tokens, np.int32),
        }

    def extend(self, seq: int, n: int) -> None:
        """Append tokens in batches."""
        start = llama_cpp.llama_memory_seq_pos_max(self.mem, seq) + 1
        while n > 0:
            part = min(n, self.n_batch)
            self.decode_rows([(start, part, seq)])
            start += part
            n -= part

    def decode_rows(self, rows: list[tuple[int, int, int]]) -> None:
        """Decode one batch."""
        self.step(rows)()

    def step(self, rows: list[tuple[int, int, int]]) -> Callable[[], object]:
        """Return what fills a batch field by field, as its own `LlamaBatch` does."""
        places = self.places(rows)

        def run() -> None:
            batch = self.batch.batch
            for at, (token, pos, seq, logits) in enumerate(places):
                batch.token[at] = token
                batch.pos[at] = pos
                batch.seq_id[at][0] = seq
                batch.n_seq_id[at] = 1
                batch.logits[at] = logits
            batch.n_tokens = len(places)
            self.context.decode(self.batch)

        return run

    def remove(self, seq: int) -> None:
        """Empty a sequence."""
        llama_cpp.llama_memory_seq_rm(self.mem, seq, -1, -1)

    def copy(self, src: int, dst: int) -> None:
        """Copy a whole sequence."""
        llama_cpp.llama_memory_seq_cp(self.mem, src, dst, -1, -1)

    def clear(self) -> None:
        """Empty everything."""
        llama_cpp.llama_memory_clear(self.mem, False)

    def first_token(self) -> int:
        """Return the likeliest next token."""
        row = llama_cpp.llama_get_logits_ith(self.context.ctx, -1)
        return int(np.ctypeslib.as_array(row, (self.n_vocab,)).argmax())

    def held(self) -> int:
        """Return the length of sequence 0."""
        return int(llama_cpp.llama_memory_seq_pos_max(self.mem, 0)) + 1

    def before_decode(self) -> None:
        """Go back to the tokens that were there."""
        llama_cpp.llama_memory_seq_rm(self.mem, 0, self.depth, -1)
        places = range(self.depth, self.depth + 16)
        self.names["steps"] = [(i, self.tokens(i, 1)) for i in places]

    def restore(self, how: str, path: str) -> None:
        """Restore a sequence state through the ctypes functions."""
        if how == "memory":
            llama_cpp.llama_state_seq_set_data(self.context.ctx, self.blob, len(self.blob), 1)
        elif how == "file":
            room = (llama_cpp.llama_token * (1 << 16))()
            got = ctypes.c_size_t()
            llama_cpp.llama_state_seq_load_file(
                self.context.ctx, path.encode(), 1, room, 1 << 16, ctypes.byref(got)
            )
        else:
            raise NotThereError(f"restoring from {how}")

    def keep_state(self, n: int, path: str) -> int:
        """Keep the state of sequence 0."""
        size = llama_cpp.llama_state_seq_get_size(self.context.ctx, 0)
        self.blob = (ctypes.c_uint8 * size)()
        llama_cpp.llama_state_seq_get_data(self.context.ctx, self.blob, size, 0)
        if path:
            tokens = (llama_cpp.llama_token * n)(*self.tokens(0, n))
            llama_cpp.llama_state_seq_save_file(self.context.ctx, path.encode(), 0, tokens, n)
        return int(size)

    def load_blob(self, blob: bytes) -> None:
        """Set the state of sequence 0."""
        self.blob = (ctypes.c_uint8 * len(blob)).from_buffer_copy(blob)
        if not llama_cpp.llama_state_seq_set_data(self.context.ctx, self.blob, len(blob), 0):
            raise ValueError("llama.cpp refused the state")

    def state_call(self, what: str) -> Callable[[], object]:
        """Return one save, load or memcpy."""
        ctx, blob, size = self.context.ctx, self.blob, len(self.blob)
        out = (ctypes.c_uint8 * size)()
        if what == "save":
            return lambda: llama_cpp.llama_state_seq_get_data(ctx, out, size, 0)
        if what == "save_new":

            def save_new() -> object:
                fresh = (ctypes.c_uint8 * llama_cpp.llama_state_seq_get_size(ctx, 0))()
                return llama_cpp.llama_state_seq_get_data(ctx, fresh, len(fresh), 0)

            return save_new
        if what == "load":
            return lambda: llama_cpp.llama_state_seq_set_data(ctx, blob, size, 0)
        if what == "memcpy":
            return lambda: ctypes.memmove(out, blob, size)
        raise NotThereError(f"state {what}")

    # Llama and its cache ------------------------------------------------------------------

    def llama(self) -> Any:
        """Return its high-level object, which counts what it evaluates."""
        if self.llm is None:
            threads = self.options["threads"]
            self.llm = llama_cpp.Llama(
                self.path,
                n_ctx=self.options["n_ctx"],
                n_batch=512,
                n_threads=threads,
                n_threads_batch=threads,
                verbose=False,
            )
            inner = self.llm.eval

            def counted(tokens: list[int]) -> None:
                self.evaluated += len(tokens)
                inner(tokens)

            self.llm.eval = counted
        return self.llm

    def do_llama(self, n: int, how: str, tail: int = 16) -> Answer:
        """Time `Llama.generate` to its first token, with its RAM cache or its own prefix match."""
        llm, shared = self.llama(), self.tokens(0, n)
        mine, other = shared + self.tokens(n, tail), shared + self.tokens(n + 5, tail)
        # One for each length: a cache answers with any state that shares a beginning.
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
        if how == "cold":
            llm.reset()
        elif how == "cache":
            llm.load_state(cache[mine])
        ready = time.perf_counter() - start
        next(llm.generate(mine, temp=0.0))
        first = time.perf_counter() - start
        return {"ready": ready, "first": first, "evaluated": self.evaluated}


if __name__ == "__main__":
    serve(LlamaCppPython())
