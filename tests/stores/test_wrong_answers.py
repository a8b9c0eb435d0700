"""A Redis server that answers with something else than was asked for: misses and counters."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from pykvcache.prefix.stores import RedisStore
from stores.servers import PATIENT

pytest.importorskip("redis", reason="pip install 'pykvcache[redis]'")

KEYS = [b"k" * 32, b"l" * 32, b"m" * 32]
NAME = b"$42\r\npykvcache:" + b"k" * 32 + b"\r\n"
REPLIES = [
    b"+OK\r\n",
    b":-5\r\n",
    b":99999999999999999999999\r\n",
    b"$-1\r\n",
    b"$3\r\nabc\r\n",
    b"*0\r\n",
    b"*-1\r\n",
    b"*2\r\n:0\r\n:5\r\n",
    b"*2\r\n$1\r\n0\r\n$3\r\nabc\r\n",
    b"*2\r\n$1\r\nz\r\n*0\r\n",
    b"*2\r\n$1\r\n0\r\n*1\r\n:5\r\n",
    b"*2\r\n$1\r\n0\r\n*1\r\n" + NAME,
    b"*2\r\n*0\r\n*0\r\n",
    b"*2\r\n+inf\r\n*0\r\n",
    b"-WRONGTYPE no\r\n",
    b"-\r\n",
    b"\xff\xfe\r\n",
    b"#t\r\n",
    b",1.5\r\n",
    b",nan\r\n",
    b"%1\r\n$1\r\na\r\n:1\r\n",
]
SCAN = b"*2\r\n$1\r\n0\r\n*1\r\n" + NAME


def commands_of(client: socket.socket) -> Iterator[bytes]:
    """Yield the names of the commands that come, each once all of it is there."""
    with client.makefile("rb") as file:
        while line := file.readline():
            parts = []
            for _ in range(int(line[1:])):
                parts.append(file.read(int(file.readline()[1:])))
                file.read(2)
            yield parts[0].upper()


class Server:
    """Answers each command as `answers` says."""

    def __init__(self) -> None:
        self.answers: Callable[[bytes], bytes] = lambda name: b"+OK\r\n"
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            # A reply goes out at once: it would wait until the one before it is acknowledged.
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            try:
                for name in commands_of(client):
                    client.sendall(self.answers(name))
            except (OSError, ValueError):
                return

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    yield one
    one.close()


def use(store: RedisStore) -> None:
    """Call everything; what comes back is what each method promises."""
    for call in (store.contains, store.discard):
        assert call(KEYS) >= 0
    there = store.present(KEYS)
    assert [type(one) for one in there] == [bool] * len(KEYS)
    assert 0 <= store.get_into(KEYS, [bytearray(64) for _ in KEYS]) <= len(KEYS)
    assert 0 <= store.put([(key, b"z" * 50) for key in KEYS]) <= len(KEYS)
    store.touch(KEYS)
    for entry in store.entries():
        assert (type(entry.key), type(entry.size), len(entry.key)) == (bytes, int, 32)
    store.trim(0)
    assert type(store.lease(KEYS[0], 5)) is bool
    store.release(KEYS[0])


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("reply", REPLIES)
def test_an_answer_of_another_type_is_a_miss(server: Server, reply: bytes, protocol: int) -> None:
    hello = {b"HELLO": b"%1\r\n$5\r\nproto\r\n:3\r\n", b"CLIENT": b"+OK\r\n", b"PING": b"+PONG\r\n"}
    with RedisStore(f"{server.url}?protocol={protocol}", **PATIENT) as store:
        server.answers = lambda name: hello.get(name, reply)
        use(store)
        # What there is to list, and its sizes are something else.
        server.answers = lambda name: hello.get(name, SCAN if name == b"SCAN" else reply)
        use(store)


@pytest.mark.parametrize("reply", [b"+OK\r\n", b":1\r\n", b"*0\r\n", b"*2\r\n:1\r\n:2\r\n"])
def test_a_server_that_greets_in_another_way_is_a_miss(server: Server, reply: bytes) -> None:
    server.answers = lambda name: reply
    with RedisStore(f"{server.url}?protocol=3", **PATIENT) as store:
        use(store)
        assert store.counters.failed + store.counters.skipped > 0
