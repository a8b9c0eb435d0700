"""Events over ZMQ, read by processes that know nothing but ZMQ and msgpack: ours, and Dynamo's."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memory.kit import Make, words
from pykvcache import PrefixCache
from stores.servers import free_port
from tiers.kit import SIZE, WAIT, evaluate

pytest.importorskip("zmq", reason="pip install '.[zmq]'")
pytest.importorskip("msgpack", reason="pip install '.[zmq]'")

from pykvcache.prefix import zmq_events as publish
from pykvcache.prefix.zmq_events import EventPublisher

SUBSCRIBER = """
import json, sys
import msgpack, zmq
socket = zmq.Context().socket(zmq.SUB)
socket.setsockopt(zmq.SUBSCRIBE, sys.argv[2].encode())
socket.connect(sys.argv[1])
socket.setsockopt(zmq.RCVTIMEO, 30000)
print("ready", flush=True)
while True:
    topic, number, payload = socket.recv_multipart()
    time, events, rank = msgpack.unpackb(payload)
    facts = [topic.decode(), int.from_bytes(number, "big"), time, events, rank]
    print(json.dumps(facts), flush=True)
    if any(event["type"] == "AllBlocksCleared" for event in events):
        break
"""


def test_another_process_hears_what_comes_and_goes(make_context: Make) -> None:
    cache = PrefixCache(make_context("llama"), block_size=SIZE)
    with EventPublisher(
        cache, "tcp://127.0.0.1:*", topic="kv@pod@model", data_parallel_rank=np.int64(3)
    ) as publisher:
        command = [sys.executable, "-c", SUBSCRIBER, publisher.endpoint, "kv@"]
        reader = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert reader.stdout is not None
        try:
            assert reader.stdout.readline() == b"ready\n"
            messages: list[list[object]] = []
            # A subscription takes a moment to arrive: what was sent before is not heard.
            prompt = words(0, 40)
            for i in range(200):
                if i:
                    prompt = words(i, 40)
                with cache.sequence(prompt) as sequence:
                    sequence.evaluate()
                import select

                if select.select([reader.stdout], [], [], 0.1)[0]:
                    break
            cache.clear()
            out, _ = reader.communicate(timeout=60)
        finally:
            reader.kill()
            reader.wait()
    messages = [json.loads(line) for line in out.splitlines()]
    numbers = [message[1] for message in messages]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))  # type: ignore[operator]
    assert {message[0] for message in messages} == {"kv@pod@model"}
    assert {message[4] for message in messages} == {3}
    stored = next(event for message in messages for event in message[3])  # type: ignore[attr-defined]
    assert stored["type"] == "BlockStored"
    assert len(stored["block_hashes"]) == 5
    assert all(0 <= one < 2**64 for one in stored["block_hashes"])
    assert len(stored["token_ids"]) == 40
    assert stored["block_size"] == SIZE
    assert stored["parent_block_hash"] is None
    assert stored["medium"] == "CPU"


def test_what_was_missed_can_be_asked_for(make_context: Make) -> None:
    import msgpack
    import zmq

    cache = PrefixCache(make_context("llama"), block_size=SIZE)
    with EventPublisher(
        cache, "tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*"
    ) as publisher:
        for i in range(3):
            with cache.sequence(words(i, 20)) as sequence:
                sequence.evaluate()
            while publisher._next <= i:
                publisher._thread.join(0.01)
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.RCVTIMEO, 30000)
            assert publisher.replay_endpoint is not None
            socket.connect(publisher.replay_endpoint)
            socket.send_multipart([b"", (1).to_bytes(8, "big")])
            answers = []
            while True:
                _, number, payload = socket.recv_multipart()
                if int.from_bytes(number, "big", signed=True) < 0:
                    break
                answers.append((int.from_bytes(number, "big"), msgpack.unpackb(payload)))
    assert [number for number, _ in answers] == [1, 2]
    assert answers[0][1][1][0]["token_ids"] == words(1, 20)[:16]


def test_events_that_were_forgotten_leave_a_gap(
    make_context: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than can wait came while the thread was at one: no number was left out for them."""
    import msgpack

    monkeypatch.setattr(publish, "MAX_WAITING", 5)
    cache = PrefixCache(make_context("llama"), block_size=SIZE)
    at_it, go_on = threading.Event(), threading.Event()

    def slow(*arguments: Any, **options: Any) -> Any:
        at_it.set()
        assert go_on.wait(60)
        return msgpack.packb(*arguments, **options)

    with EventPublisher(cache, "tcp://127.0.0.1:*") as publisher:
        publisher._pack = slow
        for i in range(9):
            with cache.sequence(words(i, 20)) as sequence:
                sequence.evaluate()
            assert at_it.wait(60)
        go_on.set()
        publisher.close()
        assert [number for number, _ in publisher._sent] == [0, 2]
        found = [msgpack.unpackb(payload)[1] for _, payload in publisher._sent]
        assert [len(events) for events in found] == [1, 5]


