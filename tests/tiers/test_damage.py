"""What lies in a store may be anything: it is right, or it is a miss that is counted."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from memory.kit import Fresh, Make, apart
from pykvcache import LlamaContext, PrefixCache
from pykvcache.errors import StoreError
from pykvcache.prefix.memory import CacheMemory
from pykvcache.prefix.stores import BlockStore, Envelope, MemoryStore, SealedStore
from tiers.kit import clear_memory
from tiers.test_tiers import SIZE, WAIT, words


def write(ctx: LlamaContext, tier: object, prompt: list[int]) -> None:
    with PrefixCache(ctx, block_size=SIZE, **WAIT, tiers=[tier]) as cache:  # type: ignore[list-item]
        cache.sequence(prompt).evaluate()


@pytest.mark.hazard("N78")
@pytest.mark.parametrize("name", ["llama", "jamba", "gemma3", "mamba"])
def test_flipped_and_cut_files_are_misses(
    name: str, make_context: Make, fresh_logits: Fresh, tmp_path: Path
) -> None:
    """Each round damages one file somewhere: header, content, check, length."""
    prompt = words(1, 45)
    rng = random.Random(7)
    rejected = 0
    for round_ in range(8):
        write(make_context(name), tmp_path, prompt)
        files = sorted(tmp_path.glob("blocks/*/*.block"))
        path = rng.choice(files)
        data = bytearray(path.read_bytes())
        if round_ % 4 == 0:
            data = data[: rng.randrange(len(data))]
        else:
            data[rng.choice([rng.randrange(128), rng.randrange(len(data)), -1])] ^= (
                1 << rng.randrange(8)
            )
        path.write_bytes(data)
        with PrefixCache(make_context(name), block_size=SIZE, **WAIT, tiers=[tmp_path]) as cache:
            with cache.sequence(prompt) as sequence:
                assert apart(sequence.logits(), fresh_logits(name, prompt)) < 1e-2
            rejected += cache.stats().tiers[0].rejected
    assert rejected >= 4


@pytest.mark.hazard("N78")
@pytest.mark.parametrize("name", ["llama", "jamba", "gemma3"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_blocks_with_values_that_are_not_finite_are_misses(
    name: str, value: float, make_context: Make, fresh_logits: Fresh
) -> None:
    """Sealed as they should be: nothing but their values is wrong."""
    prompt = words(1, 45)
    store = MemoryStore()
    ctx = make_context(name)
    write(ctx, store, prompt)
    with PrefixCache(make_context(name), block_size=SIZE, **WAIT, tiers=[store]) as cache:
        sealed = cache._core.link.tiers.tiers[0].sealed
        names = [sealed.envelope.name(entry.key) for entry in store.entries()]
        for key in names:
            (content,) = sealed.get([key], [1 << 24])
            if bytes(content[:4]) == b"pkve":
                continue
            bad = np.frombuffer(content, np.uint8).copy()
            bad[: len(bad) // 4 * 4].view(np.float32)[5] = value
            assert store.discard([key])
            assert sealed.put([(key, bad)])
        with cache.sequence(prompt) as sequence:
            assert sequence.reuse.remote == 0
            assert apart(sequence.logits(), fresh_logits(name, prompt)) < 1e-2
        assert cache.stats().tiers[0].refused >= 5
        assert cache.flush(30)
    # What was refused was removed, and is written again.
    with PrefixCache(make_context(name), block_size=SIZE, **WAIT, tiers=[store]) as cache:
        assert cache.sequence(prompt).reuse.remote >= 40


@pytest.mark.parametrize("name", ["llama", "jamba", "gemma3", "mamba"])
def test_ends_of_another_content_are_misses(
    name: str, make_context: Make, fresh_logits: Fresh
) -> None:
    prompt = words(1, 45)
    store = MemoryStore()
    write(make_context(name), store, prompt)
    rng = random.Random(3)
    for _ in range(6):
        with PrefixCache(make_context(name), block_size=SIZE, **WAIT, tiers=[store]) as cache:
            sealed = cache._core.link.tiers.tiers[0].sealed
            for key in [entry.key for entry in store.entries()]:
                (content,) = sealed.get([key], [1 << 24]) or (b"",)
                if bytes(content[:4]) != b"pkve":
                    continue
                bad = bytearray(content)
                bad[rng.randrange(min(200, len(bad)))] ^= 1 << rng.randrange(8)
                store.discard([key])
                sealed.put([(key, bad[: rng.choice([len(bad), rng.randrange(len(bad))])])])
            with cache.sequence(prompt) as sequence:
                logits = sequence.logits()
                # A bit of a value is nothing that a store could know of; its checksum fits.
                assert np.isfinite(logits).all()


def test_no_request_waits_for_the_removal_of_a_state_that_memory_refuses(
    make_context: Make, fresh_logits: Fresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found out while the cache is locked: the store removes it in the tier's thread."""
    prompt, removed = words(1, 45), list[str]()

    class Slow(MemoryStore):
        def discard(self, keys: Sequence[bytes]) -> int:
            removed.append(threading.current_thread().name)
            return super().discard(keys)

    def refuse(memory: CacheMemory, content: object, n: int) -> None:
        raise ValueError("none of this memory")

    store = Slow()
    write(make_context("jamba"), store, prompt)
    with PrefixCache(make_context("jamba"), block_size=SIZE, **WAIT, tiers=[store]) as cache:
        with monkeypatch.context() as patch:
            patch.setattr(CacheMemory, "make_state", refuse)
            with cache.sequence(prompt) as sequence:
                assert sequence.reuse.evaluated == len(prompt)
                assert apart(sequence.logits(), fresh_logits("jamba", prompt)) < 1e-2
        assert cache.flush(60)
        assert removed == ["pykvcache-write-behind"]
        assert cache.stats().tiers[0].refused == 1
        # It was written again, behind the removal.
        clear_memory(cache)
        assert cache.sequence(prompt).reuse.evaluated <= SIZE


