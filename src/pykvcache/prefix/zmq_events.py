"""Events of a cache over ZMQ in vLLM's format, for routers such as those of llm-d and Dynamo.

A message has three frames: the topic, a sequence number of 8 bytes (big-endian), and msgpack of
``[time, [event, ...], rank]``; an event is a map. Block hashes are sent as their low 64 bits.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from importlib import import_module
from typing import Any, SupportsIndex

from pykvcache._arguments import as_int, as_text
from pykvcache._closing import Closing
from pykvcache.errors import ClosedError, how_to_install, shown
from pykvcache.prefix.cache import PrefixCache
from pykvcache.prefix.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent

__all__ = ["EventPublisher", "as_map"]

#: Maximum numbers of queued events, and of messages that can be replayed.
MAX_WAITING, MAX_REPLAY = 100_000, 10_000

_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


def as_map(event: CacheEvent) -> dict[str, Any]:
    """Return an event as the map to send."""
    if isinstance(event, AllBlocksCleared):
        return {"type": "AllBlocksCleared"}
    hashes = [_low(name) for name in event.block_hashes]
    if isinstance(event, BlockRemoved):
        return {
            "type": "BlockRemoved",
            "block_hashes": hashes,
            "medium": event.medium,
            "group_idx": None,
        }
    assert isinstance(event, BlockStored)
    parent = event.parent_block_hash
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None if parent is None else _low(parent),
        "token_ids": list(event.token_ids),
        "block_size": event.block_size,
        "medium": event.medium,
        **dict.fromkeys(("lora_id", "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind")),
    }


def _low(name: bytes) -> int:
    return int.from_bytes(name[-8:], "big")


class EventPublisher(Closing):
    """Sends a cache's events to subscribers, from a thread of its own. Needs the extra ``zmq``.

    If no subscriber reads, messages are dropped, and subscribers see a gap in the sequence numbers.

    Parameters
    ----------
    cache
        The cache whose events are sent.
    endpoint
        Address to bind a PUB socket to: ``tcp://*:5557``, ``ipc:///run/kv``.
    topic
        First frame of each message; llm-d reads ``kv@POD@MODEL``.
    replay_endpoint
        Address to bind a ROUTER socket to, which replays the last 10,000 messages from a requested
        sequence number on.
    data_parallel_rank
        Third part of each message, 0 or more.

    Raises
    ------
    OSError
        An address cannot be bound.
    """

    def __init__(
        self,
        cache: PrefixCache,
        endpoint: str = "tcp://*:5557",
        *,
        topic: str = "",
        replay_endpoint: str | None = None,
        data_parallel_rank: SupportsIndex | None = None,
    ) -> None:
        try:
            import zmq

            msgpack: Any = import_module("msgpack")  # it has no types
        except ImportError as error:
            raise ImportError(
                f"EventPublisher needs zmq: {how_to_install('zmq')} ({error})"
            ) from error
        if not isinstance(cache, PrefixCache):
            raise TypeError(f"cache must be a PrefixCache, not {type(cache).__name__}")
        if cache.is_closed:
            raise ClosedError("the cache is closed")
        self._zmq: Any = zmq
        self._pack = msgpack.packb
        self._topic = as_text(topic, "topic").encode()
        rank = data_parallel_rank
        # A rank that cannot be packed would end the thread at the first event.
        self._rank = None if rank is None else as_int(rank, "data_parallel_rank", 0, 2**31 - 1)
        self._waiting: deque[CacheEvent] = deque(maxlen=MAX_WAITING)
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=MAX_REPLAY)
        self._next = 0
        self._has_gap = False  # whether events were dropped since the last message
        self._pid = os.getpid()
        self._wake = threading.Event()
        self._closed = False
        self._context = zmq.Context()
        self._bound: list[str] = []
        self._replay: Any = None
        try:
            self._publish = self._bind(zmq.PUB, endpoint, "endpoint")
            if replay_endpoint is not None:
                self._replay = self._bind(zmq.ROUTER, replay_endpoint, "replay_endpoint")
            self._thread = threading.Thread(target=self._work, name="pykvcache-events", daemon=True)
            self._thread.start()
        except BaseException:
            self._context.destroy(0)  # unbinds all addresses
            raise
        self._stop = cache.events.subscribe(self._note)

    @property
    def endpoint(self) -> str:
        """The bound address, with its port."""
        return self._bound[0]

    @property
    def replay_endpoint(self) -> str | None:
        """The address of the replay socket; None without one."""
        return self._bound[1] if self._replay is not None else None

    def _bind(self, kind: int, endpoint: str, name: str) -> Any:
        as_text(endpoint, name)
        socket: Any = self._context.socket(kind)
        socket.setsockopt(self._zmq.LINGER, 0)
        try:
            socket.bind(endpoint)
        except self._zmq.ZMQError as error:
            text = f"{self._zmq.strerror(error.errno)}: {name} {shown(endpoint)}"
            raise OSError(error.errno, text) from error
        bound: Any = socket.getsockopt(self._zmq.LAST_ENDPOINT)
        self._bound.append(bound.rstrip(b"\0").decode())
        return socket

    def _note(self, event: CacheEvent) -> None:
        if os.getpid() == self._pid:  # after os.fork() the child lacks the thread
            # A full queue drops its oldest event; subscribers see a gap.
            self._has_gap = self._has_gap or len(self._waiting) == self._waiting.maxlen
            self._waiting.append(event)
            self._wake.set()

    def _work(self) -> None:
        try:
            self._serve()
        finally:
            self._context.destroy(200)

    def _serve(self) -> None:
        while True:
            # The replay socket is polled: only subscribers that missed messages use it.
            self._wake.wait(None if self._replay is None else 0.05)
            self._wake.clear()
            events: list[dict[str, Any]] = []
            has_gap, self._has_gap = self._has_gap, False  # a gap before the events taken now
            while self._waiting and len(events) < 1000:
                events.append(as_map(self._waiting.popleft()))
            if self._waiting:
                self._wake.set()
            if events:
                self._next += has_gap
                self._send(events)
            if self._replay is not None:
                self._answer()
            if self._closed and not self._waiting:
                return

    def _send(self, events: list[dict[str, Any]]) -> None:
        payload = self._pack([time.time(), events, self._rank], use_bin_type=True)
        number, self._next = self._next, self._next + 1
        self._sent.append((number, payload))
        frames = [self._topic, number.to_bytes(8, "big"), payload]
        with contextlib.suppress(self._zmq.ZMQError):  # subscribers see a gap
            self._publish.send_multipart(frames, self._zmq.NOBLOCK)

    def _answer(self) -> None:
        replay = self._replay
        try:
            while True:
                who, *_, first = replay.recv_multipart(self._zmq.NOBLOCK)
                begin = int.from_bytes(first, "big")
                for number, payload in list(self._sent):
                    if number >= begin:
                        frames = [who, b"", number.to_bytes(8, "big"), payload]
                        replay.send_multipart(frames, self._zmq.NOBLOCK)
                replay.send_multipart([who, b"", _END_OF_REPLAY, b""], self._zmq.NOBLOCK)
        except (self._zmq.ZMQError, ValueError):
            return

    def close(self) -> None:
        """Send the queued events and release the addresses. Idempotent."""
        if os.getpid() == self._pid:
            self._stop()
            self._closed = True
            self._wake.set()
            self._thread.join(5)
