"""fork() while other threads hold every lock there is: the child closes, or is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from binding.conftest import Child, assert_quiet

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")

CHILD = """
import faulthandler, gc, os, sys, threading, warnings
from contextlib import ExitStack
from pykvcache import BatchGenerator, LlamaContext, LlamaModel, LlamaSequence, PrefixCache
from pykvcache.errors import ClosedError
from pykvcache.prefix.stores import MemoryStore
from pykvcache.sequence import pool
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks with threads
model = LlamaModel(sys.argv[1])
ctx = LlamaContext(model, n_ctx=256, n_threads=1)
cache = PrefixCache(ctx, block_size=8, tiers=[MemoryStore()])
generator = BatchGenerator(cache)
handles = [generator.submit(range(5, 30 + i), 9) for i in range(5)]
sequence, cached = LlamaSequence(ctx, range(5, 20)), cache.sequence(range(5, 40))
for one in (sequence, cached): one.evaluate()
text = sequence.generate(5)
pin = cache.pin(range(5, 40))
generator.step()
tier, writer = cache._tiers.tiers[0], cache._tiers.writers[0]
LOCKS = [
    pool.pool_of(ctx), pool._pools_lock, generator._changed, cache.events._lock,
    cache._prefetches._lock, writer._changed, tier._lock, tier._leasing, tier.speed._lock,
    tier.notices._lock, tier.notices._sending,
]
held, done = threading.Event(), threading.Event()

def hold():
    with ExitStack() as stack:
        for lock in LOCKS: stack.enter_context(lock)
        held.set()
        done.wait()

thread = threading.Thread(target=hold); thread.start(); held.wait()
pid = os.fork()
if pid == 0:
    faulthandler.dump_traceback_later(20, exit=True)
    def refuses(call):
        try: call()
        except ClosedError: return
        raise AssertionError("not refused")
    for call in (
        sequence.logits, sequence.fork, lambda: sequence.append([5]), lambda: next(text),
        generator.step, generator.start, lambda: generator.run(progress=False),
        lambda: generator.submit([5], 1), cache.clear, cache.tree, lambda: cache.pin([5]),
        lambda: cache.sequence([5]), lambda: cache.prefetch([5]), lambda: cache.flush(1),
    ): refuses(call)
    cache.stats(), list(cache.events), cache.events.subscribe(print)(), pin.release()
    handles[0].abort()
    refuses(handles[0].wait)
    own = LlamaContext(LlamaModel(sys.argv[1]), n_ctx=64, n_threads=1)
    LlamaSequence(own, [5]).logits()
    if sys.argv[2] == "closes":
        for one in (generator, cached, sequence, cache): one.close()
        assert {handle.finish_reason for handle in handles} == {"aborted"}
    else:
        del one, generator, handles, cached, sequence, text, pin, cache
        gc.collect()
    os._exit(0)
status = os.waitpid(pid, 0)[1]
done.set(); thread.join()
assert status == 0, status
generator.run(progress=False)  # the parent goes on
assert all(len(handle.tokens) for handle in handles)
cache.close()
"""


@pytest.mark.parametrize("end", ["closes", "drops"])
def test_locks_that_were_held_at_a_fork_are_free_in_the_child(
    child: Child, model: Any, end: str
) -> None:
    assert_quiet(child(CHILD, model("llama").path, end, timeout=60))


SWEEP = """
import os, signal, sys, threading, warnings
from contextlib import ExitStack
from pykvcache import BatchGenerator, LlamaContext, LlamaModel, PrefixCache
from pykvcache.prefix.stores import FolderStore, MemoryStore
from pykvcache import _fork
from pykvcache.sequence import pool
from support.interrupts import CtrlCAnywhere, InterruptAnywhere
warnings.simplefilter("ignore", DeprecationWarning)
_fork.PATIENCE = 0  # for how long a fork waits for the folder's lock
ctx = LlamaContext(LlamaModel(sys.argv[1]), n_ctx=256, n_threads=1)
folder, memory, free = FolderStore(sys.argv[2]), MemoryStore(), FolderStore(sys.argv[2])
cache = PrefixCache(ctx, block_size=8, tiers=[memory, folder])
cache.events.subscribe(print)
generator = BatchGenerator(cache)
tier, writer = cache._tiers.tiers[0], cache._tiers.writers[0]
WHERE = [
    (pool.pool_of(ctx), "lock"), (pool, "_pools_lock"), (generator, "_lock"),
    (cache.events, "_lock"), (cache._prefetches, "_lock"), (writer, "_lock"), (tier, "_lock"),
    (tier, "_leasing"), (tier.speed, "_lock"), (tier.notices, "_lock"), (tier.notices, "_sending"),
    (folder, "_lock"), (folder, "_writing"), (memory, "_lock"),
]
held, done = threading.Event(), threading.Event()

