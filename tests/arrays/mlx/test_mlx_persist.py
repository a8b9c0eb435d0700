import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_reference import ids, kv, snapshot, stored
from test_mlx_trait import FRESH, fill

from pykvcache.arrays import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    load_prompt_cache,
    save_prompt_cache,
)
from pykvcache.errors import CacheDTypeError, CacheOrderError, CacheValueError, KvCacheError

safetensors = pytest.importorskip("safetensors")
from safetensors import safe_open  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402


@pytest.mark.parametrize("kind", FRESH)
@pytest.mark.parametrize("full", [False, True])
def test_every_kind_survives_a_file(kind, full, tmp_path):
    """save_prompt_cache / load_prompt_cache: every kind, empty or not."""
    path = tmp_path / "cache.safetensors"
    caches = [FRESH[kind](), FRESH[kind](), KVCache()]
    if full:
        fill(caches[1])
    save_prompt_cache(path, caches)
    loaded = load_prompt_cache(path)
    assert [snapshot(c) for c in loaded] == [snapshot(c) for c in caches]
    assert list(tmp_path.iterdir()) == [path]


def test_user_metadata_come_back(tmp_path):
    """load_prompt_cache(return_metadata=True)."""
    path = str(tmp_path / "cache")
    metadata = {"model": "m", "a.b": "c", "0": "zero", "": "nameless", "unicode": "é"}
    save_prompt_cache(path, [fill(KVCache())], metadata)
    caches, back = load_prompt_cache(path, return_metadata=True)
    assert back == metadata
    assert len(caches) == 1
    save_prompt_cache(path, [])
    assert load_prompt_cache(path, return_metadata=True) == ([], {})


def test_file_layout_is_that_of_mlx_lm(tmp_path):
    """save_prompt_cache: arrays flattened; metadata = [meta, user metadata, class names]."""
    path = tmp_path / "cache.safetensors"
    nested = CacheList(fill(KVCache()), fill(RotatingKVCache(4)))
    save_prompt_cache(path, [fill(KVCache()), nested], {"model": "m"})
    with safe_open(path, framework="np") as file:
        keys = ["0.0", "0.1", "1.0.0", "1.0.1", "1.1.0", "1.1.1"]
        assert sorted(file.keys()) == keys
        assert file.metadata() == {
            "0.0": "",
            "0.1.0.0": "KVCache", "0.1.0.1": "RotatingKVCache",
            "0.1.1.0": "", "0.1.1.1.0": "0", "0.1.1.1.1": "4", "0.1.1.1.2": "5", "0.1.1.1.3": "1",
            "1.model": "m", "2.0": "KVCache", "2.1": "CacheList",
        }  # fmt: skip


def test_a_file_as_mlx_lm_writes_it_is_read(tmp_path):
    """load_prompt_cache reads the layout of mlx-lm."""
    path = tmp_path / "mlx.safetensors"
    keys, values = kv([1, 2, 3])
    batch_keys, batch_values = kv([0, 1], [2, 3])
    arrays = {
        "0.0": keys, "0.1": values, "1.0": keys, "1.1": values, "2.0": np.ones((1, 3)),
        "2.1": np.ones((1, 2)), "3.0": batch_keys, "3.1": batch_values,
        "3.2": np.array([1, 2], np.int32), "3.3": np.array([1, 0], np.int32),
        "4.0": batch_keys, "4.1": batch_values,
        "4.2": np.array([7, 9], np.int32), "4.3": np.array([-2, 0], np.int32),
    }  # fmt: skip
    texts = {
        "0.0": "", "0.1.0": "0", "0.1.1": "3", "0.1.2": "7", "0.1.3": "1", "0.2": "", "0.3": "",
        "0.4.0": "2", "0.4.1": "9", "0.4.2": "1", "0.4.3": "True",
        "2.0": "KVCache", "2.1": "RotatingKVCache", "2.2": "ArraysCache", "2.3": "BatchKVCache",
        "2.4": "BatchRotatingKVCache",
    }  # fmt: skip
    save_file(arrays, path, texts)
    plain, ring, slots, batch, batch_ring = load_prompt_cache(path)
    assert stored(plain) == [1, 2, 3]
    assert ring.offset == 7
    assert ring.rotated
    assert len(slots) == 2
    assert batch.left_padding.tolist() == [1, 0]
    assert batch_ring.rotated
    assert batch_ring.left_padding.tolist() == [0, 0]


def test_bfloat16_becomes_float32(tmp_path):
    """load_prompt_cache: bfloat16, which NumPy lacks, is widened exactly."""
    exact = np.array([0.0, 1.5, -2.0, 3.140625, 1e30], np.float32)
    halves = (exact.view(np.uint32) >> 16).astype("<u2")
    widened = (halves.astype(np.uint32) << 16).view(np.float32)
    entry = {"dtype": "BF16", "shape": [1, 1, 5, 1]}
    header = json.dumps(
        {
            "__metadata__": {"0.0": "", "2.0": "KVCache"},
            "0.0": {**entry, "data_offsets": [0, 10]},
            "0.1": {**entry, "data_offsets": [10, 20]},
        }
    ).encode()
    path = tmp_path / "bf16.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + halves.tobytes() * 2)
    (cache,) = load_prompt_cache(path)
    assert cache.state[0].dtype == np.float32
    assert cache.state[0].ravel().tolist() == widened.tolist()


