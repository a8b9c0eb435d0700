"""Parameters of a context: refusals, and llama.cpp's effective values."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from binding.kit import resident_bytes
from pykvcache import LlamaContext, LlamaModel
from pykvcache._params import default_threads, usable_cpus
from pykvcache.enums import FlashAttention, GgmlType, PoolingType
from pykvcache.errors import ContextCreateError
from support.children import assert_quiet, child
from support.models import MODELS, make_model

SIZES = ["n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_threads", "n_threads_batch"]
SIZES += ["yarn_orig_ctx"]
ENUMS = ["type_k", "type_v", "flash_attn", "pooling_type", "attention_type", "rope_scaling_type"]
FLOATS = ["rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor"]
FLOATS += ["yarn_beta_fast", "yarn_beta_slow"]
FLAGS = ["kv_unified", "swa_full", "embeddings", "offload_kqv", "op_offload", "no_perf"]
# Removed from ggml, and such that llama.cpp crashes.
BAD_TYPES = [4, 5, *range(10, 20), *range(21, 30), 31, 32, 33, 36, 37, 38, 9999]

WRONG: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(SIZES, (-1, 0, 2**31, 2**32 - 1, 2**63, 10**30, True, 512.0, "512", [1])),
    **dict.fromkeys(FLAGS, (1, None, "yes")),
    **dict.fromkeys(ENUMS, ("", "f17", "q8_k", 99, -7, 2**40, 1.0, None, b"f16")),
    **dict.fromkeys(FLOATS, (float("nan"), float("inf"), -1.5, 1e31, 10**400, True, "1", None)),
}
WRONG["n_seq_max"] += (257,)
for _name in ("type_k", "type_v"):
    WRONG[_name] += (*BAD_TYPES,)
for _name in ("n_ctx", "yarn_orig_ctx"):  # 0: as in the model
    WRONG[_name] = tuple(value for value in WRONG[_name] if value != 0)


@pytest.mark.hazard("C2", "C3", "C4", "C5", "C8", "C9", "C10", "C11", "C12")
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_option_is_refused_by_name(model: Any, name: str) -> None:
    for value in WRONG[name]:
        with pytest.raises((ValueError, TypeError), match=name) as caught:
            LlamaContext(model("llama"), **{name: value})
        if name in SIZES and type(value) is int:
            assert isinstance(caught.value, ValueError)
            assert f"{name} is {value}" in str(caught.value)


def test_the_model_must_be_one() -> None:
    for what in (None, "model.gguf", LlamaModel):
        with pytest.raises(TypeError, match="LlamaModel"):
            LlamaContext(what)  # type: ignore[arg-type]


QUANTIZED = ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
POOLINGS = ["mean", "cls", "last", "rank"]
TOGETHER: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"n_ctx": 4, "n_seq_max": 8}, "n_seq_max"),
    ("llama", {"n_batch": 4, "n_seq_max": 8}, "n_seq_max"),
    ("llama", {"n_ctx": 255, "n_seq_max": 256}, "n_seq_max"),
    ("t5", {"kv_unified": False, "n_seq_max": 2}, "kv_unified"),
    # The blocks do not divide the head.
    *(
        ("llama", {"flash_attn": flash, what: kind}, what)
        for what in ("type_k", "type_v")
        for kind in QUANTIZED
        for flash in ("auto", FlashAttention.ENABLED, "disabled")
    ),
    *(
        ("llama_h64", {"type_v": kind, "flash_attn": "disabled"}, "flash_attn")
        for kind in QUANTIZED
    ),
    ("deepseek4", {"embeddings": True}, r"of 64 values, and llama\.cpp reads 256"),
    *(
        ("t5", {"pooling_type": pooling, "embeddings": embeddings}, "pool")
        for pooling in POOLINGS
        for embeddings in (True, False)
    ),
    ("llama", {"embeddings": True, "pooling_type": "rank"}, "classifier"),
    ("bert", {"embeddings": True, "pooling_type": "rank"}, "classifier"),
]


@pytest.mark.hazard("C1", "C6", "C7", "D29", "N6", "N9")
@pytest.mark.parametrize(("name", "options", "said"), TOGETHER)
def test_options_that_do_not_go_together_are_refused(
    model: Any, name: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ContextCreateError, match=said):
        LlamaContext(model(name), **options)


def test_an_encoder_decoder_has_one_separate_stream(model: Any) -> None:
    LlamaContext(model("t5"), kv_unified=False, n_seq_max=1).close()


@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba", "bert"])
def test_a_long_context_model_costs_little_by_default(model: Any, name: str) -> None:
    # bert's table of positions is as long as its context.
    long = model(name, n_ctx_train=1_000_000 if name != "bert" else 100_000)
    before = resident_bytes()
    with LlamaContext(long, n_threads=1) as ctx:
        assert ctx.n_ctx == 2048
        assert resident_bytes() - before < 100 * 2**20


@pytest.mark.hazard("C12")
@pytest.mark.parametrize("name", ["llama", "jamba", "t5"])
@pytest.mark.parametrize("streams", [1, 256])
def test_a_cache_larger_than_the_machine_is_refused_at_once(
    model: Any, name: str, streams: int
) -> None:
    before, start = resident_bytes(), time.monotonic()
    unified = streams == 1 or name == "t5"
    with pytest.raises(ContextCreateError, match=r"GiB"):
        LlamaContext(model(name), n_ctx=2**31 - 1, n_seq_max=streams, kv_unified=unified)
    assert time.monotonic() - start < 5
    assert resident_bytes() - before < 50 * 2**20


SHORT = """
import resource, sys
from pykvcache import LlamaContext, LlamaModel
from pykvcache._params import default_threads, usable_cpus
from pykvcache.errors import ContextCreateError, ModelLoadError
everything = resource.getrlimit(resource.RLIMIT_AS)
used = 4096 * int(open("/proc/self/statm").read().split()[0])

