"""fork(): the child's objects are closed and say so; the parent goes on."""

from __future__ import annotations

import os
from typing import Any

import pytest

from binding.conftest import Child, assert_quiet

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")

START = """
import gc, os, signal, sys, threading, time, warnings
import numpy as np
from pykvcache import LlamaContext, LlamaModel, Sampler
from pykvcache.errors import ClosedError
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks with threads
model = LlamaModel(sys.argv[1])
ctx = LlamaContext(model, n_ctx=4096, n_threads=2)
tokens = np.arange(5, 45)
ctx.decode(tokens)
row = ctx.logits()
sampler = Sampler(temperature=0); sampler.sample(ctx)
running = ctx.generate([5], 10, seq_id=1); next(running)

def refuses(call):
    try: call()
    except ClosedError: return
    raise AssertionError("not refused")

def wait_for(pid):
    until = time.monotonic() + 15
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hangs"
"""

GOES_ON = """
ctx.clear_kv_cache_seq(0)
ctx.decode(tokens)
assert np.abs(ctx.logits() - row).max() < 1e-3
assert len(list(running)) == 9
ctx.close(); model.close()
"""

REFUSED = """
pid = os.fork()
if pid == 0:
    assert ctx.is_closed and model.is_closed
    for call in (
        lambda: ctx.decode([5]), lambda: ctx.logits(), lambda: ctx.clear_kv_cache(),
        lambda: ctx.kv_cache_seq_pos_max(0), lambda: ctx.copy_kv_cache_seq(0, 1),
        lambda: ctx.clear_kv_cache_seq(0), lambda: ctx.kv_cache_update(), lambda: ctx.perf(),
        lambda: ctx.set_n_threads(1), lambda: next(ctx.generate([5], 2)), lambda: next(running),
        lambda: sampler.sample(ctx), lambda: LlamaContext(model), lambda: model.tokenize("a"),
        lambda: model.detokenize([5]), lambda: model.is_eog(5), lambda: model.token_bos,
    ):
        refuses(call)
    assert ctx.abort() is False
    assert "closed" in repr(ctx) and "closed" in repr(model)
    assert model.n_vocab == 320 and ctx.n_ctx == 4096
"""

ENDS = {
    "leaves": "os._exit(0)",
    "closes": "ctx.close(); ctx.close(); model.close(); os._exit(0)",
    "drops": "del ctx, model, running, sampler; gc.collect(); os._exit(0)",
    "drops the model first": "del model; gc.collect(); del ctx, running; gc.collect(); os._exit(0)",
    "exits as Python does": "sys.exit(0)",
    "forks again": """
    again = os.fork()
    if again == 0:
        refuses(lambda: ctx.decode([5]))
        sys.exit(0)
    os._exit(wait_for(again))""",
}


@pytest.mark.parametrize("end", ENDS)
def test_the_child_refuses_and_the_parent_goes_on(child: Child, model: Any, end: str) -> None:
    code = START + REFUSED + "    " + ENDS[end].strip() + "\nassert wait_for(pid) == 0\n" + GOES_ON
    done = child(code, model("llama").path, timeout=60)
    assert_quiet(done)


def test_a_fork_during_a_decode_of_another_thread_does_not_hang(child: Child, model: Any) -> None:
    code = (
        START
        + """
stop = False
def work():
    while not stop:
        ctx.clear_kv_cache_seq(3)
        ctx.decode(np.full(1000, 5), seq_id=3)
thread = threading.Thread(target=work); thread.start()
pids = []
for _ in range(5):
    time.sleep(0.01)
    pid = os.fork()
    if pid == 0:
        refuses(lambda: ctx.decode([5]))
        refuses(lambda: ctx.kv_cache_seq_pos_max(0))
        ctx.close()
        model.close()
        os._exit(0)
    pids.append(pid)
codes = [wait_for(pid) for pid in pids]
stop = True
thread.join()
assert codes == [0] * 5, codes
"""
        + GOES_ON
    )
    done = child(code, model("llama").path, timeout=60)
    assert_quiet(done)


def test_a_child_may_open_its_own_with_one_thread(child: Child, model: Any) -> None:
    code = (
        START
        + """
pid = os.fork()
if pid == 0:
    with LlamaModel(sys.argv[1]) as own, LlamaContext(own, n_ctx=256, n_threads=1) as fresh:
        fresh.decode(tokens)
        assert np.abs(fresh.logits() - row).max() < 0.05
    os._exit(0)
assert wait_for(pid) == 0
"""
        + GOES_ON
    )
    done = child(code, model("llama").path, timeout=60)
    assert_quiet(done)


def test_workers_of_multiprocessing_refuse_what_they_inherit(child: Child, model: Any) -> None:
    code = (
        START
        + """
import multiprocessing
def use(_):
    try: ctx.decode([5])
    except ClosedError as error: return str(error)
with multiprocessing.get_context("fork").Pool(2) as pool:
    said = pool.map_async(use, range(4)).get(20)
assert all("fork" in text for text in said), said
"""
        + GOES_ON
    )
    done = child(code, model("llama").path, timeout=60)
    assert_quiet(done)
