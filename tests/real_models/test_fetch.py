"""models/fetch.py against a server on this machine: whole, resumed, cut, damaged, missing."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DATA = bytes(range(256)) * 9000
HALF = len(DATA) // 2


@dataclass
class Hub:
    """A server that holds one file, and what it was asked."""

    url: str = ""
    data: bytes = DATA
    honours_range: bool = True
    cut_at: int | None = None
    """Bytes after which it hangs up, although it promised more."""
    ranges: list[str | None] = field(default_factory=list)


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/owner/repo/resolve/abc/model.gguf":
                # As the hub does, which keeps the files elsewhere.
                self.send_response(302)
                self.send_header("Location", f"{hub.url}/files/model.gguf")
                self.end_headers()
            elif self.path == "/files/model.gguf":
                self.send_file()
            else:
                self.send_error(404)

        def send_file(self) -> None:
            asked = self.headers.get("Range")
            hub.ranges.append(asked)
            start = 0
            if asked and hub.honours_range:
                start = int(asked.removeprefix("bytes=").removesuffix("-"))
                if start >= len(hub.data):
                    self.send_error(416)
                    return
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(hub.data) - start))
            if start:
                last = len(hub.data) - 1
                self.send_header("Content-Range", f"bytes {start}-{last}/{len(hub.data)}")
            self.end_headers()
            self.wfile.write(hub.data[start : hub.cut_at])

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("no_proxy", "*")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield hub
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def remote(fetch: ModuleType) -> Any:
    digest = hashlib.sha256(DATA).hexdigest()
    return fetch.Remote("m", "owner/repo", "abc", "model.gguf", len(DATA), digest, "MIT", "none")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the models go: a folder that is not there yet."""
    folder = tmp_path / "new" / "models"
    monkeypatch.setenv("PYKVCACHE_MODELS", str(folder))
    return folder


def failed(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line that reports a failure."""
    text = capsys.readouterr().err
    assert text.startswith("fetch.py: ")
    assert text.count("\n") == 1
    return text


def test_downloads_once(fetch: ModuleType, remote: Any, hub: Hub, folder: Path) -> None:
    assert fetch.main([], [remote]) == 0
    assert (folder / "model.gguf").read_bytes() == DATA
    assert fetch.main(["m"], [remote]) == 0
    assert hub.ranges == [None], "what is there is not fetched again"
    assert [path.name for path in folder.iterdir()] == ["model.gguf"]


def test_goes_on_where_it_stopped(
    fetch: ModuleType, remote: Any, hub: Hub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.cut_at = HALF
    assert fetch.main([], [remote]) == 1
    assert "run it again" in failed(capsys)
    assert not (folder / "model.gguf").exists()
    assert (folder / "model.gguf.part").read_bytes() == DATA[:HALF]
    hub.cut_at = None
    assert fetch.main([], [remote]) == 0
    assert hub.ranges == [None, f"bytes={HALF}-"]
    assert (folder / "model.gguf").read_bytes() == DATA


def test_starts_again_where_the_server_cannot_resume(
    fetch: ModuleType, remote: Any, hub: Hub, folder: Path
) -> None:
    folder.mkdir(parents=True)
    (folder / "model.gguf.part").write_bytes(DATA[:HALF])
    hub.honours_range = False
    assert fetch.main([], [remote]) == 0
    assert (folder / "model.gguf").read_bytes() == DATA


@pytest.mark.parametrize("start", [DATA[: HALF - 1] + b"?", DATA + b"more"])
def test_wrong_bytes_are_never_kept(
    fetch: ModuleType,
    remote: Any,
    hub: Hub,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    start: bytes,
) -> None:
    folder.mkdir(parents=True)
    (folder / "model.gguf.part").write_bytes(start)
    if len(start) < len(DATA):
        assert fetch.main([], [remote]) == 1
        assert "SHA-256" in failed(capsys)
        assert list(folder.iterdir()) == []
    assert fetch.main([], [remote]) == 0
    assert (folder / "model.gguf").read_bytes() == DATA


def test_a_server_with_other_sizes(
    fetch: ModuleType, remote: Any, hub: Hub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.data = DATA + b"more"
    assert fetch.main([], [remote]) == 1
    assert "more than" in failed(capsys)
    hub.data = DATA[:HALF]
    (folder / "model.gguf.part").write_bytes(DATA[: HALF + 5])
    assert fetch.main([], [remote]) == 1
    assert "less than was downloaded" in failed(capsys)
    assert list(folder.iterdir()) == []


def test_what_cannot_be_fetched_is_one_line(
    fetch: ModuleType,
    remote: Any,
    hub: Hub,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").write_bytes(b"")
    for model, arguments, said in (
        (replace(remote, file="other.gguf"), [], "404"),
        (remote, ["--folder", str(tmp_path / "file" / "models")], "cannot write"),
        (replace(remote, size=2**62), [], "free"),
    ):
        assert fetch.main(arguments, [model]) == 1
        assert said in failed(capsys)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert fetch.main([], [remote]) == 1
    assert "cannot reach http://127.0.0.1:9/owner" in failed(capsys)
    assert not any(folder.iterdir())


def test_another_file_of_that_name_is_left_alone(
    fetch: ModuleType, remote: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.mkdir(parents=True)
    (folder / "model.gguf").write_bytes(b"mine")
    assert fetch.main([], [remote]) == 1
    assert "delete it first" in failed(capsys)
    assert (folder / "model.gguf").read_bytes() == b"mine"


def test_the_script_by_itself(fetch: ModuleType) -> None:
    def run(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-I", str(fetch.__file__), *args]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    listed = run("--list").stdout
    for model in fetch.MODELS:
        assert model.name in listed
        assert model.repo in listed
        assert len(model.sha256) == 64
        assert len(model.revision) == 40
    wrong = run("nonesuch")
    assert wrong.returncode == 2
    assert wrong.stderr.count("\n") == 1
