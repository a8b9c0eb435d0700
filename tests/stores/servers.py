"""Real servers for the tests, each on a free port of loopback."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

INSTALL = "needs a server: apt-get install redis-server"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    port: int

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"


@contextlib.contextmanager
def redis_server(folder: Path, *options: str, port: int | None = None) -> Iterator[Server]:
    """Run valkey-server or redis-server; skip where there is neither."""
    pytest.importorskip("redis", reason="pip install 'pykvcache[redis]'")
    path = shutil.which("valkey-server") or shutil.which("redis-server")
    if path is None:
        pytest.skip(INSTALL)
    port = port or free_port()
    command = [path, "--bind", "127.0.0.1", "--dir", str(folder), "--save", "", *options]
    if "--tls-port" not in options:
        command += ["--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(500):
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, "the server ended"
            time.sleep(0.01)
        yield Server(process, port)
    finally:
        process.kill()
        process.wait()
