"""Interpreter exit with live objects."""

from __future__ import annotations

import sysconfig
from typing import Any

import pytest

from binding.conftest import Child, assert_quiet
from support.examples import some

START = """
import sys, gc, time, atexit, threading
import numpy as np
from pykvcache import LlamaContext, LlamaModel, Sampler, KvCacheError
model = LlamaModel(sys.argv[1])
ctx = LlamaContext(model, n_ctx=2048, n_threads=2)
ctx.decode([5, 6, 7])
"""

ENDS = {
    "nothing closed": "",
    "model dropped": "del model",
    "a cycle": "ctx.model_again = model; model.ctx = ctx; me = [ctx]; me.append(me)",
    "hidden in a builtin module": "sys.keep = (ctx, model, ctx.generate([5], 9))",
    "a suspended generator": "tokens = ctx.generate([5], 10); next(tokens)",
    "a grammar": "s = Sampler(grammar='root ::= [a-z]+', model=model); s.sample(ctx)",
    "a finalizer that decodes": """
class Late:
    def __del__(self):
        try: ctx.decode([5])
        except (KvCacheError, NameError, TypeError, RuntimeError): pass
late = Late()
""",
    "a thread that ends later": """
def work():
    time.sleep(0.2)
    try: ctx.decode(np.full(500, 5))
    except KvCacheError: pass
threading.Thread(target=work).start()
""",
}

DAEMONS = {
    "decoding": """
def work():
    own = LlamaContext(model, n_ctx=2048, n_threads=THREADS)
    while True:
        own.clear_kv_cache()
        own.decode(np.full(1500, 5))
""",
    "sharing a context": """
def work():
    while True:
        ctx.clear_kv_cache_seq(1)
        ctx.decode(np.full(300, 5), seq_id=1)
        ctx.kv_cache_seq_pos_max(0)
""",
    "loading models": """
def work():
    while True:
        LlamaModel(sys.argv[1], progress=lambda f: None).tokenize("hello " * 1000)
""",
}


@pytest.mark.hazard("L3")
@pytest.mark.parametrize("end", some(ENDS, "nothing closed", "a cycle", "a suspended generator"))
def test_the_interpreter_ends_quietly(child: Child, model: Any, end: str) -> None:
    done = child(START + ENDS[end], model("llama").path)
    assert_quiet(done)


@pytest.mark.hazard("N18")
@pytest.mark.skipif(
    bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
    reason="a free-threaded interpreter may wait for a lock of a thread that it ended",
)
@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("work", DAEMONS)
def test_the_interpreter_ends_under_working_daemons(
    child: Child, model: Any, work: str, threads: int
) -> None:
    code = START + DAEMONS[work].replace("THREADS", str(threads))
    code += (
        "for _ in range(3): threading.Thread(target=work, daemon=True).start()\ntime.sleep(0.15)"
    )
    done = child(code, model("llama").path)
    assert (done.returncode, done.stdout) == (0, "")
    # A daemon may still say that its context was closed under it.
    assert "Fatal" not in done.stderr
    assert "terminate" not in done.stderr


def test_an_exception_ends_the_process_with_its_own_code(child: Child, model: Any) -> None:
    done = child(START + "ctx.decode([-1])", model("llama").path)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("is outside [0, 320)")
