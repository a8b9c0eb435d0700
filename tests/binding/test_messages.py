"""Messages name the real cause, and the argument that is wrong."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
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
from pykvcache.errors import SeqIdTooLarge, SequenceIdError, UnsupportedOperation

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


def shift(ctx: LlamaContext) -> None:
    ctx.kv_cache_seq_add(0, 0, None, 1)


def copy_part(ctx: LlamaContext) -> None:
    ctx.copy_kv_cache_seq(0, 1, 0, 3)


@pytest.mark.parametrize(
    ("name", "options", "call", "whose"),
    [
        ("llama", {}, LlamaContext.embeddings, "context"),
        ("llama", {}, LlamaContext.seq_embeddings, "context"),
        ("llama", {"embeddings": True, "pooling_type": "mean"}, LlamaContext.embeddings, "context"),
        ("llama", {"type_k": "bf16"}, shift, "context"),
        ("llama", {"kv_unified": False}, copy_part, "context"),
        ("mamba", {}, copy_part, "memory: copy_kv_cache_seq"),
        ("qwen2vl", {}, shift, "model: kv_cache_seq_add"),
        ("mamba", {}, lambda ctx: ctx.sequence_state(0)[:2], "state: slice"),
        ("llama", {}, lambda ctx: (ctx.copy_kv_cache_seq(0, 1), shift(ctx)), "sequence: kv_cache"),
    ],
)
def test_the_error_names_whose_limit_it_is(
    make_context: Any, name: str, options: Any, call: Any, whose: str
) -> None:
    ctx = make_context(name, **options)
    ctx.decode(words(5))
    with pytest.raises(UnsupportedOperation, match=f"supported by this {whose}") as caught:
        call(ctx)
    assert caught.value.subject == whose.partition(":")[0]
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.subject, again.operation) == (caught.value.subject, caught.value.operation)


@pytest.mark.hazard("D37")
def test_missing_logits_have_the_right_reason(make_context: Any) -> None:
    ctx = make_context("llama")
    for ask in (ctx.logits, lambda: ctx.logits(3), lambda: Sampler().sample(ctx)):
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


MAX = 2**31 - 1
EACH = (0, MAX, ValueError)
THREADS = (1, 512, ValueError)
SEQUENCE = (0, 3, (SequenceIdError, SeqIdTooLarge))
#: Calls with an integer, its limits and the error beyond them; of `objects`.
INTEGERS: dict[str, tuple[Callable[[Any, Any], object], int, int, Any]] = {
    "seq_id of decode": (lambda o, v: o.ctx.decode([5], seq_id=v), *SEQUENCE),
    "seq_id of encode": (lambda o, v: o.bert.encode([5], seq_id=v), 0, 3, ValueError),
    "seq_id of generate": (lambda o, v: next(o.ctx.generate([5], 3, seq_id=v)), *SEQUENCE),
    "seq_id of generate with text": (lambda o, v: next(o.ctx.generate("a", 3, None, v)), *SEQUENCE),
    "seq_id of seq_embeddings": (lambda o, v: o.bert.seq_embeddings(v), *SEQUENCE),
    "i of logits": (lambda o, v: o.ctx.logits(v), -1, 2, IndexError),
    "i of embeddings": (lambda o, v: o.embeds.embeddings(v), -3, 2, IndexError),
    "i of sample": (lambda o, v: o.sampler.sample(o.ctx, v), -1, 2, IndexError),
    "token of accept": (lambda o, v: o.sampler.accept(v, o.ctx.model), 0, 319, IndexError),
    "token of token_to_piece": (lambda o, v: o.ctx.model.token_to_piece(v), 0, 319, IndexError),
    "token of is_eog": (lambda o, v: o.ctx.model.is_eog(v), 0, 319, IndexError),
    "token of detokenize": (lambda o, v: o.ctx.model.detokenize([1, v]), 0, 319, Exception),
    "n_threads": (lambda o, v: o.ctx.set_n_threads(v), *THREADS),
    "n_threads_batch": (lambda o, v: o.ctx.set_n_threads(1, [v] if v is None else v), *THREADS),
    "max_tokens": (lambda o, v: o.ctx.generate([5], v), 0, MAX, ValueError),
    "block_size": (lambda o, v: PrefixCache(o.ctx, block_size=v), 1, MAX, ValueError),
    "token of add": (lambda o, v: o.batch.add(v, 0, 0), *EACH),
    "pos of add": (lambda o, v: o.batch.add(0, v, 0), *EACH),
    "seq_ids of add": (lambda o, v: o.batch.add(0, 0, [0, 1, v]), *EACH),
    "seq_id of add_sequence": (lambda o, v: o.batch.add_sequence([1, 2], v), *EACH),
    "start": (lambda o, v: o.batch.add_sequence([1, 2], 0, start=v), *EACH),
    "seq_ids of from_arrays": (
        lambda o, v: LlamaBatch.from_arrays([1], [0], [v]),
        -MAX - 1,
        *EACH[1:],
    ),
    "capacity": (lambda o, v: LlamaBatch(v), *EACH),
    "n_seq_max of a batch": (lambda o, v: LlamaBatch(4, v), 1, 256, ValueError),
}
NO_INTEGERS = (True, np.True_, 1.0, "1", b"1", None, object())


@pytest.fixture(scope="module")
def objects(model: Any) -> Any:
    contexts = {}
    options: dict[str, Any] = {"n_ctx": 256, "n_seq_max": 4, "n_threads": 1}
    for name, of, embeddings in (
        ("ctx", "llama", False),
        ("embeds", "llama", True),
        ("bert", "bert", True),
    ):
        contexts[name] = LlamaContext(model(of), embeddings=embeddings, **options)
        contexts[name].decode([5, 6, 7])
    yield SimpleNamespace(**contexts, sampler=Sampler(), batch=LlamaBatch())
    for one in contexts.values():
        one.close()


@pytest.mark.hazard("C15", "V1", "V2")
@pytest.mark.parametrize("name", INTEGERS)
def test_what_is_no_integer_of_the_range_is_refused(objects: Any, name: str) -> None:
    call, low, high, error = INTEGERS[name]
    for wrong in NO_INTEGERS:
        with pytest.raises(TypeError):
            call(objects, wrong)
    for value in (low - 1, high + 1, 2**31, -(2**31) - 1, 2**63, 10**40, -(10**40)):
        with pytest.raises(error) as caught:
            call(objects, value)
        assert value in vars(caught.value).values() or str(value) in str(caught.value)
        assert isinstance(caught.value, SeqIdTooLarge) == (error == SEQUENCE[2] and value > MAX)
    assert len(objects.batch) == 0
    assert objects.ctx.sequences().keys() == {0}
    assert objects.ctx.kv_cache_seq_pos_max(0) == 2
    objects.ctx.logits()


def test_arrays_that_are_no_integers_are_named(objects: Any) -> None:
    """All arrays have ``__index__``."""
    ctx = objects.ctx
    for name, call in {
        "sequence id": ctx.kv_cache_seq_pos_max,
        "p0": lambda given: ctx.remove(0, given, 2),
        "n_threads": ctx.set_n_threads,
        "block_size": lambda given: PrefixCache(ctx, block_size=given),
    }.items():
        for given in (np.array(1.5), np.array([1, 2]), np.array("1")):
            with pytest.raises(TypeError, match=f"{name} must be an integer, not ndarray"):
                call(given)
    assert ctx.kv_cache_seq_pos_max(np.array(0)) == 2  # one that is an integer
