"""Parameters of a context: refusals, and llama.cpp's effective values."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from binding.conftest import Child, assert_quiet
from binding.kit import resident_bytes
from pykvcache import KvCacheError, LlamaContext, LlamaModel
from pykvcache.enums import GgmlType, PoolingType
from pykvcache.errors import ContextCreateError
from support.models import MODELS, make_model

SIZES = [
    "n_ctx",
    "n_batch",
    "n_ubatch",
    "n_seq_max",
    "n_threads",
    "n_threads_batch",
    "yarn_orig_ctx",
]
ENUMS = ["type_k", "type_v", "flash_attn", "pooling_type", "attention_type", "rope_scaling_type"]
FLOATS = ["rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor"]
FLOATS += ["yarn_beta_fast", "yarn_beta_slow"]
FLAGS = ["kv_unified", "swa_full", "embeddings", "offload_kqv", "op_offload", "no_perf"]


# Refused ------------------------------------------------------------------------------


@pytest.mark.hazard("C12")
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [-1, -(2**31), 2**31, 2**32 - 1, 2**63, -(2**63), 10**30])
def test_a_size_out_of_range_is_a_value_error(model: Any, name: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"{name} is {value}: it must be in \["):
        LlamaContext(model("llama"), **{name: value})


@pytest.mark.hazard("C11")
@pytest.mark.parametrize(
    "name", ["n_batch", "n_ubatch", "n_seq_max", "n_threads", "n_threads_batch"]
)
def test_zero_of_what_must_be_positive_is_refused(model: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0"):
        LlamaContext(model("llama"), **{name: 0})


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [True, 512.0, "512", [512], np.array([1, 2]), np.float32(5)])
def test_sizes_of_other_types_are_type_errors(model: Any, name: str, value: Any) -> None:
    with pytest.raises(TypeError):
        LlamaContext(model("llama"), **{name: value})


def test_a_numpy_integer_is_an_integer(model: Any) -> None:
    with LlamaContext(model("llama"), n_ctx=np.int64(512), n_batch=np.uint8(64)) as ctx:
        assert (ctx.n_ctx, ctx.n_batch) == (512, 64)


@pytest.mark.hazard("C8", "C9", "C10")
@pytest.mark.parametrize("name", ENUMS)
@pytest.mark.parametrize("value", ["", "f17", "q8_k", 99, -7, 2**40, 1.0, None, True, [0], b"f16"])
def test_unknown_choices_are_refused_by_name(model: Any, name: str, value: Any) -> None:
    if (name, value) == ("flash_attn", True):
        pytest.skip("flash attention takes flags")
    with pytest.raises((ValueError, TypeError), match=name):
        LlamaContext(model("llama"), **{name: value})


@pytest.mark.hazard("C3", "C4", "C5")
@pytest.mark.parametrize("name", ["type_k", "type_v"])
def test_types_that_crash_llama_cpp_are_refused(model: Any, name: str) -> None:
    removed = [4, 5, 31, 32, 33, 36, 37, 38]
    crashing = [9999, 15, 24, 25, 26, 27, 28, *range(10, 20), *range(21, 24), 29]
    for value in removed + crashing:
        with pytest.raises(ValueError, match=name):
            LlamaContext(model("llama"), **{name: value})


@pytest.mark.hazard("C10")
@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), -float("inf"), -1.5, 1e31, 10**400, True, "1", None, 1j, [1.0]],
)
def test_invalid_numbers_are_refused(model: Any, name: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError, OverflowError)):
        LlamaContext(model("llama"), **{name: value})


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [1, 0, None, "yes", 1.0, []])
def test_a_flag_is_true_or_false(model: Any, name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=name):
        LlamaContext(model("llama"), **{name: value})


@pytest.mark.hazard("C11")
@pytest.mark.parametrize("what", [None, "model.gguf", 5, LlamaModel, object()])
def test_the_model_must_be_one(what: Any) -> None:
    with pytest.raises(TypeError, match="LlamaModel"):
        LlamaContext(what)


def test_options_are_keywords_and_known(model: Any) -> None:
    with pytest.raises(TypeError):
        LlamaContext(model("llama"), 512)  # type: ignore[misc]
    with pytest.raises(TypeError):
        LlamaContext(model("llama"), n_context=512)  # type: ignore[call-arg]


@pytest.mark.hazard("C1")
@pytest.mark.parametrize(
    "options",
    [
        {"n_ctx": 4, "n_seq_max": 8},
        {"n_ctx": 1},
        {"n_batch": 4, "n_seq_max": 8},
        {"n_ctx": 255, "n_seq_max": 256},
        {"n_batch": 1, "n_ubatch": 512, "n_seq_max": 2},
    ],
)
def test_fewer_tokens_per_call_than_sequences_are_refused(model: Any, options: Any) -> None:
    with pytest.raises(ContextCreateError, match="n_seq_max"):
        LlamaContext(model("llama"), **options)


@pytest.mark.hazard("C2")
def test_more_than_256_sequences_are_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="n_seq_max is 257"):
        LlamaContext(model("llama"), n_ctx=512, n_seq_max=257)


@pytest.mark.hazard("D29")
def test_separate_streams_of_an_encoder_decoder_are_refused(model: Any) -> None:
    with pytest.raises(ContextCreateError, match="kv_unified"):
        LlamaContext(model("t5"), kv_unified=False, n_seq_max=2)
    LlamaContext(model("t5"), kv_unified=False, n_seq_max=1).close()


# Memory -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba", "bert"])
def test_a_long_context_model_costs_little_by_default(model: Any, name: str) -> None:
    # bert's table of positions is as long as its context.
    long = model(name, n_ctx_train=1_000_000 if name != "bert" else 100_000)
    before = resident_bytes()
    with LlamaContext(long, n_threads=1) as ctx:
        assert ctx.n_ctx == 2048
        assert resident_bytes() - before < 100 * 2**20


def test_n_ctx_0_gives_the_whole_length_of_the_model(model: Any) -> None:
    with LlamaContext(model("llama", n_ctx_train=100_000), n_ctx=0, n_threads=1) as ctx:
        assert ctx.n_ctx == 100_096


@pytest.mark.hazard("C12")
@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba", "t5"])
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


def test_a_compute_buffer_that_cannot_be_had_is_a_typed_error(model: Any) -> None:
    with pytest.raises((ContextCreateError, MemoryError)) as error:
        LlamaContext(model("llama"), n_ctx=1_000_000, n_batch=2**31 - 1, n_ubatch=2**31 - 1)
    assert isinstance(error.value, (KvCacheError, MemoryError))
    LlamaContext(model("llama")).close()


SHORT = """
import resource, sys
from pykvcache import LlamaContext, LlamaModel
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
def test_contexts_too_large_for_memory_raise_a_typed_error(
    child: Child, model: Any, model_folder: Path
) -> None:
    large = make_model("llama", model_folder, n_embd=512, n_ff=2048)
    assert_quiet(child(SHORT, model("llama").path, large, timeout=60))


@pytest.mark.parametrize("options", [{}, {"attention_type": "non_causal"}])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_huge_batch_size_costs_nothing(model: Any, name: str, options: Any) -> None:
    before = resident_bytes()
    with LlamaContext(
        model(name), n_ctx=256, n_batch=2**31 - 1, n_ubatch=16, n_threads=1, **options
    ) as ctx:
        assert ctx.n_batch <= 2304
        ctx.decode(np.full(16, 5, np.int32))
        assert resident_bytes() - before < 50 * 2**20


# Effective values ---------------------------------------------------------------------


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
