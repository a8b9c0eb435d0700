"""Every store does what `pykvcache.prefix.stores.conformance` asks, a 40-line one too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pykvcache.prefix.stores import BlockStore, Envelope, FolderStore, MemoryStore, SealedStore
from pykvcache.prefix.stores.base import check_items, check_keys, writable
from pykvcache.prefix.stores.conformance import StoreConformance, chain
from support.doc_blocks import read_blocks


class TestMemory(StoreConformance):
    shared = False

    def make_store(self) -> BlockStore:
        return MemoryStore()


class TestFolder(StoreConformance):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.path = tmp_path / "store"

    def make_store(self) -> BlockStore:
        return FolderStore(self.path, 64 << 20)


class TestSealed(StoreConformance):
    secret: str | None = None
    encrypt = True

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.path = tmp_path / "store"

    def make_store(self) -> BlockStore:
        envelope = Envelope(model="m", layout="l", secret=self.secret, encrypt=self.encrypt)
        return SealedStore(FolderStore(self.path, 64 << 20), envelope)


class TestEncrypted(TestSealed):
    ordered = False  # trim gives the names in the store, which tell nothing of the keys
    can_discard = False  # and so does entries
    secret = "a secret of more than 16 bytes"

    @pytest.fixture(autouse=True)
    def _needs_cryptography(self) -> None:
        pytest.importorskip("cryptography", reason="pip install '.[crypto]'")

    def test_trimming_to_nothing_removes_all(self) -> None:
        blocks = chain(5)
        with self.opened() as store:
            store.put(blocks)
            assert len(store.trim(0)) == 5
            self.expect(store, blocks, 0)


class TestAuthenticated(TestEncrypted):
    encrypt = False


def blocks_of_the_document() -> list[str]:
    text = (Path(__file__).parents[2] / "docs" / "stores.md").read_text(encoding="utf-8")
    return [block.code for block in read_blocks(text)]


def store_of_the_document() -> Any:
    """The example of docs/stores.md."""
    names: dict[str, Any] = {}
    exec(blocks_of_the_document()[0], names)
    return names["MyStore"]


Smallest: Any = store_of_the_document()


class TestSmallest(StoreConformance):
    shared = can_discard = False

    def make_store(self) -> BlockStore:
        store: BlockStore = Smallest()
        return store


def test_the_smallest_store_has_40_lines() -> None:
    lines = blocks_of_the_document()[0].splitlines()
    assert len([line for line in lines if line.strip()]) <= 43, "with two of imports"


def test_what_a_wrong_store_does_is_seen() -> None:
    """Guards the suite: each of these breaks one rule of the interface."""

    class Replaces(Smallest):
        def put(self, items: Iterable[tuple[bytes, Any]]) -> int:
            new = {key: bytes(data) for key, data in check_items(items)}
            self.blocks.update(new)
            return len(new)

    class Skips(Smallest):
        def contains(self, keys: Sequence[bytes]) -> int:
            return sum(key in self.blocks for key in check_keys(keys))

    class Forgets(Smallest):
        def touch(self, keys: Sequence[bytes]) -> None:
            check_keys(keys)

    class Reverses(Smallest):
        def touch(self, keys: Sequence[bytes]) -> None:
            super().touch(keys[::-1])

    class Overruns(Smallest):
        def get_into(self, keys: Sequence[bytes], buffers: Sequence[Any]) -> int:
            for buffer in buffers:
                writable(buffer)[:] = bytes(len(buffer))
            return super().get_into(keys, buffers)

    for kind, test in [
        (Replaces, "test_what_is_there_is_not_replaced"),
        (Skips, "test_a_missing_block_ends_the_run"),
        (Forgets, "test_the_least_recently_used_goes_first"),
        (Reverses, "test_no_block_is_removed_before_one_that_needs_it"),
        (Overruns, "test_a_buffer_may_be_longer"),
    ]:
        suite = TestSmallest()
        suite.make_store = kind  # type: ignore[method-assign]
        with pytest.raises(AssertionError):
            getattr(suite, test)()
