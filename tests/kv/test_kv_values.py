"""Keys and values are what independent NumPy code computes, rotated, shifted and rounded."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from memory.kit import Make
from pykvcache import LlamaModel
from pykvcache._native import lib
from pykvcache.enums import GgmlType
from pykvcache.errors import StateError, UnsupportedOperation
from pykvcache.kv import SequenceKV
from support.blueprint import Tensor
from support.models import MODELS, make_model, write_gguf
from support.numpy_llama import LedgerLlama

from .kit import N, different, words

Floats = npt.NDArray[np.floating[Any]]

ERROR = {
    "f32": 1e-4,
    "f16": 2e-3,
    "bf16": 2e-2,
    "q8_0": 0.05,
    "q5_1": 0.25,
    "q5_0": 0.3,
    "q4_1": 0.5,
    "q4_0": 0.6,
    "iq4_nl": 0.5,
}
"""Largest error of a key or value of the first layer, which are 1 in size and 5 at most."""

BOUND = {
    "f16": 2**-11,
    "bf16": 2**-8,
    "q8_0": 0.0045,
    "q5_1": 0.034,
    "q5_0": 0.063,
    "q4_1": 0.068,
    "q4_0": 0.126,
    "iq4_nl": 0.21,
}
"""What storing may change, as a share of the largest of the 32 values of a block."""


def stored_as(kind: str) -> dict[str, Any]:
    flash = "disabled" if kind in ("f32", "f16", "bf16") else "enabled"
    return {"type_k": kind, "type_v": kind, "flash_attn": flash}


def turned(
    keys: Floats, positions: npt.ArrayLike, neox: bool, base: float, scale: Any = 1.0
) -> Floats:
    """RoPE from its definition, in float64: pairs are complex numbers."""
    half = keys.shape[-1] // 2
    speed = base ** (-np.arange(half) / half) * scale
    angle = np.asarray(positions)[:, None, None] * speed
    first, second = (
        (keys[..., :half], keys[..., half:]) if neox else (keys[..., ::2], keys[..., 1::2])
    )
    pairs = (first.astype(np.float64) + 1j * second) * np.exp(1j * angle)
    result = np.empty(keys.shape)
    if neox:
        result[..., :half], result[..., half:] = pairs.real, pairs.imag
    else:
        result[..., ::2], result[..., 1::2] = pairs.real, pairs.imag
    return result


@pytest.fixture(scope="module")
def ledger(model_folder: Path) -> LedgerLlama:
    return LedgerLlama(make_model("llama_h64", model_folder))


@pytest.mark.hazard("N30")
@pytest.mark.parametrize("rotation", [True, False], ids=["hadamard", "plain"])
@pytest.mark.parametrize("kind", ERROR)
def test_values_are_those_of_a_numpy_forward_pass(
    ledger: LedgerLlama,
    kind: str,
    rotation: bool,
    monkeypatch: pytest.MonkeyPatch,
    make_context: Make,
) -> None:
    if not rotation:
        monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")
    ctx = make_context("llama_h64", **stored_as(kind))
    edge = 64 if rotation and GgmlType[kind.upper()].is_quantized else 0
    assert ctx.native.hadamard("attention") == (edge, edge)
    tokens = words(ctx.model)
    ctx.decode(tokens)
    ledger.clear()
    ledger.decode(0, tokens)
    cells = ledger.cells(0)
    arrays, before_rope = ctx.kv(0, dtype=np.float32), ctx.kv(0, rope=False)
    # In later layers the rounding of the first ones is computed on, and is no longer bounded.
    deep = ctx.model.n_layer if kind in ("f32", "f16") else 1
    for i in range(deep):
        tolerance = ERROR[kind] * (1 if i == 0 else 10)
        layer = arrays.layers[i]
        assert np.abs(layer.keys - ledger.rotate(cells.k[i], cells.pos)).max() < tolerance
        assert np.abs(layer.values - cells.v[i]).max() < tolerance
        assert np.abs(before_rope.layers[i].keys - cells.k[i]).max() < tolerance
        assert np.abs(before_rope.layers[i].values - layer.values).max() == 0


@pytest.mark.hazard("N30")
@pytest.mark.parametrize("kind", ERROR)
def test_floats_written_back_are_the_bits_that_were_there(kind: str, make_context: Make) -> None:
    ctx = make_context("llama_h64", **stored_as(kind))
    ctx.decode(words(ctx.model))
    for dtype in ("stored", np.float32):
        ctx.write_kv(ctx.kv(0, dtype=dtype), 1)
        assert different(ctx.kv(0, dtype="stored"), ctx.kv(1, dtype="stored")) == []
    arrays = ctx.kv(0, dtype="stored")
    fewer = [replace(layer, keys=layer.keys[..., :-2]) for layer in arrays.layers]
    with pytest.raises(StateError, match=r"attention layers\[0\]\.keys has"):
        ctx.write_kv(replace(arrays, layers=fewer), 1)


@pytest.mark.parametrize("kind", BOUND)
def test_what_storing_changes_is_bounded(kind: str) -> None:
    rng = np.random.default_rng(1)
    spread = rng.lognormal(0, 2, (2000, 1)).astype(np.float32)
    floats = rng.standard_normal((2000, 32)).astype(np.float32)
    # The worst that is known for iq4_nl, whose scale is fitted to many at one end of its table.
    floats[0] = np.r_[1.0, [-1.0] * 30, 0.91]
    floats *= spread
    number = GgmlType[kind.upper()]
    stored = lib.quantize(number, floats.reshape(-1))
    assert stored.nbytes == floats.size // number.block_size * number.block_bytes
    back = lib.dequantize(number, stored).reshape(floats.shape)
    share = np.abs(back - floats).max(axis=1) / np.abs(floats).max(axis=1)
    assert BOUND[kind] / 2 < share.max() <= BOUND[kind]


def test_the_page_states_the_bounds_that_are_tested() -> None:
    text = (Path(__file__).parents[2] / "docs" / "kv-arrays.md").read_text(encoding="utf-8")
    header, _, row = re.findall(r"^\|.*\|$", text[text.index("| f16 | bf16") :], re.M)[:3]
    names, bounds = (re.findall(r"[\w.^-]+", line) for line in (header, row))
    assert {n: eval(b.replace("^", "**")) for n, b in zip(names, bounds, strict=True)} == BOUND


def test_conversions_refuse_unknown_types_and_wrong_block_sizes() -> None:
    floats = np.ones(33, np.float32)
    for kind in (-1, 4, 5, 24, 99, 2**31 - 1):  # removed, integer, or beyond
        with pytest.raises(ValueError, match="type"):
            lib.quantize(kind, floats[:32].copy())
    with pytest.raises(ValueError, match="whole blocks"):
        lib.quantize(GgmlType.Q8_0, floats)
    with pytest.raises(ValueError, match="whole blocks"):
        lib.dequantize(GgmlType.Q8_0, np.zeros(33, np.uint8))
    with pytest.raises(ValueError, match="NaN"):
        lib.quantize(GgmlType.Q8_0, np.full(32, np.nan, np.float32))
    assert lib.quantize(GgmlType.Q8_0, floats[:0]).shape == (0,)
    assert lib.dequantize(GgmlType.Q8_0, np.zeros(0, np.uint8)).shape == (0,)


def with_rope_factors(folder: Path, factors: npt.NDArray[np.float32]) -> Path:
    """A llama model whose file divides the angle of each pair, as Llama 3.1 does."""
    info = MODELS["llama3l"]
    plan = info.plan(info.sizes, info.n_vocab)
    plan.tensors["rope_freqs.weight"] = Fixed(factors.shape, values_=tuple(factors.tolist()))
    path = folder / "factors.gguf"
    write_gguf(path, plan, info.vocab(), 0)
    return path


class Fixed(Tensor):
    """A tensor of given values."""

    def __init__(self, shape: tuple[int, ...], values_: tuple[float, ...]) -> None:
        super().__init__(shape)
        object.__setattr__(self, "given", np.array(values_, np.float32))

    def values(self, name: str, seed: int) -> npt.NDArray[np.float32]:
        given: npt.NDArray[np.float32] = self.given  # type: ignore[attr-defined]
        return given


def shiftable() -> list[str]:
    return [n for n, info in MODELS.items() if info.has_rope and info.can_shift and info.has_memory]


def attention_parts(arrays: SequenceKV) -> list[SequenceKV]:
    return [arrays, *([arrays.window] if arrays.window else [])]


@pytest.mark.hazard("S1")
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("name", [*shiftable(), "lfm2_swa"])
def test_rope_is_what_numpy_computes_from_its_definition(
    name: str, scale: float, make_context: Make
) -> None:
    arch = MODELS[name].arch
    ctx = make_context(name, rope_freq_scale=scale)
    ctx.decode(words(ctx.model))
    base = float(ctx.model.metadata.get(f"{arch}.rope.freq_base", 10000.0))
    by = 37
    unshifted, plain = ctx.kv(0), ctx.kv(0, rope=False)
    shifted: SequenceKV | None = None
    if MODELS[name].can_shift:
        ctx.kv_cache_seq_add(0, None, None, by)
        shifted = ctx.kv(0)
    for h, part in enumerate(attention_parts(unshifted)):
        for i, layer in enumerate(part.layers):
            # The windows of this architecture have a scale of their own, which is 1.
            use = (
                arch not in ("llama", "granitehybrid"),
                1.0 if (h, arch) == (1, "gemma3") else scale,
            )
            raw = np.asarray(attention_parts(plain)[h].layers[i].keys)
            expected = turned(raw, part.positions, use[0], base, use[1])
            assert np.abs(expected - layer.keys).max() < 1e-4
            if shifted is not None:
                moved = attention_parts(shifted)[h]
                assert np.array_equal(moved.positions, part.positions + by)
                expected = turned(
                    np.asarray(layer.keys), np.full(len(part), by), use[0], base, use[1]
                )
                assert np.abs(expected - moved.layers[i].keys).max() < 1e-3
                assert np.array_equal(moved.layers[i].values, layer.values)


def test_frequency_factors_of_the_model_are_used(tmp_path: Path, make_context: Make) -> None:
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    path = with_rope_factors(tmp_path, factors)
    assert any(t.name == "rope_freqs.weight" for t in gguf.GGUFReader(path).tensors)
    ctx = make_context(LlamaModel(path))
    ctx.decode(words(ctx.model))
    base = float(ctx.model.metadata["llama.rope.freq_base"])
    for layer, plain in zip(ctx.kv(0).layers, ctx.kv(0, rope=False).layers, strict=True):
        expected = turned(np.asarray(plain.keys), np.arange(N), False, base, 1 / factors)
        assert np.abs(expected - layer.keys).max() < 1e-4


@pytest.mark.parametrize("factor", [0.25, 0.7])
def test_yarn_is_undone_with_its_length(
    model: Callable[..., LlamaModel], make_context: Make, factor: float
) -> None:
    """The keys before RoPE do not depend on how they are rotated afterwards, in the first layer."""
    wide = model("llama3l", n_embd=256, n_head=2)
    options = {"rope_scaling_type": "yarn", "rope_freq_scale": factor, "yarn_beta_fast": 8.0}
    plain, yarn = make_context(wide), make_context(wide, **options)
    facts = yarn.native.rope(0)
    assert facts is not None
    assert facts["ext_factor"] == 1
    for ctx in (plain, yarn):
        ctx.decode(words(wide))
    keys = [np.asarray(ctx.kv(0, rope=False).layers[0].keys) for ctx in (plain, yarn)]
    assert np.abs(keys[0] - keys[1]).max() < 1e-4
    longer = [np.linalg.norm(ctx.kv(0).layers[0].keys) for ctx in (plain, yarn)]
    assert longer[1] / longer[0] == pytest.approx(1 + 0.1 * np.log(1 / factor), rel=1e-4)
    arrays = yarn.kv(0, rope=False)
    yarn.write_kv(arrays, 1)
    rotated = yarn.kv(1).layers[0].keys
    assert np.abs(np.asarray(yarn.kv(0).layers[0].keys) - rotated).max() < 1e-5


def test_keys_before_rope_can_be_written_at_other_positions(make_context: Make) -> None:
    ctx = make_context("llama3l")
    ctx.decode(words(ctx.model))
    plain = ctx.kv(0, rope=False)
    ctx.write_kv(replace(plain, positions=plain.positions + 5), 1)
    ctx.kv_cache_seq_add(0, None, None, 5)
    for a, b in zip(ctx.kv(0).layers, ctx.kv(1).layers, strict=True):
        assert np.abs(np.asarray(a.keys) - b.keys).max() < 1e-4
        assert np.array_equal(a.values, b.values)


def test_mrope_is_not_undone(make_context: Make) -> None:
    ctx = make_context("qwen2vl")
    ctx.decode(words(ctx.model))
    with pytest.raises(UnsupportedOperation, match="rope=True"):
        ctx.kv(0, rope=False)
    with pytest.raises(UnsupportedOperation, match="rope=True"):
        ctx.write_kv(replace(ctx.kv(0), rope=False), 1)
