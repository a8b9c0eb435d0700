"""Records that are damaged anywhere: a miss with a counter, never wrong logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory.kit import Case, Fresh, Logits, Make, apart
from prefix.model_free import token_bytes
from pykvcache import PrefixCache
from pykvcache.prefix.block_hash import block_names
from pykvcache.prefix.stores import BlockStore, Envelope, MemoryStore
from pykvcache.prefix.tiers.loader import END_OVERHEAD, End
from stores.kinds import SHARED, STORES
from support.examples import examples
from tiers.kit import clear_memory
from tiers.test_tiers import SIZE, WAIT, total, words

PROMPT = words(1, 45)
N_BLOCKS = len(PROMPT) // SIZE
SECRET = b"a secret of more than 16 bytes"
#: Where the header of a sealed record ends, and that of an end record in it.
HEADERS = 128 + END_OVERHEAD

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
    """A cache over a store that has all records of one prompt."""

    def __init__(self, cache: PrefixCache, store: BlockStore, case: Case, wanted: Logits) -> None:
        self.cache, self.store, self.case, self.wanted = cache, store, case, wanted
        self.is_plain = case.name == "llama"
        with cache.sequence(PROMPT) as sequence:
            sequence.evaluate()
        assert cache.flush(60)
        self.right = {entry.key: self.read(entry.key) for entry in store.entries()}
        envelope = cache._core.link.tiers.tiers[0].sealed.envelope
        names = block_names(cache._core.link.root(""), token_bytes(PROMPT), 4 * SIZE)
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
        """Damage records, and ask for the prompt."""
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
        pytest.importorskip("cryptography", reason="pip install 'pykvcache[crypto]'")
        options = WAIT | {"secret": SECRET}
    with (
        STORES[where.partition(" ")[0]].running(tmp_path) as kind,
        kind.open() as store,
        PrefixCache(make_context(name), block_size=SIZE, tiers=[store], **options) as cache,
    ):
        bench = Bench(cache, store, Case(name), fresh_logits(name, PROMPT))
        settings(max_examples=examples(n))(given(DAMAGES)(bench.check))()


def test_a_writer_without_the_secret_is_not_believed(
    make_context: Make, fresh_logits: Fresh
) -> None:
    """An attacker who knows names, format, model and layout, and seals with every check."""
    pytest.importorskip("cryptography", reason="pip install 'pykvcache[crypto]'")
    store = MemoryStore()
    options: dict[str, Any] = WAIT | {"secret": SECRET}
    with PrefixCache(make_context("llama"), block_size=SIZE, tiers=[store], **options) as cache:
        bench = Bench(cache, store, Case("llama"), fresh_logits("llama", PROMPT))
        mine = cache._core.link.tiers.tiers[0].sealed.envelope
        for secret, encrypt in ((None, True), (SECRET[::-1], True), (SECRET[::-1], False)):
            other = Envelope(model="m", layout="l", secret=secret, encrypt=encrypt)
            other._model, other._layout = mine._model, mine._layout
            for named in (False, True):
                for key, data in bench.right.items():
                    forged = bytearray(other.seal(key, bytes(len(data) - Envelope.overhead)))
                    if named:
                        forged[16:48] = key
                    bench.put(key, bytes(forged))
                clear_memory(cache)
                with cache.sequence(PROMPT) as sequence:
                    assert sequence.reuse.evaluated == len(PROMPT)
                    assert apart(sequence.logits(), bench.wanted) < 1e-3
                assert cache.flush(60)


@given(st.binary(max_size=300), st.integers(0, 400), st.integers(0, 255))
def test_any_bytes_are_an_end_record_or_none(noise: bytes, at: int, value: int) -> None:
    row = np.arange(5, dtype=np.float32)
    cells, window, state = (np.full(n, n, np.uint8) for n in (24, 16, 40))
    right = End(3, cells, window, state, row).encode()
    data = bytearray(right + noise if at % 2 else noise)
    if data:
        data[at % len(data)] ^= value
    found = End.decode(bytes(data))
    if found is not None:
        again = End.decode(found.encode())
        assert again is not None
        assert again.encode() == found.encode()
        assert len(found.encode()) == len(data)
