"""RedisStore against a real server: refusals, eviction, readers, TLS; frozen and dead servers."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pykvcache.errors import StoreError
from pykvcache.prefix.stores import BlockStore, RedisStore, open_store
from pykvcache.prefix.stores.conformance import StoreConformance, chain
from stores.servers import PATIENT, Server, free_port, freeze, redis_server

redis = pytest.importorskip("redis", reason="pip install '.[redis]'")

BLOCKS = chain(12, "redis")
KEYS = [key for key, _ in BLOCKS]


def buffers(blocks: list[tuple[bytes, bytes]] = BLOCKS) -> list[bytearray]:
    return [bytearray(len(data)) for _, data in blocks]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def admin(server: Server) -> Iterator[Any]:
    with redis.Redis(port=server.port) as client:
        client.flushall()
        yield client
        client.config_set("maxmemory", 0)
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("requirepass", "")


class TestRedis(StoreConformance):
    ordered = False  # the server's clock of uses has seconds

    @pytest.fixture(autouse=True)
    def _server(self, server: Server, admin: Any) -> None:
        self.url = server.url

    def make_store(self) -> BlockStore:
        return RedisStore(self.url, **PATIENT)


def try_again(store: RedisStore) -> None:
    for breaker in (*store._breakers.values(), store._writes):
        breaker._until = 0.0


def at(server: Server, login: str) -> str:
    return server.url.replace("redis://", f"redis://{login}@")


def test_a_server_that_refuses_raises_at_once(server: Server, admin: Any) -> None:
    admin.acl_setuser(
        "other", enabled=True, passwords=["+secret"], categories=["+@read"], keys=["other:*"]
    )
    for url, reason in [
        (at(server, "nobody:hidden"), "invalid username-password pair"),
        (at(server, "other:secret"), "no permissions to access"),
        (server.url.replace("/0", "/99"), "DB index is out of range"),
    ]:
        with pytest.raises(StoreError, match=reason) as caught:
            RedisStore(url, **PATIENT)
        assert "hidden" not in str(caught.value)
    admin.config_set("requirepass", "hidden")
    for url in (server.url, at(server, ":wrong")):
        with pytest.raises(StoreError, match=f"{server.port}/0 refused"):
            RedisStore(url, **PATIENT)
    RedisStore(at(server, ":hidden"), **PATIENT).close()


def test_urls_that_cannot_be_used_raise_and_tell_no_password() -> None:
    for url in ("http://user:hidden@host", "no url", "redis://user:hidden@host:port"):
        with pytest.raises(StoreError) as caught:
            RedisStore(url)
        assert "hidden" not in str(caught.value)
    assert "hidden" not in repr(RedisStore("redis://user:hidden@127.0.0.1:1"))


def test_a_server_that_is_down_is_a_warning_and_is_used_once_it_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    with RedisStore(f"redis://127.0.0.1:{port}", **PATIENT) as store:
        for _ in range(50):
            assert store.get_into(KEYS, buffers()) == store.put(BLOCKS) == 0
        (warning,) = caplog.records
        assert (warning.name, warning.levelno) == ("pykvcache.prefix", logging.WARNING)
        assert f"127.0.0.1:{port} does not answer" in warning.getMessage()
        assert 1 <= store.counters.failed <= 3 < store.counters.skipped
        with redis_server(tmp_path, port=port):
            try_again(store)
            assert store.put(BLOCKS) == store.get_into(KEYS, buffers()) == 12
        assert store.contains(KEYS) == 0
        with redis_server(tmp_path, port=port):
            try_again(store)
            assert store.put(BLOCKS) == 12
        assert len(caplog.records) == 2, "one warning each time it goes"


def test_tls(tmp_path: Path) -> None:
    files = {name: str(tmp_path / name) for name in ("key.pem", "cert.pem")}
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", files["key.pem"], "-out", files["cert.pem"]]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("needs openssl: apt-get install openssl")
    port = free_port()
    options = ["--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no"]
    options += ["--tls-cert-file", files["cert.pem"], "--tls-key-file", files["key.pem"]]
    options += ["--tls-ca-cert-file", files["cert.pem"], "--requirepass", "secret"]
    url = f"rediss://:secret@127.0.0.1:{port}/0"
    with redis_server(tmp_path, *options, port=port):
        with RedisStore(f"{url}?ssl_ca_certs={files['cert.pem']}", **PATIENT) as store:
            assert store.put(BLOCKS) == store.get_into(KEYS, buffers()) == 12
        with pytest.raises(StoreError, match="CERTIFICATE_VERIFY_FAILED"):
            RedisStore(url, **PATIENT)


def test_a_unix_socket_and_the_name_valkey(tmp_path: Path) -> None:
    with (
        tempfile.TemporaryDirectory() as short,  # a socket's name has room for 100 characters
        redis_server(tmp_path, "--unixsocket", path := os.path.join(short, "s")) as running,
    ):
        with RedisStore(f"unix://{path}", **PATIENT) as store:
            assert store.put(BLOCKS) == 12
        with open_store(running.url.replace("redis", "valkey"), **PATIENT) as store:
            assert isinstance(store, RedisStore)
            assert store.get_into(KEYS, buffers()) == 12


def test_the_least_recently_touched_second_goes_first(server: Server, admin: Any) -> None:
    with RedisStore(server.url, **PATIENT) as store:
        store.put(BLOCKS)
        time.sleep(1.2)
        store.touch(KEYS[:6])
        removed = store.trim(sum(entry.size for entry in store.entries()) - 100)
        assert sorted(removed) == sorted(KEYS[6:]), "blocks of one second leave together"
        assert store.contains(KEYS) == 6


def test_a_full_server_takes_no_blocks_and_is_read(
    server: Server, admin: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with RedisStore(server.url, **PATIENT) as store:
        store.put(BLOCKS)
        admin.config_set("maxmemory", 1 << 20)
        assert store.put(chain(40, "too many", 50_000)) < 40
        assert store.counters.full == 1
        assert store.put(chain(1, "later")) == 0
        assert store.counters.skipped > 0, "a full server is asked again and again"
        assert store.get_into(KEYS, buffers()) == 12
        assert [record.getMessage().partition(" (")[0] for record in caplog.records] == [
            f"{store._name} is read, but not written"
        ]
        admin.config_set("maxmemory", 0)
        try_again(store)
        assert store.put(chain(1, "later")) == 1


def test_a_block_that_the_server_evicted_ends_the_run(server: Server, admin: Any) -> None:
    blocks = chain(100, "evicted", 50_000)
    keys = [key for key, _ in blocks]
    with RedisStore(server.url, **PATIENT) as store:
        used = admin.info("memory")["used_memory"]
        admin.config_set("maxmemory-policy", "allkeys-lru")
        admin.config_set("maxmemory", used + (2 << 20))
        assert store.put(blocks) == 100
        there = [bool(admin.exists(b"pykvcache:" + key)) for key in keys]
        assert 0 < sum(there) < 100
        run = there.index(False)
        assert store.contains(keys) == store.get_into(keys, buffers(blocks)) == run
        assert store.counters.full == store.counters.failed == 0


def test_a_user_who_only_reads(server: Server, admin: Any) -> None:
    admin.acl_setuser(
        "reader",
        enabled=True,
        passwords=["+pass word"],
        categories=["+@read"],
        keys=["pykvcache:*"],
    )
    with RedisStore(server.url, **PATIENT) as store:
        store.put(BLOCKS)
    with RedisStore(at(server, "reader:pass%20word"), **PATIENT) as store:
        assert store.contains(KEYS) == store.get_into(KEYS, buffers()) == 12
        store.touch(KEYS)
        assert len(list(store.entries())) == 12
        assert store.counters.denied == 0
        assert store.put(chain(2, "denied")) == store.discard(KEYS) == 0
        assert store.counters.denied >= 1
        assert store.get_into(KEYS, buffers()) == 12, "reads go on"


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP")
def test_a_frozen_server_costs_one_timeout(tmp_path: Path) -> None:
    with (
        redis_server(tmp_path) as frozen,
        RedisStore(frozen.url, timeout=1.0, connect_timeout=30) as store,
    ):
        assert store.put(BLOCKS) == 12
        freeze(frozen.process)
        began = time.monotonic()
        for _ in range(100):
            assert store.get_into(KEYS, buffers()) == 0
            assert store.put(BLOCKS) == store.contains(KEYS) == 0
        assert time.monotonic() - began < 10, "each call waits"
        assert 1 <= store.counters.timed_out <= 4
        frozen.process.send_signal(signal.SIGCONT)
        while store.get_into(KEYS, buffers()) < 12:
            assert time.monotonic() - began < 60
            try_again(store)


ANSWERS = [
    b"+OK\r\n",
    b":-5\r\n",
    b"$-1\r\n",
    b"$3\r\nabc\r\n",
    b"$99999999999999999999\r\nabc",
    b"*0\r\n",
    b"*2\r\n:0\r\n:5\r\n",
    b"*2\r\n$1\r\nz\r\n*0\r\n",
    b"*2\r\n$1\r\n0\r\n*1\r\n:5\r\n",
    b"*2\r\n$1\r\n0\r\n*1\r\n$42\r\npykvcache:" + b"k" * 32 + b"\r\n",
    b"-WRONGTYPE no\r\n",
    b"-NOPERM no\r\n",
    b"-MOVED\r\n",
    b"\xff\xfe\r\n",
    b"",
]


@pytest.mark.parametrize("answer", ANSWERS)
def test_whatever_a_server_answers_is_a_miss(answer: bytes) -> None:
    """A server that answers every command alike, after it was polite when the store was made."""
    polite = True
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(client: socket.socket) -> None:
        with client:
            while data := client.recv(1 << 16):
                reply = b"$-1\r\n" if polite else answer
                client.sendall(reply * data.count(b"*"))
                if not reply.endswith(b"\r\n"):
                    return

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    url = f"redis://127.0.0.1:{listener.getsockname()[1]}"
    with listener, RedisStore(url, timeout=1, connect_timeout=30) as store:
        polite = False
        for call in (
            lambda: store.contains(KEYS) in range(13),
            lambda: len(store.present(KEYS)) == 12,
            lambda: store.get_into(KEYS, [bytearray(9)] * 12) in range(13),
            lambda: store.put(BLOCKS[:2]) in range(3),
            lambda: store.discard(KEYS) in range(13),
            lambda: store.touch(KEYS) is None,
            lambda: all(entry.size >= 0 for entry in store.entries()),
            lambda: len(store.trim(0)) < 2,
        ):
            try_again(store)
            assert call()
        listener.shutdown(socket.SHUT_RDWR)
