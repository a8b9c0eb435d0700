"""What holds for every store: the conformance suite, wrong arguments, forks."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pykvcache.errors import StoreError
from pykvcache.prefix.stores import (
    BlockStore,
    Envelope,
    FolderStore,
    MemoryStore,
    ObjectStore,
    RedisClusterStore,
    RedisStore,
    SealedStore,
    open_store,
)
from pykvcache.prefix.stores.base import check_items, check_keys, writable
from pykvcache.prefix.stores.conformance import StoreConformance, chain
from pykvcache.prefix.stores.tools import open_existing
from stores.kinds import NOWHERE, STORES
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


#: The example of docs/stores.md.
_DOCUMENT = Path(__file__).parents[2] / "docs" / "stores.md"
exec(read_blocks(_DOCUMENT.read_text(encoding="utf-8"))[0].code, names := dict[str, Any]())
Smallest: Any = names["MyStore"]


class TestSmallest(StoreConformance):
    shared = can_discard = False

    def make_store(self) -> BlockStore:
        store: BlockStore = Smallest()
        return store


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


KEY = b"k" * 32


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlockStore]:
    with STORES[request.param].at(tmp_path).open() as one:
        yield one


def test_nothing_is_read_into_objects_or_characters(store: BlockStore) -> None:
    """Python takes what stands in these for pointers and characters."""
    store.put([(KEY, bytes(32))])  # what is read would be no pointers, and end nothing
    for dtype in (object, "U2", [("n", "i4"), ("who", "O")], [("n", "i4"), ("text", "U1")]):
        array = np.zeros(8, dtype)
        with pytest.raises(TypeError, match="not of objects or characters"):
            store.get_into([KEY], [array])
        with pytest.raises(TypeError, match="not of objects or characters"):
            store.put([(b"o" * 32, array)])
    assert store.contains([b"o" * 32]) == 0


def test_arrays_of_numbers_are_buffers() -> None:
    store = MemoryStore()
    fields = np.dtype([("Ouw", "i4"), ("&", "<f8")])
    for i, dtype in enumerate(["f2", "f4", "i8", "c16", "?", fields]):
        array = np.zeros(6, dtype)
        array.view(np.uint8)[:] = 1
        key = bytes([i]) * 32
        assert store.put([(key, array)]) == 1
        found = np.zeros((2, 3), dtype)
        assert store.get_into([key], [found]) == 1
        assert found.tobytes() == array.tobytes()


def test_what_holds_no_keys_or_items_is_a_type_error(store: BlockStore) -> None:
    wrongs: list[Any] = [None, np.array(5), [5], ["k" * 32], "k"]
    for wrong in wrongs:
        for method in (store.contains, store.present, store.touch, store.discard):
            with pytest.raises(TypeError, match=r"keys must be a sequence of|a key is bytes"):
                method(wrong)
        with pytest.raises(TypeError, match=r"keys must be a sequence of|a key is bytes"):
            store.get_into(wrong, [bytearray(5)])
    wrongs = [None, 5, np.zeros(1, np.uint8), [None], ["text"]]
    for wrong in wrongs:
        with pytest.raises(TypeError, match=r"must be a (sequence of buffers|buffer of bytes)"):
            store.get_into([KEY], wrong)
    wrongs = [None, np.array(5), [5], [(KEY,)], [(KEY, None)]]
    for wrong in wrongs:
        with pytest.raises(TypeError, match=r"items must|an item is|must be a buffer of bytes"):
            store.put(wrong)
    wrongs = [None, True, 1.5, "1", np.array([1, 2])]
    for wrong in wrongs:
        with pytest.raises(TypeError, match="max_bytes must be an integer, not"):
            store.trim(wrong)


@pytest.mark.parametrize("name", ["timeout", "connect_timeout"])
@pytest.mark.parametrize("kind", [RedisStore, RedisClusterStore])
def test_times_are_numbers_of_any_size(kind: type[BlockStore], name: str) -> None:
    pytest.importorskip("redis")
    url = NOWHERE.replace("redis:", "redis+cluster:") if kind is RedisClusterStore else NOWHERE
    make: Any = kind
    for wrong in (0, -1, float("nan"), float("inf"), 10**5000):
        with pytest.raises(StoreError, match=f"{name} is .*: it must be above 0 and at most 3600"):
            make(url, **{name: wrong})
    for wrong in (None, True, "1", 1j):
        with pytest.raises(TypeError, match=f"{name} must be a number, not"):
            make(url, **{name: wrong})


@pytest.mark.parametrize("kind", [RedisStore, RedisClusterStore, ObjectStore])
def test_addresses_are_texts(kind: type[BlockStore]) -> None:
    pytest.importorskip("obstore" if kind is ObjectStore else "redis")
    make: Any = kind
    for wrong in (None, 5, b"redis://h", np.array(5), Path("redis://h"), object()):
        with pytest.raises(TypeError, match="url must be a str, not"):
            make(wrong)
    with pytest.raises(StoreError, match=r"url is not Unicode text: character 9") as info:
        make("redis://h\ud800")
    assert (info.value.what, info.value.limit) == ("url", 9)
    if kind is not ObjectStore:
        with pytest.raises(TypeError, match="prefix must be a str, not NoneType"):
            make(NOWHERE.replace("redis:", "redis+cluster:"), prefix=None)


@pytest.mark.parametrize("make", [FolderStore, open_store, open_existing])
def test_names_of_folders_are_names(make: Any) -> None:
    for wrong in (None, 5, 1.5, np.array(5), object(), ["a"]):
        with pytest.raises(TypeError, match=r"must be a str or an os.PathLike, not"):
            make(wrong)
    for wrong in ("a\0b", "a\ud800", "~/a\0b"):
        with pytest.raises((StoreError, FileNotFoundError), match=r"cannot be part|no such folder"):
            make(wrong)


CODE = """
    import os, signal, tempfile, threading
    from pykvcache.errors import ClosedError, StoreError
    from pykvcache.prefix.stores import *
    from pykvcache.prefix.stores.conformance import chain
    blocks = chain(4, "fork")
    keys = [key for key, _ in blocks]
    store = {store}
    assert store.put(blocks) == 4
    calls = [
        lambda: store.contains(keys),
        lambda: store.present(keys),
        lambda: store.get_into(keys, [bytearray(2000) for _ in keys]),
        lambda: store.put(chain(2, "new")),
        lambda: store.touch(keys),
        lambda: store.trim(0),
        lambda: store.discard(keys),
        lambda: list(store.entries()),
    ]
    def child():
        signal.alarm(20)
        for call in calls:
            try:
                call()
            except ClosedError:
                continue
            os._exit(1)
        try:
            with {store} as new:
                os._exit(new.put(chain(3, "child")) != 3)
        except StoreError as error:  # obstore works in no forked child
            os._exit("ObjectStore" not in repr(store) or "forked child" not in str(error))
    # Another thread holds a lock of the store while the process is forked.
    held, over = threading.Event(), threading.Event()
    def hold():
        with store.counters._lock:
            held.set()
            over.wait()
    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    pid = os.fork()
    if not pid:
        child()
    over.set()
    thread.join()
    assert os.waitpid(pid, 0)[1] == 0
    assert store.contains(keys) == 4
    store.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize("name", STORES)
def test_a_forked_child_gets_closed_errors_and_opens_its_own(name: str, tmp_path: Path) -> None:
    with STORES[name].running(tmp_path) as kind:
        code = textwrap.dedent(CODE.format(store=kind.code))
        subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)
