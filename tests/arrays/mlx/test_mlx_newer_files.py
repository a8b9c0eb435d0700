"""Files as mlx-lm 0.32 and later writes them: whole buffers, numbers among the arrays."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_reference import ids, kv, snapshot, stored

from pykvcache.arrays import (
    BatchRotatingKVCache,
    CacheList,
    RotatingKVCache,
    load_prompt_cache,
)
from pykvcache.errors import CacheValueError, KvCacheError

pytest.importorskip("safetensors")
from safetensors.numpy import save_file


def written(path, layers, metadata=None):
    """Write `(class name, state)` per layer: numbers and None become arrays that are listed."""
    arrays, listed = {}, []

    def put(key, part):
        if isinstance(part, (list, tuple)):
            for i, inner in enumerate(part):
                put(f"{key}.{i}", inner)
            return
        if isinstance(part, np.ndarray):
            arrays[key] = part
            return
        kind = "none" if part is None else "string" if isinstance(part, str) else "scalar"
        listed.append((key, kind))
        plain = [] if part is None else [ord(c) for c in part] if kind == "string" else part
        arrays[key] = np.array(plain, np.int32 if kind == "string" else None)

    texts = {f"0.{k}": v for k, v in (metadata or {}).items()}
    texts["2.0"] = ""
    for i, (name, state) in enumerate(layers):
        put(str(i), state)
        texts[f"1.{i}"] = name
    for i, (key, kind) in enumerate(listed, 1):
        texts |= {f"2.{i}.0": key, f"2.{i}.1": kind}
    save_file(arrays, path, texts)
    return path


def buffers(*rows, room=8):
    """Keys and values in buffers with spare room after them."""
    return [np.concatenate([a, np.zeros((*a.shape[:2], room, a.shape[3]), a.dtype)], 2)
            for a in kv(*rows)]  # fmt: skip


PAIR = buffers([1, 2, 3])
BATCH = buffers([0, 1], [2, 3])
COUNTS = np.array([1, 2], np.int32), np.array([1, 0], np.int32)
WORDS = (np.zeros((1, 2, 9, 4), np.uint32), *[np.ones((1, 2, 9, 1), np.float32)] * 2)
LAYERS = [
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


def test_newer_files_are_read(tmp_path):
    """load_prompt_cache reads the layout of mlx-lm 0.32 as well."""
    path = written(tmp_path / "c", LAYERS, {"model": "m", "a.b": "c"})
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
    assert caches[6].left_padding.tolist() == [1, 0]
    assert caches[6].state[1] is None
    assert stored(caches[7].extract(0)) == [1]
    assert caches[8].left_padding.tolist() == [1, 0]
    assert caches[9].rotated
    assert isinstance(caches[10], CacheList)
    assert stored(caches[10][0]) == [1, 2, 3]
    assert caches[12].max_size == 5
    assert caches[15].left_padding.tolist() == [1, 0]
    assert caches[16].meta_state == ("4", "0", "0", "False", "1", "0")


@pytest.mark.parametrize("newer", [False, True])
def test_a_batch_merged_from_wrapped_rings_is_read(tmp_path, newer):
    """mlx-lm's merge counts the columns, of which the rows have seen more."""
    long, short = RotatingKVCache(4), RotatingKVCache(4)
    for cache, n in ((long, 100), (short, 7)):
        for token in range(n):
            cache.update(*kv([token]))
    mine = BatchRotatingKVCache.merge([long, short])
    state = kv([96, 97, 98, 99], [3, 4, 5, 6])
    rows = np.array([100, 7], np.int32), np.array([0, 0], np.int32)
    path = tmp_path / "c"
    if newer:
        written(path, [("BatchRotatingKVCache", (*state, *rows, 4, 4, 4, False))])
    else:
        texts = {"0.0.0": "4", "0.0.1": "4", "0.0.2": "4", "0.0.3": "False"}
        arrays = {f"0.{i}": array for i, array in enumerate((*state, *rows))}
        save_file(arrays, path, texts | {"2.0": "BatchRotatingKVCache"})
    (read,) = load_prompt_cache(path)
    assert snapshot(read) == snapshot(mine)
    for n in (1, 1, 3, 1):
        new = kv([200] * n, [300] * n)
        assert ids(read.update(*new)[1]) == ids(mine.update(*new)[1])
    assert snapshot(read) == snapshot(mine)