def test_saved_views_are_whole(tmp_path):
    """Arrays that lie strided or in another byte order are saved as they read."""
    cache = KVCache()
    keys, values = kv([1, 2, 3])
    cache.update(keys.astype(">f4")[:, ::-1], values[:, ::-1])
    save_prompt_cache(tmp_path / "c", [cache])
    (back,) = load_prompt_cache(tmp_path / "c")
    assert np.array_equal(back.state[0], keys[:, ::-1])


def test_missing_file_is_an_os_error(tmp_path):
    """A missing file is an OSError."""
    with pytest.raises(FileNotFoundError):
        load_prompt_cache(tmp_path / "none")
    with pytest.raises(OSError):  # noqa: PT011
        load_prompt_cache(tmp_path)
    with pytest.raises(OSError):  # noqa: PT011
        save_prompt_cache(tmp_path / "no" / "folder", [fill(KVCache())])


def test_truncated_and_changed_files_are_refused(tmp_path):
    """A damaged file is a KvCacheError, wherever it was cut."""
    path = tmp_path / "cache"
    save_prompt_cache(path, [fill(RotatingKVCache(4)), fill(CacheList(KVCache()))], {"a": "b"})
    whole = path.read_bytes()
    header = int.from_bytes(whole[:8], "little") + 8
    for size in sorted({*range(0, header + 64, 7), header, len(whole) - 1}):
        path.write_bytes(whole[:size])
        with pytest.raises(KvCacheError):
            load_prompt_cache(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(KvCacheError):
        load_prompt_cache(path)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_damaged_header_never_gives_another_error(tmp_path_factory, data):
    """A damaged file is a KvCacheError, whatever byte of its header is wrong."""
    path = tmp_path_factory.mktemp("damaged") / "cache"
    save_prompt_cache(path, [fill(RotatingKVCache(4)), fill(CacheList(ArraysCache(2), KVCache()))])
    content = bytearray(path.read_bytes())
    header = int.from_bytes(content[:8], "little") + 8
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        caches = load_prompt_cache(path)
    except KvCacheError:
        return
    assert all(cache.nbytes >= 0 for cache in caches)  # a digit or a name that still makes sense


@pytest.mark.parametrize(
    "texts",
    [
        None,
        {"x": "y"},
        {"2.0": "Unknown"},
        {"2.1": "KVCache"},
        {"2.0": "KVCache", "0.0.0": "1"},
        {"2.0": "KVCache", "0.3": ""},
        {"2.0": "RotatingKVCache", "0.0": "text"},
        {"2.0": "CacheList", "0.0.0.0": "KVCache"},
        {"2.0.0": "KVCache"},
        {"2.0": "KVCache", "0.0": "", "0.0.0": ""},
        {"2.0": "KVCache", "0." + ".".join("0" * 5000): ""},
        {"2.0": "ArraysCache", "0.0.0": "99999999999", "0.0.1": "", "0.0.2": ""},
    ],
)
def test_files_that_are_no_prompt_cache_are_refused(tmp_path, texts):
    """A file whose parts do not belong together is a KvCacheError."""
    keys, values = kv([1])
    save_file({"0.0": keys, "0.1": values}, tmp_path / "c", texts)
    with pytest.raises(CacheValueError):
        load_prompt_cache(tmp_path / "c")


@pytest.mark.parametrize("key", ["0", "x", "0.2", "1.0", "0.0.0", "0.-1", "0.1000000000"])
def test_arrays_in_the_wrong_place_are_refused(tmp_path, key):
    keys, values = kv([1])
    save_file({"0.0": keys, "0.1": values, key: keys}, tmp_path / "c", {"2.0": "KVCache"})
    with pytest.raises(KvCacheError):
        load_prompt_cache(tmp_path / "c")


def test_what_cannot_be_saved_leaves_the_old_file(tmp_path):
    """save_prompt_cache: a refused save changes nothing on disk."""
    path = tmp_path / "cache"
    save_prompt_cache(path, [fill(KVCache())])
    before = path.read_bytes()
    pending = BatchKVCache([0, 0])
    pending.update(*kv([1], [2]))
    pending.prepare(right_padding=[0, 1])
    strange = KVCache()
    strange.update(
        *(a.astype(np.complex256 if hasattr(np, "complex256") else complex) for a in kv([1]))
    )
    for caches, metadata, error in (
        ([pending], None, CacheOrderError),
        ([strange], None, CacheDTypeError),
        ([KVCache()], {"a": 1}, CacheDTypeError),
        ([KVCache()], {1: "a"}, CacheDTypeError),
    ):
        with pytest.raises(error):
            save_prompt_cache(path, caches, metadata)
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]


def test_loaded_cache_goes_on(tmp_path):
    cache = RotatingKVCache(4, keep=1)
    for token in range(1, 8):
        cache.update(*kv([token]))
    save_prompt_cache(tmp_path / "c", [cache])
    (back,) = load_prompt_cache(tmp_path / "c")
    for tokens in ([8], [9, 10], [11]):
        assert ids(back.update(*kv(tokens))[1]) == ids(cache.update(*kv(tokens))[1])
