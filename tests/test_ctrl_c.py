"""Ctrl-C: put off while something changes, it stops a decode, and everything goes on afterwards."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memory.kit import Logits, apart
from pykvcache import LlamaContext, LlamaSequence, PrefixCache
from pykvcache.sequence.pool import pool_of
from support.children import child
from support.models import RIGHT

Make = Callable[..., LlamaContext]
Fresh = Callable[..., Logits]

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows handles it as Python does")

#: Interrupts of each program.
TIMES = int(os.environ.get("PYKVCACHE_FUZZ_INTERRUPTS", "100"))

PROGRAM = """
import faulthandler, gc, os, random, signal, sys, threading, time
import numpy as np
from pykvcache import BatchGenerator, LlamaContext, LlamaModel, LlamaSequence, PrefixCache, Sampler
from pykvcache.prefix.stores import MemoryStore
from support.models import EXACT, RIGHT

path, folder, times = sys.argv[1], sys.argv[2], int(sys.argv[3])
faulthandler.dump_traceback_later(240, exit=True)
signal.signal(signal.SIGINT, signal.default_int_handler)
os.setpriority = lambda *_: None  # other tests would starve the writer of the tiers
rng = random.Random(1)
model = LlamaModel(path)
options = dict(EXACT, n_threads=1, n_threads_batch=1)
ctx = LlamaContext(model, n_ctx=1024, n_seq_max=4, **options)
plain = LlamaContext(model, n_ctx=1024, **options)
cache = PrefixCache(ctx, block_size=8, ram_bytes=1 << 20, tiers=[MemoryStore(), folder + "/tier"])
generator = BatchGenerator(cache, n_chunk=16)
trunk = [rng.randrange(5, 56) for _ in range(300)]

# A thread that presses the keys while it may, and when it last did.
lock, armed, pressed = threading.Lock(), [False], [0.0]

def press():
    while True:
        time.sleep(rng.choice([0.0005, 0.003, 0.01, 0.03]) * rng.random())
        with lock:
            if armed[0]:
                armed[0], pressed[0] = False, time.monotonic()
                for _ in range(3 if rng.random() < 0.1 else 1):
                    os.kill(os.getpid(), signal.SIGINT)
                    time.sleep(0.0002)

def interrupted(call):
    try:
        with lock: armed[0] = True
        call()
        with lock: armed[0] = False
    except KeyboardInterrupt:
        while True:
            try:
                with lock: pass
                return True
            except KeyboardInterrupt: pass
    return False

def prompt():
    n = rng.randrange(280)
    return trunk[:n] + [rng.randrange(5, 56) for _ in range(rng.randrange(1, 20))]

def check(sequence):
    tokens = sequence.tokens
    plain.clear_kv_cache()
    if not len(tokens): return
    plain.decode(tokens)
    assert np.abs(sequence.logits() - plain.logits()).max() < RIGHT, tokens

def use(sequence):
    what = rng.randrange(6)
    if what == 0: sequence.sync(prompt())
    elif what == 1: sequence.truncate(rng.randrange(1, len(sequence) + 1))
    elif what == 2: sequence.park()
    elif what == 3: sequence.fork().logits()
    elif what == 4: sequence.save(folder + "/saved", sync=False)
    else: list(sequence.generate(5, Sampler(seed=1)))
    sequence.logits()

def batch():
    for _ in range(3): handles.append(generator.submit(prompt(), 6, Sampler(seed=2)))
    generator.run(progress=False)

def cached():
    with cache.sequence(prompt()) as sequence: sequence.logits()
    if rng.random() < 0.1: cache.clear()

threading.Thread(target=press, daemon=True).start()
handles, waits, n = [], [], 0
mine = LlamaSequence(ctx, prompt())
while n < times:
    action = rng.choice([lambda: use(mine), batch, cached])
    if interrupted(action):
        n += 1
        waits.append(time.monotonic() - pressed[0])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if rng.random() < 0.3:
            check(mine)
            with cache.sequence(prompt()) as sequence: check(sequence)
    if len(mine) > 320: mine.truncate(20)
    for handle in [handle for handle in handles if handle.finish_reason is not None]:
        handles.remove(handle)
        assert handle.error is None, handle.error