def hold():
    with ExitStack() as stack:
        for thing, name in WHERE: stack.enter_context(getattr(thing, name))
        cache._ram._is_changing = True
        held.set()
        done.wait()

thread = threading.Thread(target=hold, daemon=True); thread.start(); held.wait()

def taken(*where):
    found = []
    def look():  # another thread, which owns none of them
        for thing, name in where:
            lock = getattr(thing, name)
            if lock.acquire(blocking=False): lock.release()
            else: found.append(name)
    other = threading.Thread(target=look); other.start(); other.join()
    return found

def attempt(kind, place):
    read, write = os.pipe()
    parent, interrupt = os.getpid(), kind(place, ("pykvcache",))
    sys.unraisablehook = lambda found: None
    try: interrupt.run(os.fork)
    except KeyboardInterrupt: pass
    if os.getpid() != parent:
        signal.alarm(30)
        still = taken(*WHERE, (free, "_lock"), (_fork, "_changing"))
        still += ["events"] * bool(cache.events._callbacks) + ["change"] * cache._ram.is_busy
        os.write(write, f"{interrupt.seen} {still}".encode())
        os._exit(0)
    os.close(write)
    os.wait()
    assert not taken((free, "_lock"), (_fork, "_changing")), place
    with open(read) as answer: n, still = answer.read().split(" ", 1)
    assert still == "[]", (place, still)
    return int(n)

for kind in (InterruptAnywhere, CtrlCAnywhere):
    n = attempt(kind, 0)
    assert n > 50, n
    for place in range(1, n + 1): attempt(kind, place)
os._exit(0)
"""


def test_ctrl_c_in_a_child_that_is_just_forked_leaves_no_lock(
    child: Child, model: Any, tmp_path: Path
) -> None:
    """What it comes in the middle of is done by the second call."""
    assert_quiet(child(SWEEP, model("llama").path, tmp_path, timeout=300))


SUBSCRIBER = """
import os, sys, threading, warnings
from pykvcache.prefix.tiers.notices import Notices, Place
warnings.simplefilter("ignore", DeprecationWarning)
pids = []
notices = Notices("disk", lambda event, namespace: pids.append(os.fork()))
notices.stored([Place(bytes(32), None, bytes(32))])
if pids == [0]:
    notices.stored([Place(bytes(31) + b"1", None, bytes(32))])  # it goes on, too
    os._exit(0)
assert os.waitpid(pids[0], 0)[1] == 0
"""


def test_a_child_that_a_subscriber_forks_returns(child: Child) -> None:
    assert_quiet(child(SUBSCRIBER))


ONCE = """
import os, signal, sys, threading, warnings
from pykvcache import LlamaContext, LlamaModel, PrefixCache
from pykvcache import model as models
from pykvcache.prefix.stores import MemoryStore
warnings.simplefilter("ignore", DeprecationWarning)
model, asked, done = LlamaModel(sys.argv[1]), threading.Event(), threading.Event()
compute = models.model_fingerprint

def slow(*arguments):
    if threading.current_thread() is not threading.main_thread():
        asked.set()
        done.wait()
    return compute(*arguments)

models.model_fingerprint = slow
thread = threading.Thread(target=lambda: model.fingerprint); thread.start(); asked.wait()
pid = os.fork()
if not pid:
    signal.alarm(30)
    with LlamaModel(sys.argv[1]) as own, LlamaContext(own, n_ctx=64) as ctx:
        PrefixCache(ctx, tiers=[MemoryStore()]).close()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
done.set(); thread.join()
"""


def test_a_child_computes_what_another_thread_is_computing(child: Child, model: Any) -> None:
    """Up to Python 3.11 `functools.cached_property` has a lock, which was held in the child."""
    assert_quiet(child(ONCE, model("llama").path, timeout=90))
