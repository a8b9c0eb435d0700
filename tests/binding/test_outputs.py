"""Outputs of a decode: logits, embeddings, measurements."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from binding.kit import differ, words
from pykvcache import LlamaBatch
from pykvcache.errors import ClosedError, InvalidBatch, UnsupportedOperation
from pykvcache.facts import PerfData
from support.models import MODELS, usual

# Logits -------------------------------------------------------------------------------


def test_logits_are_indexed_by_the_batch_and_from_the_end_of_those_asked(make_context: Any) -> None:
    ctx = make_context("llama")
    ctx.decode(LlamaBatch.from_arrays(words(6), np.arange(6), 0, np.array([0, 1, 0, 1, 0, 0])))
    assert ctx.logits().dtype == np.float32
    assert ctx.logits().shape == (320,)
    assert (ctx.logits(-1) == ctx.logits(3)).all()
    assert (ctx.logits(-2) == ctx.logits(np.int64(1))).all()
    assert (ctx.logits(1) != ctx.logits(3)).any()
    for i in (0, 2, 4, 5, 6, -3, -6, 2**31, -(2**31) - 1, 2**63, 10**30, -(10**30)):
        with pytest.raises(IndexError):
            ctx.logits(i)
    for i in (True, 1.0, "1", None, [1], np.True_):
        with pytest.raises(TypeError, match="index"):
            ctx.logits(i)


def test_an_array_gives_the_logits_of_its_last_token(make_context: Any) -> None:
    ctx = make_context("llama")
    ctx.decode(words(7))
    assert (ctx.logits(6) == ctx.logits(-1)).all()
    for i in (0, 5, 7, -2):
        with pytest.raises(IndexError):
            ctx.logits(i)


@pytest.mark.hazard("D33", "D34")
def test_logits_exist_only_after_a_decode_that_asked_for_them(make_context: Any) -> None:
    ctx = make_context("llama")
    for _ in range(2):
        for i in (0, -1):
            with pytest.raises(IndexError):
                ctx.logits(i)
        ctx.decode(LlamaBatch.from_arrays([5], [ctx.kv_cache_seq_pos_max(0) + 1], 0, False))


@pytest.mark.hazard("D36")
def test_logits_are_copies_that_outlive_the_context(make_context: Any) -> None:
    ctx = make_context("llama")
    ctx.decode(words(5))
    first = ctx.logits()
    kept = first.copy()
    first[:] = 0
    assert (ctx.logits() == kept).all()
    other = ctx.logits()
    ctx.decode(words(5, 1))
    assert (other == kept).all()
    ctx.close()
    assert (other == kept).all()
    with pytest.raises(ClosedError):
        ctx.logits()


@pytest.mark.hazard("D3")
def test_rows_of_earlier_parts_are_copies_too(make_context: Any) -> None:
    ctx = make_context("llama", n_batch=8)
    ctx.decode(LlamaBatch.from_arrays(words(20), np.arange(20), 0, True))
    row = ctx.logits(0)
    kept = row.copy()
    row[:] = 0
    assert (ctx.logits(0) == kept).all()


@pytest.mark.parametrize("name", [n for n in usual(MODELS) if not MODELS[n].is_embedder])
def test_logits_are_finite_and_depend_on_the_tokens(make_context: Any, name: str) -> None:
    ctx = make_context(name)
    ctx.decode(words(10), seq_id=0)
    one = ctx.logits()
    ctx.decode(words(10, 1), seq_id=1)
    assert one.shape == (MODELS[name].n_vocab,)
    assert np.isfinite(one).all()
    assert differ(one, ctx.logits()) > 0.3


@pytest.mark.hazard("D35")
def test_a_model_of_embeddings_has_no_logits(make_context: Any) -> None:
    for options in ({}, {"embeddings": False}, {"pooling_type": "none"}):
        ctx = make_context("bert", **options)
        ctx.decode(words(5))
        with pytest.raises(UnsupportedOperation):
            ctx.logits()


# Figures ------------------------------------------------------------------------------


def test_tokens_that_were_computed_are_counted(make_context: Any) -> None:
    ctx = make_context("llama")
    assert ctx.tokens_evaluated == 0
    ctx.decode(words(10))
    ctx.copy_kv_cache_seq(0, 1)
    ctx.decode([5], seq_id=1)
    with pytest.raises(InvalidBatch):
        ctx.decode([-1])
    assert ctx.tokens_evaluated == 11
    bert = make_context("bert")
    bert.encode(words(7))
    assert bert.tokens_evaluated == 7


def test_llama_cpp_s_own_figures(make_context: Any) -> None:
    ctx = make_context("llama")
    ctx.decode(words(10))
    ctx.decode([5])
    ctx.decode([6])
    perf = ctx.perf()
    assert isinstance(perf, PerfData)
    assert (perf.n_p_eval, perf.n_eval) == (10, 2)
    assert perf.t_p_eval_ms > 0
    with pytest.raises(AttributeError):
        perf.n_eval = 5  # type: ignore[misc]
    ctx.perf_reset()
    # llama.cpp reports at least 1 of each, to avoid divisions by zero.
    assert ctx.perf().n_p_eval <= 1
    assert ctx.tokens_evaluated == 12


@pytest.mark.hazard("C15")
@pytest.mark.parametrize("n", [0, -1, 513, 2**40, True, 1.5, None, "2"])
def test_threads_are_between_1_and_512(make_context: Any, n: Any) -> None:
    ctx = make_context("llama")
    with pytest.raises((ValueError, TypeError)):
        ctx.set_n_threads(n)
    with pytest.raises((ValueError, TypeError)):
        ctx.set_n_threads(1, n if n is not None else 0)
    ctx.set_n_threads(2, 1)
    ctx.decode(words(5))
