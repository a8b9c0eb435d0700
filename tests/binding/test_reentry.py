"""Code that runs inside of a call: `__index__`, signal handlers, finalizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from binding.conftest import Child, assert_quiet, needs_timers
from binding.test_threads import PATIENCE, together
from pykvcache import KvCacheError


class Calls:
    """An integer that calls something while it is read."""

    def __init__(self, action: Callable[[], object], value: int) -> None:
        self.action, self.value = action, value

    def __index__(self) -> int:
        self.action()
        return self.value


def test_an_integer_that_uses_the_context_neither_hangs_nor_crashes(make_context: Any) -> None:
    def work() -> None:
        for action in ("close", "kv_cache_can_shift", "clear_kv_cache", "perf"):
            for use in ("logits", "kv_cache_seq_pos_max", "kv_cache_seq_keep", "seq_embeddings"):
                ctx = make_context("llama", embeddings=True)
                ctx.decode([5, 6])
                try:
                    getattr(ctx, use)(Calls(getattr(ctx, action), 0))
                except KvCacheError:
                    continue

    together(work)


@needs_timers
def test_signal_handlers_and_finalizers_may_use_the_context(child: Child, model: Any) -> None:
    code = """
import gc, signal, sys
import numpy as np
from pykvcache import LlamaContext, LlamaModel
from pykvcache.errors import ReentryError
ctx = LlamaContext(LlamaModel(sys.argv[1]), n_ctx=4096, n_batch=64, n_threads=1)
seen = []
def look(*_):
    try: seen.append(ctx.kv_cache_seq_pos_max(0))
    except ReentryError: seen.append("busy")
signal.signal(signal.SIGALRM, look)
signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
class Late:
    def __init__(self): self.me = self
    def __del__(self): look()
gc.set_threshold(1)
for _ in range(5):
    Late()
    ctx.clear_kv_cache()
    ctx.decode(np.full(2000, 5))
signal.setitimer(signal.ITIMER_REAL, 0)
gc.collect()  # a free-threaded interpreter leaves some for the end, when the context is closed
assert "busy" in seen, seen
"""
    done = child(code, model("llama").path, timeout=PATIENCE)
    assert_quiet(done)
