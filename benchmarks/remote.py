"""A model on two RPC servers on loopback, compared with the same build without them."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks import setup
from benchmarks.harness import Answer, Contestant, Plan, Row, closing, few, interleave, show
from benchmarks.models import medium
from benchmarks.settings import open_one

SERVERS, LOCAL = "two servers", "without servers"
STEPS, PROMPT, HELD = 8, 128, 448
#: It ends with its standard input, so that an interrupted run leaves no process.
CODE = """
import os, sys, threading
from pykvcache._native import lib
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
lib.rpc_serve(sys.argv[1], 1, ["CPU"])
"""


@contextlib.contextmanager
def served(n: int) -> Iterator[list[str]]:
    """Run n RPC servers on this machine, one thread each."""
    processes, endpoints = [], []
    try:
        for _ in range(n):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            endpoints.append(f"127.0.0.1:{port}")
            command = [os.fspath(setup.python_of(setup.OURS)), "-c", CODE, endpoints[-1]]
            processes.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
            )
            wait_for(port)
        yield endpoints
    finally:
        for process in processes:
            process.communicate()


def wait_for(port: int) -> None:
    """Wait until a server accepts connections."""
    for _ in range(600):
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise TimeoutError("the RPC server does not answer")


def run(plan: Plan) -> list[Row]:
    """Measure tokens per second, and saving and restoring a state, by wall time."""
    command = [os.fspath(setup.python_of(setup.OURS)), "-m", "benchmarks.peers.ours"]
    both = {who: Contestant(who, command, setup.PATHS) for who in (SERVERS, LOCAL)}
    shape: dict[str, Any] = {"n_ctx": 512, "n_seq_max": 1, "threads": 1}
    with served(2) as endpoints, closing(both):
        for who, contestant in both.items():
            rpc: dict[str, Any] = {"rpc": endpoints} if who == SERVERS else {}
            answer = open_one(contestant, medium("f16"), **shape, **rpc)
            assert "error" not in answer, answer

        def each(do: str, **request: Any) -> dict[str, Any]:
            return {who: partial(c.ask, do, **request) for who, c in both.items()}

        def rate(answer: Answer) -> float:
            return float(answer["tokens"]) / float(answer["seconds"])

        name = "30M f16 over RPC"
        rows = [
            interleave(
                f"decode, {name}", "tokens/s", each("decode", parallel=1, steps=STEPS), plan, rate
            ),
            interleave(
                f"prefill, {name}",
                "tokens/s",
                each("prefill", parallel=1, tokens=PROMPT),
                plan,
                rate,
            ),
        ]
        for contestant in both.values():
            contestant.ask("fill", n=HELD)
            contestant.ask("keep_state", n=HELD)
        for what, label in (("save", "state out"), ("load", "state in")):
            rows.append(
                interleave(
                    f"{label}, {HELD} tokens, {name}", "s", each("state", what=what), few(plan)
                )
            )
    for row in rows:
        scale, unit = (1.0, "tokens/s") if row.unit == "tokens/s" else (1e3, "ms")
        show(row, scale, unit, LOCAL)
    return rows
