"""The fingerprint's digests, recomputed from what docs/state-format.md says of them."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest

from pykvcache import LlamaModel
from pykvcache.errors import StateLayoutMismatch
from state.kit import WORDS
from support.models import MODELS, make_model, write_gguf

if TYPE_CHECKING:
    from conftest import ContextFactory


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


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba", "jamba", "bert"])
def test_the_models(name: str, model_folder: Path) -> None:
    path = make_model(name, model_folder)
    with LlamaModel(path) as model:
        assert model.fingerprint == digest_of_model(path)


def test_that_of_a_model_in_parts(tmp_path: Path) -> None:
    info = MODELS["llama"]
    words = info.vocab()
    write_gguf(
        tmp_path / "p.gguf", info.plan(info.sizes, len(words)), words, 0, split_max_tensors=8
    )
    parts = sorted(tmp_path.glob("p-*.gguf"))
    assert len(parts) > 1
    with LlamaModel(parts[0]) as model:
        assert model.fingerprint == digest_of_model(*parts)


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
def test_the_rotations(
    name: str, options: dict[str, Any], records: list[bytes], make_context: ContextFactory
) -> None:
    ctx = make_context(name, **options)
    ctx.decode(WORDS[:5])
    found = ctx.sequence_state(0).fingerprint.rope_digest
    assert found == hashlib.sha256(b"".join(records)).hexdigest()


def test_that_of_yarn(make_context: ContextFactory) -> None:
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
