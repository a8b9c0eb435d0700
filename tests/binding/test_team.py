"""Compute threads are shared by contexts, sleep when idle, and may be fewer than asked for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from binding.conftest import Child, assert_quiet
from support.breaking import make_breaking
from support.models import make_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

START = """
import os, sys, time
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


def test_contexts_share_their_threads(child: Child, model: Any) -> None:
    code = (
        START
        + """
more = [LlamaContext(model, n_ctx=256, n_threads=n) for n in (2, 4, 3, 1)]
for one in (ctx, *more, ctx):
    assert np.abs(row(one) - alone).max() < 0.05
assert n_threads() == others + 3, n_threads()
"""
    )
    assert_quiet(child(code, model("llama").path))


def test_contexts_compute_at_the_same_time(child: Child, model: Any) -> None:
    code = (
        START
        + """
import threading
wrong = []
def work(n):
    with LlamaContext(model, n_ctx=256, n_threads=n) as own:
        for _ in range(20):
            wrong.append(np.abs(row(own) - alone).max() > 0.05)
threads = [threading.Thread(target=work, args=(n,)) for n in (2, 3, 4)]
for one in threads: one.start()
for one in threads: one.join()
assert len(wrong) == 60 and not any(wrong)
"""
    )
    assert_quiet(child(code, model("llama").path, timeout=60))


@pytest.mark.hazard("N40")
def test_idle_threads_sleep(child: Child, model: Any) -> None:
    code = (
        "import os; del os.environ['OMP_WAIT_POLICY']"
        + START
        + """
row(ctx)
time.sleep(0.1)
begin = time.process_time()
time.sleep(0.5)
assert time.process_time() - begin < 0.05
"""
    )
    assert_quiet(child(code, model("llama").path))


def test_a_decode_runs_on_the_threads_that_the_system_gives(child: Child, model: Any) -> None:
    code = (
        START
        + """
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
"""
    )
    assert_quiet(child(code, model("llama").path))


@pytest.mark.hazard("F1")
def test_a_forked_child_computes_with_new_threads(child: Child, model: Any) -> None:
    code = (
        START
        + """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks with threads
row(ctx)
pid = os.fork()
if pid == 0:
    with LlamaModel(sys.argv[1]) as own, LlamaContext(own, n_ctx=256, n_threads=4) as fresh:
        assert np.abs(row(fresh) - alone).max() < 0.05
        assert n_threads() == 4
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert np.abs(row(ctx) - alone).max() < 0.05
"""
    )
    assert_quiet(child(code, model("llama").path, timeout=60))


@pytest.mark.hazard("N27")
def test_an_assertion_in_one_compute_thread_stops_the_others(
    child: Child, model_folder: Path, tmp_path: Path
) -> None:
    # The table names experts that do not exist. Each thread looks at its own rows, and those
    # without one wait at a barrier.
    code = """
import sys
from pykvcache import LlamaContext, LlamaModel
from pykvcache.errors import InternalError
model, good = LlamaModel(sys.argv[1]), LlamaModel(sys.argv[2])
other = LlamaContext(good, n_ctx=256, n_threads=4)
for n_threads in (1, 2, 4, 20):
    with LlamaContext(model, n_ctx=256, n_threads=n_threads) as ctx:
        for tokens in (range(5, 45), [5]):
            try: ctx.decode(tokens)
            except InternalError as error: assert "i01 >= 0" in str(error)
            else: raise AssertionError("not refused")
            ctx.clear_kv_cache()
            other.clear_kv_cache()
            other.decode(range(5, 45))
            assert other.logits().std() > 0.5
"""
    path = make_breaking(tmp_path)
    assert_quiet(child(code, path, make_model("llama", model_folder), timeout=60))


@pytest.mark.parametrize("n_callers", [1, 3])
def test_a_copy_does_not_wait_for_a_late_worker(n_callers: int, child: Child, model: Any) -> None:
    """On one processor no worker starts in time, so the caller copies everything."""
    code = f"""
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

threads = [threading.Thread(target=work) for _ in range({n_callers})]
for one in threads: one.start()
for one in threads: one.join()
assert len(wrong) == 25 * {n_callers} and not any(wrong), wrong
"""
    wide = model("llama", n_embd=512, n_head_kv=4, n_layer=4)
    assert_quiet(child(code, wide.path, timeout=120))