def refused(room, call):
    resource.setrlimit(resource.RLIMIT_AS, (used + room, everything[1]))
    try:
        call().close()
    except (ContextCreateError, ModelLoadError, MemoryError):
        return True
    finally:
        resource.setrlimit(resource.RLIMIT_AS, everything)
    return False

small = {"n_ctx": 256, "n_threads": 1}
model = LlamaModel(sys.argv[1])
ctx = LlamaContext(model, **small)
ctx.decode([5, 6, 7])
logits = ctx.logits()
for mib in range(0, 64, 4):
    refused(mib << 20, lambda: LlamaContext(model, n_ctx=2**17, n_threads=1))
    refused(mib << 20, lambda: LlamaContext(model, n_ctx=2**14, n_batch=2**14, n_ubatch=2**14))
    refused(mib << 18, lambda: LlamaModel(sys.argv[2], load_mode="none"))
assert refused(0, lambda: LlamaContext(model, n_ctx=2**17, n_threads=1))
assert refused(0, lambda: LlamaModel(sys.argv[2], load_mode="none"))
with LlamaContext(LlamaModel(sys.argv[1]), **small) as fresh:
    fresh.decode([5, 6, 7])
    assert (fresh.logits() == logits).all()
ctx.clear_kv_cache()
ctx.decode([5, 6, 7])
assert (ctx.logits() == logits).all()
"""


@pytest.mark.hazard("N42")
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's limits")
def test_contexts_too_large_for_memory_raise_a_typed_error(model: Any, model_folder: Path) -> None:
    large = make_model("llama", model_folder, n_embd=512, n_ff=2048)
    assert_quiet(child(SHORT, model("llama").path, large, timeout=60))


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_huge_batch_size_costs_nothing(model: Any, name: str) -> None:
    before = resident_bytes()
    with LlamaContext(model(name), n_ctx=256, n_batch=2**31 - 1, n_ubatch=16, n_threads=1) as ctx:
        assert ctx.n_batch <= 2304
        ctx.decode(np.full(16, 5, np.int32))
        assert resident_bytes() - before < 50 * 2**20


@pytest.mark.hazard("C13", "C14")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (512, 512, 512, 512, 8)),
        ({"n_ctx": 0}, (512, 512, 512, 512, 8)),
        ({"n_ctx": 300}, (512, 512, 300, 300, 8)),
        ({"n_ctx": 1, "n_seq_max": 1}, (256, 256, 1, 1, 1)),
        ({"n_batch": 8, "n_ubatch": 2}, (512, 512, 8, 2, 8)),
        ({"n_batch": 100, "n_ubatch": 700}, (512, 512, 100, 100, 8)),
        ({"n_ctx": 512, "n_seq_max": 3, "kv_unified": False}, (768, 256, 512, 512, 3)),
        ({"n_ctx": 256, "n_seq_max": 256, "kv_unified": False}, (65536, 256, 256, 256, 256)),
        ({"n_ctx": 256, "n_seq_max": 256}, (256, 256, 256, 256, 256)),
    ],
)
def test_rounded_parameters_are_readable(model: Any, options: Any, expected: Any) -> None:
    with LlamaContext(model("llama"), n_threads=1, **options) as ctx:
        assert (ctx.n_ctx, ctx.n_ctx_seq, ctx.n_batch, ctx.n_ubatch, ctx.n_seq_max) == expected
        # One token per sequence fits after any rounding.
        ctx.decode(np.full(min(ctx.n_batch, 40), 5, np.int32), seq_id=ctx.n_seq_max - 1)


def test_types_flags_and_pooling_are_readable(model: Any) -> None:
    with LlamaContext(model("llama"), type_k="F32", type_v=GgmlType.BF16, kv_unified=False) as ctx:
        assert (ctx.type_k, ctx.type_v) == (GgmlType.F32, GgmlType.BF16)
        assert ctx.kv_unified is False
        assert ctx.pooling_type is PoolingType.NONE
        assert ctx.model is model("llama")
        assert "K f32, V bf16" in repr(ctx)
    assert "(closed)" in repr(ctx)
    with LlamaContext(model("bert"), embeddings=True) as ctx:
        assert ctx.pooling_type is PoolingType.MEAN
    with LlamaContext(model("bert"), embeddings=True, pooling_type="cls") as ctx:
        assert ctx.pooling_type is PoolingType.CLS


@pytest.mark.parametrize("name", MODELS)
def test_the_kind_of_memory_has_a_name(make_context: Any, name: str) -> None:
    assert make_context(name).memory_kind == MODELS[name].memory


@pytest.mark.hazard("N63")
def test_a_context_with_yarn_changes_nothing_for_others(model: Any) -> None:
    # llama.cpp writes the length that YaRN makes into the model.
    for name, embeddings in (("llama", False), ("bert", True)):
        one = model(name)
        before = LlamaContext(one, n_ctx=0, embeddings=embeddings, n_threads=1)
        yarn = LlamaContext(
            one,
            rope_scaling_type="yarn",
            rope_freq_scale=1e-6,
            yarn_orig_ctx=512,
            embeddings=embeddings,
            n_threads=1,
        )
        after = LlamaContext(one, n_ctx=0, embeddings=embeddings, n_threads=1)
        assert after.n_ctx == before.n_ctx == one.n_ctx_train == 512
        assert after.max_position == before.max_position
        if name == "bert":
            assert after.max_position == yarn.max_position == 511
        for each in (before, yarn, after):
            each.close()


@pytest.mark.parametrize("kind", QUANTIZED)
def test_a_quantized_cache_gives_nearly_the_same_logits(make_context: Any, kind: str) -> None:
    tokens = np.arange(10, 74, dtype=np.int32)
    alike = 0.999 if kind == "q8_0" else 0.97
    exact = make_context("llama_h64")
    exact.decode(tokens)
    for options in ({"type_k": kind}, {"type_k": kind, "type_v": kind, "flash_attn": "auto"}):
        ctx = make_context("llama_h64", **options)
        ctx.decode(tokens)
        same = float(np.corrcoef(ctx.logits(), exact.logits())[0, 1])
        assert alike < same < 1, options


def test_a_small_model_has_one_thread_for_a_token_and_all_for_a_batch(model: Any) -> None:
    with LlamaContext(model("llama"), n_ctx=64) as ctx:
        assert (ctx.n_threads, ctx.n_threads_batch) == (1, usable_cpus())
    with LlamaContext(model("llama"), n_ctx=64, n_threads=2) as ctx:
        assert (ctx.n_threads, ctx.n_threads_batch) == (2, 2)
    with LlamaContext(model("llama"), n_ctx=64, n_threads_batch=3) as ctx:
        assert (ctx.n_threads, ctx.n_threads_batch) == (1, 3)


def test_a_large_model_has_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pykvcache._params.usable_cpus", lambda: 6)
    assert default_threads(0) == (1, 6)
    assert default_threads(61 * 10**6) == (4, 6)
    assert default_threads(10**10) == (6, 6)


@pytest.mark.hazard("N43")
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity here")
def test_affinity_and_the_quotas_of_all_cgroups_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    own = tmp_path / "own"
    own.write_text("0::/pod/one\n")
    folder = tmp_path / "cgroup" / "pod" / "one"
    folder.mkdir(parents=True)
    cgroups = tmp_path / "cgroup"
    assert usable_cpus(cgroups, own) == 8
    (folder / "cpu.max").write_text("max 100000\n")
    assert usable_cpus(cgroups, own) == 8
    (folder.parent / "cpu.max").write_text("250000 100000\n")
    assert usable_cpus(cgroups, own) == 3
    (folder / "cpu.max").write_text("50000 100000\n")
    assert usable_cpus(cgroups, own) == 1
    for damaged in ("", "x y", "1 0", "-5 100000"):
        (folder / "cpu.max").write_text(damaged)
        assert usable_cpus(cgroups, own) >= 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4096)))
    assert usable_cpus(tmp_path / "none", own) == 512
