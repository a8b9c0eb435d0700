"""Where the system gives no thread: an error that says so, or the same without one. No hang."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import pytest

from memory.kit import Logits, apart
from pykvcache import BatchGenerator, LlamaContext, PrefixCache
from pykvcache.errors import ThreadRefused
from pykvcache.prefix.stores import MemoryStore
from support.no_threads import no_more_threads
from tiers.test_tiers import SIZE, WAIT, words

Make = Callable[..., LlamaContext]
Fresh = Callable[..., Logits]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="others limit stacks otherwise")


def test_python_itself_is_refused() -> None:
    with no_more_threads(), pytest.raises(RuntimeError):
        threading.Thread(target=print).start()


def test_a_generator_whose_thread_was_refused_starts_later_or_closes(make_context: Make) -> None:
    for again in (True, False):
        generator = BatchGenerator(make_context("llama"))
        handle = generator.submit(words(1, 9), 3)
        with no_more_threads(), pytest.raises(ThreadRefused) as caught:
            generator.start()
        assert caught.value.what == "pykvcache-generate"
        if again:
            generator.start()
            assert handle.wait().finish_reason in ("length", "stop")
        generator.close()
        assert handle.finish_reason is not None


def test_a_cache_over_a_tier_goes_on_without_threads(
    make_context: Make, fresh_logits: Fresh
) -> None:
    store, prompt = MemoryStore(), words(1, 45)
    with PrefixCache(make_context("llama"), block_size=SIZE, tiers=[store]) as cache:
        cache.sequence(prompt, namespace="a").evaluate()
    cache = PrefixCache(make_context("llama"), block_size=SIZE, **WAIT, tiers=[store])
    with no_more_threads():
        with cache.sequence(prompt, namespace="a") as sequence:
            assert sequence.reuse.evaluated == len(prompt)
            assert apart(sequence.logits(), fresh_logits("llama", prompt)) < 1e-3
        one = cache.prefetch(words(2, 45))
        assert one.wait(30)
        with cache.sequence(words(2, 45)) as sequence:
            sequence.evaluate()
        assert cache.flush(30)
        assert cache.stats().tiers[0].dropped > 0
    # Later all is as ever.
    with cache.sequence([*prompt, 7], namespace="b") as sequence:
        sequence.evaluate()
    cache.close()
    with PrefixCache(make_context("llama"), block_size=SIZE, **WAIT, tiers=[store]) as cache:
        assert cache.sequence(prompt, namespace="a").reuse.evaluated <= 1
        assert cache.sequence([*prompt, 7], namespace="b").reuse.evaluated <= 1
        cache.sequence(words(2, 45)).evaluate()
    with PrefixCache(make_context("llama"), block_size=SIZE, **WAIT, tiers=[store]) as cache:
        assert cache.sequence(words(2, 45)).reuse.evaluated <= 1


def test_a_publisher_without_its_thread_gives_its_address_back(make_context: Make) -> None:
    pytest.importorskip("zmq", reason="pip install 'pykvcache[zmq]'")
    pytest.importorskip("msgpack", reason="pip install 'pykvcache[zmq]'")
    from pykvcache.prefix.publish import EventPublisher

    cache = PrefixCache(make_context("llama"), block_size=SIZE)
    with EventPublisher(cache, "tcp://127.0.0.1:*") as publisher:
        endpoint = publisher.endpoint
    with no_more_threads(), pytest.raises(ThreadRefused, match="pykvcache-events"):
        EventPublisher(cache, endpoint)
    EventPublisher(cache, endpoint).close()
