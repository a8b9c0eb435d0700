"""Compute threads: where the system gives none, in the child of a fork, beside each other."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from binding.conftest import Child, assert_quiet

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits and /proc of Linux")

START = """
import os, resource, sys, time
import numpy as np
from pykvcache import LlamaContext, LlamaModel
model = LlamaModel(sys.argv[1])
tokens = np.arange(5, 45)

def n_threads():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Threads:"))

def n_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()

def row(ctx):
    ctx.clear_kv_cache()
    ctx.decode(tokens)
    return ctx.logits()

alone = row(LlamaContext(model, n_ctx=256, n_threads=1))
others = n_threads()
ctx = LlamaContext(model, n_ctx=256, n_threads=4)
"""

LIMITS = {
    # A stack has no room in the address space.
    "address space": """
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (n_bytes() + (1 << 20), hard))
def lift():
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
""",
    # Root may have any number: another user, who has none yet, may have this thread alone.
    "threads of a user": """
soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
resource.setrlimit(resource.RLIMIT_NPROC, (1, hard))
if os.getuid() == 0:
    os.setresuid(54321, 54321, 54321)
def lift():
    resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))
""",
}


def test_threads_are_taken_until_the_address_space_is_full(child: Child, model: Any) -> None:
    """A thread that has a stack and finds no room for its thread-local data ends the process."""
    for more in (150, 300):
        code = (
            START
            + f"""
from pykvcache import KvCacheError
limit = n_bytes() + ({more} << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
ctx.set_n_threads(512, 512)
try:
    row(ctx)
except (MemoryError, KvCacheError):
    pass
print("end")
"""
        )
        done = child(code, model("llama").path)
        assert done.stdout == "end\n", done.stderr[-300:]


@pytest.mark.parametrize("limit", LIMITS)
def test_a_decode_goes_on_with_the_threads_that_there_are(
    child: Child, model: Any, limit: str
) -> None:
    code = (
        START
        + LIMITS[limit]
        + """
few = row(ctx)
assert n_threads() == others, n_threads()
assert np.abs(few - alone).max() < 0.05
lift()
time.sleep(1.1)  # so long none is asked for again
assert np.abs(row(ctx) - alone).max() < 0.05
assert n_threads() == others + 3, n_threads()
"""
    )
    assert_quiet(child(code, model("llama").path))


def test_a_forked_child_may_compute_with_several_threads(child: Child, model: Any) -> None:
    code = (
        START
        + """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks with threads
row(ctx)
assert n_threads() == others + 3
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


def test_contexts_that_compute_in_turn_share_their_threads(child: Child, model: Any) -> None:
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


@pytest.mark.parametrize("policy", ["active", "passive"])
def test_any_wait_policy_gives_the_same_logits(child: Child, model: Any, policy: str) -> None:
    before = f"import os; os.environ['OMP_WAIT_POLICY'] = {policy!r}"
    code = before + START + "assert np.abs(row(ctx) - alone).max() < 0.05"
    assert_quiet(child(code, model("llama").path))


LATE = """
import os, sys, threading, time
import numpy as np
from pykvcache import LlamaContext, LlamaModel
model = LlamaModel(sys.argv[1])
words = np.random.default_rng(1).integers(5, 60, 200).astype(np.int32)

def work(rounds, is_wrong):
    with LlamaContext(model, n_ctx=512, n_seq_max=2, n_threads=1) as ctx:
        ctx.decode(words)
        state, row = bytes(ctx.get_state(0)), ctx.logits()
        assert len(state) > 1 << 20
        ctx.set_n_threads(1, 3)
        for i in range(rounds):
            if i % 3 == 0:
                time.sleep(0.002)  # who waits for work sleeps by then
            is_wrong.append(bytes(ctx.get_state(0)) != state)
            ctx.clear_kv_cache()
            ctx.set_state(state, 0)
            is_wrong.append(bytes(ctx.get_state(0)) != state)
            if i % 4 == 0:
                ctx.clear_kv_cache()
                ctx.decode(words)
                is_wrong.append(np.abs(ctx.logits() - row).max() > 0.05)
                ctx.set_state(state, 0)
"""


@pytest.mark.parametrize("n_callers", [1, 3])
def test_a_worker_that_comes_late_is_not_waited_for(
    n_callers: int, child: Child, model: Any
) -> None:
    """On one processor it never comes in time: who copies lets it go, and gives it other work."""
    code = (
        LATE
        + f"""
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
lists = [[] for _ in range({n_callers})]
threads = [threading.Thread(target=work, args=(40, one)) for one in lists]
for one in threads: one.start()
for one in threads: one.join()
assert all(len(one) == 90 for one in lists), [len(one) for one in lists]
assert not any(map(any, lists))
"""
    )
    wide = model("llama", n_embd=512, n_head_kv=4, n_layer=4)
    assert_quiet(child(code, wide.path, timeout=120))
