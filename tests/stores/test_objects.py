"""ObjectStore: a folder and memory for real; the protocol of S3 with moto, which is a mock."""

from __future__ import annotations

import contextlib
import http.server
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pykvcache.errors import StoreError
from pykvcache.prefix.stores import BlockStore, ObjectStore, open_store
from pykvcache.prefix.stores.conformance import StoreConformance, chain
from stores.servers import free_port

obstore = pytest.importorskip("obstore", reason="pip install '.[obstore]'")

BLOCKS = chain(12, "objects")
KEYS = [key for key, _ in BLOCKS]


class Objects(StoreConformance):
    ordered = False


class TestFolderByUrl(Objects):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.url = f"file://{tmp_path}/objects"

    def make_store(self) -> BlockStore:
        return ObjectStore(self.url)


class TestMemoryByUrl(Objects):
    shared = False

    def make_store(self) -> BlockStore:
        return ObjectStore("memory:///")


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    """Run moto's server, a mock of S3, in a process of its own: it shares our threads otherwise."""
    pytest.importorskip("moto.server", reason="pip install 'moto[s3,server]'")
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(url, timeout=5).close()
                break
            except OSError:
                assert process.poll() is None, "moto ended"
                time.sleep(0.05)
        yield url
    finally:
        process.kill()
        process.wait()


def s3(endpoint: str, bucket: str, **options: Any) -> ObjectStore:
    return ObjectStore(
        f"s3://{bucket}/prefix",
        endpoint=endpoint,
        region="us-east-1",
        access_key_id="a",
        secret_access_key="b",
        client_options={"allow_http": True},
        **options,
    )


def make_bucket(endpoint: str, name: str) -> None:
    request = urllib.request.Request(f"{endpoint}/{name}", method="PUT", data=b"")
    urllib.request.urlopen(request, timeout=30).close()


class TestS3(Objects):
    # Tested over a folder and over memory: here it would take 15 s.
    keeps_paths = False

    @pytest.fixture(autouse=True)
    def _bucket(self, moto: str, request: pytest.FixtureRequest) -> None:
        self.endpoint = moto
        self.bucket = request.node.name.replace("_", "-")[:60]
        make_bucket(moto, self.bucket)

    def make_store(self) -> BlockStore:
        return s3(self.endpoint, self.bucket)


def test_nothing_is_listed_on_the_path_of_a_request(
    moto: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_bucket(moto, "unlisted")
    monkeypatch.setattr(obstore, "list", None)
    monkeypatch.setattr(obstore, "list_with_delimiter", None)
    with s3(moto, "unlisted") as store:
        assert store.put(BLOCKS) == 12
        assert store.contains(KEYS) == 12
        assert store.get_into(KEYS, [bytearray(len(data)) for _, data in BLOCKS]) == 12
        store.touch(KEYS)
        assert store.counters.failed == 0


def test_a_bucket_that_is_not_there_raises_at_once(moto: str) -> None:
    with pytest.raises(StoreError, match="NoSuchBucket"):
        s3(moto, "nowhere")


@contextlib.contextmanager
def answering(status: int, code: str) -> Iterator[str]:

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = f"<Error><Code>{code}</Code></Error>".encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def test_credentials_that_may_not_read_raise_at_once() -> None:
    with answering(403, "AccessDenied") as url, pytest.raises(StoreError, match="AccessDenied"):
        s3(url, "bucket")


def test_a_server_that_fails_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with answering(503, "SlowDown") as url, s3(url, "bucket", timeout=1.0) as store:
        assert store.contains(KEYS) == 0
        assert store.counters.failed + store.counters.timed_out == 1
        (warning,) = caplog.records
        assert "does not answer" in warning.getMessage()


def test_uses_are_recorded_once_a_minute_and_kept_by_trim(tmp_path: Path) -> None:
    def records() -> list[Path]:
        return [*(tmp_path / "uses").glob("*")]

    with ObjectStore(f"file://{tmp_path}") as one, ObjectStore(f"file://{tmp_path}") as other:
        one.put(BLOCKS)
        for i in range(12):
            one.touch(KEYS[: 12 - i])
        other.touch(KEYS[3:9])
        assert len(records()) == 2
        one.close()
        assert len(records()) == 3
        (tmp_path / "uses" / "cut").write_bytes(bytes(90))
        # The store that was closed used the first blocks last, before the other one.
        assert other.trim(7350) == [*KEYS[:8:-1], *KEYS[2:0:-1]]
        assert len(records()) == 1
    with ObjectStore(f"file://{tmp_path}") as store:
        assert store.trim(0) == [KEYS[0], *KEYS[8:2:-1]]


def test_a_server_that_is_gone_is_asked_once() -> None:
    with s3(f"http://127.0.0.1:{free_port()}", "bucket", timeout=1.0) as store:
        assert store.get_into(KEYS, [bytearray(5000)] * 12) == 0
        asked = store.counters.failed + store.counters.timed_out
        assert 0 < asked <= 8
        assert store.put(BLOCKS) == store.contains(KEYS) == 0
        assert store.counters.failed + store.counters.timed_out == asked
        assert store.counters.skipped > 0


def test_a_slow_server_ends_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = chain(60, "slow", 10)
    keys = [key for key, _ in blocks]
    with ObjectStore("memory:///", timeout=0.2) as store:
        store.put(blocks)
        head = obstore.head

        def slow(*args: Any) -> Any:
            time.sleep(0.08)
            return head(*args)

        monkeypatch.setattr(obstore, "head", slow)
        assert store.contains(keys) in range(8, 40)
        assert store.counters.timed_out == 1


def test_addresses_name_stores(tmp_path: Path) -> None:
    with open_store(f"file://{tmp_path}/a") as store:
        assert isinstance(store, ObjectStore)
        assert open_store(store) is store
    with pytest.raises(StoreError, match="ftp"):
        open_store("ftp://somewhere")
    with pytest.raises(StoreError, match="n_parallel"):
        ObjectStore("memory:///", n_parallel=0)
    with pytest.raises(StoreError, match="obstore cannot use"):
        ObjectStore("s3://bucket/prefix", no_such_option=3)