@pytest.mark.parametrize(
    "layer",
    [
        ("KVCache", (*PAIR, 12)),
        ("KVCache", (*PAIR, -1)),
        ("KVCache", (*PAIR, 2.0)),
        ("KVCache", (*PAIR, True)),
        ("KVCache", (*PAIR, 3, 4)),
        ("KVCache", (PAIR[0][0], PAIR[1], 3)),
        ("KVCache", (1, 2, 3)),
        ("RotatingKVCache", (*PAIR, 3, 1, 20)),
        ("RotatingKVCache", (7, 7, 3, 1, 20, 3)),
        ("ChunkedKVCache", (*PAIR, 2, 4, 6)),
        ("QuantizedKVCache", (*PAIR, 3, 32, 4)),
        ("BatchKVCache", (*BATCH, 1, 1, 2)),
        ("BatchKVCache", (None, None, 1, 1, 0)),
        ("ArraysCache", (np.ones((1, 2)), None, None)),
        ("ArraysCache", ([np.ones((1, 2))], 5, None)),
        ("CacheList", [((*PAIR, 3), 1)]),
        ("MambaCache", ([np.ones((1, 2))], None, None)),
        ("Unknown", (*PAIR, 3)),
    ],
)
def test_newer_files_whose_parts_do_not_fit_are_refused(tmp_path, layer):
    """A damaged file is a KvCacheError."""
    with pytest.raises(CacheValueError):
        load_prompt_cache(written(tmp_path / "c", [layer]))


LONG = "x" * 100_000
RING = (*buffers((1, 5), (1, 5)), np.int32([5, 5]), np.int32([0, 0]), 4, 5, 1)


@pytest.mark.parametrize(
    "rotated", [PAIR[0], np.ones(2, np.int32), np.ones(0, np.int32), "x" * 200]
)
def test_a_flag_that_is_none_is_refused(tmp_path, rotated):
    with pytest.raises(CacheValueError, match="should be a flag") as caught:
        load_prompt_cache(written(tmp_path / "c", [("BatchRotatingKVCache", (*RING, rotated))]))
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("arrays", "texts"),
    [
        ({}, {"2.0": LONG}),
        ({}, {"2.0": "", "1.0": LONG}),
        ({"0.0": PAIR[0]}, {"2.0": "", "1.0": "KVCache", "2.1.0": "0.0", "2.1.1": LONG}),
        ({"0.0": PAIR[0]}, {"2.0": "", "1.0": "KVCache", "2.1.0": LONG, "2.1.1": "none"}),
        ({"0." * 50_000 + "0": PAIR[0], "0.0": PAIR[0]}, {"2.0": "", "1.0": "KVCache"}),
        ({}, {"2.0": "RotatingKVCache", "0.0.0": LONG, **dict.fromkeys(("0.0.1", "0.0.2"), "1")}),
        ({}, {"2.0": "BatchKVCache", "0.0.0": LONG}),
        ({}, {"2.0": "ArraysCache", "0.0.0": "1", "0.0.1": LONG, "0.0.2": ""}),
        ({}, {"2.0": "CacheList", "0.0.0": LONG}),
    ],
)
def test_an_error_does_not_repeat_a_whole_file(tmp_path, arrays, texts):
    save_file(arrays, tmp_path / "c", texts)
    with pytest.raises(CacheValueError) as caught:
        load_prompt_cache(tmp_path / "c")
    assert len(str(caught.value).replace(str(tmp_path), "")) < 700


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_damaged_newer_header_never_gives_another_error(tmp_path_factory, data):
    """A damaged file is a KvCacheError, whatever byte of its header is wrong."""
    layer = data.draw(st.sampled_from(LAYERS))
    path = written(tmp_path_factory.mktemp("damaged") / "c", [layer])
    content = bytearray(path.read_bytes())
    header = int.from_bytes(content[:8], "little") + 8
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(8, header - 1))] = data.draw(st.integers(32, 126))
    path.write_bytes(content)
    try:
        caches = load_prompt_cache(path)
    except KvCacheError:
        return
    assert len(caches) <= 1


def test_an_empty_newer_file_has_no_layers(tmp_path):
    save_file({}, tmp_path / "c", {"2.0": ""})
    assert load_prompt_cache(tmp_path / "c") == []
    save_file({"0.0": PAIR[0]}, tmp_path / "d", {"2.0": "", "1.0": "KVCache", "2.1.0": "0.0"})
    with pytest.raises(CacheValueError):
        load_prompt_cache(tmp_path / "d")
