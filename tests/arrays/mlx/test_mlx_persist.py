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
    MambaCache,
    RotatingKVCache,
    from_state,
    load_prompt_cache,
    prompt_cache_layout,
    save_prompt_cache,
)
from pykvcache.errors import CacheDTypeError, CacheOrderError, CacheValueError, KvCacheError

safetensors = pytest.importorskip("safetensors")
from safetensors import safe_open  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402


@pytest.mark.parametrize("kind", FRESH)
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("layout", ["0.31", "0.32"])
def test_every_kind_survives_a_file(kind, full, layout, tmp_path):
    """save_prompt_cache / load_prompt_cache: every kind, empty or not."""
    path = tmp_path / "cache.safetensors"
    caches = [FRESH[kind](), FRESH[kind](), KVCache()]
    if full:
        fill(caches[1])
    save_prompt_cache(path, caches, layout=layout)
    assert prompt_cache_layout(path) == layout
    loaded = load_prompt_cache(path)
    assert [snapshot(c) for c in loaded] == [snapshot(c) for c in caches]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("layout", ["0.31", "0.32"])
def test_user_metadata_come_back(layout, tmp_path):
    """load_prompt_cache(return_metadata=True)."""
    path = str(tmp_path / "cache")
    metadata = {"model": "m", "a.b": "c", "0": "zero", "": "nameless", "unicode": "é"}
    save_prompt_cache(path, [fill(KVCache())], metadata, layout=layout)
    caches, back = load_prompt_cache(path, return_metadata=True)
    assert back == metadata
    assert len(caches) == 1
    save_prompt_cache(path, [], layout=layout)
    assert load_prompt_cache(path, return_metadata=True) == ([], {})


def test_older_layout_is_that_of_mlx_lm_0_31(tmp_path):
    """save_prompt_cache(layout="0.31"): flat arrays; metadata = [meta, user metadata, names]."""
    path = tmp_path / "cache.safetensors"
    nested = CacheList(fill(KVCache()), fill(RotatingKVCache(4)))
    save_prompt_cache(path, [fill(KVCache()), nested], {"model": "m"}, layout="0.31")
    with safe_open(path, framework="np") as file:
        keys = ["0.0", "0.1", "1.0.0", "1.0.1", "1.1.0", "1.1.1"]
        assert sorted(file.keys()) == keys
        assert file.metadata() == {
            "0.0": "",
            "0.1.0.0": "KVCache", "0.1.0.1": "RotatingKVCache",
            "0.1.1.0": "", "0.1.1.1.0": "0", "0.1.1.1.1": "4", "0.1.1.1.2": "5", "0.1.1.1.3": "1",
            "1.model": "m", "2.0": "KVCache", "2.1": "CacheList",
        }  # fmt: skip


