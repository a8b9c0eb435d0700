"""cyllama, from its wheel: another llama.cpp, built for any x86-64 processor."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any, ClassVar

from cyllama.llama import llama_cpp as cy

from benchmarks.peers.primitives import Answer, NotThereError, Rows, apply
from benchmarks.peers.worker import Worker, serve


class Model(cy.LlamaModel):  # type: ignore[misc]
    """Adds the attribute that `get_logits` lacks in this version."""

    @property
    def n_vocab(self) -> int:
        """The size of the vocabulary."""
        return int(self.get_vocab().n_vocab)


class Cyllama(Worker):
    """Its ``LlamaContext`` and ``LlamaBatch``; batches take lists, so an array is converted."""

    STATEMENTS: ClassVar[dict[str, str]] = {
        "pos_max": "ctx.memory_seq_pos_max(0)",
        "pos_min": "ctx.memory_seq_pos_min(0)",
        "copy": "ctx.memory_seq_cp(0, s, -1, -1)",
        "copy_part": "ctx.memory_seq_cp(0, s, 0, 8)",
        "copy_over": "ctx.memory_seq_rm(s, -1, -1)\nctx.memory_seq_cp(0, s, -1, -1)",
        "remove": "ctx.memory_seq_rm(s, -1, -1)",
        "remove_part": "ctx.memory_seq_rm(s, 8, 16)",
        "keep": "ctx.memory_seq_keep(0)",
        "add": "ctx.memory_seq_add(s, -1, -1, delta)",
        "logits": "ctx.get_logits()",
        "batch1": "batch.set_batch(array1.tolist(), 0, False)",
        "batch1_list": "batch.set_batch(list1, 0, False)",
        "batch512": "batch.set_batch(array512.tolist(), 0, False)",
        "batch512_list": "batch.set_batch(list512, 0, False)",
        "decode1": "for i, token in steps:\n    one.set_batch(token, i, True)\n    ctx.decode(one)",
    }

    def __init__(self) -> None:
        super().__init__()
        cy.disable_logging()
        self.model: Any = None
        self.ctx: Any = None
        self.blob = b""
        self.greedy = cy.LlamaSampler(cy.LlamaSamplerChainParams())
        self.greedy.add_greedy()

    def facts(self) -> Answer:
        """Return versions."""
        return {
            "binding": "cyllama",
            "version": importlib.metadata.version("cyllama"),
            "llama.cpp": f"ggml {cy.ggml_version()}, {cy.ggml_commit()}",
        }

    def open(self, model: str | None, **options: Any) -> None:
        """Open a context."""
        if self.ctx is not None:
            self.ctx.close()
        if model is not None:
            self.model = Model(model, cy.LlamaModelParams())
        self.ctx = cy.LlamaContext(self.model, apply(cy.LlamaContextParams(), options))
        self.n_vocab = self.model.n_vocab
        self.batch = cy.LlamaBatch(n_tokens=self.n_batch, embd=0, n_seq_max=1)
        tokens = self.tokens(0, 512)
        self.names = {
            "ctx": self.ctx,
            "batch": cy.LlamaBatch(n_tokens=512, embd=0, n_seq_max=1),
            "one": cy.LlamaBatch(n_tokens=1, embd=0, n_seq_max=1),
            "list1": tokens[:1],
            "list512": tokens,
        }
        # Imported late, because the binding does not need it and its memory is measured.
        import numpy as np

        self.names["array1"] = np.array(tokens[:1], np.int32)
        self.names["array512"] = np.array(tokens, np.int32)

    def reported(self) -> Answer:
        """Return the context's settings, and the parameters it was created with."""
        names = ("n_ctx", "n_seq_max", "n_batch", "n_ubatch")
        found = {name: int(getattr(self.ctx, name)) for name in names}
        params = self.ctx.params
        types = {name: int(getattr(params, name)) for name in ("type_k", "type_v")}
        flash = int(params.flash_attn_type)
        return {**found, **types, "flash_attn": flash, "threads": int(self.ctx.n_threads())}

    def end(self, seq: int) -> int:
        """Return the position after the last token."""
        return int(self.ctx.memory_seq_pos_max(seq)) + 1

    def step(self, rows: Rows) -> Callable[[], object]:
        """Return a function that adds tokens one by one to a batch and decodes it."""
        places = [(token, pos, [seq], logits) for token, pos, seq, logits in self.places(rows)]

        def run() -> None:
            self.batch.reset()
            for place in places:
                self.batch.add(*place)
            self.ctx.decode(self.batch)

        return run

    def remove(self, seq: int) -> None:
        """Empty a sequence."""
        self.ctx.memory_seq_rm(seq, -1, -1)

    def cut(self, seq: int, length: int) -> None:
        """Truncate a sequence."""
        self.ctx.memory_seq_rm(seq, length, -1)

    def copy(self, src: int, dst: int) -> None:
        """Copy a whole sequence."""
        self.ctx.memory_seq_cp(src, dst, -1, -1)

    def clear(self) -> None:
        """Empty everything."""
        self.ctx.kv_cache_clear(False)

    def first_token(self) -> int:
        """Return the likeliest next token: its greedy sampler reads the logits in C."""
        return int(self.greedy.sample(self.ctx, -1))

    def restore(self, how: str, path: str) -> None:
        """Restore a sequence state."""
        if how == "memory":
            self.ctx.set_state_seq_data(self.blob, 1)
        else:
            self.ctx.load_state_seq_file(path, 1, 1 << 16)

    def keep_state(self, n: int, path: str) -> int:
        """Keep the state of sequence 0; its files have no tokens, because those above 255 fail."""
        self.blob = self.ctx.get_state_seq_data(0)
        if path:
            self.ctx.save_state_seq_file(path, 0, [])
        return len(self.blob)

    def load_blob(self, blob: bytes) -> None:
        """Set the state of sequence 0, whose layout may differ between llama.cpp versions."""
        self.blob = blob
        self.ctx.set_state_seq_data(blob, 0)
        if self.ctx.get_state_seq_data(0) != blob:
            raise NotThereError("its llama.cpp lays states out in another way")

    def state_call(self, what: str) -> Callable[[], object]:
        """Return one save or load."""
        if what == "save_new":
            return lambda: self.ctx.get_state_seq_data(0)
        if what == "load":
            return lambda: self.ctx.set_state_seq_data(self.blob, 0)
        why = "a yardstick: measured in C, with NumPy and with ctypes"
        raise NotThereError("its saves make a new object" if what == "save" else why)

    def file_call(self, what: str, path: str, n: int) -> Callable[[], object]:
        """Return one save or load."""
        if what == "file_load":
            return lambda: self.ctx.load_state_seq_file(path, 0, 1 << 16)
        return lambda: self.ctx.save_state_seq_file(path, 0, [])


if __name__ == "__main__":
    serve(Cyllama())
