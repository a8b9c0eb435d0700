"""Messages name the real cause, and the argument that is wrong."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from binding.kit import words
from pykvcache import (
    LlamaBatch,
    LlamaContext,
    LlamaModel,
    LlamaSequence,
    PrefixCache,
    Sampler,
    SequenceState,
    describe_state,
)
from pykvcache.errors import UnsupportedOperation

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
    assert str(caught.value).endswith(f": the argument order is {order}")
    assert "not int" in str(caught.value)
    assert ctx.kv_cache_seq_pos_max(0) == 4
    assert not [*tmp_path.iterdir()]


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


def test_the_error_names_the_memory_the_model_or_the_sequence(make_context: Any) -> None:
    mamba, qwen = make_context("mamba"), make_context("qwen2vl")
    mamba.decode(words(5))
    qwen.decode(words(5))
    with pytest.raises(UnsupportedOperation, match="by this memory: copy_kv_cache_seq"):
        mamba.copy_kv_cache_seq(0, 1, 0, 3)
    with pytest.raises(UnsupportedOperation, match="by this model: kv_cache_seq_add"):
        qwen.kv_cache_seq_add(0, 0, None, 1)
    with pytest.raises(UnsupportedOperation, match="by this state: slice"):
        mamba.sequence_state(0)[:2]
    ctx = make_context("llama")
    ctx.decode(words(5))
    ctx.copy_kv_cache_seq(0, 1)
    with pytest.raises(UnsupportedOperation, match="by this sequence: kv_cache_seq_add") as caught:
        ctx.kv_cache_seq_add(0, 0, None, 1)
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert (error.subject, error.operation) == ("sequence", "kv_cache_seq_add")


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


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([{"role": "user", "content": "Hi"}], r"not dict \(at 0\): model.apply_chat_template"),
        ({"role": "user"}, "not a mapping: model.apply_chat_template"),
        ([5, "six"], r"tokens must be integers, not str \(at 1\)$"),
        ([5, 6.5], r"tokens must be integers, not float \(at 1\)$"),
        (5, "tokens must be a sequence of integers, not int"),
    ],
)
def test_wrong_tokens_are_named_once(make_context: Any, given: Any, says: str) -> None:
    ctx = make_context("llama")
    for call in (ctx.decode, lambda tokens: LlamaSequence(ctx, tokens), ctx.model.detokenize):
        with pytest.raises(TypeError, match=says) as error:
            call(given)
        assert str(error.value).count("tokens must be") == 1


def test_arrays_that_are_no_integers_are_named(make_context: Any) -> None:
    """All arrays have ``__index__``."""
    ctx = make_context("llama")
    ctx.decode(words(3))
    for given in (np.array(1.5), np.array([1, 2]), np.array("1")):
        calls: dict[str, Callable[[], object]] = {
            "sequence id": lambda given=given: ctx.kv_cache_seq_pos_max(given),
            "p0": lambda given=given: ctx.remove(0, given, 2),
            "n_threads": lambda given=given: ctx.set_n_threads(given),
            "block_size": lambda given=given: PrefixCache(ctx, block_size=given),
        }
        for name, call in calls.items():
            with pytest.raises(TypeError, match=f"{name} must be an integer, not ndarray"):
                call()
    ctx.remove(0, np.array(2), None)  # one that is an integer
    assert ctx.kv_cache_seq_pos_max(0) == 1
