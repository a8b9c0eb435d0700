"""``pykvcache rpc-server``: it warns, serves, and says in one line why it cannot."""

from __future__ import annotations

import socket

import pytest

pytest.importorskip("pykvcache._native.lib", reason="not built", exc_type=ImportError)
pytest.importorskip("click", reason="pip install '.[cli]'")

from devices.rpc_kit import has_rpc
from pykvcache.cli import main


def test_it_warns_and_reports_why_it_cannot_listen(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["rpc-server", "--port", str(taken.getsockname()[1])]) == 1
    warning, reason = capsys.readouterr().err.splitlines()
    assert "neither encrypted nor authenticated" in warning
    assert "in use" in reason or (not has_rpc() and "GGML_RPC=ON" in reason)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--port", "0"], "0 is not in"),
        (["--host", "no-such-host.invalid"], "is not a known host"),
        (["--device", "CUDA99"], "is not one of CPU"),
    ],
)
def test_an_invalid_address_is_refused(
    words: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rpc-server", *words]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert what in error
