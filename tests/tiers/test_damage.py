"""What lies in a store may be anything: it is right, or it is a miss that is counted."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory.kit import Case, Fresh, Logits, Make, apart, words
from prefix.model_free import token_bytes
from pykvcache import PrefixCache
from pykvcache.errors import StoreError
from pykvcache.prefix.block_hash import block_names
from pykvcache.prefix.stores import BlockStore, Envelope, MemoryStore
from pykvcache.prefix.tiers.loader import TAIL_OVERHEAD, TailRecord
from stores.kinds import SHARED, STORES
from support.examples import examples
from tiers.kit import SIZE, WAIT, clear_memory, evaluate, total, write


@pytest.mark.hazard("N78")
@pytest.mark.parametrize(
    ("name", "value"), [("llama", np.inf), ("jamba", np.nan), ("gemma3", np.nan)]
)
def test_blocks_with_values_that_are_not_finite_are_misses(
    name: str, value: float, make_context: Make, fresh_logits: Fresh
) -> None:
    """Sealed as they should be: nothing but their values is wrong."""
    prompt = words(1, 45)
    store = MemoryStore()
    ctx = make_context(name)
    write(ctx, store, prompt)
    with PrefixCache(make_context(name), block_size=SIZE, **WAIT, tiers=[store]) as cache:
        sealed = cache._core.link.tiers[0].sealed
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


@pytest.mark.parametrize("name", ["llama", "jamba", "mamba"])
def test_ends_of_another_content_are_misses(name: str, make_context: Make) -> None:
    prompt = words(1, 45)
    store = MemoryStore()
    write(make_context(name), store, prompt)
    rng = random.Random(3)
    for _ in range(6):
        with PrefixCache(make_context(name), block_size=SIZE, **WAIT, tiers=[store]) as cache:
            sealed = cache._core.link.tiers[0].sealed
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


class Raising(BlockStore):
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


@pytest.mark.parametrize(("name", "value"), [("medium", "nvme"), ("n_probes", None)])
def test_a_store_of_properties_that_serve_no_cache_is_refused(
    name: str, value: object, make_context: Make
) -> None:
    """Every prompt that was found in one of another medium ended in a `StopIteration`."""
    store = type("Theirs", (MemoryStore,), {name: value})()
    ctx = make_context("llama")
    with pytest.raises((StoreError, TypeError), match="Theirs"):
        PrefixCache(ctx, tiers=[store])
    PrefixCache(ctx).close()


PROMPT = words(1, 45)
N_BLOCKS = len(PROMPT) // SIZE
SECRET = b"a secret of more than 16 bytes"
#: Where the header of a sealed record ends, and that of an end record in it.
HEADERS = 128 + TAIL_OVERHEAD

Damage = tuple[int, str, int, int]
DAMAGES = st.lists(
    st.tuples(
        st.integers(0, 1000),  # which record
        st.sampled_from(["change", "change", "cut", "append", "swap"]),
        st.integers(0, HEADERS) | st.integers(-20, -1) | st.integers(0, 1 << 20),  # where
        st.integers(1, 255),
    ),
    min_size=1,
    max_size=4,
)


def damaged(data: bytes, how: str, at: int, value: int, other: bytes) -> bytes:
    at %= len(data)
    if how == "change":
        return data[:at] + bytes([data[at] ^ value]) + data[at + 1 :]
    return {"cut": data[:at], "append": data + bytes([value] * value), "swap": other}[how]


class Bench:
    def __init__(self, cache: PrefixCache, store: BlockStore, case: Case, wanted: Logits) -> None:
        self.cache, self.store, self.case, self.wanted = cache, store, case, wanted
        self.is_plain = case.name == "llama"
        evaluate(cache, PROMPT)
        self.right = {entry.key: self.read(entry.key) for entry in store.entries()}
        envelope = cache._core.link.tiers[0].sealed.envelope
        names = block_names(cache._core.blocks.memory.root(""), token_bytes(PROMPT), 4 * SIZE)
        self.blocks = [envelope.name(name) for name in names]
        assert {*self.blocks} < self.right.keys()

    def read(self, key: bytes) -> bytes:
        buffer = bytearray(1 << 20)
        assert self.store.get_into([key], [buffer]) == 1
        size = int.from_bytes(buffer[8:16], "little") + Envelope.overhead
        return bytes(buffer[:size])

    def put(self, key: bytes, data: bytes) -> None:
        self.store.discard([key])
        assert self.store.put([(key, data)]) == 1

    def check(self, damages: list[Damage]) -> None:
        keys = [*self.blocks, *sorted(self.right.keys() - {*self.blocks})]
        wrong: dict[bytes, bytes] = {}
        for which, how, at, value in damages:
            key, other = keys[which % len(keys)], keys[(which + value) % len(keys)]
            data = damaged(self.right[key], how, at, value, self.right[other])
            if data != self.right[key]:
                wrong[key] = data
        for key, data in wrong.items():
            self.put(key, data)
        clear_memory(self.cache)
        before = self.cache.stats().tiers[0].rejected
        with self.cache.sequence(PROMPT) as sequence:
            report = sequence.reuse
            assert total(report) == len(PROMPT)
            assert apart(sequence.logits(), self.wanted) < self.case.tolerance
        depths = [i for i, key in enumerate(self.blocks) if key in wrong]
        if depths:
            assert report.disk + report.remote <= depths[0] * SIZE
            if self.is_plain:
                assert report.disk + report.remote == depths[0] * SIZE
                assert self.cache.stats().tiers[0].rejected > before
        # What was read and refused was removed, and is written again.
        assert self.cache.flush(60)
        for key, data in wrong.items():
            if self.is_plain and self.read(key) != data:
                assert len(self.read(key)) == len(self.right[key])
            self.put(key, self.right[key])
        clear_memory(self.cache)
        with self.cache.sequence(PROMPT) as sequence:
            assert sequence.reuse.evaluated <= (1 if self.is_plain else SIZE)
            assert apart(sequence.logits(), self.wanted) < self.case.tolerance


@pytest.mark.hazard("N78")
@pytest.mark.parametrize(
    ("where", "name", "n"),
    [
        ("memory", "llama", 40),
        ("memory", "gemma3", 40),
        ("memory", "jamba", 40),
        ("memory", "mamba", 20),
        ("memory with a secret", "llama", 20),
        *((where, "llama", 20) for where in SHARED),
    ],
)
def test_damaged_records_are_misses(
    where: str, name: str, n: int, make_context: Make, fresh_logits: Fresh, tmp_path: Path
) -> None:
    options: dict[str, Any] = WAIT
    if "secret" in where:
        pytest.importorskip("cryptography", reason="pip install '.[crypto]'")
        options = WAIT | {"secret": SECRET}
    with (
        STORES[where.partition(" ")[0]].running(tmp_path) as kind,
        kind.open() as store,
        PrefixCache(make_context(name), block_size=SIZE, tiers=[store], **options) as cache,
    ):
        bench = Bench(cache, store, Case(name), fresh_logits(name, PROMPT))
        settings(max_examples=examples(n))(given(DAMAGES)(bench.check))()


@given(st.binary(max_size=300), st.integers(0, 400), st.integers(0, 255))
def test_any_bytes_are_an_end_record_or_none(noise: bytes, at: int, value: int) -> None:
    row = np.arange(5, dtype=np.float32)
    cells, window, state = (np.full(n, n, np.uint8) for n in (24, 16, 40))
    right = TailRecord(3, cells, window, state, row).encode()
    data = bytearray(right + noise if at % 2 else noise)
    if data:
        data[at % len(data)] ^= value
    found = TailRecord.decode(bytes(data))
    if found is not None:
        again = TailRecord.decode(found.encode())
        assert again is not None
        assert again.encode() == found.encode()
        assert len(found.encode()) == len(data)
