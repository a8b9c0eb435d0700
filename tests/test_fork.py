"""fork(): the child's objects are closed; it can open its own, and the parent goes on."""

from __future__ import annotations

import os
from typing import Any

import pytest

from support.children import assert_quiet, child
from support.examples import some

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")

START = """
import gc, os, sys, threading, warnings
import numpy as np
from pykvcache import *
from pykvcache.errors import ClosedError
from pykvcache.prefix.stores import MemoryStore
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks with threads
model = LlamaModel(sys.argv[1])
ctx = LlamaContext(model, n_ctx=1024, n_seq_max=8, n_threads=2)
tokens = list(range(5, 45))
ctx.decode(tokens)
row = ctx.logits()
sampler = Sampler(temperature=0); sampler.sample(ctx)
running = ctx.generate([5], 10, seq_id=1); next(running)
cache = PrefixCache(ctx, block_size=8, tiers=[MemoryStore()])
generator = BatchGenerator(cache)
handle = generator.submit(tokens, 4)
one, cached, pin = LlamaSequence(ctx, tokens), cache.sequence(tokens), cache.pin(tokens)
text = one.generate(5); next(text)
generator.step()

def refuses(call):
    try: call()
    except ClosedError: return
    raise AssertionError("not refused")

def code_of(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""

REFUSED = """
    assert ctx.is_closed and model.is_closed and one.is_closed and generator.is_closed
    for call in (
        lambda: ctx.decode([5]), lambda: ctx.logits(), lambda: ctx.clear_kv_cache(),
        lambda: ctx.kv_cache_seq_pos_max(0), lambda: ctx.copy_kv_cache_seq(0, 1),
        lambda: ctx.clear_kv_cache_seq(0), lambda: ctx.kv_cache_update(), lambda: ctx.perf(),
        lambda: ctx.set_n_threads(1), lambda: next(ctx.generate([5], 2)), lambda: next(running),
        lambda: sampler.sample(ctx), lambda: LlamaContext(model), lambda: model.tokenize("a"),
        lambda: model.detokenize([5]), lambda: model.is_eog(5), lambda: model.token_bos,
        one.logits, one.fork, lambda: one.append([5]), lambda: next(text), cached.logits,
        lambda: LlamaSequence(ctx), generator.step, generator.start, handle.wait,
        lambda: generator.run(progress=False), lambda: generator.submit([5], 1),
        cache.clear, cache.tree, lambda: cache.pin([5]), lambda: cache.sequence([5]),
    ):
        refuses(call)
    assert ctx.abort() is False
    assert "closed" in repr(ctx) and "closed" in repr(model) and "closed" in repr(one)
    assert model.n_vocab == 320 and ctx.n_ctx == 1024 and one.tokens.tolist()[:40] == tokens
    handle.abort()
"""

OWN = """
    with LlamaModel(sys.argv[1]) as own, LlamaContext(own, n_ctx=256, n_threads=1) as fresh:
        assert np.abs(LlamaSequence(fresh, tokens).logits() - row).max() < 0.05
"""

GOES_ON = """
ctx.clear_kv_cache_seq(0)
ctx.decode(tokens)
assert np.abs(ctx.logits() - row).max() < 1e-3
assert len(list(running)) == 9
assert len(handle.wait().tokens) == 4
assert len(list(text)) == 4
for each in (generator, cached, one, cache, ctx, model): each.close()
"""

ENDS = {
    "leaves": "os._exit(0)",
    "closes": "for each in (generator, cached, one, cache, ctx, ctx, model): each.close()\n"
    "    os._exit(0)",
    "drops": "del ctx, model, running, sampler, cache, generator, handle, one, cached, pin, text\n"
    "    gc.collect(); os._exit(0)",
    "exits as Python does": "sys.exit(0)",
    "forks again": """again = os.fork()
    if again == 0:
        refuses(lambda: ctx.decode([5])); refuses(one.logits)
        sys.exit(0)
    os._exit(code_of(again))""",
}


@pytest.mark.hazard("F1", "F2")
@pytest.mark.parametrize("end", some(ENDS, "leaves", "drops"))
def test_the_child_refuses_and_the_parent_goes_on(model: Any, end: str) -> None:
    code = START + "pid = os.fork()\nif pid == 0:" + REFUSED + OWN + "    " + ENDS[end]
    code += "\nassert code_of(pid) == 0\n" + GOES_ON
    assert_quiet(child(code, model("llama").path, timeout=60))


def test_a_fork_while_other_threads_are_at_work_does_not_hang(model: Any) -> None:
    work = """
stop = False
def decode():
    while not stop: ctx.clear_kv_cache_seq(3); ctx.decode([5] * 300, seq_id=3)
def use():
    with LlamaSequence(ctx) as mine:
        while not stop: mine.sync(tokens); mine.logits()
threads = [threading.Thread(target=each) for each in (decode, use)]
for thread in threads: thread.start()
pids = []
for _ in range(8):
    pid = os.fork()
    if pid == 0:
        for call in (lambda: ctx.decode([5]), one.logits, generator.step, cache.tree): refuses(call)
        for each in (one, generator, cache, ctx, model): each.close()
        os._exit(0)
    pids.append(pid)
codes = [code_of(pid) for pid in pids]
stop = True
for thread in threads: thread.join()
assert codes == [0] * 8, codes
"""
    assert_quiet(child(START + work + GOES_ON, model("llama").path, timeout=60))


def test_workers_of_multiprocessing_refuse_what_they_inherit(model: Any) -> None:
    work = """
import multiprocessing
def use(_):
    try: one.logits()
    except ClosedError as error: return "fork" in str(error)
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert all(pool.map_async(use, range(4)).get(20))
"""
    assert_quiet(child(START + work + GOES_ON, model("llama").path, timeout=60))
