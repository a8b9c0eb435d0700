"""RedisStore against a real server: eviction, readers, TLS; frozen, dead and slow ones."""

from __future__ import annotations

import contextlib
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
from pykvcache.prefix.stores import BlockStore, RedisStore, _redis_requests, open_store
from pykvcache.prefix.stores import redis as module
from pykvcache.prefix.stores.conformance import StoreConformance, chain
from stores.servers import PATIENT, Server, free_port, freeze, redis_server

redis = pytest.importorskip("redis", reason="pip install 'pykvcache[redis]'")

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


class TestRedis(StoreConformance):
    ordered = False  # the server's clock for this has seconds

    @pytest.fixture(autouse=True)
    def _server(self, server: Server, admin: Any) -> None:
        self.url = server.url

    def make_store(self) -> BlockStore:
        return RedisStore(self.url, **PATIENT)


def test_a_request_moves_half_a_mebibyte_to_four(server: Server, admin: Any) -> None:
    blocks = chain(64, "grouped", 128 << 10)
    sizes: list[int] = []
    real, receive = RedisStore._send, RedisStore._receive

    class Counting(RedisStore):
        def _send(self, commands: list[Any], until: float, *, errors: bool = False) -> list[Any]:
            answers = real(self, commands, until, errors=errors)
            sizes.append(sum(len(c[2]) for c in commands if c[0] == "SET"))
            return answers

        def _receive(self, commands: list[Any], views: list[memoryview]) -> tuple[list[int], bool]:
            found = receive(self, commands, views)
            sizes.append(sum(found[0]))
            return found

    with Counting(server.url, **PATIENT) as store:
        assert store.put(blocks) == 64
        assert store.get_into([key for key, _ in blocks], buffers(blocks)) == 64
        assert len(sizes) == 2 * 5  # 8 MiB and a little
        assert all(1 << 19 <= size <= 4 << 20 for size in sizes[:4] + sizes[5:9])


