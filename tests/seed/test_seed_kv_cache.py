"""The tests of seed 000, each with a context given ``n_ctx=512`` only, named as there or almost so.

The seed's default model has M-RoPE, so what runs on it there runs on an M-RoPE model here, and
on an ordinary one too. Its embedding model is one with RoPE and a memory: `llama` stands for
it, since the generated `bert` keeps no memory and can shift nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from pykvcache import LlamaBatch, LlamaContext, LlamaModel
from pykvcache.errors import (
    KvCacheConversionError,
    P0TooLarge,
    P1TooLarge,
    SeqIdTooLarge,
    UnsupportedOperation,
)

U32_MAX = 2**32 - 1

SEQ_ID_TOO_LARGE = "Provided sequence id is too large for a i32"
P0_TOO_LARGE = "Provided start position is too large for a i32"
P1_TOO_LARGE = "Provided end position is too large for a i32"

OpenContext = Callable[[str], LlamaContext]


@pytest.fixture
def open_context(model: Callable[[str], LlamaModel]) -> Iterator[OpenContext]:
    """A context made as the seed makes it."""
    with ExitStack() as stack:
        yield lambda name: stack.enter_context(LlamaContext(model(name), n_ctx=512))


@pytest.fixture(params=["qwen2vl", "llama"], ids=["mrope", "plain"])
def context(request: pytest.FixtureRequest, open_context: OpenContext) -> LlamaContext:
    """A context of the seed's default model."""
    return open_context(request.param)


def decode_hello_world(context: LlamaContext) -> int:
    """Decode "Hello world" into sequence 0 as the seed does; return the number of tokens."""
    tokens = context.model.tokenize("Hello world", add_special=True)
    batch = LlamaBatch(512, 1)
    batch.add_sequence(tokens, 0, False)
    context.decode(batch)
    return len(tokens)


def test_clear_kv_cache_resets_positions(context: LlamaContext) -> None:
    decode_hello_world(context)
    context.clear_kv_cache()
    assert context.kv_cache_seq_pos_max(0) == -1


def test_kv_cache_seq_pos_max_is_non_negative_after_decode(context: LlamaContext) -> None:
    n = decode_hello_world(context)
    assert context.kv_cache_seq_pos_max(0) == n - 1 >= 0


def test_clear_kv_cache_seq_with_range(context: LlamaContext) -> None:
    decode_hello_world(context)
    assert context.clear_kv_cache_seq(0, 0, 1) is True
    assert context.kv_cache_seq_pos_min(0) == 1


def test_copy_kv_cache_seq_succeeds(context: LlamaContext) -> None:
    n = decode_hello_world(context)
    context.copy_kv_cache_seq(0, 1, None, None)
    assert context.kv_cache_seq_pos_max(1) == n - 1


def test_copy_cache_executes_without_crash(context: LlamaContext) -> None:
    decode_hello_world(context)
    pos_max = context.kv_cache_seq_pos_max(0)
    context.copy_cache(0, 1, pos_max + 1)
    assert context.kv_cache_seq_pos_max(1) == pos_max


@pytest.mark.parametrize(("name", "by"), [("kv_cache_seq_add", 1), ("kv_cache_seq_div", 2)])
def test_shifts_return_an_error_for_an_mrope_model(
    open_context: OpenContext, name: str, by: int
) -> None:
    context = open_context("qwen2vl")
    n = decode_hello_world(context)
    with pytest.raises(UnsupportedOperation) as caught:
        getattr(context, name)(0, 0, None, by)
    assert str(caught.value).startswith(f"operation not supported by this model: {name}")
    assert isinstance(caught.value, KvCacheConversionError)
    assert context.kv_cache_seq_pos_max(0) == n - 1


def test_kv_cache_seq_keep_retains_specified_sequence(context: LlamaContext) -> None:
    n = decode_hello_world(context)
    context.kv_cache_seq_keep(0)
    assert context.kv_cache_seq_pos_max(0) == n - 1 >= 0


def test_copy_kv_cache_seq_with_explicit_range(context: LlamaContext) -> None:
    decode_hello_world(context)
    context.copy_kv_cache_seq(0, 2, 0, 1)
    assert context.kv_cache_seq_pos_max(2) == 0


def test_kv_cache_seq_add_succeeds_on_embedding_model(open_context: OpenContext) -> None:
    context = open_context("llama")
    n = decode_hello_world(context)
    context.kv_cache_seq_add(0, 0, None, 1)
    assert context.kv_cache_seq_pos_min(0) == 1
    assert context.kv_cache_seq_pos_max(0) == n


def test_kv_cache_seq_div_succeeds_on_embedding_model(open_context: OpenContext) -> None:
    context = open_context("llama")
    n = decode_hello_world(context)
    context.kv_cache_seq_div(0, 0, None, 2)
    assert context.kv_cache_seq_pos_max(0) == (n - 1) // 2


def test_kv_cache_seq_pos_max_returns_negative_one_for_unused_seq(context: LlamaContext) -> None:
    assert context.kv_cache_seq_pos_max(999) == -1


REJECTED: dict[str, tuple[Callable[[LlamaContext], object], type[Exception], str]] = {
    "copy_kv_cache_seq_rejects_p0": (
        lambda c: c.copy_kv_cache_seq(0, 1, U32_MAX, None), P0TooLarge, P0_TOO_LARGE),
    "copy_kv_cache_seq_rejects_p1": (
        lambda c: c.copy_kv_cache_seq(0, 1, 0, U32_MAX), P1TooLarge, P1_TOO_LARGE),
    "clear_kv_cache_seq_rejects_src": (
        lambda c: c.clear_kv_cache_seq(U32_MAX, None, None), SeqIdTooLarge, SEQ_ID_TOO_LARGE),
    "clear_kv_cache_seq_rejects_p0": (
        lambda c: c.clear_kv_cache_seq(0, U32_MAX, None), P0TooLarge, P0_TOO_LARGE),
    "clear_kv_cache_seq_rejects_p1": (
        lambda c: c.clear_kv_cache_seq(0, 0, U32_MAX), P1TooLarge, P1_TOO_LARGE),
    "kv_cache_seq_add_rejects_p0": (
        lambda c: c.kv_cache_seq_add(0, U32_MAX, None, 1), P0TooLarge, P0_TOO_LARGE),
    "kv_cache_seq_add_rejects_p1": (
        lambda c: c.kv_cache_seq_add(0, 0, U32_MAX, 1), P1TooLarge, P1_TOO_LARGE),
    "kv_cache_seq_div_rejects_p0": (
        lambda c: c.kv_cache_seq_div(0, U32_MAX, None, 2), P0TooLarge, P0_TOO_LARGE),
    "kv_cache_seq_div_rejects_p1": (
        lambda c: c.kv_cache_seq_div(0, 0, U32_MAX, 2), P1TooLarge, P1_TOO_LARGE),
}  # fmt: skip


@pytest.mark.parametrize("name", REJECTED)
def test_numbers_exceeding_i32_max_are_rejected(context: LlamaContext, name: str) -> None:
    """The error is what the seed's comparison accepts: class, text and the value behind it."""
    call, kind, text = REJECTED[name]
    with pytest.raises(KvCacheConversionError) as caught:
        call(context)
    assert type(caught.value) is kind
    assert str(caught.value) == text
    assert getattr(caught.value, "value", None) == U32_MAX