def test_file_layout_is_that_of_mlx_lm_0_32(tmp_path):
    """save_prompt_cache: states with numbers; metadata = [user metadata, class names, what]."""
    path = tmp_path / "cache.safetensors"
    slots = ArraysCache(2, left_padding=[1, 0])
    slots[1] = np.ones((2, 3))
    nested = CacheList(fill(RotatingKVCache(4)), slots)
    save_prompt_cache(path, [fill(KVCache()), nested, KVCache()], {"model": "m"})
    with safe_open(path, framework="np") as file:
        texts = file.metadata()
        arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    what = {texts[f"2.{i}.0"]: texts[f"2.{i}.1"] for i in range(1, (len(texts) - 5) // 2 + 1)}
    assert texts["2.0"] == ""
    assert {k: v for k, v in texts.items() if not k.startswith("2.")} == {
        "0.model": "m", "1.0": "KVCache", "1.1": "CacheList", "1.2": "KVCache",
    }  # fmt: skip
    # keys, values, offset; of a ring also keep, max_size and the next row; of a list (state, name)
    ring, scalar = "RotatingKVCache", "scalar"
    assert what == {
        "0.2": scalar,
        "1.0.0.2": scalar, "1.0.0.3": scalar, "1.0.0.4": scalar, "1.0.0.5": scalar,
        "1.0.1": "string",
        "1.1.0.0.0": "none", "1.1.0.2": "none", "1.1.1": "string",
        "2.0": "none", "2.1": "none", "2.2": scalar,
    }  # fmt: skip
    assert sorted(set(arrays) - set(what)) == [
        "0.0", "0.1", "1.0.0.0", "1.0.0.1", "1.1.0.0.1", "1.1.0.1",
    ]  # fmt: skip
    numbers = [arrays[key].item() for key in what if what[key] == scalar]
    assert numbers == [5, 5, 0, 4, 1, 0]
    assert all(arrays[k].dtype == np.int32 for k in what if what[k] != "none")
    assert "".join(map(chr, arrays["1.0.1"])) == ring
    assert arrays["2.0"].shape == (0,)
    assert arrays["1.1.0.1"].dtype == np.int32
    assert arrays["1.1.0.1"].tolist() == [1, 0]


def test_counts_that_no_int32_holds_are_int64(tmp_path):
    cache = from_state("RotatingKVCache", kv([1, 2]), ("0", "2", str(2**40), "1"))
    save_prompt_cache(tmp_path / "c", [cache])
    (back,) = load_prompt_cache(tmp_path / "c")
    assert back.offset == 2**40


@pytest.mark.parametrize("nothing", [ArraysCache(0), CacheList(), CacheList(CacheList())])
def test_what_the_newer_layout_has_no_place_for_is_refused(nothing, tmp_path):
    with pytest.raises(CacheValueError, match="layer 1"):
        save_prompt_cache(tmp_path / "c", [KVCache(), nothing])
    assert not list(tmp_path.iterdir())
    save_prompt_cache(tmp_path / "c", [KVCache(), nothing], layout="0.31")
    assert snapshot(load_prompt_cache(tmp_path / "c")[1]) == snapshot(nothing)


def test_a_mamba_cache_is_an_arrays_cache_to_mlx_lm_and_comes_back(tmp_path):
    """mlx-lm 0.32 has no MambaCache; it skips the text that says where there was one."""
    layers = [ArraysCache(1), MambaCache(), CacheList(KVCache(), CacheList(fill(MambaCache())))]
    save_prompt_cache(tmp_path / "c", layers)
    with safe_open(tmp_path / "c", framework="np") as file:
        texts = file.metadata()
        assert [texts[f"1.{i}"] for i in range(3)] == ["ArraysCache", "ArraysCache", "CacheList"]
        assert "".join(map(chr, file.get_tensor("2.1.0.0.1"))) == "ArraysCache"
        assert texts["2.0"].split() == ["MambaCache:", "2.1.0.0.1", "1"]
        arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    back = load_prompt_cache(tmp_path / "c")
    assert [type(cache) for cache in back] == [ArraysCache, MambaCache, CacheList]
    assert type(back[2][1][0]) is MambaCache
    assert [snapshot(c) for c in back] == [snapshot(c) for c in layers]
    for key in ("0.0", "2", "7", "2.1.0.0", "x"):
        save_file(arrays, tmp_path / "d", {**texts, "2.0": f"MambaCache: {key}"})
        with pytest.raises(CacheValueError):
            load_prompt_cache(tmp_path / "d")


@pytest.mark.parametrize("layout", ["", "0.33", None, 0.32, ["0.32"]])
def test_layouts_that_do_not_exist_are_refused(layout, tmp_path):
    with pytest.raises(CacheValueError, match="layout"):
        save_prompt_cache(tmp_path / "c", [KVCache()], layout=layout)


def test_the_layout_of_other_files_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        prompt_cache_layout(tmp_path / "none")
    (tmp_path / "junk").write_bytes(b"junk")
    with pytest.raises(CacheValueError):
        prompt_cache_layout(tmp_path / "junk")
    # Weights, with the metadata that they usually have, and a file of nothing but metadata.
    for arrays, texts in (
        ({"x": np.ones(2)}, None),
        ({"model.layers.0.weight": np.ones(2)}, {"format": "pt"}),
        ({}, {"format": "pt"}),
    ):
        save_file(arrays, tmp_path / "foreign", texts)
        for read in (prompt_cache_layout, load_prompt_cache):
            with pytest.raises(CacheValueError, match="no prompt cache"):
                read(tmp_path / "foreign")


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
    with pytest.raises(FileNotFoundError, match="there is no folder") as error:
        save_prompt_cache(tmp_path / "no" / "folder", [fill(KVCache())])
    assert error.value.filename == str(tmp_path / "no" / "folder")


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
    layers = [fill(RotatingKVCache(4)), fill(CacheList(ArraysCache(2), KVCache()))]
    save_prompt_cache(path, layers, layout=data.draw(st.sampled_from(["0.31", "0.32"])))
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
def test_files_without_a_prompt_cache_are_refused(tmp_path, texts):
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
