"""The caches of a whole prompt: made, trimmed, and in files of both of mlx-lm's layouts."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_support import EMPTY, fill, filled, ids, kv, ring, slots, snapshot, stored

from pykvcache.arrays import (
    ROTATING_DEFAULT_KEEP,
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ConcatenateKVCache,
    KVCache,
    MambaCache,
    PromptCacheConfig,
    RotatingKVCache,
    can_trim_prompt_cache,
    from_state,
    load_prompt_cache,
    make_prompt_cache,
    prompt_cache_layout,
    save_prompt_cache,
    trim_prompt_cache,
)
from pykvcache.errors import CacheDTypeError, CacheOrderError, CacheValueError, KvCacheError
from support.examples import examples

safetensors_numpy = pytest.importorskip("safetensors.numpy")
from safetensors import SafetensorError, safe_open  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402

layouts = pytest.mark.parametrize("layout", ["0.31", "0.32"])
posix = pytest.mark.skipif(os.name == "nt", reason="POSIX has these files")
ONE = filled(KVCache(), [[1, 2]])


def test_a_prompt_cache_has_a_cache_per_layer() -> None:
    plain = make_prompt_cache(PromptCacheConfig(num_hidden_layers=3))
    assert [type(cache) for cache in plain] == [KVCache] * 3
    for window, size in ((512, 512), (0, 0), (-7, 0)):
        rings: Any = make_prompt_cache(PromptCacheConfig(2, sliding_window=window))
        assert [(type(c), c.max_size, c.keep) for c in rings] == [(RotatingKVCache, size, 4)] * 2
    assert ROTATING_DEFAULT_KEEP == 4
    assert make_prompt_cache(PromptCacheConfig(0)) == []
    wrong: Any = PromptCacheConfig(1.0)  # type: ignore[arg-type]
    for bad, error in ((PromptCacheConfig(-1), CacheValueError), (wrong, TypeError)):
        with pytest.raises(error):
            make_prompt_cache(bad)


def test_a_prompt_cache_trims_all_layers_or_none() -> None:
    layers = [filled(KVCache(), [range(5)]), filled(KVCache(), [range(3)])]
    assert can_trim_prompt_cache(layers)
    assert trim_prompt_cache((layer for layer in layers), 2) == 2  # type: ignore[arg-type]
    assert [layer.offset for layer in layers] == [3, 1]
    layers.append(ring(2, [1, 2, 3]))
    assert not can_trim_prompt_cache(layers)
    assert trim_prompt_cache(layers, 2) == 0
    assert [layer.offset for layer in layers] == [3, 1, 3]
    assert can_trim_prompt_cache([])
    assert trim_prompt_cache([], 2) == 0
    with pytest.raises(CacheValueError):
        trim_prompt_cache(layers, -1)


# Both layouts --------------------------------------------------------------------------------


@layouts
def test_every_kind_survives_a_file(tmp_path: Path, layout: Any) -> None:
    path, metadata = tmp_path / "file", {"model": "m", "a.b": "c", "0": "zero", "": "é"}
    mamba = MambaCache()
    mamba[0] = np.ones((1, 3))
    some_slots = slots(1, 2)
    some_slots.prepare(lengths=[3, 4])
    empty, full = ([make() for make in EMPTY.values()] for _ in range(2))
    nested = CacheList(ring(4, range(6)), CacheList(mamba, KVCache()), some_slots)
    largest = [RotatingKVCache(sys.maxsize), BatchRotatingKVCache(sys.maxsize, [0])]
    caches = [
        *empty,
        *map(fill, full),
        nested,
        mamba,
        *(filled(c, [[1]]) for c in largest),
        KVCache(),
    ]
    save_prompt_cache(path, caches, metadata, layout=layout)
    assert prompt_cache_layout(path) == layout
    loaded, back = load_prompt_cache(path, return_metadata=True)
    assert back == metadata
    names = ["KVCache" if type(c) is ConcatenateKVCache else type(c).__name__ for c in caches]
    assert [type(c).__name__ for c in loaded] == names
    assert [snapshot(c) for c in loaded] == [snapshot(c) for c in caches]
    save_prompt_cache(str(path), [], layout=layout)
    assert load_prompt_cache(path, return_metadata=True) == ([], {})
    assert [*tmp_path.iterdir()] == [path]


def contents(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    with safe_open(path, framework="np") as file:
        return {key: file.get_tensor(key) for key in [*file.keys()]}, file.metadata()


def test_the_older_layout_is_that_of_mlx_lm_0_31(tmp_path: Path) -> None:
    nested = CacheList(filled(KVCache(), [[1]]), ring(4, range(5)))
    save_prompt_cache(tmp_path / "c", [ONE, nested], {"model": "m"}, layout="0.31")
    arrays, texts = contents(tmp_path / "c")
    assert sorted(arrays) == ["0.0", "0.1", "1.0.0", "1.0.1", "1.1.0", "1.1.1"]
    assert texts == {
        "0.0": "",
        "0.1.0.0": "KVCache", "0.1.0.1": "RotatingKVCache",
        "0.1.1.0": "", "0.1.1.1.0": "0", "0.1.1.1.1": "4", "0.1.1.1.2": "5", "0.1.1.1.3": "1",
        "1.model": "m", "2.0": "KVCache", "2.1": "CacheList",
    }  # fmt: skip


def test_the_newer_layout_is_that_of_mlx_lm_0_32(tmp_path: Path) -> None:
    some_slots = ArraysCache(2, left_padding=[1, 0])
    some_slots[1] = np.ones((2, 3))
    nested = CacheList(ring(4, range(5)), some_slots)
    save_prompt_cache(tmp_path / "c", [ONE, nested, KVCache()], {"model": "m"})
    arrays, texts = contents(tmp_path / "c")
    what = {texts[f"2.{i}.0"]: texts[f"2.{i}.1"] for i in range(1, (len(texts) - 5) // 2 + 1)}
    assert texts["2.0"] == ""
    assert {k: v for k, v in texts.items() if not k.startswith("2.")} == {
        "0.model": "m", "1.0": "KVCache", "1.1": "CacheList", "1.2": "KVCache",
    }  # fmt: skip
    # keys, values, offset; of a ring also keep, max_size and the next row; of a list (state, name)
    scalar = "scalar"
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
    assert [arrays[key].item() for key in what if what[key] == scalar] == [2, 5, 0, 4, 1, 0]
    assert all(arrays[k].dtype == np.int32 for k in (*what, "1.1.0.1") if what.get(k) != "none")
    assert "".join(map(chr, arrays["1.0.1"])) == "RotatingKVCache"
    assert arrays["2.0"].shape == (0,)
    assert arrays["1.1.0.1"].tolist() == [1, 0]


def test_a_mamba_cache_is_an_arrays_cache_to_mlx_lm(tmp_path: Path) -> None:
    layers = [ArraysCache(1), MambaCache(), CacheList(KVCache(), CacheList(MambaCache()))]
    save_prompt_cache(tmp_path / "c", layers)
    arrays, texts = contents(tmp_path / "c")
    assert [texts[f"1.{i}"] for i in range(3)] == ["ArraysCache", "ArraysCache", "CacheList"]
    assert "".join(map(chr, arrays["2.1.0.0.1"])) == "ArraysCache"
    assert texts["2.0"].split() == ["MambaCache:", "2.1.0.0.1", "1"]
    assert [snapshot(c) for c in load_prompt_cache(tmp_path / "c")] == [snapshot(c) for c in layers]
    for key in ("0.0", "2", "7", "2.1.0.0", "x"):
        save_file(arrays, tmp_path / "d", {**texts, "2.0": f"MambaCache: {key}"})
        with pytest.raises(CacheValueError):
            load_prompt_cache(tmp_path / "d")
    save_prompt_cache(tmp_path / "e", [fill(KVCache())])
    arrays, texts = contents(tmp_path / "e")
    save_file(arrays, tmp_path / "e", {**texts, "2.0": "MambaCache: 0.0"})
    with pytest.raises(CacheValueError):
        load_prompt_cache(tmp_path / "e")


def test_large_counts_and_strided_arrays_are_saved(tmp_path: Path) -> None:
    far = from_state("RotatingKVCache", kv([1, 2]), ("0", "2", str(2**40), "1"))
    keys, values = kv([1, 2, 3])
    cache = KVCache()
    cache.update(keys.astype(">f4")[:, ::-1], values[:, ::-1])
    save_prompt_cache(tmp_path / "c", [far, cache])
    back, strided = load_prompt_cache(tmp_path / "c")
    assert back.offset == 2**40
    assert np.array_equal(strided.state[0], keys[:, ::-1])


def test_bfloat16_becomes_float32(tmp_path: Path) -> None:
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
    path = tmp_path / "bf16"
    path.write_bytes(len(header).to_bytes(8, "little") + header + halves.tobytes() * 2)
    (cache,) = load_prompt_cache(path)
    assert cache.state[0].dtype == np.float32
    assert cache.state[0].ravel().tolist() == widened.tolist()


# Files of mlx-lm: whole buffers, numbers among the arrays --------------------------------------


def written(path: Path, layers: Any, metadata: Any = None) -> Path:
    """Write `(class name, parts)` per layer as mlx-lm 0.32 does."""
    arrays: dict[str, Any] = {}
    listed: list[tuple[str, str]] = []

    def put(key: str, part: Any) -> None:
        if isinstance(part, (list, tuple)):
            for i, inner in enumerate(part):
                put(f"{key}.{i}", inner)
        elif isinstance(part, np.ndarray):
            arrays[key] = part
        else:
            kind = "none" if part is None else "string" if isinstance(part, str) else "scalar"
            listed.append((key, kind))
            plain = [] if part is None else [ord(c) for c in part] if kind == "string" else part
            arrays[key] = np.array(plain, np.int32 if kind == "string" else None)

    texts = {f"0.{k}": v for k, v in (metadata or {}).items()} | {"2.0": ""}
    for i, (name, parts) in enumerate(layers):
        put(str(i), parts)
        texts[f"1.{i}"] = name
    for i, (key, kind) in enumerate(listed, 1):
        texts |= {f"2.{i}.0": key, f"2.{i}.1": kind}
    save_file(arrays, path, texts)
    return path


def buffers(*rows: Any, room: int = 8) -> list[Any]:
    """Return keys and values in buffers with spare room after them."""
    return [np.pad(a, ((0, 0), (0, 0), (0, room), (0, 0))) for a in kv(*rows)]


PAIR, BATCH = buffers([1, 2, 3]), buffers([0, 1], [2, 3])
COUNTS = np.array([1, 2], np.int32), np.array([1, 0], np.int32)
WORDS = (np.zeros((1, 2, 9, 4), np.uint32), *[np.ones((1, 2, 9, 1), np.float32)] * 2)
LAYERS: list[tuple[str, Any]] = [
    ("KVCache", (*PAIR, 3)),
    ("ConcatenateKVCache", kv([1, 2, 3])),
    ("RotatingKVCache", (*PAIR, 3, 1, 20, 3)),
    ("RotatingKVCache", (*kv([5, 2, 3, 4]), 5, 0, 4, 1)),
    ("ChunkedKVCache", (*PAIR, 9, 4, 6)),
    ("QuantizedKVCache", (WORDS, WORDS, 7, 32, 4)),
    ("ArraysCache", ([np.ones((2, 3)), None], COUNTS[1], None)),
    ("BatchKVCache", (*BATCH, *COUNTS, 2)),
    ("BatchRotatingKVCache", (*BATCH, *COUNTS, 20, 2, 2, False)),
    ("BatchRotatingKVCache", (*kv([0, 1], [2, 3]), np.array([6, 7]), COUNTS[1] - 5, 2, 7, 1, True)),
    ("CacheList", [((*PAIR, 3), "KVCache"), (([np.ones((1, 2))], None, None), "ArraysCache")]),
    ("KVCache", (None, None, 0)),
    ("RotatingKVCache", (None, None, 0, 0, 5, 0)),
    ("ChunkedKVCache", (None, None, 0, 4, 0)),
    ("QuantizedKVCache", (None, None, 0, 64, 8)),
    ("BatchKVCache", (None, None, -COUNTS[1], COUNTS[1], 0)),
    ("BatchRotatingKVCache", (None, None, -COUNTS[1], COUNTS[1], 4, 0, 0, False)),
]


def test_files_of_mlx_lm_0_32_are_read(tmp_path: Path) -> None:
    path = written(tmp_path / "c", LAYERS, {"model": "m", "a.b": "c"})
    caches: Any
    caches, metadata = load_prompt_cache(path, return_metadata=True)
    assert metadata == {"model": "m", "a.b": "c"}
    names = [name if name != "ConcatenateKVCache" else "KVCache" for name, _ in LAYERS]
    assert [type(cache).__name__ for cache in caches] == names
    assert [cache.offset for cache in caches[:11]] == [3, 3, 3, 5, 9, 7, 0, 2, 2, 7, 3]
    assert all(cache.is_empty() for cache in caches[11:])
    for cache in caches[:3]:
        assert ids(cache.update(*kv([4]))[1]) == [1, 2, 3, 4]
    assert ids(caches[3].update(*kv([6]))[1]) == [5, 6, 3, 4]
    assert caches[4].start_position == 6
    assert (caches[6].left_padding.tolist(), caches[6][1]) == ([1, 0], None)
    assert stored(caches[7].extract(0)) == [1]
    assert caches[8].left_padding.tolist() == [1, 0]
    assert caches[9].rotated
    assert stored(caches[10][0]) == [1, 2, 3]
    assert caches[12].max_size == 5
    assert caches[15].left_padding.tolist() == [1, 0]
    assert caches[16].meta_state == ("4", "0", "0", "False", "1", "0")
    save_file({}, path, {"2.0": ""})
    assert load_prompt_cache(path) == []


def test_files_of_mlx_lm_0_31_are_read(tmp_path: Path) -> None:
    pair, pairs = kv([1, 2, 3]), kv([0, 1], [2, 3])
    arrays = {"2.0": np.ones((1, 3)), "2.1": np.ones((1, 2))}
    for layer, both in ((0, pair), (1, pair), (3, pairs), (4, pairs)):
        arrays |= {f"{layer}.0": both[0], f"{layer}.1": both[1]}
    arrays |= {"3.2": COUNTS[0], "3.3": COUNTS[1]}
    arrays |= {"4.2": np.array([7, 9], np.int32), "4.3": np.array([-2, 0], np.int32)}
    texts = {
        "0.0": "", "0.1.0": "0", "0.1.1": "3", "0.1.2": "7", "0.1.3": "1", "0.2": "", "0.3": "",
        "0.4.0": "2", "0.4.1": "9", "0.4.2": "1", "0.4.3": "True",
        "2.0": "KVCache", "2.1": "RotatingKVCache", "2.2": "ArraysCache", "2.3": "BatchKVCache",
        "2.4": "BatchRotatingKVCache",
    }  # fmt: skip
    save_file(arrays, tmp_path / "c", texts)
    caches: Any = load_prompt_cache(tmp_path / "c")
    assert stored(caches[0]) == [1, 2, 3]
    assert (caches[1].offset, caches[1].rotated, len(caches[2])) == (7, True, 2)
    assert caches[3].left_padding.tolist() == [1, 0]
    assert (caches[4].rotated, caches[4].left_padding.tolist()) == (True, [0, 0])


@layouts
def test_a_batch_that_mlx_lm_merged_from_wrapped_rings_is_read(tmp_path: Path, layout: str) -> None:
    """mlx-lm's merge counts the columns, of which the rows have seen more."""
    mine = BatchRotatingKVCache.merge([ring(4, range(100)), ring(4, range(7))])
    state = *kv([96, 97, 98, 99], [3, 4, 5, 6]), np.array([100, 7]), np.array([0, 0])
    path = tmp_path / "c"
    if layout == "0.32":
        written(path, [("BatchRotatingKVCache", (*state, 4, 4, 4, False))])
    else:
        texts = {"0.0.0": "4", "0.0.1": "4", "0.0.2": "4", "0.0.3": "False"}
        arrays = {f"0.{i}": array for i, array in enumerate(state)}
        save_file(arrays, path, texts | {"2.0": "BatchRotatingKVCache"})
    read: Any = load_prompt_cache(path)[0]
    for n in (1, 1, 3, 1):
        assert snapshot(read) == snapshot(mine)
        new = kv([200] * n, [300] * n)
        assert ids(read.update(*new)[1]) == ids(mine.update(*new)[1])