def test_an_address_that_is_taken_is_an_error(make_context: Make) -> None:
    cache = PrefixCache(make_context("llama"), block_size=SIZE)
    with EventPublisher(cache, "tcp://127.0.0.1:*") as publisher:
        with pytest.raises(OSError, match=r"127\.0\.0\.1"):
            EventPublisher(cache, publisher.endpoint)
        with pytest.raises(OSError, match="nothing"):
            EventPublisher(cache, "nothing")
    EventPublisher(cache, publisher.endpoint).close()


@pytest.mark.parametrize(
    ("options", "error", "name"),
    [
        ({"endpoint": b"tcp://127.0.0.1:*"}, TypeError, "endpoint must be a str"),
        ({"endpoint": "\ud800"}, ValueError, "endpoint"),
        ({"replay_endpoint": "x"}, OSError, "replay_endpoint 'x'"),
        ({"topic": b"kv"}, TypeError, "topic must be a str"),
        ({"data_parallel_rank": object()}, TypeError, "data_parallel_rank"),
        ({"data_parallel_rank": 2**64}, ValueError, "data_parallel_rank"),
        ({"data_parallel_rank": -1}, ValueError, "data_parallel_rank"),
    ],
)
def test_wrong_arguments_raise_in_the_call_and_leave_nothing(
    options: dict[str, Any], error: type[Exception], name: str, make_context: Make
) -> None:
    """A rank that msgpack cannot pack ended the thread, and no event went out."""
    with PrefixCache(make_context("llama"), block_size=SIZE) as cache:
        with pytest.raises(error, match=name):
            EventPublisher(cache, **({"endpoint": "tcp://127.0.0.1:*"} | options))
        assert not cache.events._callbacks


# A wheel of 75 MB; its dependencies are not needed here.
INSTALL = "needs Dynamo's indexer: pip install --no-deps ai-dynamo-runtime"


class Indexer:
    def __init__(self, endpoint: str) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "dynamo.indexer", "--port", str(self.port)]
        command += ["--threads", "1", "--block-size", str(SIZE), "--workers", f"1={endpoint}"]
        null = subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdout=null, stderr=null)

    def known(self, tokens: list[int]) -> dict[str, Any]:
        body = json.dumps({"model_name": "default", "token_ids": tokens}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/query", body, {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                found: dict[str, Any] = json.load(answer)["instances"].get("1", {})
                return found
        except urllib.error.URLError:
            assert self.process.poll() is None, "the indexer ended"
            return {}

    def wait_for(self, tokens: list[int], **wanted: int) -> None:
        until = time.monotonic() + 30
        while (found := self.known(tokens)) != found | wanted:
            assert time.monotonic() < until, found
            time.sleep(0.02)


@pytest.fixture
def model_cache(make_context: Make, tmp_path: Path) -> Iterator[PrefixCache]:
    if importlib.util.find_spec("dynamo") is None or not importlib.util.find_spec("dynamo.indexer"):
        pytest.skip(INSTALL)
    with PrefixCache(make_context("llama"), block_size=SIZE, tiers=[tmp_path], **WAIT) as cache:
        yield cache


def test_dynamo_sees_what_is_in_memory_and_on_disk(model_cache: PrefixCache) -> None:
    cache, prompt = model_cache, words(1, 45)
    with EventPublisher(cache, "tcp://127.0.0.1:*", data_parallel_rank=0) as publisher:
        indexer = Indexer(publisher.endpoint)
        try:
            # A subscription takes a moment to arrive: what was sent before is not heard.
            for seed in range(100, 1000):
                with cache.sequence(words(seed, SIZE + 1)) as sequence:
                    sequence.evaluate()
                time.sleep(0.02)
                if indexer.known(words(seed, SIZE + 1)):
                    break
            evaluate(cache, prompt)
            indexer.wait_for(prompt, cpu=40, disk=40)
            indexer.wait_for(prompt[:20] + words(2, 20), cpu=16, disk=16)
            cache.clear("")
            indexer.wait_for(prompt, cpu=0, disk=40)
            # The third block goes, and a request looks for it.
            store: Any = cache._core.link.tiers[0].sealed
            name = next(
                event.block_hashes[2]
                for event in cache.events
                if getattr(event, "medium", "") == "DISK" and len(event.block_hashes) == 5
            )
            store.discard([name])
            with cache.sequence(prompt) as sequence:
                assert sequence.reuse.disk == 16
                indexer.wait_for(prompt, disk=16)
        finally:
            indexer.process.kill()
            indexer.process.wait()
