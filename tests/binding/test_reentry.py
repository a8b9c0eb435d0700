"""Code that runs inside of a call: `__index__`, signal handlers, finalizers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from binding.conftest import Child, assert_quiet, needs_timers
from binding.test_threads import HAMMER_SECONDS, PATIENCE, together
from pykvcache import KvCacheError, Sampler


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


WITH_AN_INTEGER: dict[str, Callable[[Any, Any], object]] = {
    "logits": lambda ctx, n: ctx.logits(n),
    "embeddings": lambda ctx, n: ctx.embeddings(n),
    "seq_embeddings": lambda ctx, n: ctx.seq_embeddings(n),
    "kv_cache_seq_pos_max": lambda ctx, n: ctx.kv_cache_seq_pos_max(n),
    "clear_kv_cache_seq": lambda ctx, n: ctx.clear_kv_cache_seq(n, n, n),
    "copy_kv_cache_seq": lambda ctx, n: ctx.copy_kv_cache_seq(n, n, n, n),
    "kv_cache_seq_keep": lambda ctx, n: ctx.kv_cache_seq_keep(n),
    "kv_cache_seq_add": lambda ctx, n: ctx.kv_cache_seq_add(0, n, 3, n),
    "kv_cache_seq_div": lambda ctx, n: ctx.kv_cache_seq_div(0, n, 3, n),
    "get_state": lambda ctx, n: ctx.get_state(n),
    "can_resume": lambda ctx, n: ctx.can_resume(n, n),
    "copy_prefix": lambda ctx, n: ctx.copy_prefix(0, n, n),
    "decode": lambda ctx, n: ctx.decode([n], seq_id=n),
    "kv": lambda ctx, n: ctx.kv(n),
    "sample": lambda ctx, n: Sampler().sample(ctx, n),
}


@pytest.mark.parametrize("use", WITH_AN_INTEGER)
@pytest.mark.parametrize("value", [0, 1, -1, 77, 2**31, 2**70])
def test_an_integer_may_wait_for_a_thread_that_uses_the_context(
    use: str, value: int, make_context: Any
) -> None:
    ctx = make_context("llama", embeddings=use.endswith("embeddings"), pooling_type="none")
    ctx.decode([5, 6, 7])

    def wait() -> None:
        other = threading.Thread(target=ctx.kv_cache_seq_pos_max, args=(0,), daemon=True)
        other.start()
        other.join(20)
        assert not other.is_alive()

    with contextlib.suppress(KvCacheError):
        WITH_AN_INTEGER[use](ctx, Calls(wait, value))


@needs_timers
def test_signal_handlers_and_finalizers_may_use_the_context(forked: Child, model: Any) -> None:
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
    done = forked(code, model("llama").path, timeout=PATIENCE)
    assert_quiet(done)


@pytest.mark.parametrize("use", ["is_eog", "token_to_piece"])
def test_an_integer_that_closes_the_model_is_an_error(use: str, forked: Child, path: Path) -> None:
    code = """
import sys
from pykvcache import LlamaModel
from pykvcache.errors import ClosedError
class Closes:
    def __index__(self):
        model.close()
        self.junk = [bytearray(b"\\xff" * n) for n in (64, 256, 4096) * 200]
        return 5
model = LlamaModel(sys.argv[1])
try:
    getattr(model, sys.argv[2])(Closes())
except ClosedError:
    sys.exit(0)
sys.exit("no error")
"""
    assert_quiet(forked(code, path, use))


@pytest.mark.parametrize("how", ["sequence", "batch", "cache"])
def test_context_and_model_may_be_closed_while_another_thread_generates(
    how: str, child: Child, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Freed memory is filled, so that a use of it shows."""
    code = f"""
import sys, threading, time
from pykvcache import *
from pykvcache.errors import ClosedError
from pykvcache.prefix.stores import MemoryStore
sys.setswitchinterval(1e-6)
path, how = sys.argv[1:]
def work(ctx):
    sampler = Sampler(seed=1, logit_bias={{2: -1e4}})
    prompt = [5 + i % 50 for i in range(20)]
    try:
        cache = PrefixCache(ctx, block_size=8, tiers=[MemoryStore()]) if how == "cache" else None
        generator = BatchGenerator(ctx) if how == "batch" else None
        while True:
            if generator is not None:
                handle = generator.submit(prompt, 200, sampler)
                generator.run()
            else:
                one = cache.sequence(prompt) if cache else LlamaSequence(ctx, prompt)
                with one:
                    for _ in one.generate(50, sampler): pass
    except ClosedError:
        ended.append(True)
ended, rounds = [], 0
end = time.monotonic() + {HAMMER_SECONDS / 2}
while time.monotonic() < end or rounds < 5:
    model = LlamaModel(path)
    ctx = LlamaContext(model, n_ctx=512, n_seq_max=2, n_threads=1)
    thread = threading.Thread(target=work, args=(ctx,))
    thread.start()
    rounds += 1
    time.sleep(0.003 * (rounds % 7))
    ctx.close()
    model.close()
    thread.join({PATIENCE})
assert len(ended) == rounds, (len(ended), rounds)
"""
    monkeypatch.setenv("MALLOC_PERTURB_", "85")  # read as the child starts
    assert_quiet(child(code, path, how, timeout=60))