class Raising(BlockStore):
    """A store of a user that breaks its contract."""

    def __init__(self, what: object) -> None:
        self.what = what

    def _answer(self) -> object:
        if isinstance(self.what, BaseException):
            raise self.what
        return self.what

    contains = get_into = put = touch = trim = lambda self, *_: self._answer()  # type: ignore[assignment]
    present = discard = lambda self, *_: self._answer()  # type: ignore[assignment]


@pytest.mark.hazard("N79")
@pytest.mark.parametrize("what", [OSError("no"), 10**9, -5, None, "x", RecursionError()], ids=repr)
def test_a_store_that_raises_or_lies_costs_nothing_but_its_blocks(
    what: object, make_context: Make, fresh_logits: Fresh
) -> None:
    prompt = words(1, 45)
    with PrefixCache(
        make_context("llama"), block_size=SIZE, **WAIT, tiers=[Raising(what)]
    ) as cache:
        for _ in range(2):
            with cache.sequence(prompt) as sequence:
                assert apart(sequence.logits(), fresh_logits("llama", prompt)) < 1e-3
            cache.flush(30)
            clear_memory(cache)
        assert cache.stats().disk == cache.stats().remote == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("medium", "nvme"),
        ("medium", None),
        ("n_probes", "all"),
        ("n_probes", None),
    ],
)
def test_a_store_of_properties_that_serve_no_cache_is_refused(
    name: str, value: object, make_context: Make
) -> None:
    """Every prompt that was found in one of another medium ended in a `StopIteration`."""
    store = type("Theirs", (MemoryStore,), {name: value})()
    ctx = make_context("llama")
    with pytest.raises((StoreError, TypeError), match="Theirs"):
        PrefixCache(ctx, tiers=[store])
    PrefixCache(ctx).close()


def test_blocks_of_another_model_under_the_same_names_are_misses(make_context: Make) -> None:
    """A writer puts foreign blocks under our names: they are not taken."""
    prompt, store, other = words(1, 45), MemoryStore(), MemoryStore()
    write(make_context("llama"), store, prompt)
    for entry in list(store.entries()):
        buffer = bytearray(entry.size)
        store.get_into([entry.key], [buffer])
        foreign = SealedStore(other, Envelope(model="another", layout="one"))
        foreign.put([(entry.key, buffer[128:-16])])
    with PrefixCache(make_context("llama"), block_size=SIZE, **WAIT, tiers=[other]) as cache:
        assert cache.sequence(prompt).reuse.remote == 0
        assert cache.stats().tiers[0].rejected == 2  # the first block, and the end
