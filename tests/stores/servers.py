"""Real servers for the tests, each on a free port of loopback."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

#: Of a RedisStore where time-outs are not what is tested: the machine may be busy.
PATIENT: dict[str, float] = {"timeout": 30.0, "connect_timeout": 30.0}
INSTALL = "needs a server: apt-get install redis-server"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def free_ports(n: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(n)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def freeze(process: subprocess.Popen[Any]) -> None:
    """Stop a process until it gets SIGCONT; the signal alone may reach it a moment later."""
    process.send_signal(signal.SIGSTOP)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), "the process ended"


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    port: int

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def started(self) -> bool:
        """Wait until it answers; False where it ended: somebody else took the port.

        It listens on its port before it does on its other sockets; when it answers, on all of them.
        """
        until = time.monotonic() + 60
        while self.process.poll() is None:
            with contextlib.suppress(OSError), socket.socket() as client:
                client.settimeout(60)
                client.connect(("127.0.0.1", self.port))
                client.sendall(b"PING\r\n")
                with contextlib.suppress(ConnectionResetError):  # a server of TLS
                    client.recv(1)
                return True
            assert time.monotonic() < until, "the server does not answer"
            time.sleep(0.01)
        return False


@contextlib.contextmanager
def redis_server(folder: Path, *options: str, port: int | None = None) -> Iterator[Server]:
    """Run valkey-server or redis-server; skip where there is neither."""
    pytest.importorskip("redis", reason="pip install 'pykvcache[redis]'")
    path = shutil.which("valkey-server") or shutil.which("redis-server")
    if path is None:
        pytest.skip(INSTALL)
    command = [path, "--bind", "127.0.0.1", "--dir", str(folder), "--save", "", *options]
    null = subprocess.DEVNULL
    for _ in range(3 if port is None else 1):
        at = port or free_port()
        where = [] if "--tls-port" in options else ["--port", str(at)]
        server = Server(subprocess.Popen([*command, *where], stdout=null, stderr=null), at)
        try:
            if server.started():
                yield server
                return
        finally:
            server.process.kill()
            server.process.wait()
    raise AssertionError("the server ended")


@dataclass
class Cluster:
    """Three servers that share the slots, a third each."""

    servers: list[Server]
    clients: list[Any]

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{one.port}" for one in self.servers)

    def wait(self) -> None:
        """Wait until every node knows of every slot."""
        until = time.monotonic() + 60
        while True:
            states = [client.execute_command("CLUSTER INFO") for client in self.clients]
            if all(state["cluster_state"] == "ok" for state in states) and all(
                state["cluster_known_nodes"] == "3" for state in states
            ):
                return
            assert time.monotonic() < until, states
            time.sleep(0.02)


@contextlib.contextmanager
def redis_cluster(folder: Path) -> Iterator[Cluster]:
    """Run a cluster of three nodes; skip where there is no server, or one without clusters."""
    redis = pytest.importorskip("redis", reason="pip install 'pykvcache[redis]'")
    with contextlib.ExitStack() as stack:
        servers, clients = [], []
        for i, bus in enumerate(buses := free_ports(3)):
            (folder / str(i)).mkdir()
            options = ("--cluster-enabled", "yes", "--cluster-port", str(bus))
            server = stack.enter_context(redis_server(folder / str(i), *options))
            servers.append(server)
            clients.append(stack.enter_context(redis.Redis(port=server.port)))
        for i, client in enumerate(clients):
            slots = range(i * 16384 // 3, (i + 1) * 16384 // 3)
            client.execute_command("CLUSTER ADDSLOTS", *slots)
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", i + 1)
        for i, j in ((0, 1), (1, 2), (2, 0)):
            clients[i].execute_command("CLUSTER MEET", "127.0.0.1", servers[j].port, buses[j])
        cluster = Cluster(servers, clients)
        cluster.wait()
        yield cluster
