"""fork() while other threads hold every lock there is: the child closes, or is refused."""

from __future__ import annotations

import os
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
