"""Wrong arguments of the stores: one clear error each, and the store goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pykvcache.errors import StoreError
from pykvcache.prefix.stores import (
    BlockStore,
    FolderStore,
    MemoryStore,
    ObjectStore,
    RedisClusterStore,
    RedisStore,
    open_store,
)
from pykvcache.prefix.stores.tools import open_existing
from stores.kinds import NOWHERE, STORES

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
        with pytest.raises(TypeError, match=f"{name} is a number, not"):
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
