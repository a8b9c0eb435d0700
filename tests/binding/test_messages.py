"""Messages name the real cause."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from binding.kit import words
from pykvcache import (
    LlamaBatch,
    LlamaContext,
    LlamaModel,
    PrefixCache,
    Sampler,
    SequenceState,
    describe_state,
)
from pykvcache.errors import KvCacheError, UnsupportedOperation

# Order of arguments --------------------------------------------------------------------

SWAPPED: dict[str, tuple[Callable[[LlamaContext, Any], object], str]] = {
    "save_sequence": (lambda c, p: c.save_sequence(0, p), "save_sequence(path, seq_id)"),
    "load_sequence": (lambda c, p: c.load_sequence(0, p), "load_sequence(path, seq_id)"),
    "restore_sequence": (
        lambda c, p: c.restore_sequence(0, c.sequence_state(0)),  # type: ignore[arg-type]
        "restore_sequence(state, seq_id)",
    ),
    "write_kv": (lambda c, p: c.write_kv(0, c.kv(0)), "write_kv(arrays, seq_id)"),  # type: ignore[arg-type]
    "set_state": (lambda c, p: c.set_state(0, c.get_state(0)), "set_state(buffer, seq_id)"),  # type: ignore[arg-type]
    "save_llama_file": (lambda c, p: c.save_llama_file(0, p), "save_llama_file(path, seq_id)"),
    "load_llama_file": (lambda c, p: c.load_llama_file(0, p), "load_llama_file(path, seq_id)"),
}


@pytest.mark.parametrize("name", SWAPPED)
def test_swapped_arguments_name_the_order(make_context: Any, name: str, tmp_path: Path) -> None:
    ctx = make_context("llama")
    ctx.decode(words(5))
    call, order = SWAPPED[name]
    with pytest.raises(TypeError) as caught:
        call(ctx, tmp_path / "file")
    assert str(caught.value).endswith(f": the order is {order}")
    assert "not int" in str(caught.value)
    assert ctx.kv_cache_seq_pos_max(0) == 4
    assert not [*tmp_path.iterdir()]


class Unwritable:
    """An object without a repr."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


TAKES_NUMBERS: dict[str, Callable[[LlamaContext, Any], object]] = {
    "clear_kv_cache_seq": lambda c, n: c.clear_kv_cache_seq(n),
    "p0": lambda c, n: c.clear_kv_cache_seq(0, n),
    "p1": lambda c, n: c.clear_kv_cache_seq(0, 0, n),
    "copy_prefix": lambda c, n: c.copy_prefix(0, 1, n),
    "kv_cache_seq_add": lambda c, n: c.kv_cache_seq_add(0, None, None, n),
    "kv_cache_seq_div": lambda c, n: c.kv_cache_seq_div(0, None, None, n),
    "decode": lambda c, n: c.decode(n),
    "decode, token": lambda c, n: c.decode([n]),
    "cells": lambda c, n: c.cells(n),
    "kv": lambda c, n: c.kv(n),
    "logits": lambda c, n: c.logits(n),
    "n_ctx": lambda c, n: LlamaContext(c.model, n_ctx=n),
    "n_threads": lambda c, n: LlamaContext(c.model, n_threads=n),
    "rope_freq_base": lambda c, n: LlamaContext(c.model, rope_freq_base=n),
    "type_k": lambda c, n: LlamaContext(c.model, type_k=n),
    "detokenize": lambda c, n: c.model.detokenize([n]),
    "Sampler": lambda c, n: Sampler(seed=n),
    "Sampler, temperature": lambda c, n: Sampler(temperature=n),
    "LlamaBatch": lambda c, n: LlamaBatch(n),
    "LlamaBatch.add": lambda c, n: LlamaBatch(4).add(n, 0, [0], True),
    "LlamaBatch.add, position": lambda c, n: LlamaBatch(4).add(5, n, [0], True),
    "LlamaBatch.add, sequence": lambda c, n: LlamaBatch(4).add(5, 0, [n], True),
    "PrefixCache": lambda c, n: PrefixCache(c, block_size=n),
    "PrefixCache, ram_bytes": lambda c, n: PrefixCache(c, ram_bytes=n),
}


@pytest.mark.parametrize("name", TAKES_NUMBERS)
def test_an_error_tells_of_what_cannot_be_written(make_context: Any, name: str) -> None:
    """Python refuses to write integers of more than 4300 digits, and other texts may be long."""
    ctx = make_context("llama")
    ctx.decode(words(5))
    for wrong in (
        -(10**5000),
        10**5000,
        [-(10**5000)],
        "x" * 100_000,
        Unwritable(),
        [Unwritable()],
    ):
        with pytest.raises((KvCacheError, TypeError)) as caught:
            TAKES_NUMBERS[name](ctx, wrong)
        assert 5 < len(str(caught.value)) < 500
    assert ctx.kv_cache_seq_pos_max(0) == 4