generator.run(progress=False)
check(mine)
if os.path.exists(folder + "/saved"):
    with LlamaSequence.load(ctx, folder + "/saved") as loaded: check(loaded)
assert cache.flush(60)
generator.close(); mine.close(); cache.close(); gc.collect()
assert not ctx.sequences() and not ctx.n_cells_used
assert not [name for name in os.listdir(folder) if name.endswith(".tmp")]
print(sorted(waits)[len(waits) // 2])
"""


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.slow), "step35", "jamba"])
def test_everything_goes_on_after_interrupts_at_any_time(
    name: str, model: Any, tmp_path: Path
) -> None:
    done = child(PROGRAM, model(name).path, tmp_path, TIMES, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout) < 0.1


# One at a time, in this process ------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press_during(ctx: LlamaContext) -> threading.Thread:
    """Press Ctrl-C while a turn of a context's sequences is under way."""
    pool = pool_of(ctx)

    def press() -> None:
        until = time.monotonic() + 60
        while not pool.depth and time.monotonic() < until:
            time.sleep(0)
        time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    return thread


TOKENS = (np.arange(3000) % 50 + 5).tolist()


@pytest.fixture
def ctx(make_context: Make) -> LlamaContext:
    return make_context("llama", n_ctx=4096, n_seq_max=2, n_batch=4096, n_ubatch=64, n_threads=1)


def test_a_prompt_is_stopped_and_goes_on(ctx: LlamaContext, fresh_logits: Fresh) -> None:
    one = LlamaSequence(ctx, TOKENS)
    thread = press_during(ctx)
    with pytest.raises(KeyboardInterrupt):
        one.evaluate()
    thread.join()
    assert one.n_evaluated < len(TOKENS)
    assert one.tokens.tolist() == TOKENS
    one.truncate(200)
    assert apart(one.logits(), fresh_logits("llama", TOKENS[:200])) < RIGHT


def test_an_encode_is_stopped(make_context: Make) -> None:
    ctx = make_context("t5", n_ctx=2048, n_batch=2048, n_ubatch=2048, n_threads=1)

    def encode() -> None:
        threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT)).start()
        while True:
            ctx.encode(TOKENS[:2000])

    for _ in range(5):
        with pytest.raises(KeyboardInterrupt):
            encode()
    ctx.encode(TOKENS[:9])


def test_a_decode_by_hand_is_stopped(ctx: LlamaContext) -> None:
    before = signal.getsignal(signal.SIGINT)

    def decode() -> None:
        threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT)).start()
        while True:
            ctx.clear_kv_cache()
            ctx.decode(TOKENS)

    with pytest.raises(KeyboardInterrupt):
        decode()
    assert signal.getsignal(signal.SIGINT) is before
    ctx.clear_kv_cache()
    ctx.decode(TOKENS[:9])
    assert len(ctx.logits())


@pytest.mark.parametrize("raises", [False, True])
def test_a_handler_of_the_program_is_called_afterwards(
    raises: bool, ctx: LlamaContext, fresh_logits: Fresh
) -> None:
    """It decides what happens: no decode is stopped for it. It may use sequences."""
    one, lengths = LlamaSequence(ctx, TOKENS[:1000]), list[int]()

    def handle(*_: object) -> None:
        lengths.append(one.n_evaluated)
        one.append([7])
        if raises:
            raise ZeroDivisionError

    signal.signal(signal.SIGINT, handle)
    thread = press_during(ctx)
    if raises:
        with pytest.raises(ZeroDivisionError):
            one.evaluate()
    else:
        one.evaluate()
    thread.join()
    assert lengths == [1000]
    assert one.tokens.tolist() == [*TOKENS[:1000], 7]
    one.truncate(100)
    assert apart(one.logits(), fresh_logits("llama", TOKENS[:100])) < RIGHT


