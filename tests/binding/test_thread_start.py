"""Starting a thread comes back where memory ends before the thread begins."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from pykvcache._threads import Worker, has_started
from support.interrupts import CtrlCAnywhere

# Threads with small stacks, so that what is missing is sometimes the memory of the interpreter.
CHILD = """
import faulthandler, json, resource, sys, threading
from pykvcache._threads import Worker, has_started
faulthandler.dump_traceback_later(60, exit=True)
threading.stack_size(64 << 10)
went = threading.Event()
counts = {"started": 0, "refused": 0}

soft, hard = resource.getrlimit(resource.RLIMIT_AS)
for extra in range(0, 1 << 20, 4096):
    went.clear()
    worker = Worker(lambda n: went.wait(30), "stays", 1)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + extra, hard))
    try:
        started = has_started(worker)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    counts["started" if started else "refused"] += 1
    went.set()
    if started:
        worker.join(30)
    assert not worker.is_alive()
assert threading.enumerate() == [threading.main_thread()]
print(json.dumps(counts))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is Linux's")
def test_a_thread_that_ends_before_it_begins_is_not_waited_for() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    counts = json.loads(done.stdout)
    assert counts["started"] > 100
    # On a machine whose threads need no memory for their first frame there is nothing to see.
    ended = done.stderr.count("in thread started by")
    assert counts["refused"] >= ended


def test_ctrl_c_as_a_thread_is_started_is_no_refusal() -> None:
    """The thread was running, and who had started it was told that the system gave none."""
    went = threading.Event()

    def begin() -> None:
        worker = Worker(went.wait, "waits", 30)
        assert has_started(worker)

    def attempt(place: int) -> int:
        interrupt = CtrlCAnywhere(place, ("/_threads.py",), ("/threading.py",))
        interrupt.run(begin)
        return interrupt.seen

    # How often it looks whether the thread has begun differs.
    n = max(attempt(0) for _ in range(5))
    assert n > 20
    for place in range(1, n + 1):
        for _ in range(3):
            attempt(place)
    went.set()