# Damaged and foreign files ---------------------------------------------------------------------


@settings(max_examples=examples(250), deadline=None)
@given(data=st.data())
def test_a_damaged_header_is_a_cache_error(tmp_path_factory: Any, data: st.DataObject) -> None:
    path, layer = tmp_path_factory.mktemp("damaged") / "c", data.draw(st.sampled_from(LAYERS))
    if data.draw(st.booleans(), label="of mlx-lm"):
        written(path, [layer])
    else:
        layers = [ring(4, range(6)), CacheList(slots(1, 2), KVCache())]
        save_prompt_cache(path, layers, layout=data.draw(st.sampled_from(["0.31", "0.32"])))
    content = bytearray(path.read_bytes())
    header = int.from_bytes(content[:8], "little") + 8
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.none() | st.integers(0, header + 64))])
    try:
        caches = load_prompt_cache(path)
    except KvCacheError:
        return
    assert all(cache.nbytes >= 0 for cache in caches)  # a digit or a name that still makes sense


@pytest.mark.parametrize(
    "layer",
    [
        *[("KVCache", (*PAIR, *more)) for more in ((12,), (-1,), (2.0,), (True,), (3, 4))],
        ("KVCache", (1, 2, 3)),
        ("RotatingKVCache", (*PAIR, 3, 1, 20)),
        ("ChunkedKVCache", (*PAIR, 2, 4, 6)),
        ("QuantizedKVCache", (*PAIR, 3, 32, 4)),
        ("BatchKVCache", (None, None, 1, 1, 0)),
        ("BatchRotatingKVCache", (*BATCH, *COUNTS, 4, 2, 2, np.ones(2, np.int32))),
        ("ArraysCache", ([np.ones((1, 2))], 5, None)),
        ("CacheList", [((*PAIR, 3), 1)]),
        ("CacheList", [((*PAIR, 3), "KVCache", "KVCache")]),
        ("MambaCache", ([np.ones((1, 2))], None, None)),
        ("Unknown", (*PAIR, 3)),
    ],
)
def test_parts_of_0_32_that_do_not_fit_are_refused(tmp_path: Path, layer: Any) -> None:
    with pytest.raises((CacheDTypeError, CacheValueError)) as caught:
        load_prompt_cache(written(tmp_path / "c", [layer]))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("keys", "texts"),
    [
        (["0.0", "0.1"], None),
        ([], {"format": "pt"}),
        (["model.layers.0.weight"], {"2.0": ""}),
        (["0.0", "0.1"], {"2.0": "KVCache", "0.0.0": "1"}),
        (["0.0", "0.1"], {"2.0": "KVCache", "0.3": ""}),
        (["0.0", "0.1"], {"2.0": "CacheList", "0.0.0.0": "KVCache"}),
        (["0.0", "0.1"], {"2.0": "KVCache", "0." + ".".join("0" * 5000): ""}),
        (["0.0", "0.1"], {"2.0": "x" * 100_000}),
        (["0.0", "0.1"], {"2.0": "KVCache", "0.0": "", "0.0.0": ""}),
        (["0.0", "0.1"], {"2.0": "", "1.0": "KVCache", "2.1.0": "0.0", "2.1.1": "x"}),
        (["0.0", "0.1"], {"2.0": "", "1.0": "KVCache", "2.1.0": "0.0", "2.1.1": "string"}),
        (["0.0"], {"0.0": "", "2.0": "CacheList"}),
        (["0.0"], {"0.0.0.0": "KVCache", "2.0": "CacheList"}),
        (["0.0", "0.1"], {"2.0": "CacheList", "0.0.0": "KVCache"}),
        (["0.0", "0.1"], {"2.0": "", "1.0": "KVCache", "1.1": "KVCache"}),
        *[(["0.0", "0.1", key], {"2.0": "KVCache"}) for key in ("x", "0.2", "0.0.0", "0.-1")],
        (["0.0", "0.1", "0.1000000000"], {"2.0": "KVCache"}),
        (["0.0.0.0", "0.0.1"], {"1.0": "CacheList", "2.0": ""}),
        (["0.0.0", "0.1.0", "0.2.0"], {"1.0": "ArraysCache", "2.0": ""}),
    ],
)
def test_keys_and_texts_that_do_not_fit_are_refused(tmp_path: Path, keys: Any, texts: Any) -> None:
    save_file(dict.fromkeys(keys, kv([1])[0]), tmp_path / "c", texts)
    with pytest.raises(KvCacheError) as caught:
        load_prompt_cache(tmp_path / "c")
    assert len(str(caught.value).replace(str(tmp_path), "")) < 700


