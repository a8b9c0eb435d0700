"""A thread that has no memory for its first call, or its first exception, raises MemoryError."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.models import make_model

CHILD = """
import ctypes, resource, sys, threading
import numpy as np
from pykvcache import LlamaContext, LlamaModel
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
ctx = LlamaContext(LlamaModel(sys.argv[1]), n_ctx=2048, n_seq_max=2, n_threads=1)
ctx.decode(np.arange(600) % 200 + 5)
state = ctx.get_state(0)
everything = (resource.RLIM_INFINITY,) * 2
none = (resource.getpagesize(), resource.RLIM_INFINITY)
eaten = np.zeros(1 << 20, np.uint64)
sizes = (1 << 16, 1 << 10, 32)
outcomes = []

def without_memory(call):
    n = 0
    resource.setrlimit(resource.RLIMIT_AS, none)
    for size in sizes:
        while at := libc.malloc(size):
            eaten[n] = at
            n += 1
    try:
        call()
        outcome = "done"
    except MemoryError:
        outcome = "MemoryError"
    resource.setrlimit(resource.RLIMIT_AS, everything)
    for at in eaten[:n].tolist():
        libc.free(at)
    outcomes.append(outcome)

def first_call():
    without_memory(lambda: ctx.kv_cache_seq_pos_max(0))

def first_exception():
    ctx.kv_cache_seq_pos_max(0)
    without_memory(lambda: ctx.set_state(state, 1))

for work in (first_call, first_exception):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
assert ctx.kv_cache_seq_pos_max(1) == -1
ctx.set_state(state, 1)
assert ctx.kv_cache_seq_pos_max(1) == 599
print(*outcomes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's limits")
def test_a_thread_without_memory_raises(model_folder: Path) -> None:
    # Thread-local data is made when it is used first; glibc ends the process where it cannot be.
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(make_model("llama", model_folder))],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"GGML_NO_BACKTRACE": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["MemoryError", "MemoryError"]
