"""Damage at every place of the format: a miss with a counter, in every store.

The places come from the format itself: each field of the envelope's header and of an end's, the
content, the check.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from memory.kit import Logits, apart
from pykvcache import LlamaContext, PrefixCache
from pykvcache.prefix.block_hash import block_names, token_bytes
from pykvcache.prefix.stores import (
    BlockStore,
    Envelope,
    FolderStore,
    MemoryStore,
    RedisStore,
    open_store,
)
from pykvcache.prefix.stores import envelope as sealing
from pykvcache.prefix.tiers import records as ends
from pykvcache.prefix.tiers.records import end_key
from stores.servers import PATIENT, redis_server
from tiers.kit import clear_memory
from tiers.test_tiers import SIZE, WAIT, words

Make = Callable[..., LlamaContext]
Fresh = Callable[..., Logits]
PROMPT = words(1, 45)
N_BLOCKS = len(PROMPT) // SIZE
SECRET = b"a secret of more than 16 bytes"


def edges(header: struct.Struct, begin: int = 0) -> list[int]:
    """Return where the fields of a header begin, and where it ends."""
    fields = re.findall(r"\d*[a-zA-Z]", header.format)
    return [begin + struct.calcsize("<" + "".join(fields[:n])) for n in range(len(fields) + 1)]


def regions(sealed: bytes) -> list[int]:
    """Return where every part of a sealed block begins, and its end."""
    head = edges(sealing._HEADER)
    content, check = head[-1], len(sealed) - sealing._CHECK
    inside = [content + (check - content) * i // 8 for i in range(8)]
    if sealed[content : content + 4] == ends._MAGIC:
        inside = edges(ends._HEADER, content) + inside
    return sorted({*head, *inside, check, len(sealed)})


class Bench:
    """A cache over one store whose blocks are damaged, one after the other."""

    def __init__(self, cache: PrefixCache, store: BlockStore, wanted: Any) -> None:
        self.cache, self.store, self.wanted = cache, store, wanted
        with cache.sequence(PROMPT) as sequence:
            sequence.evaluate()
        assert cache.flush(30)
        tokens = token_bytes(PROMPT)
        keys = block_names(cache._root_name(""), tokens, 4 * SIZE)
        keys.append(end_key(keys[-1], tokens[4 * SIZE * N_BLOCKS :]))
        self.names = [cache._link.tiers.tiers[0].sealed.envelope.name(key) for key in keys]
        self.right = [self.read(name) for name in self.names]

    def read(self, name: bytes) -> bytes:
        buffer = bytearray(1 << 20)
        assert self.store.get_into([name], [buffer]) == 1
        size = sealing._HEADER.unpack_from(buffer)[4] + Envelope.overhead
        return bytes(buffer[:size])

    def put(self, i: int, data: bytes) -> None:
        self.store.discard([self.names[i]])
        assert self.store.put([(self.names[i], data)]) == 1

    def rejected(self) -> int:
        return self.cache.stats().tiers[0].rejected

    def check(self, i: int, data: bytes, what: object, n_rejected: int = 1) -> None:
        """Put what is wrong in the place of block i, and ask for the prompt."""
        before = self.rejected()
        self.put(i, data)
        clear_memory(self.cache)
        with self.cache.sequence(PROMPT) as sequence:
            report = sequence.reuse
            assert apart(sequence.logits(), self.wanted) < 1e-3, what
        if n_rejected:
            assert report.disk + report.remote == i * SIZE, what
        assert self.rejected() - before == n_rejected, what
        assert self.cache.flush(30)
        self.put(i, self.right[i])


@contextlib.contextmanager
def opened(where: str, tmp_path: Path) -> Iterator[BlockStore]:
    with contextlib.ExitStack() as stack:
        if where == "redis":
            yield stack.enter_context(
                RedisStore(stack.enter_context(redis_server(tmp_path)).url, **PATIENT)
            )
        elif where == "object":
            pytest.importorskip("obstore", reason="pip install 'pykvcache[obstore]'")
            yield stack.enter_context(open_store("memory:///"))
        else:
            yield FolderStore(tmp_path) if where == "folder" else MemoryStore()


WHERE = ["memory", "memory with a secret", "folder", "redis", "object"]


@pytest.fixture
def bench(
    request: pytest.FixtureRequest, make_context: Make, fresh_logits: Fresh, tmp_path: Path
) -> Iterator[Bench]:
    where, _, secret = request.param.partition(" ")
    if secret:
        pytest.importorskip("cryptography", reason="pip install 'pykvcache[crypto]'")
    options: dict[str, Any] = WAIT | ({"secret": SECRET} if secret else {})
    with opened(where, tmp_path) as store:
        ctx = make_context("llama")
        with PrefixCache(ctx, block_size=SIZE, tiers=[store], **options) as cache:
            yield Bench(cache, store, fresh_logits("llama", PROMPT))


@pytest.mark.parametrize("bench", WHERE, indirect=True)
def test_a_bit_of_every_region_is_seen(bench: Bench) -> None:
    """In memory every byte of header and check; elsewhere the edges of the regions."""
    places = []
    whole = isinstance(bench.store, MemoryStore) and bench.right[1][6] == 1  # with a checksum
    for i in (1, N_BLOCKS):
        begins = regions(bench.right[i])
        for begin, end in itertools.pairwise(begins):
            every = whole and i == 1 and end - begin <= 36
            some = range(begin, end) if every else [begin if len(places) % 2 else end - 1]
            places += [(i, at) for at in some]
    assert len(places) > (150 if whole else 35)
    for n, (i, at) in enumerate(places):
        data = bytearray(bench.right[i])
        data[at] ^= 1 << n % 8
        bench.check(i, bytes(data), (i, at, n % 8))


@pytest.mark.parametrize("bench", WHERE[2:], indirect=True)
def test_a_cut_at_every_boundary_is_seen(bench: Bench) -> None:
    for i in (1, N_BLOCKS):
        right = bench.right[i]
        for at in regions(right)[:-1]:
            bench.check(i, right[:at], (i, at))
        bench.check(i, right[:-1], (i, -1))
    # What is longer cannot be the block; it is removed, too, and written again.
    bench.check(1, bench.right[1] + b"x", "longer")
    # An end says itself how long it is.
    bench.check(N_BLOCKS, bench.right[N_BLOCKS] + b"x", "longer end", n_rejected=0)


@pytest.mark.parametrize("bench", WHERE[:2], indirect=True)
def test_blocks_that_changed_places_are_seen(bench: Bench) -> None:
    right = bench.right
    for i, other in ((0, 1), (2, 1), (N_BLOCKS, 0), (1, N_BLOCKS)):
        bench.check(i, right[other], (i, other))
        patched = bytearray(right[other])
        patched[16:48] = bench.names[i]
        bench.check(i, bytes(patched), (i, other, "with the name of the place"))


@pytest.mark.parametrize("bench", WHERE[1:4], indirect=True)
def test_what_is_removed_is_written_again(bench: Bench) -> None:
    bench.put(1, bench.right[1][:-1])
    clear_memory(bench.cache)
    for evaluated in (45 - SIZE, 1):
        with bench.cache.sequence(PROMPT) as sequence:
            sequence.evaluate()
            assert sequence.reuse.evaluated == evaluated
        assert bench.cache.flush(30)
        clear_memory(bench.cache)


def test_who_has_no_secret_cannot_write_what_is_taken(
    make_context: Make, fresh_logits: Fresh
) -> None:
    """An attacker who knows names, format, model and layout, and seals with all kinds."""
    pytest.importorskip("cryptography", reason="pip install 'pykvcache[crypto]'")
    store = MemoryStore()
    options: dict[str, Any] = WAIT | {"secret": SECRET}
    with PrefixCache(make_context("llama"), block_size=SIZE, tiers=[store], **options) as cache:
        bench = Bench(cache, store, fresh_logits("llama", PROMPT))
        mine = cache._link.tiers.tiers[0].sealed.envelope
        for secret, encrypt in ((None, True), (SECRET[::-1], True), (SECRET[::-1], False)):
            other = Envelope(model="m", layout="l", secret=secret, encrypt=encrypt)
            other._model, other._layout = mine._model, mine._layout
            for i in (1, N_BLOCKS):
                forged = bytearray(other.seal(bench.names[i], bytes(len(bench.right[i]) - 144)))
                bench.check(i, bytes(forged), (secret, encrypt))
                forged[16:48] = bench.names[i]
                bench.check(i, bytes(forged), (secret, encrypt, "named"))


@pytest.mark.parametrize("name", ["gemma3", "jamba", "mamba"])
def test_states_of_other_parts_are_seen_too(
    name: str, make_context: Make, fresh_logits: Fresh
) -> None:
    """Every region of every end: their headers, cells, states."""
    store, wanted = MemoryStore(), fresh_logits(name, PROMPT)
    with PrefixCache(make_context(name), block_size=SIZE, tiers=[store], **WAIT) as cache:
        with cache.sequence(PROMPT) as sequence:
            sequence.evaluate()
        assert cache.flush(30)
        right = {}
        for entry in list(store.entries()):
            buffer = bytearray(entry.size)
            store.get_into([entry.key], [buffer])
            if buffer[128:132] == ends._MAGIC:
                right[entry.key] = bytes(buffer)
        begins = regions(next(iter(right.values())))
        for n, at in enumerate(begins[:-1]):
            for key, data in right.items():
                damaged = bytearray(data)
                damaged[min(at, len(data) - 1)] ^= 1 << n % 8
                store.discard([key])
                store.put([(key, damaged)])
            before = cache.stats().tiers[0].rejected
            clear_memory(cache)
            with cache.sequence(PROMPT) as sequence:
                assert sequence.reuse.remote == 0
                assert apart(sequence.logits(), wanted) < 1e-2, at
            assert cache.stats().tiers[0].rejected > before
            assert cache.flush(30)