def test_where_it_is_ignored_nothing_happens(ctx: LlamaContext) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    one = LlamaSequence(ctx, TOKENS[:1000])
    thread = press_during(ctx)
    one.evaluate()
    thread.join()
    assert one.n_evaluated == 1000
    os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_where_it_ends_the_process_it_does_so_at_once(model: Any) -> None:
    code = """
import os, signal, sys, threading
from pykvcache import LlamaContext, LlamaModel, LlamaSequence
one = LlamaSequence(LlamaContext(LlamaModel(sys.argv[1]), n_ctx=4096, n_threads=1))
signal.signal(signal.SIGINT, signal.SIG_DFL)
threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
while True:
    one.sync([5, 6, 7, 8] * 1000); one.evaluate(); one.truncate(0)
"""
    assert child(code, model("llama").path, timeout=60).returncode == -signal.SIGINT


def test_a_decode_of_another_thread_goes_on(ctx: LlamaContext) -> None:
    one, done = LlamaSequence(ctx, TOKENS), threading.Event()
    working = threading.Thread(target=lambda: (one.evaluate(), done.set()))
    thread = press_during(ctx)
    working.start()
    with pytest.raises(KeyboardInterrupt):
        done.wait(60)
    thread.join()
    assert done.wait(60)
    working.join()
    assert one.n_evaluated == len(TOKENS)


def test_a_turn_within_a_turn_of_another_context_is_put_off_as_a_whole(
    ctx: LlamaContext, make_context: Make
) -> None:
    other, seen = LlamaSequence(make_context("llama", n_ctx=256), TOKENS[:9]), []

    def listen(event: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        other.truncate(5)
        seen.append(event)

    with PrefixCache(ctx, block_size=8) as cache:
        stop = cache.events.subscribe(listen)
        sequence = cache.sequence(TOKENS[:20])
        sequence.evaluate()
        with pytest.raises(KeyboardInterrupt):
            sequence.close()
        stop()
        assert len(seen) == 1
        sequence.close()
        assert len(other) == 5


def test_a_handler_that_is_installed_within_a_turn_stays(ctx: LlamaContext) -> None:
    seen = list[int]()

    def listen(event: object) -> None:
        signal.signal(signal.SIGINT, lambda number, _: seen.append(number))

    with PrefixCache(ctx, block_size=8) as cache:
        cache.events.subscribe(listen)
        with cache.sequence(TOKENS[:20]) as sequence:
            sequence.evaluate()
        os.kill(os.getpid(), signal.SIGINT)
        assert seen == [signal.SIGINT]


def test_the_third_signal_ends_what_hangs(ctx: LlamaContext) -> None:
    inside, began = threading.Event(), time.monotonic()

    def hang(event: object) -> None:
        inside.set()
        time.sleep(60)

    def press() -> None:
        inside.wait(60)
        for _ in range(3):
            time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

    with PrefixCache(ctx, block_size=8) as cache:
        stop = cache.events.subscribe(hang)
        sequence = cache.sequence(TOKENS[:20])
        sequence.evaluate()
        thread = threading.Thread(target=press)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            sequence.close()
        thread.join()
        stop()
    assert time.monotonic() - began < 30


def test_ctrl_c_while_waiting_for_a_turn_takes_none(ctx: LlamaContext) -> None:
    pool, held, over = pool_of(ctx), threading.Event(), threading.Event()
    one = LlamaSequence(ctx, TOKENS[:9])

    def hold() -> None:
        with pool:
            held.set()
            over.wait(60)

    holding = threading.Thread(target=hold)
    holding.start()
    held.wait(60)
    thread = press_during(ctx)
    with pytest.raises(KeyboardInterrupt):
        one.truncate(3)
    over.set()
    holding.join()
    thread.join()
    assert len(one) == 9
    one.truncate(3)
    assert not pool.depth