# Files that are saved --------------------------------------------------------------------------


@layouts
def test_a_refused_save_leaves_the_old_file(tmp_path: Path, layout: Any) -> None:
    file = tmp_path / "file"
    save_prompt_cache(file, [ONE], layout=layout)
    old = file.read_bytes()

    class Mine(KVCache):
        pass

    deep: Any = ONE
    for _ in range(8):
        deep = CacheList(deep)
    pending, strange = filled(BatchKVCache([0, 0]), [[1], [2]]), KVCache()
    pending.prepare(right_padding=[0, 1])
    wide = np.complex256 if hasattr(np, "complex256") else complex
    strange.update(*(a.astype(wide) for a in kv([1])))
    mine = filled(Mine(), [[1]])
    refused: list[tuple[Any, Any, type]] = [
        ([deep], None, CacheValueError),
        ([mine], None, CacheValueError),
        ([pending], None, CacheOrderError),
        ([strange], None, CacheDTypeError),
        ([ONE], {"a": 1}, CacheDTypeError),
        ([ONE], [("a", "b")], TypeError),
        ([ONE], {"a": "\ud800"}, CacheValueError),
    ]
    for layers, metadata, error in refused:
        with pytest.raises(error) as found:
            save_prompt_cache(file, layers, metadata, layout=layout)
        assert len(str(found.value)) < 400
        assert file.read_bytes() == old
    with pytest.raises(CacheValueError, match="layout"):
        save_prompt_cache(file, [ONE], layout="0.33")  # type: ignore[arg-type]
    for nothing in (ArraysCache(0), CacheList(CacheList())):
        with pytest.raises(CacheValueError, match="layer 1"):
            save_prompt_cache(file, [ONE, nothing])
        save_prompt_cache(tmp_path / "other", [ONE, nothing], layout="0.31")
        assert snapshot(load_prompt_cache(tmp_path / "other")[1]) == snapshot(nothing)
    assert sorted(tmp_path.iterdir()) == [file, tmp_path / "other"]


