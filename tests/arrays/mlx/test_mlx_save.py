"""Files that are saved: whole or not at all, and never such that they cannot be loaded."""

from __future__ import annotations

import os
import stat
import sys

import numpy as np
import pytest
from mlx_makers import filled
from mlx_reference import kv, snapshot

from pykvcache.arrays import (
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    load_prompt_cache,
    prompt_cache_layout,
    save_prompt_cache,
)
from pykvcache.errors import CacheValueError, KvCacheError

safetensors_numpy = pytest.importorskip("safetensors.numpy")
SafetensorError = pytest.importorskip("safetensors").SafetensorError
layouts = pytest.mark.parametrize("layout", ["0.31", "0.32"])
posix = pytest.mark.skipif(os.name == "nt", reason="POSIX has these files")
ONE = filled(KVCache(), [[1, 2]])


@posix
def test_pipes_and_devices_are_refused_and_stay(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, "/dev/null", tmp_path):
        for call in (load_prompt_cache, prompt_cache_layout, lambda p: save_prompt_cache(p, [ONE])):
            with pytest.raises(OSError, match=r"regular|directory|denied"):
                call(path)
    assert stat.S_ISFIFO(os.stat(pipe).st_mode)
    assert [*tmp_path.iterdir()] == [pipe]


@posix
def test_links_are_followed(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    for there in (True, False):
        link, data = tmp_path / f"link{there}", folder / f"data{there}"
        link.symlink_to(data)
        if there:
            data.write_bytes(b"old")
        save_prompt_cache(link, [ONE])
        assert link.is_symlink()
        assert load_prompt_cache(data)[0].offset == 2
        assert load_prompt_cache(link)[0].offset == 2


@posix
def test_permissions_stay_and_new_files_get_those_of_new_files(tmp_path):
    file, other = tmp_path / "file", tmp_path / "other"
    before = os.umask(0o027)
    try:
        save_prompt_cache(file, [ONE])
        other.touch()
        assert file.stat().st_mode == other.stat().st_mode
        for mode in (0o664, 0o600, 0o640):
            file.chmod(mode)
            save_prompt_cache(file, [ONE])
            assert stat.S_IMODE(file.stat().st_mode) == mode
    finally:
        os.umask(before)
    assert sorted(tmp_path.iterdir()) == [file, other]


@posix
@pytest.mark.parametrize("mode", [0o444, 0o400, 0o640, None])
def test_a_file_that_may_only_be_read_is_replaced(tmp_path, monkeypatch, mode):
    """The new one can be written first, also where safetensors opens it by its name."""
    file, plain, seen = tmp_path / "file", safetensors_numpy.save_file, []

    def save_file(arrays, path, texts):
        seen.append(stat.S_IMODE(os.stat(path).st_mode))
        plain(arrays, path, texts)

    monkeypatch.setattr(safetensors_numpy, "save_file", save_file)
    before = os.umask(0o333)
    try:
        if mode is not None:
            file.touch(mode)
            file.chmod(mode)
        save_prompt_cache(file, [ONE])
    finally:
        os.umask(before)
    assert seen == [0o600]
    assert stat.S_IMODE(os.stat(file).st_mode) == (0o444 if mode is None else mode)


@pytest.mark.parametrize("text", ["I/O error: no space", "IoError(Os { code: 28 })"])
def test_a_disk_that_is_full_is_an_os_error(tmp_path, monkeypatch, text):
    """Both are what versions of safetensors call it."""

    def save_file(*arguments):
        raise SafetensorError(f"Error while serializing: {text}")

    monkeypatch.setattr(safetensors_numpy, "save_file", save_file)
    with pytest.raises(OSError, match="while serializing"):
        save_prompt_cache(tmp_path / "file", [ONE])
    assert [*tmp_path.iterdir()] == []


def test_long_names_and_files_of_others_are_no_obstacle(tmp_path):
    file = tmp_path / ("x" * 250)
    mine = tmp_path / f"data.{os.getpid()}.part"
    mine.write_text("mine")
    for path in (file, tmp_path / "data"):
        save_prompt_cache(path, [ONE])
        assert load_prompt_cache(path)[0].offset == 2
    assert mine.read_text() == "mine"
    assert len([*tmp_path.iterdir()]) == 3
    with pytest.raises(OSError, match=r".+"):
        save_prompt_cache(tmp_path / ("x" * 300), [ONE])


@layouts
def test_what_could_not_be_loaded_is_not_saved(tmp_path, layout):
    """The old file stays."""
    file = tmp_path / "file"
    save_prompt_cache(file, [ONE], layout=layout)
    old = file.read_bytes()

    class Mine(KVCache):
        pass

    deep = ONE
    for _ in range(8):
        deep = CacheList(deep)
    for layers in ([deep], [filled(Mine(), [[1]])], [CacheList(filled(Mine(), [[1]]))]):
        with pytest.raises(CacheValueError):
            save_prompt_cache(file, layers, layout=layout)
        assert file.read_bytes() == old
    for metadata in ({"a": "\ud800"}, {"\ud800": "a"}, {"a": "x" * 100_000_000}):
        with pytest.raises(CacheValueError) as found:
            save_prompt_cache(file, [ONE], metadata, layout=layout)
        assert len(str(found.value)) < 400
        assert file.read_bytes() == old
    assert [*tmp_path.iterdir()] == [file]


@layouts
def test_whatever_is_saved_is_loaded(tmp_path, layout):
    file = tmp_path / "file"
    deep = ONE
    for _ in range(6):
        deep = CacheList(deep)
    rings = [RotatingKVCache(sys.maxsize), BatchRotatingKVCache(sys.maxsize, [0])]
    for cache in (deep, *rings, ChunkedKVCache(sys.maxsize)):
        if cache is not deep:
            cache.update(*kv([1]))
        save_prompt_cache(file, [cache], layout=layout)
        assert snapshot(load_prompt_cache(file)[0]) == snapshot(cache)


@pytest.mark.parametrize(
    ("arrays", "texts"),
    [
        (["0.0.0.0", "0.0.0.1"], {"1.0": "CacheList", "2.0": ""}),
        (["0.0"], {"1.0": "CacheList", "2.0": ""}),
        (["0.0.0", "0.0.1", "0.0.2"], {"1.0": "CacheList", "2.0": ""}),
        (["0.0.0.0", "0.0.1"], {"1.0": "CacheList", "2.0": ""}),
        (["0.0.0.0"], {"1.0": "QuantizedKVCache", "2.0": ""}),
        (["0.0.0", "0.1.0", "0.2.0"], {"1.0": "ArraysCache", "2.0": ""}),
        (["0.0"], {"0.0": "", "2.0": "CacheList"}),
        (["0.0"], {"0.0.0.0": "KVCache", "2.0": "CacheList"}),
    ],
)
def test_forged_files_of_lists_are_refused(tmp_path, arrays, texts):
    file = tmp_path / "file"
    zeros = np.zeros((1, 1, 1, 2), np.float32)
    safetensors_numpy.save_file(dict.fromkeys(arrays, zeros), file, texts)
    with pytest.raises(KvCacheError):
        load_prompt_cache(file)
