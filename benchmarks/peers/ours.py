"""pykvcache, from the wheel of this tree."""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from benchmarks.peers.ours_real import Real
from benchmarks.peers.ours_reuse import Reuse
from benchmarks.peers.ours_tiers import Tiered
from benchmarks.peers.primitives import Answer, Rows
from benchmarks.peers.worker import serve
from pykvcache import LlamaBatch, LlamaContext, LlamaModel
from pykvcache.enums import FlashAttention, GgmlType
from pykvcache.kv import LayerKV, SequenceKV


class Ours(Reuse, Tiered, Real):
    """Uses the public API."""

    STATEMENTS: ClassVar[dict[str, str]] = {
        "empty0": "empty.nothing()",
        "empty1": "empty.one(0)",
        "empty2": "empty.two(0, s)",
        "empty4": "empty.four(0, s, None, None)",
        "pos_max": "ctx.kv_cache_seq_pos_max(0)",
        "pos_min": "ctx.kv_cache_seq_pos_min(0)",
        "can_shift": "ctx.kv_cache_can_shift()",
        "copy": "ctx.copy_kv_cache_seq(0, s)",
        "copy_part": "ctx.copy_kv_cache_seq(0, s, 0, 8)",
        "copy_over": "ctx.copy_kv_cache_seq(0, s)",
        "remove": "ctx.clear_kv_cache_seq(s)",
        "remove_part": "ctx.clear_kv_cache_seq(s, 8, 16)",
        "keep": "ctx.kv_cache_seq_keep(0)",
        "add": "ctx.kv_cache_seq_add(s, None, None, delta)",
        "div": "ctx.kv_cache_seq_div(s, None, None, 2)",
        "can_resume": "ctx.can_resume(0, 16)",
        "logits": "ctx.logits()",
        "batch1": "batch.clear()\nbatch.add_sequence(array1, 0)",
        "batch1_list": "batch.clear()\nbatch.add_sequence(list1, 0)",
        "batch512": "batch.clear()\nbatch.add_sequence(array512, 0)",
        "batch512_list": "batch.clear()\nbatch.add_sequence(list512, 0)",
        "batch512_new": "LlamaBatch.from_arrays(array512, positions, 0)",
        "decode1": "for token in steps:\n    ctx.decode(token)",
    }

    def __init__(self) -> None:
        super().__init__()
        self.model: LlamaModel | None = None
        self.ctx: LlamaContext | None = None
        self.blob: Any = b""

    def facts(self) -> Answer:
        """Return versions."""
        return {"binding": "pykvcache", "version": importlib.metadata.version("pykvcache")}

    def open(self, model: str | None, **options: Any) -> None:
        """Open a context with the requested settings."""
        if self.ctx is not None:
            self.ctx.close()
        servers = options.pop("rpc", None)
        if model is not None:
            self.model = LlamaModel(model, rpc=servers)
        assert self.model is not None
        self.n_vocab = self.model.n_vocab
        self.ctx = LlamaContext(
            self.model,
            n_threads=options.pop("threads"),
            flash_attn=FlashAttention(options.pop("flash_attn")),
            type_k=GgmlType(options.pop("type_k")),
            type_v=GgmlType(options.pop("type_v")),
            **options,
        )
        array = np.array(self.tokens(0, 512), np.int32)
        self.names = {
            "ctx": self.ctx,
            "batch": LlamaBatch(),
            "LlamaBatch": LlamaBatch,
            "array1": array[:1].copy(),
            "list1": array[:1].tolist(),
            "array512": array,
            "list512": array.tolist(),
            "positions": np.arange(512, dtype=np.int32),
        }
        if "PYKVCACHE_BENCH_NATIVE" in os.environ:
            sys.path.insert(0, os.environ["PYKVCACHE_BENCH_NATIVE"])
            import bench_thin

            self.names["empty"] = bench_thin.Empty()

    def reported(self) -> Answer:
        """Return all settings."""
        ctx = self.context
        names = ("n_ctx", "n_seq_max", "n_batch", "n_ubatch", "flash_attn", "type_k", "type_v")
        assert ctx.n_threads == ctx.n_threads_batch
        return {name: int(getattr(ctx, name)) for name in names} | {"threads": ctx.n_threads}

    @property
    def context(self) -> LlamaContext:
        """The open context."""
        assert self.ctx is not None
        return self.ctx

    def array(self, start: int, n: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Return the tokens of some places as an array."""
        return np.array(self.tokens(start, n), np.int32)

    def extend(self, seq: int, n: int) -> None:
        """Append tokens to a sequence."""
        self.context.decode(self.array(self.end(seq), n), seq_id=seq)

    def end(self, seq: int) -> int:
        """Return the position after the last token."""
        return self.context.kv_cache_seq_pos_max(seq) + 1

    def step(self, rows: Rows) -> Callable[[], object]:
        """Return a function that makes a batch from arrays and decodes it."""
        columns = np.array(self.places(rows), np.int32).T.copy()
        token, pos, seq, logits = columns
        return lambda: self.context.decode(LlamaBatch.from_arrays(token, pos, seq, logits))

    def remove(self, seq: int) -> None:
        """Empty a sequence."""
        self.context.clear_kv_cache_seq(seq)

    def cut(self, seq: int, length: int) -> None:
        """Truncate a sequence."""
        self.context.clear_kv_cache_seq(seq, length)

    def copy(self, src: int, dst: int) -> None:
        """Copy a whole sequence."""
        self.context.copy_kv_cache_seq(src, dst)

    def clear(self) -> None:
        """Empty everything."""
        self.context.clear_kv_cache_seq(None)

    def first_token(self) -> int:
        """Return the likeliest next token."""
        return int(self.context.logits().argmax())

    def sequences(self) -> dict[int, int]:
        """Return the number of cells of each sequence."""
        return {s: held.n_cells for s, held in self.context.sequences().items()}

    def before_decode(self) -> None:
        """Remove the decoded tokens; prepare the next ones as arrays."""
        super().before_decode()
        self.names["steps"] = [self.array(i, 1) for i, _ in self.names["steps"]]

    def restore(self, how: str, path: str) -> None:
        """Restore a sequence state."""
        if how == "memory":
            self.context.set_state(self.blob, 1)
        else:
            self.context.load_sequence(path, 1)

    def keep_state(self, n: int, path: str) -> int:
        """Keep the state of sequence 0."""
        self.blob = self.context.get_state(0)
        if path:
            self.context.save_sequence(path, 0)
        return len(self.blob)

    def load_blob(self, blob: bytes) -> None:
        """Set the state of sequence 0."""
        self.blob = np.frombuffer(blob, np.uint8)
        self.context.set_state(self.blob, 0)

    def do_make_blob(self, n: int, path: str) -> Answer:
        """Write a state of n tokens with random keys and values, for `load_blob`."""
        self.do_fill(1)
        rng = np.random.default_rng(0)
        layers = []
        for layer in self.context.kv(0).layers:
            pair = [
                rng.standard_normal((n, *a.shape[1:]), np.float32).astype(a.dtype)
                for a in (layer.keys, layer.values)
            ]
            layers.append(LayerKV(pair[0], pair[1]))
        self.clear()
        self.context.write_kv(SequenceKV(np.arange(n, dtype=np.int32), layers), 0)
        with open(path, "wb") as file:
            file.write(self.context.get_state(0).tobytes())
        return {}

    def state_call(self, what: str) -> Callable[[], object]:
        """Return one save, load or memcpy."""
        ctx = self.context
        blob: Any = np.frombuffer(self.blob, np.uint8)
        # As in C, vary the offset within a page.
        room: Any = np.ones(len(blob) + 4096, np.uint8)
        outs = itertools.cycle([room[i : i + len(blob)] for i in range(0, 4096, 256)])
        calls: dict[str, Callable[[], object]] = {
            "save": lambda: ctx.get_state(0, out=next(outs)),
            "save_new": lambda: ctx.get_state(0),
            "load": lambda: ctx.set_state(blob, 0),
            "memcpy": lambda: np.copyto(next(outs), blob),
            "memcpy_new": blob.copy,
        }
        return calls[what]

    def file_call(self, what: str, path: str, n: int) -> Callable[[], object]:
        """Return a load, or a save that does not wait for the disk, like C's."""
        ctx, tokens = self.context, np.zeros(n, np.int32)
        if what == "file_load":
            return lambda: ctx.load_sequence(path, 0)
        return lambda: ctx.save_sequence(path, 0, tokens, sync=False)


if __name__ == "__main__":
    serve(Ours())