def test_missing_files_and_folders_are_os_errors(tmp_path: Path) -> None:
    for call in (load_prompt_cache, prompt_cache_layout):
        with pytest.raises(FileNotFoundError):
            call(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="there is no folder") as error:
        save_prompt_cache(tmp_path / "no" / "folder", [ONE])
    assert error.value.filename == str(tmp_path / "no" / "folder")
    with pytest.raises(OSError, match=r".+"):
        save_prompt_cache(tmp_path / ("x" * 300), [ONE])
    (tmp_path / "junk").write_bytes(b"junk")
    with pytest.raises(CacheValueError):
        prompt_cache_layout(tmp_path / "junk")


@posix
def test_pipes_and_devices_are_refused_and_links_followed(tmp_path: Path) -> None:
    pipe, link, data = tmp_path / "pipe", tmp_path / "link", tmp_path / "data"
    os.mkfifo(pipe)
    calls: list[Callable[[Any], Any]] = [load_prompt_cache, prompt_cache_layout]
    for path in (pipe, "/dev/null", tmp_path, "/"):
        for call in (*calls, lambda p: save_prompt_cache(p, [ONE])):
            with pytest.raises(OSError, match=r"regular|directory|denied"):
                call(path)
    assert stat.S_ISFIFO(os.stat(pipe).st_mode)
    link.symlink_to(data)
    for _ in range(2):
        save_prompt_cache(link, [ONE])
        assert link.is_symlink()
        assert load_prompt_cache(data)[0].offset == load_prompt_cache(link)[0].offset == 2
    assert sorted(tmp_path.iterdir()) == [data, link, pipe]


