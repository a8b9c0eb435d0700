"""Threads of the program on one context and on several, those that compute, and abort()."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from binding.conftest import needs_timers
from binding.kit import differ, lengths, words
from pykvcache import LlamaBatch
from pykvcache.errors import DecodeAborted
from support.children import assert_quiet, child, forked
from support.models import RIGHT
from support.sanitizer import SLOWER
from support.stopping import stop_soon

PATIENCE = 60 * SLOWER
"""Seconds after which a thread counts as stuck."""


HAMMER_SECONDS = float(os.environ.get("PYKVCACHE_FUZZ_SECONDS", "2"))
"""How long two threads use one context."""


def together(*works: Callable[[], None], patience: float = PATIENCE) -> None:
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        try:
            barrier.wait()
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience)
        assert not thread.is_alive(), "a thread is stuck"
    if errors:
        raise errors[0]


@pytest.mark.hazard("T1")
@pytest.mark.parametrize("name", ["llama", "jamba"])
def test_contexts_of_one_model_run_side_by_side(
    make_context: Any, fresh_logits: Any, name: str
) -> None:
    rows: dict[int, Any] = {}
    contexts = [make_context(name) for _ in range(4)]

    def work(k: int) -> Callable[[], None]:
        def run() -> None:
            for token in words(40, k):
                contexts[k].decode([token])
            rows[k] = contexts[k].logits()

        return run

    together(*map(work, range(4)))
    for k in range(4):
        assert differ(rows[k], fresh_logits(name, words(40, k))) < RIGHT


@pytest.mark.hazard("T2", "T3", "N19")
def test_two_threads_hammer_one_context_without_a_wrong_result(make_context: Any) -> None:
    prompts = [[5 + k, 6, 7 + 2 * k] for k in range(8)]
    alone = make_context("llama", n_ctx=1024)
    expected = []
    for prompt in prompts:
        alone.clear_kv_cache()
        expected.append(list(alone.generate(prompt, 12)))
    ctx = make_context("llama", n_ctx=1024)
    until = time.monotonic() + HAMMER_SECONDS
    rounds = [0, 0]

    def work(me: int) -> Callable[[], None]:
        def run() -> None:
            rng = Random(me)
            seq, fork = 2 * me, 2 * me + 1
            while time.monotonic() < until or rounds[me] < 3:
                k = rng.randrange(len(prompts))
                assert ctx.clear_kv_cache_seq(seq)
                ctx.decode(prompts[k][:-1], seq_id=seq)
                ctx.copy_kv_cache_seq(seq, fork)
                for one in rng.sample([seq, fork], 2):
                    assert list(ctx.generate(prompts[k][-1:], 12, seq_id=one)) == expected[k]
                    held = ctx.kv_cache_seq_pos_max(one) + 1
                    assert held - len(prompts[k]) in (len(expected[k]) - 1, len(expected[k]))
                rounds[me] += 1

        return run

    together(work(0), work(1), patience=PATIENCE + HAMMER_SECONDS)
    assert min(rounds) >= 3


def test_other_threads_run_during_a_decode(make_context: Any) -> None:
    ctx = make_context("llama", n_ctx=2048, n_batch=2048)
    count, done = [0], threading.Event()

    def work() -> None:
        while not done.is_set():
            count[0] += 1
            time.sleep(0)  # lets go of the GIL

    thread = threading.Thread(target=work, daemon=True)
    interval = sys.getswitchinterval()
    # Nobody is made to give up the GIL: the counter gets it only while the decode is without it.
    sys.setswitchinterval(1000)
    try:
        thread.start()
        for _ in range(200):
            ctx.clear_kv_cache()
            before = count[0]
            ctx.decode(words(1000))
            advanced = count[0] - before
            if advanced > 10:
                break
    finally:
        done.set()
        sys.setswitchinterval(interval)
    thread.join(PATIENCE)
    assert advanced > 10


@pytest.mark.hazard("N11")
def test_tokens_that_change_during_a_decode_do_no_harm(model: Any) -> None:
    code = """