@pytest.mark.parametrize("wrong", [5, None, 1.5, ["a"]])
def test_the_error_names_the_argument_that_is_not_a_path(make_context: Any, wrong: Any) -> None:
    ctx = make_context("llama")
    kind = type(wrong).__name__
    for call in (
        LlamaModel,
        describe_state,
        SequenceState.load,
        ctx.sequence_state(0).save,
        ctx.save_context,
        ctx.load_context,
    ):
        with pytest.raises(TypeError, match=f"path must be a str or an os.PathLike, not {kind}"):
            call(wrong)


# What is in the way ----------------------------------------------------------------------


def test_the_error_names_the_option_and_not_the_model(make_context: Any) -> None:
    ctx = make_context("llama")
    ctx.decode(words(5))
    pooled = make_context("llama", embeddings=True, pooling_type="mean")
    pooled.decode(words(5))
    bf16 = make_context("llama", type_k="bf16")
    bf16.decode(words(5))
    streams = make_context("llama", kv_unified=False)
    streams.decode(words(5))
    for call in (
        ctx.embeddings,
        ctx.seq_embeddings,
        pooled.embeddings,
        lambda: bf16.kv_cache_seq_add(0, 0, None, 1),
        lambda: streams.copy_kv_cache_seq(0, 1, 0, 3),
    ):
        with pytest.raises(UnsupportedOperation, match="supported by this context") as caught:
            call()
        assert caught.value.subject == "context"


def test_the_error_names_the_sequence_and_not_the_model(make_context: Any) -> None:
    ctx = make_context("llama")
    ctx.decode(words(5))
    ctx.copy_kv_cache_seq(0, 1)
    with pytest.raises(
        UnsupportedOperation, match="by this sequence: kv_cache_seq_add: "
    ) as caught:
        ctx.kv_cache_seq_add(0, 0, None, 1)
    assert (caught.value.subject, caught.value.operation) == ("sequence", "kv_cache_seq_add")


def test_memory_and_model_errors_differ(make_context: Any) -> None:
    mamba, qwen = make_context("mamba"), make_context("qwen2vl")
    mamba.decode(words(5))
    qwen.decode(words(5))
    with pytest.raises(UnsupportedOperation, match="by this memory: copy_kv_cache_seq"):
        mamba.copy_kv_cache_seq(0, 1, 0, 3)
    with pytest.raises(UnsupportedOperation, match="by this model: kv_cache_seq_add"):
        qwen.kv_cache_seq_add(0, 0, None, 1)
    with pytest.raises(UnsupportedOperation, match="by this state: slice"):
        mamba.sequence_state(0)[:2]


def test_the_subject_survives_a_pickle() -> None:
    error = UnsupportedOperation("embeddings", "why", "context")
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), copied.subject) == (str(error), "context")
    assert str(UnsupportedOperation("a", "b")) == "operation not supported by this model: a: b"


# Reasons for missing logits ------------------------------------------------------------------


def test_missing_logits_have_the_right_reason(make_context: Any) -> None:
    ctx = make_context("llama")
    for ask in (ctx.logits, lambda: ctx.logits(3)):
        with pytest.raises(IndexError, match="this context has not decoded yet"):
            ask()
    ctx.decode(words(5))
    state = ctx.sequence_state(0)
    ctx.decode(LlamaBatch.from_arrays(words(3), [5, 6, 7], 0, False))
    with pytest.raises(IndexError, match="no token of the last decode asked for them"):
        ctx.logits()
    fresh = make_context("llama")
    fresh.restore_sequence(state, 0)
    with pytest.raises(IndexError, match="what is restored brings none: decode a token"):
        fresh.logits()
    ctx.decode(words(2))
    assert ctx.logits().shape == (320,)
    # The very tokens are there again, and it is not they that have gone.
    state = ctx.sequence_state(0)
    ctx.clear_kv_cache()
    with pytest.raises(IndexError, match="no sequence holds it at position 9 any more"):
        ctx.logits()
    ctx.restore_sequence(state, 0)
    for read in (ctx.logits, lambda: ctx.logits(1), lambda: Sampler().sample(ctx)):
        with pytest.raises(IndexError, match="a state was restored since, and brings none"):
            read()
    ctx.decode(LlamaBatch.from_arrays(words(1), [10], 0, False))
    with pytest.raises(IndexError, match="no token of the last decode asked for them"):
        ctx.logits()
