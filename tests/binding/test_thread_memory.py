"""A thread that has no memory for its first call, or its first exception, raises MemoryError."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.models import make_model

CHILD = """
import ctypes, json, resource, sys, threading
import numpy as np
from pykvcache import LlamaBatch, LlamaContext, LlamaModel, Sampler, devices, system_info
from pykvcache._native import lib
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
path = sys.argv[1]
model = LlamaModel(path)

def context():
    return LlamaContext(model, n_ctx=256, n_seq_max=2, n_threads=1)

ctx = LlamaContext(model, n_ctx=2048, n_seq_max=2, n_threads=1)
ctx.decode(np.arange(600) % 200 + 5)
state = ctx.get_state(0)
row = ctx.logits()
other = context()
gone = [context(), LlamaModel(path)]
sampler, ledger, batch = Sampler(seed=3, repeat_penalty=1.2), lib.Tokens(), LlamaBatch()
tokens, many = [5, 6, 7], list(range(5, 300)) * 100
values, stored = np.zeros(64, np.float32), np.zeros(128, np.uint8)
calls = {
    "query": lambda: ctx.kv_cache_seq_pos_max(0),
    "tokenize": lambda: model.tokenize("abc"),
    "detokenize": lambda: model.detokenize(tokens),
    "piece": lambda: model.token_to_piece(7),
    "is_eog": lambda: model.is_eog(7),
    "make a sampler": lambda: Sampler(temperature=0),
    "sample": lambda: sampler.sample(row),
    "logprobs": lambda: sampler.logprobs(row),
    "accept": lambda: sampler.accept(7),
    "clone": lambda: sampler.clone(),
    "reset": lambda: sampler.reset(),
    "tokens": lambda: ledger.append(many),
    "new tokens": lambda: lib.Tokens(many),
    "batch": lambda: batch.add(5, 0, tokens),
    "add sequence": lambda: batch.add_sequence(many, 0),
    "dequantize": lambda: lib.dequantize(1, stored),
    "quantize": lambda: lib.quantize(1, values),
    "devices": lambda: devices(),
    "system_info": lambda: system_info(),
    "load": lambda: LlamaModel(path),
    "create": lambda: context(),
    "set_state": lambda: other.set_state(state, 1),
    "close": lambda: other.close(),
    "drop a context": lambda: gone.pop(0),
    "drop a model": lambda: gone.pop(),
}
everything = (resource.RLIM_INFINITY,) * 2
none = (resource.getpagesize(), resource.RLIM_INFINITY)
eaten = np.zeros(1 << 20, np.uint64)
sizes = (1 << 16, 1 << 10, 32)
outcomes = {}

def without_memory(name, call):
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
    finally:
        resource.setrlimit(resource.RLIMIT_AS, everything)
        for at in eaten[:n].tolist():
            libc.free(at)
    outcomes[name] = outcome

def first_exception():
    ctx.kv_cache_seq_pos_max(0)
    without_memory("exception", lambda: ctx.set_state(state, 1))

for name, call in calls.items():
    print(name, file=sys.stderr, flush=True)
    thread = threading.Thread(target=without_memory, args=(name, call))
    thread.start()
    thread.join()
thread = threading.Thread(target=first_exception)
thread.start()
thread.join()
assert ctx.kv_cache_seq_pos_max(1) == -1
ctx.set_state(state, 1)
assert ctx.kv_cache_seq_pos_max(1) == 599
assert other.kv_cache_seq_pos_max(0) == -1 and not other.is_closed
assert sampler.sample(row) == Sampler(seed=3, repeat_penalty=1.2).sample(row)
assert (len(ledger), len(batch), gone) == (0, 0, [])
print(json.dumps(outcomes))
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
    outcomes = json.loads(done.stdout)
    assert {name for name, outcome in outcomes.items() if outcome != "MemoryError"} == {
        "drop a context",
        "drop a model",
    }