def test_the_least_recently_touched_goes_first(server: Server, admin: Any) -> None:
    with RedisStore(server.url, **PATIENT) as store:
        store.put(BLOCKS)
        time.sleep(1.1)  # the server counts idle seconds
        store.touch(KEYS[:6])
        removed = store.trim(sum(entry.size for entry in store.entries()) // 2 + 100)
        assert removed
        assert set(removed) <= set(KEYS[6:])
        assert store.contains(KEYS[:6]) == 6


def test_a_full_server_is_a_counter_and_still_read(server: Server, admin: Any) -> None:
    with RedisStore(server.url, **PATIENT) as store:
        store.put(BLOCKS)
        admin.config_set("maxmemory", 1 << 20)
        assert store.put(chain(40, "too many", 50_000)) < 40
        assert store.counters.full == 1
        assert store.put(chain(1, "later")) == 0
        assert store.counters.skipped > 0, "a full server is asked again and again"
        assert store.get_into(KEYS, buffers()) == 12
        admin.config_set("maxmemory", 0)
        store._writes._until = 0.0
        assert store.put(chain(1, "later")) == 1


def test_what_the_server_evicts_ends_the_run(server: Server, admin: Any) -> None:
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
        assert store.contains(keys) == run
        assert store.get_into(keys, buffers(blocks)) == run
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
    url = server.url.replace("redis://", "redis://reader:pass%20word@")
    with RedisStore(url, **PATIENT) as store:
        assert store.contains(KEYS) == 12
        assert store.get_into(KEYS, buffers()) == 12
        store.touch(KEYS)
        assert store.counters.denied == 0
        assert store.put(chain(2, "denied")) == 0
        assert store.discard(KEYS) == 0
        assert store.lease(KEYS[0], 10), "who cannot take a lease evaluates"
        assert store.counters.denied >= 1
        assert store.get_into(KEYS, buffers()) == 12, "reads go on"
    with RedisStore(url.replace("pass%20word", "wrong"), **PATIENT) as store:
        assert store.get_into(KEYS, buffers()) == 0
        assert store.counters.denied == 1


def test_a_replica_is_read_and_takes_no_blocks(server: Server, admin: Any) -> None:
    with RedisStore(server.url, **PATIENT) as store:
        assert store.put(BLOCKS) == 12
        admin.execute_command("REPLICAOF", "127.0.0.1", "1")  # of nobody: it keeps what it has
        try:
            assert store.put(chain(2, "replica")) == 0
            assert store.counters.denied == 1
            assert store.lease(KEYS[0], 10), "who cannot take a lease evaluates"
            assert store.get_into(KEYS, buffers()) == 12
        finally:
            admin.execute_command("REPLICAOF", "NO", "ONE")


def test_a_value_of_another_type_and_a_foreign_key_are_misses(server: Server, admin: Any) -> None:
    admin.rpush(b"pykvcache:" + KEYS[1], "a list")
    admin.set(b"pykvcache:short", "x")
    with RedisStore(server.url, **PATIENT) as store:
        store.put(BLOCKS[:1])
        assert store.get_into(KEYS[1:2], buffers()[1:2]) == 0
        assert store.counters.failed == 1
        assert store.get_into(KEYS[:1], buffers()[:1]) == 1, "the server is not given up for it"
        assert store.discard(KEYS[1:2]) == 1


def test_a_frozen_server_costs_one_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with redis_server(tmp_path) as frozen, RedisStore(frozen.url, **PATIENT) as store:
        assert store.put(BLOCKS) == 12
        store._timeout = 0.3
        freeze(frozen.process)
        begin = time.monotonic()
        assert store.get_into(KEYS, buffers()) == 0
        for _ in range(100):
            assert store.get_into(KEYS, buffers()) == 0
            assert store.put(BLOCKS) == store.contains(KEYS) == 0
            assert store.lease(KEYS[0], 10)
        assert time.monotonic() - begin < 5, "each call waits"
        assert store.counters.timed_out <= 3
        frozen.process.send_signal(signal.SIGCONT)
        monkeypatch.setattr(_redis_requests, "_TRIAL", 30.0)
        store._timeout, store._reads._until = 30.0, 0.0
        assert store.get_into(KEYS, buffers()) == 12


def test_a_server_that_died_and_came_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    with redis_server(tmp_path, port=port) as first:
        store = RedisStore(first.url, **PATIENT)
        assert store.put(BLOCKS) == 12
    begin = time.monotonic()
    for _ in range(50):
        assert store.get_into(KEYS, buffers()) == 0
    assert time.monotonic() - begin < 5
    assert 1 <= store.counters.failed <= 3
    with redis_server(tmp_path, port=port):
        monkeypatch.setattr(_redis_requests, "_TRIAL", 30.0)
        store._reads._until = 0.0
        assert store.put(BLOCKS) == 12
        assert store.get_into(KEYS, buffers()) == 12
    store.close()


@contextlib.contextmanager
def trickle() -> Iterator[int]:
    """Answer every request with a value of which a byte comes every 20 ms."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        done = threading.Event()

        def serve() -> None:
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(b"$1000000\r\n")
                    while not done.wait(0.02):
                        connection.sendall(b"x")

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            done.set()
            thread.join(10)


def test_a_server_that_trickles_is_cut_off() -> None:
    """Every packet comes well within redis-py's own time-out; the whole would take hours."""
    with (
        trickle() as port,
        RedisStore(f"redis://127.0.0.1:{port}?protocol=2", timeout=0.3) as store,
    ):
        begin = time.monotonic()
        assert store.get_into(KEYS, buffers()) == 0
        assert time.monotonic() - begin < 5
        assert store.counters.timed_out == 1


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
            assert store.put(BLOCKS) == 12
            assert store.get_into(KEYS, buffers()) == 12
        with RedisStore(url, **PATIENT) as store:  # a certificate that nobody vouches for
            assert store.get_into(KEYS, buffers()) == 0
            assert store.counters.failed == 1


def test_a_unix_socket_and_the_name_valkey(tmp_path: Path) -> None:
    with (
        tempfile.TemporaryDirectory() as short,  # a socket's name has room for 100 characters
        redis_server(tmp_path, "--unixsocket", path := os.path.join(short, "s")) as running,
    ):
        with RedisStore(f"unix://{path}", timeout=30, connect_timeout=30) as store:
            assert store.put(BLOCKS) == 12
        with open_store(running.url.replace("redis", "valkey"), **PATIENT) as store:
            assert isinstance(store, RedisStore)
            assert store.get_into(KEYS, buffers()) == 12


def test_a_holder_that_dies_costs_the_rest_of_its_seconds(server: Server, admin: Any) -> None:
    with RedisStore(server.url, **PATIENT) as dead, RedisStore(server.url, **PATIENT) as other:
        assert dead.lease(KEYS[0], 60)
        assert not other.lease(KEYS[0], 60)
        name = b"pykvcache:lease:" + KEYS[0]
        assert 0 < admin.pttl(name) <= 60_000
        admin.pexpire(name, 1)  # its seconds are over
        while admin.exists(name):
            time.sleep(0.001)
        assert other.lease(KEYS[0], 60)
        dead.release(KEYS[0])
        assert not dead.lease(KEYS[0], 60), "a lease that has passed on is not ended"


def test_urls_that_cannot_be_used_raise_and_tell_no_password() -> None:
    for url in ("http://user:hidden@host", "no url", "redis://user:hidden@host:port"):
        with pytest.raises(StoreError) as caught:
            RedisStore(url)
        assert "hidden" not in str(caught.value)
    with pytest.raises(StoreError, match="timeout"):
        RedisStore("redis://host", timeout=0)
    assert "hidden" not in repr(RedisStore("redis://user:hidden@host"))


def test_groups_keep_to_what_a_request_may_move() -> None:
    sizes = [1, module.REQUEST_BYTES, 5, module.REQUEST_BYTES * 2, 7, 8]
    groups = list(module.groups([(KEYS[0], memoryview(bytes(size))) for size in sizes]))
    assert [[len(view) for _, view in group] for group in groups] == [[s] for s in sizes[:4]] + [
        [7, 8]
    ]
