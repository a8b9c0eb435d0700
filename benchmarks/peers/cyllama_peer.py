"""cyllama, from its wheel: another llama.cpp, built for any processor of its architecture."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any, ClassVar

from cyllama.llama import llama_cpp as cy

from benchmarks.peers.worker import Answer, NotThereError, Worker, serve


class Cyllama(Worker):
    """Its ``LlamaContext`` and ``LlamaBatch``."""

    STATEMENTS: ClassVar[dict[str, str]] = {
        "pos_max": "ctx.memory_seq_pos_max(0)",
        "pos_min": "ctx.memory_seq_pos_min(0)",
        "copy": "ctx.memory_seq_cp(0, s, -1, -1)",
        "copy_part": "ctx.memory_seq_cp(0, s, 0, 8)",
        "copy_over": "ctx.memory_seq_rm(s, -1, -1)\nctx.memory_seq_cp(0, s, -1, -1)",
        "remove": "ctx.memory_seq_rm(s, -1, -1)",
        "remove_part": "ctx.memory_seq_rm(s, 8, 16)",
        "keep": "ctx.memory_seq_keep(0)",
        "add": "ctx.memory_seq_add(s, -1, -1, 1)",
        "logits": "ctx.get_logits()",
        "batch1": "batch.set_batch(list1, 0, False)",
        "batch1_list": "batch.set_batch(list1, 0, False)",
        "batch512": "batch.set_batch(array512, 0, False)",
        "batch512_list": "batch.set_batch(list512, 0, False)",
        "decode1": "for i, token in steps:\n    one.set_batch(token, i, True)\n    ctx.decode(one)",
    }

    def __init__(self) -> None:
        super().__init__()
        cy.disable_logging()
        self.model: Any = None
        self.ctx: Any = None
        self.n_batch = 512
        self.blob = b""

    def facts(self) -> Answer:
        """Return versions."""
        return {
            "binding": "cyllama",
            "version": importlib.metadata.version("cyllama"),
            "llama.cpp": f"ggml {cy.ggml_version()}, {cy.ggml_commit()}",
        }

    def open(self, **options: Any) -> None:
        """Open a context."""
        if self.ctx is not None:
            self.ctx.close()
        path, threads = options.pop("model", None), options.pop("threads", 1)
        if path is not None:
            self.model = cy.LlamaModel(path, cy.LlamaModelParams())
        params = cy.LlamaContextParams()
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        params.swa_full = True
        params.n_batch = params.n_ubatch = self.n_batch = options.pop("n_batch", 512)
        params.n_ubatch = min(512, self.n_batch)
        for name, value in options.items():
            setattr(params, name, value)
        self.ctx = cy.LlamaContext(self.model, params)
        self.n_vocab = self.model.get_vocab().n_vocab
        self.batch = cy.LlamaBatch(n_tokens=self.n_batch, embd=0, n_seq_max=1)
        tokens = self.tokens(0, 512)
        self.names = {
            "ctx": self.ctx,
            "batch": cy.LlamaBatch(n_tokens=512, embd=0, n_seq_max=1),
            "one": cy.LlamaBatch(n_tokens=1, embd=0, n_seq_max=1),
            "list1": tokens[:1],
            "list512": tokens,
        }
        try:
            import numpy as np
        except ImportError:
            return
        self.names["array512"] = np.array(tokens, np.int32)

    def extend(self, seq: int, n: int) -> None:
        """Append tokens in batches."""
        start = self.ctx.memory_seq_pos_max(seq) + 1
        while n > 0:
            part = min(n, self.n_batch)
            self.decode_rows([(start, part, seq)])
            start += part
            n -= part

    def decode_rows(self, rows: list[tuple[int, int, int]]) -> None:
        """Decode one batch."""
        self.step(rows)()

    def step(self, rows: list[tuple[int, int, int]]) -> Callable[[], object]:
        """Return what adds token after token to a batch and decodes it."""
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

    def copy(self, src: int, dst: int) -> None:
        """Copy a whole sequence."""
        self.ctx.memory_seq_cp(src, dst, -1, -1)

    def clear(self) -> None:
        """Empty everything."""
        self.ctx.kv_cache_clear(False)

    def first_token(self) -> int:
        """Do without: reading logits raises an AttributeError in this version."""
        return 0

    def before_decode(self) -> None:
        """Go back to the tokens that were there."""
        self.ctx.memory_seq_rm(0, self.depth, -1)
        places = range(self.depth, self.depth + 16)
        self.names["steps"] = [(i, self.tokens(i, 1)) for i in places]

    def restore(self, how: str, path: str) -> None:
        """Restore a sequence state."""
        if how == "memory":
            self.ctx.set_state_seq_data(self.blob, 1)
        elif how == "file":
            self.ctx.load_state_seq_file(path, 1, 1 << 16)
        else:
            raise NotThereError(f"restoring from {how}")

    def keep_state(self, n: int, path: str) -> int:
        """Keep the state of sequence 0."""
        self.blob = self.ctx.get_state_seq_data(0)
        if path:
            self.ctx.save_state_seq_file(path, 0, self.tokens(0, n))
        return len(self.blob)

    def load_blob(self, blob: bytes) -> None:
        """Refuse: another llama.cpp may have another layout; the sequence is decoded instead."""
        raise NotThereError("a state of another llama.cpp")

    def state_call(self, what: str) -> Callable[[], object]:
        """Return one save, load or memcpy."""
        if what == "save_new":
            return lambda: self.ctx.get_state_seq_data(0)
        if what == "load":
            return lambda: self.ctx.set_state_seq_data(self.blob, 0)
        raise NotThereError(f"state {what}")


if __name__ == "__main__":
    serve(Cyllama())