import sys, threading
import numpy as np
from pykvcache import LlamaBatch, LlamaContext, LlamaModel, KvCacheError
ctx = LlamaContext(LlamaModel(sys.argv[1]), n_ctx=512, n_ubatch=16, n_threads=2)
tokens = np.full(64, 5, np.int32)
batch = LlamaBatch(64)
stop = False
def change():
    while not stop:
        tokens[:] = 2**31 - 1
        batch.clear(); batch.add_sequence(tokens, 2**31 - 1, start=77)
        tokens[:] = 5
        batch.clear(); batch.add_sequence(tokens, 0)
thread = threading.Thread(target=change); thread.start()
for i in range(300):
    for what in (tokens, batch):
        try: ctx.decode(what)
        except (KvCacheError, IndexError): pass
        ctx.clear_kv_cache()
stop = True
thread.join()
"""
    done = forked(code, model("llama").path, timeout=PATIENCE)
    assert_quiet(done)


@needs_timers
def test_signal_handlers_and_finalizers_may_use_the_context(model: Any) -> None:
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


@pytest.mark.parametrize("how", ["sequence", "batch", "cache"])
def test_context_and_model_may_be_closed_while_another_thread_generates(
    how: str, path: Path, monkeypatch: pytest.MonkeyPatch
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


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

TEAM = """
import os, sys, time
os.environ.pop("OMP_WAIT_POLICY", None)
import numpy as np
from pykvcache import LlamaContext, LlamaModel
model = LlamaModel(sys.argv[1])
tokens = np.arange(5, 45)

def n_threads():
    return len(os.listdir("/proc/self/task"))

def row(ctx):
    ctx.clear_kv_cache()
    ctx.decode(tokens)
    return ctx.logits()

alone = row(LlamaContext(model, n_ctx=256, n_threads=1))
others = n_threads()
ctx = LlamaContext(model, n_ctx=256, n_threads=4)
"""


TEAMS = {
    "contexts share their threads": """
more = [LlamaContext(model, n_ctx=256, n_threads=n) for n in (2, 4, 3, 1)]
for one in (ctx, *more, ctx):
    assert np.abs(row(one) - alone).max() < 0.05
assert n_threads() == others + 3, n_threads()
""",
    "idle threads sleep": """
row(ctx)
time.sleep(0.1)
begin = time.process_time()
time.sleep(0.5)
assert time.process_time() - begin < 0.05
""",
    "a decode runs on the threads that the system gives": """
import resource
soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
resource.setrlimit(resource.RLIMIT_NPROC, (1, hard))
if os.getuid() == 0:  # root may have any number
    os.setresuid(54321, 54321, 54321)
assert np.abs(row(ctx) - alone).max() < 0.05
assert n_threads() == others, n_threads()
resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))
assert np.abs(row(ctx) - alone).max() < 0.05
assert n_threads() == others + 3, n_threads()
""",
}


@linux
@pytest.mark.hazard("N40")
@pytest.mark.parametrize("what", TEAMS)
def test_threads_that_compute(model: Any, what: str) -> None:
    assert_quiet(child(TEAM + TEAMS[what], model("llama").path))


@linux
def test_a_copy_does_not_wait_for_a_late_worker(model: Any) -> None:
    """On one processor no worker starts in time, so the caller copies everything."""
    code = """
import os, sys, threading, time
import numpy as np
from pykvcache import LlamaContext, LlamaModel
model = LlamaModel(sys.argv[1])
words = np.random.default_rng(1).integers(5, 60, 200).astype(np.int32)
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
wrong = []

