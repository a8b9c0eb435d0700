"""Models on other processes over ggml's RPC: right, and a typed error where a server fails.

Skipped where the build has no RPC.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from devices.rpc_kit import LEAVES, Served, has_rpc, seconds
from kv.test_kv_values import with_rope_factors
from pykvcache import BatchGenerator, LlamaContext, LlamaModel, LlamaSequence, PrefixCache
from pykvcache.errors import ClosedError, DeviceLost
from support.models import EXACT, make_model

TESTS = Path(__file__).parents[1]
WORDS = np.random.default_rng(8).integers(5, 250, 40).astype(np.int32)
OPTIONS: dict[str, Any] = {"n_ctx": 256, "n_seq_max": 4, "n_threads": 1, **EXACT}
# Far above what anything here takes; far below a test that hangs.
SOON = 20.0

pytestmark = pytest.mark.skipif(not has_rpc(), reason="this build has no RPC")


@pytest.fixture
def server() -> Iterator[Served]:
    served = Served()
    yield served
    served.thaw()
    served.stop()


@pytest.fixture
def other() -> Iterator[Served]:
    served = Served()
    yield served
    served.stop()


@pytest.fixture
def llama(model_folder: Path) -> Path:
    return make_model("llama", model_folder)


def open_on(path: Path, *servers: Served, timeout: float = SOON) -> LlamaContext:
    names = [one.endpoint for one in servers] or None
    # One layer of two on each.
    split = [1, 3] if len(servers) == 2 else None
    layers = 99 if names else 0
    # A device of this machine would take layers, too, and compute otherwise than the CPU.
    model = LlamaModel(
        path, rpc=names, rpc_timeout=timeout, n_gpu_layers=layers, devices=[], tensor_split=split
    )
    return LlamaContext(model, **OPTIONS)


def logits_of(ctx: LlamaContext, tokens: Any, seq_id: int = 0) -> np.ndarray[Any, Any]:
    ctx.decode(tokens, seq_id=seq_id)
    return ctx.logits().copy()


def on_cpu(path: Path, tokens: Any) -> np.ndarray[Any, Any]:
    with open_on(path) as ctx:
        return logits_of(ctx, tokens)


def test_layers_and_their_cells_lie_on_two_servers(
    llama: Path, server: Served, other: Served
) -> None:
    with open_on(llama, server, other) as ctx:
        assert len(ctx.model.devices) == 2
        used = {name: one for name, one in ctx.memory_breakdown().items() if one.context}
        # A later connection to one address has a number: host#2:port.
        assert {re.sub(r".*\[|#\d+|\]", "", name) for name in used} == {
            server.endpoint,
            other.endpoint,
        }
        assert np.array_equal(logits_of(ctx, WORDS), on_cpu(llama, WORDS))


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba", "jamba"])
def test_forks_shifts_and_states_are_those_of_this_machine(
    name: str, model_folder: Path, server: Served, other: Served
) -> None:
    path = make_model(name, model_folder)
    with open_on(path, server, other) as far, open_on(path) as near:
        found = []
        for ctx in (far, near):
            ctx.decode(WORDS[:20])
            ctx.copy_kv_cache_seq(0, 1)
            rows = [logits_of(ctx, [7], 0), logits_of(ctx, [9], 1)]
            state = ctx.get_state(1)
            ctx.clear_kv_cache_seq(1)
            ctx.set_state(state, 2)
            rows.append(logits_of(ctx, [11], 2))
            if name in ("llama", "gemma3"):
                ctx.clear_kv_cache_seq(2)
                ctx.clear_kv_cache_seq(0, 3, 8)
                ctx.kv_cache_seq_add(0, 8, None, -5)
                rows.append(logits_of(ctx, [13], 0))
            found.append(rows)
        for a, b in zip(*found, strict=True):
            assert np.allclose(a, b, atol=1e-4)


def test_two_threads_use_one_server(llama: Path, server: Served) -> None:
    expected = on_cpu(llama, WORDS)
    with open_on(llama, server) as a, open_on(llama, server) as b:
        found: list[bool] = []

        def work(ctx: LlamaContext) -> None:
            for _ in range(20):
                ctx.clear_kv_cache()
                found.append(bool(np.array_equal(logits_of(ctx, WORDS), expected)))

        threads = [threading.Thread(target=work, args=(ctx,)) for ctx in (a, b)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [True] * 40


def check_lost(ctx: LlamaContext, endpoint: str) -> None:
    """The loss is noticed, stays, and leaves closing alone."""
    with pytest.raises(DeviceLost) as first:
        ctx.decode([1])
    assert first.value.endpoint == endpoint
    assert first.value.operation == "decode"
    assert endpoint in str(first.value)
    for call in (
        lambda: ctx.decode([1]),
        ctx.logits,
        lambda: ctx.get_state(0),
        lambda: ctx.clear_kv_cache(),
        lambda: ctx.kv_cache_seq_pos_max(0),
        lambda: LlamaContext(ctx.model, **OPTIONS),
    ):
        with pytest.raises((DeviceLost, ClosedError)):
            call()
    assert seconds(ctx.close) < SOON


@pytest.mark.hazard("N86", "N88")
def test_a_server_that_dies_is_lost_and_others_go_on(
    llama: Path, server: Served, other: Served
) -> None:
    with open_on(llama, other) as healthy, open_on(llama, server) as ctx:
        ctx.decode(WORDS[:9])
        healthy.decode(WORDS[:9])
        server.stop()
        # Another one at the same place is another server: what this context held is gone.
        again = Served(server.port)
        check_lost(ctx, server.endpoint)
        with open_on(llama, again) as fresh:
            assert np.array_equal(logits_of(fresh, WORDS), on_cpu(llama, WORDS))
        again.stop()
        assert np.allclose(logits_of(healthy, WORDS[9:]), on_cpu(llama, WORDS), atol=1e-4)


@pytest.mark.hazard("N86")
def test_a_frozen_server_is_lost_in_time(llama: Path, server: Served) -> None:
    with open_on(llama, server, timeout=0.5) as ctx:
        ctx.decode(WORDS[:9])
        server.freeze()
        assert seconds(lambda: check_lost(ctx, server.endpoint)) < SOON


def test_nothing_is_generated_or_kept_out_of_a_lost_server(llama: Path, server: Served) -> None:
    with open_on(llama, server) as ctx, PrefixCache(ctx, block_size=8) as cache:
        seq = LlamaSequence(ctx, WORDS[:9])
        kept = cache.sequence(WORDS[:24])
        kept.evaluate()
        token = next(iter(seq.generate(8)))
        n = len(seq)
        server.stop()
        with pytest.raises(DeviceLost):
            list(seq.generate(8))
        assert len(seq) == n
        assert seq.tokens[-1] == token
        with pytest.raises(DeviceLost):
            kept.park()
        with BatchGenerator(ctx) as generator:
            handle = generator.submit(WORDS[:5], 3)
            with pytest.raises(DeviceLost):
                generator.run()
            assert len(handle.tokens) == 0
        dropped = LlamaSequence(ctx, WORDS[:3])
        del dropped  # frees what it can, quietly
        seq.close()
        kept.close()


def test_who_cannot_be_reached_is_refused_in_time(llama: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(DeviceLost, match="refused") as raised:
            LlamaModel(llama, rpc=[endpoint])
        assert (raised.value.endpoint, raised.value.operation) == (endpoint, "connect")
        taken.listen(1)  # and never speaks
        begin = time.monotonic()
        with pytest.raises(DeviceLost, match=r"no answer for 0\.5 s"):
            LlamaModel(llama, rpc=[endpoint], rpc_timeout=0.5)
        assert time.monotonic() - begin < SOON
    with pytest.raises(DeviceLost, match="cannot resolve"):
        LlamaModel(llama, rpc=["no-such-host.invalid:50052"])


@pytest.mark.hazard("N89")
@pytest.mark.not_on_a_device(reason="--device rpc registers devices, which the child would ask")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork()")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_leaves_the_parents_connections_alone(llama: Path, server: Served) -> None:
    with open_on(llama, server) as ctx:
        ctx.decode(WORDS[:9])
        child = os.fork()
        if not child:
            code = 1
            try:
                with pytest.raises(ClosedError):
                    ctx.decode([1])
                with pytest.raises(ClosedError, match="fork"):
                    LlamaModel(llama, rpc=[server.endpoint])
                ctx.close()
                del ctx
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert np.allclose(logits_of(ctx, WORDS[9:]), on_cpu(llama, WORDS), atol=1e-4)


@pytest.mark.parametrize(
    "way", ["kill", "freeze-raise", pytest.param("freeze-cycle-thread", marks=pytest.mark.slow)]
)
def test_what_is_left_open_on_a_lost_server_ends_quietly(
    llama: Path, server: Served, other: Served, way: str
) -> None:
    pid = str(server.process.pid)
    done = subprocess.run(
        [sys.executable, "-c", LEAVES, llama, server.endpoint, pid, other.endpoint, way],
        env=os.environ | {"GGML_NO_BACKTRACE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == ("raise" in way), done.stderr[-3000:]
    assert ("KeyError: 'left'" if "raise" in way else "end") in done.stdout + done.stderr


def gone_at_answers(llama: Path, which: str, limit: float = 300) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "devices.rpc_driver", str(llama), which],
        env=os.environ | {"PYTHONPATH": str(TESTS), "GGML_NO_BACKTRACE": "1"},
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "survived" in done.stdout


@pytest.mark.slow
def test_a_server_goes_away_while_the_rotation_is_read(tmp_path: Path) -> None:
    """Its factors lie there, and are read while a context is made."""
    path = with_rope_factors(tmp_path, np.linspace(1, 4, 8, dtype=np.float32))
    gone_at_answers(path, "kinds")


@pytest.mark.slow
def test_a_server_goes_away_at_every_answer(llama: Path) -> None:
    gone_at_answers(llama, "all", limit=3600)


@pytest.mark.hazard("N87")
@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (
            struct.pack("<Q", 28) + bytes([3, 1]) + bytes(26),
            r"version 3\.1 of ggml's RPC, not 7\.0",
        ),
        (b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n" * 20, "no server of ggml's RPC"),
    ],
)
def test_a_server_of_something_else_is_refused(llama: Path, answer: bytes, why: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def speak() -> None:
            client, _ = listener.accept()
            with client:
                client.recv(100)
                client.sendall(answer)

        threading.Thread(target=speak, daemon=True).start()
        with pytest.raises(DeviceLost, match=why):
            LlamaModel(llama, rpc=[f"127.0.0.1:{listener.getsockname()[1]}"], rpc_timeout=5.0)
