"""Events as another program reads them: Dynamo's indexer, which its routers ask for a prefix."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memory.kit import Make
from pykvcache import PrefixCache
from stores.servers import free_port
from tiers.test_tiers import SIZE, WAIT, words

pytest.importorskip("zmq", reason="pip install '.[zmq]'")
pytest.importorskip("msgpack", reason="pip install '.[zmq]'")

from pykvcache.prefix.zmq_events import EventPublisher

# A wheel of 75 MB; its dependencies are not needed here.
INSTALL = "needs Dynamo's indexer: pip install --no-deps ai-dynamo-runtime"


class Indexer:
    """Its HTTP server, subscribed to one publisher."""

    def __init__(self, endpoint: str) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "dynamo.indexer", "--port", str(self.port)]
        command += ["--threads", "1", "--block-size", str(SIZE), "--workers", f"1={endpoint}"]
        null = subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdout=null, stderr=null)

    def known(self, tokens: list[int]) -> dict[str, Any]:
        """Return how many tokens of a prompt the publisher is thought to have, and where."""
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
            with cache.sequence(prompt) as sequence:
                sequence.evaluate()
            assert cache.flush(30)
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
