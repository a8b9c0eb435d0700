"""Runs a program again and again through a proxy that fails, each time at another answer.

``python -m devices.rpc_driver model.gguf kinds|all``: the last line is "survived".
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from devices.rpc_kit import ANSWERED, WAYS, Proxy, Served
from pykvcache import LlamaContext, LlamaModel
from pykvcache.errors import DeviceLost, KvCacheError

WORDS = np.arange(10, 30, dtype=np.int32)
TIMEOUT = 0.3


def program(path: str, proxy: Proxy | None) -> np.ndarray[Any, Any]:
    """Load, decode, fork, shift, take a state out and in, read cells; return the last logits."""
    rpc = [proxy.endpoint] if proxy else None
    timeout = TIMEOUT if proxy and proxy.way == "freeze" else 20.0
    with (
        LlamaModel(
            path, rpc=rpc, rpc_timeout=timeout, n_gpu_layers=99 if rpc else 0, devices=[]
        ) as model,
        LlamaContext(model, n_ctx=256, n_seq_max=3, n_threads=1, type_k="f32") as ctx,
    ):
        ctx.decode(WORDS)
        ctx.copy_kv_cache_seq(0, 1)
        state = ctx.get_state(1)
        ctx.clear_kv_cache_seq(1)
        ctx.set_state(state, 2)
        ctx.decode([5], seq_id=2)
        ctx.clear_kv_cache_seq(0, 3, 6)
        ctx.kv_cache_seq_add(0, 6, None, -3)
        ctx.kv(2)
        ctx._native.rope_settings(0)
        ctx.decode([7], seq_id=0)
        return np.array(ctx.logits())


def run(path: str, server: Served, way: str, at: int) -> str:
    """Run it with one failure; return what became of it."""
    proxy = Proxy(server.port, way, at)
    begin = time.monotonic()
    end, error = "done", None
    try:
        program(path, proxy)
    except (KvCacheError, MemoryError) as caught:
        end, error = type(caught).__name__, caught
    finally:
        proxy.close()
    assert time.monotonic() - begin < 20, f"{way} at {at}"
    assert isinstance(error, DeviceLost), f"{way} at {at}: {error!r}"
    assert error.endpoint == proxy.endpoint, error
    return end


def main(path: str, which: str) -> None:
    server = Served()
    honest = Proxy(server.port)
    expected = program(path, None)
    assert np.allclose(program(path, honest), expected, atol=1e-4)
    n = honest.n_answers
    honest.close()
    answers = [c for c in honest.commands if c in ANSWERED]
    assert len(answers) == n
    if which == "all":
        places = list(range(n))
    else:  # the first and the last of each kind
        places = sorted(
            {answers.index(c) for c in answers} | {n - 1 - answers[::-1].index(c) for c in answers}
        )
    ends: dict[str, dict[str, int]] = {}
    for way in WAYS:
        for at in places:
            end = run(path, server, way, at)
            ends.setdefault(way, {}).setdefault(end, 0)
            ends[way][end] += 1
    print(Path(path).name, n, "answers", len(places), "places", ends)
    assert np.array_equal(program(path, None), expected)
    last = Proxy(server.port)
    assert np.allclose(program(path, last), expected, atol=1e-4)
    last.close()
    server.stop()
    print("survived")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
