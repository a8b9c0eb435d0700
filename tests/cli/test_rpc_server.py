"""``pykvcache rpc-server``: it warns, serves, and says in one line why it cannot."""

from __future__ import annotations

import socket
import subprocess
import sys

from devices.rpc_kit import has_rpc


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pykvcache", "rpc-server", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_it_warns_and_reports_why_it_cannot_listen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = serve("--port", str(taken.getsockname()[1]))
    assert done.returncode == 1
    warning, reason = done.stderr.splitlines()
    assert "neither encrypted nor authenticated" in warning
    assert "in use" in reason or (not has_rpc() and "GGML_RPC=ON" in reason)


def test_an_invalid_address_is_refused() -> None:
    for words, what in (
        (["--port", "0"], "0 is not in"),
        (["--host", "no-such-host.invalid"], "is not a known host"),
        (["--device", "CUDA99"], "is not one of CPU"),
    ):
        done = serve(*words)
        assert done.returncode == 2
        assert what in done.stderr
        assert len(done.stderr.splitlines()) == 1
