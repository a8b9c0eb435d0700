"""llama-cpp-python, built from its source distribution: the same llama.cpp commit as ours."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import llama_cpp
import numpy as np
from llama_cpp import _internals as internals

from benchmarks.peers.llama_class import LlamaClass, reported
from benchmarks.peers.primitives import Answer, NotThereError, Rows, apply
from benchmarks.peers.worker import serve


class LlamaCppPython(LlamaClass):
    """Uses the fastest interface: ctypes functions, or `Llama` where it is the subject."""

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
        "add": "llama_cpp.llama_memory_seq_add(mem, s, -1, -1, delta)",
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
        self.batch: Any = None
        self.options: dict[str, Any] = {}
        self.blob: Any = None

    def facts(self) -> Answer:
        """Return versions."""
        system = llama_cpp.llama_print_system_info().decode()
        return {
            "binding": "llama-cpp-python",
            "version": llama_cpp.__version__,
            "system": system,
        }

    def open(self, model: str | None, **options: Any) -> None:
        """Open a context through its internal classes, which take several sequences."""
        if self.context is not None:
            self.batch.close()
            self.context.close()
        self.path, self.options, self.llm = model or self.path, options, None
        if self.model is None or self.model.path_model != self.path:
            params = llama_cpp.llama_model_default_params()
            self.model = internals.LlamaModel(path_model=self.path, params=params, verbose=False)
        params = apply(llama_cpp.llama_context_default_params(), options)
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

    def reported(self) -> Answer:
        """Return the context's settings, and the parameters it was created with."""
        return reported(self.context.ctx, self.context.params)

    def end(self, seq: int) -> int:
        """Return the position after the last token."""
        return int(llama_cpp.llama_memory_seq_pos_max(self.mem, seq)) + 1

    def step(self, rows: Rows) -> Callable[[], object]:
        """Return a function that fills a batch field by field, like its `LlamaBatch`."""
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

    def cut(self, seq: int, length: int) -> None:
        """Truncate a sequence."""
        llama_cpp.llama_memory_seq_rm(self.mem, seq, length, -1)

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

    def restore(self, how: str, path: str) -> None:
        """Restore a sequence state through the ctypes functions."""
        if how == "memory":
            llama_cpp.llama_state_seq_set_data(self.context.ctx, self.blob, len(self.blob), 1)
        else:
            self.load_file(path, 1)

    def load_file(self, path: str, seq: int) -> object:
        """Load a file; its tokens go to a new ctypes array."""
        room, got = (llama_cpp.llama_token * (1 << 16))(), ctypes.c_size_t()
        return llama_cpp.llama_state_seq_load_file(
            self.context.ctx, path.encode(), seq, room, 1 << 16, ctypes.byref(got)
        )

    def keep_state(self, n: int, path: str) -> int:
        """Keep the state of sequence 0."""
        size = llama_cpp.llama_state_seq_get_size(self.context.ctx, 0)
        self.blob = (ctypes.c_uint8 * size)()
        llama_cpp.llama_state_seq_get_data(self.context.ctx, self.blob, size, 0)
        if path:
            self.file_call("file_save", path, n)()
        return int(size)

    def file_call(self, what: str, path: str, n: int) -> Callable[[], object]:
        """Return one save or load."""
        if what == "file_load":
            return lambda: self.load_file(path, 0)
        tokens = (llama_cpp.llama_token * n)(*self.tokens(0, n))
        ctx = self.context.ctx
        return lambda: llama_cpp.llama_state_seq_save_file(ctx, path.encode(), 0, tokens, n)

    def load_blob(self, blob: bytes) -> None:
        """Set the state of sequence 0."""
        self.blob = (ctypes.c_uint8 * len(blob)).from_buffer_copy(blob)
        if not llama_cpp.llama_state_seq_set_data(self.context.ctx, self.blob, len(blob), 0):
            raise ValueError("llama.cpp refused the state")

    def state_call(self, what: str) -> Callable[[], object]:
        """Return one save, load or memcpy."""
        ctx, blob, size = self.context.ctx, self.blob, len(self.blob)
        # As in C, vary the offset within a page.
        room, places = (ctypes.c_uint8 * (size + 4096))(), range(0, 4096, 256)
        outs = itertools.cycle([(ctypes.c_uint8 * size).from_buffer(room, i) for i in places])
        if what == "save":
            return lambda: llama_cpp.llama_state_seq_get_data(ctx, next(outs), size, 0)
        if what == "save_new":

            def save_new() -> object:
                fresh = (ctypes.c_uint8 * llama_cpp.llama_state_seq_get_size(ctx, 0))()
                return llama_cpp.llama_state_seq_get_data(ctx, fresh, len(fresh), 0)

            return save_new
        if what == "load":
            return lambda: llama_cpp.llama_state_seq_set_data(ctx, blob, size, 0)
        if what == "memcpy":
            return lambda: ctypes.memmove(next(outs), blob, size)
        if what == "memcpy_new":
            return lambda: (ctypes.c_uint8 * size).from_buffer_copy(blob)
        raise NotThereError


if __name__ == "__main__":
    serve(LlamaCppPython())
