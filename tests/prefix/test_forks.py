"""fork() while another thread is in the middle of a change of a cache: the child's copy closes."""

from __future__ import annotations

import os
from typing import Any

import pytest

from binding.conftest import Child, assert_quiet, child

__all__ = ["child"]  # the fixture

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")

CODE = """
import faulthandler, gc, os, sys, threading, warnings
from pykvcache import BatchGenerator, LlamaContext, LlamaModel, PrefixCache
from pykvcache.errors import ClosedError
from pykvcache.prefix.policies import LRU
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks with threads
path, where, who = sys.argv[1:]
inside, leave, heard, parent = threading.Event(), threading.Event(), [], os.getpid()

def stay(*_):
    if not inside.is_set():
        inside.set()
        assert leave.wait(60)

class Slow(LRU):
    def __getattribute__(self, name):
        if name == where and threading.current_thread().name == "slow":
            stay()
        return super().__getattribute__(name)

def note(event):
    heard.append(event)
    if where == "event" and threading.current_thread().name == "slow":
        stay()

ctx = LlamaContext(LlamaModel(path), n_ctx=256, n_seq_max=4, n_threads=1)
cache = PrefixCache(ctx, block_size=8, ram_bytes=20_000, policy=Slow())
cache.events.subscribe(note)
cache.events.subscribe_lookups(note)
pin, other = cache.pin(range(5, 40)), cache.sequence(range(5, 30))
other.logits()
generator = BatchGenerator(cache)
handle = generator.submit(range(5, 50), 4)

def use():
    for first in (5, 9, 13, 9):
        with cache.sequence(range(first, first + 40)) as one: one.logits()

thread = threading.Thread(target=use, name="slow"); thread.start()
assert inside.wait(60)
pid = os.fork()
if pid == 0:
    faulthandler.dump_traceback_later(30, exit=True)
    heard.clear()
    if who == "closes":
        stats = cache.stats()
        assert 0 <= stats.ram_bytes and stats.stored - stats.removed == stats.ram_blocks
        for call in (cache.tree, cache.clear, generator.step, other.logits):
            try: call()
            except ClosedError: continue
            raise AssertionError("not refused")
        list(cache.events)
        for one in (generator, other, cache): one.close()
        assert handle.finish_reason == "aborted" and not cache.stats().ram_blocks
        pin.release()
    else:
        del generator, handle, other, pin, cache
        gc.collect()
    assert not heard  # it is the parent's to say
    os._exit(0)
status = os.waitpid(pid, 0)[1]
leave.set(); thread.join()
assert status == 0, status
handle.wait()
use()
assert heard
cache.close()
"""


@pytest.mark.parametrize("who", ["closes", "drops"])
@pytest.mark.parametrize("where", ["event", "added", "used", "removing", "evictable", "victim"])
def test_a_fork_in_the_middle_of_a_change_leaves_a_copy_that_closes(
    child: Child, model: Any, where: str, who: str
) -> None:
    assert_quiet(child(CODE, model("llama").path, where, who, timeout=120))
