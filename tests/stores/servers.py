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


def free_ports(n: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(n)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def free_port() -> int:
    return free_ports(1)[0]


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
        """Wait until it answers; False where it ended: another process took the port.

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
    pytest.importorskip("redis", reason="pip install '.[redis]'")
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
    servers: list[Server]
    clients: list[Any]
    options: list[tuple[str, ...]]
    ids: list[str]
    n: int
    stack: contextlib.ExitStack

    @property
    def url(self) -> str:
        return self.of()

    @property
    def owners(self) -> list[Any]:
        return self.clients[: self.n]

    def of(self, *which: int, user: str = "") -> str:
        servers = [self.servers[i] for i in which] or self.servers
        return f"redis+cluster://{user}" + ",".join(f"127.0.0.1:{one.port}" for one in servers)

    def wait(self) -> None:
        n = str(len(self.servers))
        self.until("CLUSTER INFO", cluster_state="ok", cluster_known_nodes=n)
        until = time.monotonic() + 60
        while len({_owners(one.execute_command("CLUSTER SLOTS")) for one in self.clients}) > 1:
            assert time.monotonic() < until, "they do not agree who has which slots"
            time.sleep(0.01)

    def until(self, command: str, *of: int, **values: str) -> None:
        until = time.monotonic() + 60
        clients = [self.clients[i] for i in of] or self.clients
        while True:
            states = [client.execute_command(command) for client in clients]
            if all(str(state.get(k)) == v for state in states for k, v in values.items()):
                return
            assert time.monotonic() < until, states
            time.sleep(0.01)


def _owners(slots: Any) -> frozenset[Any]:
    return frozenset((first, last, owner[1]) for first, last, owner, *_ in slots)


@contextlib.contextmanager
def redis_cluster(
    folder: Path, n: int = 3, n_replicas: int = 0, *options: str
) -> Iterator[Cluster]:
    """Run a cluster; skip where there is no server, or one without clusters."""
    redis = pytest.importorskip("redis", reason="pip install '.[redis]'")
    with contextlib.ExitStack() as stack:
        cluster = Cluster([], [], [], [], n, stack)
        for i, bus in enumerate(buses := free_ports(n + n_replicas)):
            (folder / str(i)).mkdir()
            options_of_it = ("--cluster-enabled", "yes", "--cluster-port", str(bus), *options)
            server = stack.enter_context(redis_server(folder / str(i), *options_of_it))
            client = stack.enter_context(redis.Redis(port=server.port))
            cluster.servers.append(server)
            cluster.clients.append(client)
            cluster.options.append(options_of_it)
            cluster.ids.append(client.execute_command("CLUSTER MYID").decode())
        servers, clients = cluster.servers, cluster.clients
        for i, client in enumerate(clients):
            if i < n:
                slots = range(i * 16384 // n, (i + 1) * 16384 // n)
                client.execute_command("CLUSTER ADDSLOTS", *slots)
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", i + 1)
            for j in range(i):
                client.execute_command("CLUSTER MEET", "127.0.0.1", servers[j].port, buses[j])
        cluster.until("CLUSTER INFO", cluster_known_nodes=str(len(servers)))
        for i in range(n_replicas):
            clients[n + i].execute_command("CLUSTER REPLICATE", cluster.ids[i])
        cluster.wait()
        for i in range(n_replicas):
            cluster.until("INFO", n + i, master_link_status="up")
        yield cluster


def kill(running: Cluster, i: int) -> None:
    running.servers[i].process.kill()
    running.servers[i].process.wait()


def start_again(running: Cluster, folder: Path, i: int) -> None:
    port = running.servers[i].port
    server = redis_server(folder / str(i), *running.options[i], port=port)
    running.servers[i] = running.stack.enter_context(server)
