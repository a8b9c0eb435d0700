"""What does not come back as it went in is a miss with a reason: every bit, cut and forgery."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

import pytest

from pykvcache.errors import StoreError
from pykvcache.prefix.stores import Envelope, MemoryStore, Rejection, SealedStore
from pykvcache.prefix.stores.conformance import chain

SECRET = "a secret of more than 16 bytes"
((KEY, CONTENT), (OTHER, _), *_) = chain(3, "envelope")


def make(mode: str = "xxh3", **changes: Any) -> Envelope:
    options: dict[str, Any] = {"model": "m", "layout": "l"}
    if mode in ("encrypted", "authenticated"):
        pytest.importorskip("cryptography", reason="pip install '.[crypto]'")
        options |= {"secret": SECRET, "encrypt": mode == "encrypted"}
    return Envelope(**options | changes)


def sealed_by(envelope: Envelope, key: bytes, content: bytes) -> bytearray:
    return bytearray(envelope.seal(key, content))


def without(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    real = builtins.__import__

    def import_(name: str, *args: Any) -> Any:
        if name.partition(".")[0] == missing:
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", import_)


MODES = ["xxh3", "authenticated", "encrypted"]


@pytest.mark.parametrize("mode", MODES)
def test_every_flipped_bit_is_seen(mode: str) -> None:
    envelope = make(mode)
    sealed = sealed_by(envelope, KEY, CONTENT[:100])
    assert envelope.open(KEY, sealed) == CONTENT[:100]
    assert len(sealed) == 100 + envelope.overhead
    for bit in range(8 * len(sealed)):
        sealed[bit // 8] ^= 1 << bit % 8
        assert isinstance(envelope.open(KEY, sealed), Rejection), bit
        sealed[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("mode", MODES)
def test_every_cut_is_seen(mode: str) -> None:
    envelope = make(mode)
    sealed = bytes(envelope.seal(KEY, CONTENT[:100]))
    for length in range(len(sealed)):
        assert envelope.open(KEY, sealed[:length]) is Rejection.TRUNCATED
        padded = sealed[:length] + bytes(len(sealed) - length)
        if padded != sealed:
            assert isinstance(envelope.open(KEY, padded), Rejection)
    # A buffer may be longer than the block.
    assert envelope.open(KEY, sealed + b"more") == CONTENT[:100]


@pytest.mark.parametrize("mode", MODES)
def test_what_belongs_elsewhere_is_foreign(mode: str) -> None:
    sealed = sealed_by(make(mode), KEY, CONTENT)
    assert make(mode).open(OTHER, sealed) is Rejection.FOREIGN
    assert make(mode, model="n").open(KEY, sealed) is Rejection.FOREIGN
    assert make(mode, layout="k").open(KEY, sealed) is Rejection.FOREIGN


@pytest.mark.parametrize("mode", ["authenticated", "encrypted"])
def test_without_the_secret_nothing_can_be_forged(mode: str) -> None:
    envelope = make(mode)
    sealed = sealed_by(envelope, KEY, CONTENT)
    plain, stranger = make(), make(mode, secret="another secret of 16 bytes")
    name = envelope.name(KEY)
    assert plain.open(name, sealed) is Rejection.LOCKED
    assert stranger.open(KEY, sealed) is Rejection.FOREIGN
    # The stranger knows the name under which the block lies, and writes a plain one there.
    assert envelope.open(KEY, plain.seal(name, CONTENT)) is Rejection.FORGED
    forged = sealed_by(stranger, KEY, CONTENT)
    forged[16:48] = name
    assert envelope.open(KEY, forged) is Rejection.FORGED
    # Blocks under the right secret that change places.
    moved = sealed_by(envelope, OTHER, CONTENT)
    moved[16:48] = name
    assert envelope.open(KEY, moved) is Rejection.FORGED


def test_names_and_contents_tell_nothing() -> None:
    envelope = make("encrypted")
    sealed = sealed_by(envelope, KEY, CONTENT)
    assert KEY not in sealed
    assert envelope.name(KEY) != KEY
    assert CONTENT[:16] not in sealed
    assert envelope.seal(KEY, CONTENT) != sealed
    assert CONTENT in sealed_by(make("authenticated"), KEY, CONTENT)


def test_either_form_of_one_secret_opens_the_other() -> None:
    for one, other in [("encrypted", "authenticated"), ("authenticated", "encrypted")]:
        assert make(other).open(KEY, make(one).seal(KEY, CONTENT)) == CONTENT


def test_sha256_stands_in_for_xxh3(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "xxhash")
    envelope = make()
    assert envelope.check == "sha256"
    sealed = sealed_by(envelope, KEY, CONTENT)
    assert envelope.open(KEY, sealed) == CONTENT
    sealed[200] ^= 1
    assert envelope.open(KEY, sealed) is Rejection.DAMAGED
    sealed[200] ^= 1
    monkeypatch.undo()
    pytest.importorskip("xxhash")
    assert make().check == "xxh3-128"
    assert make().open(KEY, sealed) == CONTENT


def test_xxh3_is_not_readable_without_xxhash(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xxhash")
    inner = MemoryStore()
    SealedStore(inner, make()).put([(KEY, CONTENT)])
    without(monkeypatch, "xxhash")
    store = SealedStore(inner, make())
    assert store.get([KEY], [len(CONTENT)]) == []
    assert store.rejections == {Rejection.UNVERIFIABLE: 1}
    assert inner.contains([KEY]) == 1, "other readers can read it"


def test_a_secret_needs_cryptography(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "cryptography")
    with pytest.raises(ImportError, match=r"extra crypto"):
        Envelope(model="m", layout="l", secret=SECRET)


def test_short_secrets_and_other_types_raise() -> None:
    with pytest.raises(StoreError) as caught:
        Envelope(model="m", layout="l", secret="short")
    assert (caught.value.value, caught.value.limit) == (5, 16)
    with pytest.raises(TypeError, match="model"):
        Envelope(model=3, layout="l")  # type: ignore[arg-type]
    with pytest.raises(StoreError, match="32 bytes"):
        make().seal(KEY[:-1], CONTENT)


def flip(data: bytearray) -> bytearray:
    data[len(data) // 2] ^= 1
    return data


DAMAGE: list[tuple[Callable[[bytearray], bytes], Rejection]] = [
    (flip, Rejection.DAMAGED),
    (lambda data: data[:-20], Rejection.DAMAGED),  # a store does not say how long a block is
    (lambda _: b"", Rejection.DAMAGED),
    (lambda _: sealed_by(make(), OTHER, CONTENT), Rejection.FOREIGN),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGE)
def test_a_rejected_block_ends_the_run_and_can_be_written_again(
    damage: Callable[[bytearray], bytes], reason: Rejection
) -> None:
    blocks = chain(5)
    inner = MemoryStore()
    store = SealedStore(inner, make())
    key, data = blocks[2]
    inner.put([(key, damage(sealed_by(make(), key, data)))])
    store.put(blocks)
    sizes = [len(data) for _, data in blocks]
    assert [bytes(view) for view in store.get([k for k, _ in blocks], sizes)] == [
        data for _, data in blocks[:2]
    ]
    assert store.rejections == {reason: 1}
    assert store.counters.rejected == 1
    assert store.put(blocks) == 1
    assert len(store.get([k for k, _ in blocks], sizes)) == 5


def test_a_block_that_is_too_long_for_its_kind_is_removed() -> None:
    inner = MemoryStore()
    store = SealedStore(inner, make())
    inner.put([(KEY, bytes(sealed_by(make(), KEY, CONTENT)) + b"more")])
    assert not store.get([KEY], [len(CONTENT)], exact=True)
    assert store.rejections == {Rejection.TRUNCATED: 1}
    assert not inner.present([KEY])[0]