def work():
    with LlamaContext(model, n_ctx=512, n_seq_max=2, n_threads=1) as ctx:
        ctx.decode(words)
        state, row = bytes(ctx.get_state(0)), ctx.logits()
        assert len(state) > 1 << 20
        ctx.set_n_threads(1, 3)
        for i in range(20):
            if i % 3 == 0:
                time.sleep(0.002)  # the workers sleep by then
            wrong.append(bytes(ctx.get_state(0)) != state)
            ctx.clear_kv_cache()
            if i % 4 == 0:
                ctx.decode(words)
                wrong.append(np.abs(ctx.logits() - row).max() > 0.05)
                ctx.clear_kv_cache()
            ctx.set_state(state, 0)

threads = [threading.Thread(target=work) for _ in range(3)]
for one in threads: one.start()
for one in threads: one.join()
assert len(wrong) == 75 and not any(wrong), wrong
"""
    wide = model("llama", n_embd=512, n_head_kv=4, n_layer=4)
    assert_quiet(child(code, wide.path, timeout=120))


@pytest.mark.hazard("T5")
def test_another_thread_may_stop_a_decode(make_context: Any, fresh_logits: Any) -> None:
    ctx, tokens = make_context("llama", n_ctx=4096, n_batch=256, n_ubatch=64), words(3000)
    ctx.decode(words(20, 1), seq_id=1)
    thread = stop_soon(ctx, 0.01)
    with contextlib.suppress(DecodeAborted):
        while True:
            ctx.clear_kv_cache_seq(0)
            ctx.decode(tokens)
    thread.join()
    done = ctx.kv_cache_seq_pos_max(0) + 1
    assert 0 <= done < len(tokens)
    ctx.decode(tokens[done : done + 40])
    assert lengths(ctx) == {0: done + 40, 1: 20}
    assert differ(ctx.logits(), fresh_logits("llama", tokens[: done + 40])) < RIGHT


@pytest.mark.hazard("N243")
@pytest.mark.not_on_a_device(reason="a decode is stopped between its parts alone")
@pytest.mark.parametrize("name", ["mamba", "mamba2", "jamba"])
def test_a_new_sequence_after_an_abort_starts_from_zeros(
    make_context: Any, fresh_logits: Any, name: str
) -> None:
    """For every last step of a graph: cells may be marked as zeroed without being written."""
    ctx = make_context(name, n_ctx=1024, n_seq_max=3)
    batch = LlamaBatch()
    for seq in (0, 1):
        batch.add(5, 12, seq, True)
    for step in range(1, 200):
        ctx.clear_kv_cache()
        for seq in (0, 2, 1):
            ctx.decode(words(12, seq), seq_id=seq)
        ctx.clear_kv_cache_seq(2)  # its cell lies between those of the others
        ctx.native.abort_at(step)
        try:
            ctx.decode(batch)
        except DecodeAborted as error:
            assert 2 not in error.needs_removal  # noqa: PT017
        else:
            break
        ctx.decode(words(20, 9), seq_id=2)
        assert differ(ctx.logits(), fresh_logits(name, words(20, 9))) < RIGHT, step
    assert 20 < step < 199
    assert ctx.native.abort_at(0)


@pytest.mark.hazard("N12")
@needs_timers
def test_a_signal_handler_stops_a_decode_between_its_parts(model: Any) -> None:
    code = """
import signal, sys
import numpy as np
from pykvcache import LlamaBatch, LlamaContext, LlamaModel
from pykvcache.errors import DecodeAborted
ctx = LlamaContext(LlamaModel(sys.argv[1]), n_ctx=8192, n_batch=64, n_threads=1)
said = []
signal.signal(signal.SIGALRM, lambda *_: said.append(ctx.abort()))
batch = LlamaBatch.from_arrays(np.full(8000, 5), np.arange(8000), 0, False)
for what in (np.full(8000, 5), batch):
    ctx.clear_kv_cache()
    said.clear()
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    try: ctx.decode(what)
    except DecodeAborted: pass
    else: sys.exit("it was not stopped")
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert True in said
    assert ctx.kv_cache_seq_pos_max(0) % 64 == 63
"""
    done = forked(code, model("llama").path)
    assert_quiet(done)
