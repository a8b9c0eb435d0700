"""Fingerprints: those of the weights are the digests that docs/state-format.md describes."""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from memory.kit import Make
from pykvcache import LlamaContext, LlamaModel
from pykvcache.errors import ModelLoadError, StateLayoutMismatch, StateModelMismatch
from state.kit import WORDS
from support.models import MODELS, make_model, write_gguf
from test_quantized_weights import quantized


def fingerprint(path: Path) -> str:
    with LlamaModel(path) as model:
        return model.fingerprint


def digest_of_model(*paths: Path) -> str:
    total = hashlib.sha256()
    for path in paths:
        reader = gguf.GGUFReader(path)
        data, start = path.read_bytes(), reader.data_offset
        total.update(struct.pack("<QQ", start, len(reader.tensors)) + data[:start])
        for tensor in reader.tensors:
            own = data[tensor.data_offset : tensor.data_offset + tensor.n_bytes]
            middle = max((len(own) - 256) // 2, 0)
            total.update(own[:256] + own[middle : middle + 256] + own[-256:])
    return total.hexdigest()


def split(folder: Path, *, seed: int = 0) -> list[Path]:
    """Write the llama model in several files."""
    info = MODELS["llama"]
    words = info.vocab()
    plan = info.plan(info.sizes, len(words))
    write_gguf(folder / "parts.gguf", plan, words, seed, split_max_tensors=8)
    return sorted(folder.glob("parts-*.gguf"))


def test_a_model_fingerprint_is_the_digest_that_the_docs_define(
    model_folder: Path, tmp_path: Path
) -> None:
    """It covers the header and samples of each tensor, in all files of a split model."""
    paths = [make_model(name, model_folder) for name in ("llama", "gemma3", "mamba", "jamba")]
    paths.append(quantized(tmp_path / "Q4_0", Kind.Q4_0))
    for path in paths:
        assert fingerprint(path) == digest_of_model(path)
    parts = split(tmp_path)
    assert len(parts) > 1
    assert fingerprint(parts[0]) == digest_of_model(*parts)


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
def test_a_file_that_changed_after_loading_has_no_fingerprint(
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


def test_a_fingerprint_covers_all_parts_of_a_split_model(
    tmp_path: Path, make_context: Make
) -> None:
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder, seed in zip(folders, (0, 0, 1), strict=True):
        folder.mkdir()
        assert len(split(folder, seed=seed)) > 2
    first = {folder: sorted(folder.iterdir())[0] for folder in folders}
    a, b, c = (fingerprint(first[folder]) for folder in folders)
    assert a == b != c
    flip(sorted(folders[1].iterdir())[-1], -1)
    assert fingerprint(first[folders[1]]) != a
    with LlamaModel(first[folders[1]], load_mode="none") as model:
        flip(sorted(folders[1].iterdir())[-1], -1)  # changed after it was loaded
        with pytest.raises(ModelLoadError):
            assert model.fingerprint
    with LlamaModel(first[folders[0]]) as model, LlamaModel(first[folders[2]]) as wrong:
        ctx, other = make_context(model), make_context(wrong)
        ctx.decode(WORDS[:9])
        ctx.restore_sequence(ctx.sequence_state(0), 1)
        with pytest.raises(StateModelMismatch):
            other.restore_sequence(ctx.sequence_state(0), 1)
        ctx.close()
        other.close()


def test_a_fingerprint_after_close_and_after_chdir(
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


def record(
    kind: int = 0,
    n_rot: int = 16,
    n_ctx: int = 0,
    base: float = 10,
    scale: float = 1,
    attention: float = 1,
    mixture: float = 0,
    betas: tuple[float, float] = (0, 0),
    factors: tuple[float, ...] = (),
) -> bytes:
    head = struct.pack("<B3i", 2, kind, n_rot, n_ctx)
    floats = np.array([base, scale, attention, mixture, *betas], "<f4").tobytes()
    return head + floats + struct.pack("<I", len(factors)) + np.array(factors, "<f4").tobytes()


@pytest.mark.parametrize(
    ("name", "options", "records"),
    [
        ("llama", {}, [record()] * 2),
        ("llama", {"rope_freq_base": 5000.0}, [record(base=5000)] * 2),
        ("llama", {"rope_freq_scale": 0.25}, [record(scale=0.25)] * 2),
        # What only YaRN asks for counts with YaRN alone.
        ("llama", {"yarn_beta_fast": 8.0, "yarn_orig_ctx": 100}, [record()] * 2),
        ("mamba", {}, [b"\0"] * 2),
    ],
)
def test_the_rope_digest_is_the_one_that_the_docs_define(
    name: str, options: dict[str, Any], records: list[bytes], make_context: Make
) -> None:
    ctx = make_context(name, **options)
    ctx.decode(WORDS[:5])
    found = ctx.sequence_state(0).fingerprint.rope_digest
    assert found == hashlib.sha256(b"".join(records)).hexdigest()


def test_the_rope_digest_with_yarn(make_context: Make) -> None:
    yarn = {
        "rope_scaling_type": "yarn",
        "rope_freq_scale": 0.5,
        "yarn_orig_ctx": 128,
        "yarn_beta_fast": 16.0,
        "yarn_beta_slow": 2.0,
    }
    ctx, other = (
        make_context("llama", **yarn),
        make_context("llama", **yarn | {"yarn_beta_fast": 8.0}),
    )
    ctx.decode(WORDS[:5])
    state = ctx.sequence_state(0)
    facts = state.fingerprint.rope
    wanted = record(
        n_ctx=128,
        scale=0.5,
        attention=facts["attn_factor"],
        mixture=facts["ext_factor"],
        betas=(16, 2),
    )
    assert facts["ext_factor"] == 1
    assert state.fingerprint.rope_digest == hashlib.sha256(wanted * 2).hexdigest()
    with pytest.raises(StateLayoutMismatch, match="rotates keys differently"):
        other.restore_sequence(state, 0)
