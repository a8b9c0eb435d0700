"""Servers of ggml's RPC on loopback, and proxies before them that fail at a chosen message."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from stores.servers import free_port, freeze

_CHILD = """
import sys, threading, os
from pykvcache._native import lib
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
lib.rpc_serve(sys.argv[1], 1, ["CPU"])
"""

# What a process leaves open while a server is gone, in every order that freeing it can have.
LEAVES = """
import glob, os, signal, sys, threading, time
import numpy as np
from pykvcache import LlamaContext, LlamaModel, LlamaSequence, PrefixCache
from pykvcache.errors import DeviceLost

path, lost, pid, healthy, way = sys.argv[1:]
tokens = np.arange(5, 14, dtype=np.int32)
def open_on(endpoint):
    model = LlamaModel(path, rpc=[endpoint], rpc_timeout=0.5)
    ctx = LlamaContext(model, n_ctx=64, n_seq_max=3, n_threads=1)
    ctx.decode(tokens)
    return ctx
contexts = [open_on(where) for where in (lost, healthy, lost)]
contexts.append(LlamaContext(LlamaModel(path), n_ctx=64))
model = LlamaModel(path, rpc=[lost], rpc_timeout=0.5)
contexts[3].decode(tokens)
seq = LlamaSequence(contexts[2], tokens)
cache = PrefixCache(contexts[0], block_size=4)
held = cache.sequence(tokens)
os.kill(int(pid), signal.SIGSTOP if "freeze" in way else signal.SIGKILL)
def is_over():  # the signal may reach it a moment later, and each of its threads by itself
    try:
        stats = [open(path).read() for path in glob.glob(f"/proc/{pid}/task/*/stat")]
    except OSError:
        return False
    return all(stat.rpartition(")")[2].split()[0] in "TZX" for stat in stats)
while not is_over():
    time.sleep(0.001)
try:
    contexts[0].decode([1])
except DeviceLost as error:
    kept = error, error.__traceback__
else:
    sys.exit("nothing was lost")
if "thread" in way:  # one that works when the process ends
    def work():
        while True:
            contexts[1].clear_kv_cache()
            contexts[1].decode(tokens)
    threading.Thread(target=work, daemon=True).start()
if "cycle" in way:
    contexts.append(contexts)
if "raise" in way:
    raise KeyError("left")
print("end")
"""

# Commands that are answered (ggml-rpc.cpp, version 7).
ANSWERED = {0, 1, 2, 3, 7, 8, 9, 11, 13, 14, 15}

#: How a server can go away at an answer.
WAYS = ["close", "cut", "freeze"]


def has_rpc() -> bool:
    """Whether this build can use servers."""
    from pykvcache._native import lib
    from pykvcache.errors import DeviceLost, UnsupportedOperation

    try:
        lib.Server("127.0.0.1:1", 1.0)
    except UnsupportedOperation:
        return False
    except DeviceLost:
        pass
    return True


class Served:
    """The CPU of another process; it ends with this one."""

    def __init__(self, port: int = 0) -> None:
        self.port = port or free_port()
        self.endpoint = f"127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, self.endpoint],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        for _ in range(600):
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            assert self.process.poll() is None, "the RPC server ended"
            time.sleep(0.05)
        raise TimeoutError("the RPC server does not answer")

    def freeze(self) -> None:
        """Stop it; what it was at when the signal came is over when this returns."""
        freeze(self.process)

    def thaw(self) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGCONT)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdin:
            self.process.stdin.close()


class Fault(Exception):
    """The proxy ends the connection."""


class Proxy:
    """Hands messages on, and fails at answer number `at` in the given way."""

    def __init__(self, port: int, way: str | None = None, at: int = 0) -> None:
        self.way, self.at = way, at
        self.n_answers = 0
        self.commands: list[int] = []
        self._behind = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = [self._listener]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError, Fault):
            client, _ = self._listener.accept()
            server = socket.create_connection(("127.0.0.1", self._behind))
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._open += [client, server]
            while True:
                self._exchange(client, server)
        self.close()

    def _exchange(self, client: socket.socket, server: socket.socket) -> None:
        head = _read(client, 9)
        data = _read(client, struct.unpack("<Q", head[1:])[0])
        self.commands.append(head[0])
        server.sendall(head + data)
        if head[0] not in ANSWERED:
            return
        size = _read(server, 8)
        answer = _read(server, struct.unpack("<Q", size)[0])
        self.n_answers += 1
        if self.way is not None and self.n_answers > self.at:
            self._fail(client, answer)
        else:
            client.sendall(size + answer)

    def _fail(self, client: socket.socket, answer: bytes) -> None:
        n = len(answer)
        if self.way == "freeze":
            client.recv(1)  # until the client gives up
        elif self.way == "cut":
            client.sendall(struct.pack("<Q", n) + answer[: n // 2])
        raise Fault

    def close(self) -> None:
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


def _read(source: socket.socket, n: int) -> bytes:
    found = bytearray()
    while len(found) < n:
        piece = source.recv(n - len(found))
        if not piece:
            raise Fault
        found += piece
    return bytes(found)


def seconds(call: Callable[[], Any]) -> float:
    """How long a call takes."""
    begin = time.monotonic()
    call()
    return time.monotonic() - begin
