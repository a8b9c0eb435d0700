"""What a Redis server says to GET is received in place; whatever else it says is a miss."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from pykvcache.prefix.stores import RedisStore
from pykvcache.prefix.stores._replies import Ended, NotUnderstood, receive
from stores.servers import PATIENT

pytest.importorskip("redis", reason="pip install 'pykvcache[redis]'")

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    ours.settimeout(20)
    with ours, theirs:
        yield ours, theirs


def views(*sizes: int) -> list[memoryview]:
    return [memoryview(bytearray(b"." * size)) for size in sizes]


def send(theirs: socket.socket, data: bytes, step: int) -> None:
    """Send in pieces, each of which arrives alone."""
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    for begin in range(0, len(data), step):
        theirs.sendall(data[begin : begin + step])


@pytest.mark.parametrize("step", [1, 2, 3, 7, 600, 1 << 20])
def test_values_arrive_in_place_however_they_are_cut(pair: Pair, step: int) -> None:
    ours, theirs = pair
    long = bytes(range(256)) * 5
    wire = b"$5\r\na\r\nbc\r\n$0\r\n\r\n$%d\r\n%b\r\n$1\r\nx\r\n" % (len(long), long)
    thread = threading.Thread(target=send, args=(theirs, wire, step))
    thread.start()
    found = views(8, 4, len(long), 1)
    assert receive(ours, found) == ([5, 0, len(long), 1], False)
    thread.join()
    assert [bytes(view) for view in found] == [b"a\r\nbc...", b"....", long, b"x"]


def test_a_value_that_is_missing_ends_the_run(pair: Pair) -> None:
    ours, theirs = pair
    for none in (b"$-1\r\n", b"_\r\n"):
        theirs.sendall(b"$1\r\na\r\n" + none + b"$1\r\nc\r\n")
        assert receive(ours, views(1, 1, 1)) == ([1], False)  # and all was read
    theirs.sendall(b"$1\r\na\r\n$2\r\nbb\r\n")
    assert receive(ours, views(1, 1)) == ([1], True)


@pytest.mark.parametrize(
    "reply",
    [
        b"-ERR no\r\n",
        b">2\r\n$1\r\na\r\n$1\r\nb\r\n",
        b"$\r\n",
        b"$-2\r\n",
        b"$+1\r\na\r\n",
        b"$1_0\r\n" + b"a" * 12,
        b"$ 1\r\na\r\n",
        b"\r\n",
        b"$1\r\nab\r\n",
        b"$" + b"0" * 4096,
        b"x" * 4096,
    ],
)
def test_other_replies_are_left_to_the_client(pair: Pair, reply: bytes) -> None:
    ours, theirs = pair
    theirs.sendall(reply)
    with pytest.raises(NotUnderstood):
        receive(ours, views(12, 12))


def test_an_end_at_any_byte_is_an_end() -> None:
    wire = b"$3\r\nabc\r\n$-1\r\n"
    for n in range(len(wire)):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.settimeout(20)
            theirs.sendall(wire[:n])
            theirs.close()
            with pytest.raises(Ended):
                receive(ours, views(3, 3))


HOSTILE = {
    b"-ERR no\r\n": "failed",
    b"-NOPERM no\r\n": "denied",
    b"+OK\r\n": "",
    b"$99999999999999999999\r\nabc": "too_large",
    b"$10\r\nabc": "failed",
    b"\xff\xfe\x00": "failed",
    b"": "failed",
}


@pytest.mark.parametrize("reply", HOSTILE)
def test_whatever_a_server_says_is_a_miss(reply: bytes) -> None:
    """A server that answers every GET alike, and ends the connection within a value."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client:
                while data := client.recv(1 << 16):
                    if b"GET" in data:
                        client.sendall(reply * data.count(b"GET"))
                        if not reply.endswith(b"\r\n"):
                            break
                        continue
                    client.sendall(b"+OK\r\n" * data.count(b"*"))

    threading.Thread(target=serve, daemon=True).start()
    with (
        listener,
        RedisStore(f"redis://127.0.0.1:{listener.getsockname()[1]}?protocol=2", **PATIENT) as store,
    ):
        assert store.get_into([bytes(32), b"1" * 32], [bytearray(16), bytearray(16)]) == 0
        counters = store.counters
        assert counters.misses == 1
        assert not HOSTILE[reply] or getattr(counters, HOSTILE[reply]) == 1
        listener.shutdown(socket.SHUT_RDWR)
