"""`LlamaModel.fingerprint` is equal for equal weights in any place, and only for those."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from pykvcache import LlamaContext, LlamaModel
from pykvcache.errors import ModelLoadError, StateModelMismatch
from state.kit import WORDS
from support.models import MODELS, make_model, write_gguf
from test_quantized_weights import quantized

if TYPE_CHECKING:
    from conftest import ContextFactory


def fingerprint(path: Path) -> str:
    with LlamaModel(path) as model:
        return model.fingerprint


def split(folder: Path, *, seed: int = 0) -> list[Path]:
    """Write the llama model in several files."""
    info = MODELS["llama"]
    words = info.vocab()
    plan = info.plan(info.sizes, len(words))
    write_gguf(folder / "parts.gguf", plan, words, seed, split_max_tensors=8)
    return sorted(folder.glob("parts-*.gguf"))


def test_every_model_has_its_own(model_folder: Path, tmp_path: Path) -> None:
    paths = [make_model(name, model_folder) for name in ("llama", "llama3l", "llama_bpe", "mamba")]
    paths += [make_model("llama", model_folder, seed=seed) for seed in (1, 2)]
    paths += [quantized(tmp_path / kind.name, kind) for kind in (Kind.F16, Kind.Q8_0, Kind.Q4_0)]
    found = [fingerprint(path) for path in paths]
    assert len(set(found)) == len(found)
    assert all(len(one) == 64 and set(one) <= set("0123456789abcdef") for one in found)
    assert found == [fingerprint(path) for path in paths]


def test_a_copy_elsewhere_is_the_same_model(
    model_folder: Path, tmp_path: Path, make_context: ContextFactory
) -> None:
    path = make_model("llama", model_folder)
    shutil.copy(path, tmp_path / "other name.bin")
    (tmp_path / "link").symlink_to(path)
    with LlamaModel(tmp_path / "other name.bin") as model:
        assert model.fingerprint == fingerprint(path) == fingerprint(tmp_path / "link")
        ctx = make_context("llama")
        ctx.decode(WORDS[:9])
        with LlamaContext(
            model, n_ctx=256, n_threads=1, type_k="f32", type_v="f32", flash_attn="disabled"
        ) as other:
            other.restore_sequence(ctx.sequence_state(0), 0)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def replace(path: Path) -> None:
    other = path.with_suffix(".new")
    shutil.copy(path, other)
    os.replace(other, path)


CHANGES: dict[str, Callable[[Path], object]] = {
    "one bit": lambda path: flip(path, -1),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "replaced by its like": replace,
    "deleted": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_file_that_changed_after_it_was_loaded_names_nothing(
    what: str, model_folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(make_model("llama", model_folder), path)
    os.utime(path, (1, 1))
    # Not mapped, so that the weights do not change.
    with (
        LlamaModel(path, load_mode="none") as model,
        LlamaModel(path, load_mode="none") as known,
        LlamaContext(model, n_ctx=256, n_threads=1) as ctx,
        LlamaContext(known, n_ctx=256, n_threads=1) as other,
    ):
        for one in (ctx, other):
            one.decode(WORDS[:9])
        assert known.fingerprint
        CHANGES[what](path)
        with pytest.raises(ModelLoadError, match=r"model\.gguf"):
            assert model.fingerprint
        with pytest.raises(ModelLoadError):
            ctx.save_sequence(tmp_path / "a", 0)
        with pytest.raises(ModelLoadError):
            ctx.restore_sequence(other.sequence_state(0), 0)
        assert ctx.kv_cache_seq_pos_max(0) == 8
        assert not (tmp_path / "a").exists()
        other.save_sequence(tmp_path / "b", 0)


@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_a_changed_sample_of_any_tensor_shows(
    where: str, model_folder: Path, tmp_path: Path
) -> None:
    source = make_model("llama", model_folder)
    path = tmp_path / "model.gguf"
    known = {fingerprint(source)}
    reader = gguf.GGUFReader(source)
    for tensor in reader.tensors[::5]:
        shutil.copy(source, path)
        size = int(tensor.n_bytes)
        at = {"first": 0, "middle": size // 2, "last": size - 1}[where]
        flip(path, int(tensor.data_offset) + at)
        known.add(fingerprint(path))
    assert len(known) == 1 + len(reader.tensors[::5])


def test_all_parts_of_a_split_model_count(tmp_path: Path, make_context: ContextFactory) -> None:
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder, seed in zip(folders, (0, 0, 1), strict=True):
        folder.mkdir()
        assert len(split(folder, seed=seed)) > 2
    first = {folder: sorted(folder.iterdir())[0] for folder in folders}
    a, b, c = (fingerprint(first[folder]) for folder in folders)
    assert a == b != c
    flip(sorted(folders[1].iterdir())[-1], -1)
    assert fingerprint(first[folders[1]]) != a
    with LlamaModel(first[folders[0]]) as model, LlamaModel(first[folders[2]]) as wrong:
        ctx, other = make_context(model), make_context(wrong)
        ctx.decode(WORDS[:9])
        ctx.restore_sequence(ctx.sequence_state(0), 1)
        with pytest.raises(StateModelMismatch):
            other.restore_sequence(ctx.sequence_state(0), 1)
        ctx.close()
        other.close()


def test_a_part_that_changed_after_it_was_loaded(tmp_path: Path) -> None:
    parts = split(tmp_path)
    with LlamaModel(parts[0], load_mode="none") as model:
        flip(parts[-1], -1)
        with pytest.raises(ModelLoadError):
            assert model.fingerprint


def test_a_model_that_was_closed_or_whose_folder_was_left(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = make_model("llama", model_folder)
    want = fingerprint(path)
    monkeypatch.chdir(path.parent)
    model = LlamaModel(path.name)
    monkeypatch.chdir(tmp_path)
    model.close()
    assert model.fingerprint == want
    assert np.array_equal(model.path, path.name)