@posix
@pytest.mark.parametrize("mode", [0o664, 0o400, None])
def test_permissions_stay_and_a_file_being_written_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int | None
) -> None:
    file, seen, umask = tmp_path / "file", [], 0o027

    def save(arrays: Any, path: str, texts: Any) -> None:
        seen.append(stat.S_IMODE(os.stat(path).st_mode))
        save_file(arrays, path, texts)

    monkeypatch.setattr(safetensors_numpy, "save_file", save)
    before = os.umask(umask)
    try:
        if mode is not None:
            file.touch(mode)
            file.chmod(mode)
        save_prompt_cache(file, [ONE])
    finally:
        os.umask(before)
    assert seen == [0o600]
    assert stat.S_IMODE(os.stat(file).st_mode) == (0o666 & ~umask if mode is None else mode)


@pytest.mark.parametrize("text", ["I/O error: no space", "IoError(Os { code: 28 })"])
def test_a_full_disk_is_an_os_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    def save(*arguments: Any) -> None:
        raise SafetensorError(f"Error while serializing: {text}")

    monkeypatch.setattr(safetensors_numpy, "save_file", save)
    with pytest.raises(OSError, match="while serializing"):
        save_prompt_cache(tmp_path / "file", [ONE])
    assert [*tmp_path.iterdir()] == []
