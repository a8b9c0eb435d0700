"""What exceptions have in common: a builtin beside each, facts as attributes, whole pickles."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pykvcache import (
    BatchGenerator,
    LlamaContext,
    LlamaModel,
    LlamaSequence,
    PrefixCache,
    Sampler,
    errors,
)
from pykvcache.prefix.stores import MemoryStore

FACTS: list[errors.KvCacheError] = [
    errors.SeqIdTooLarge(2**40),
    errors.UnsupportedOperation("decode", "no"),
    errors.SequenceIdError(9, 8),
    errors.PositionError("far", 1, 2, value=3, limit=4),
    errors.KvCacheFull("full", capacity=4, batch=5),
    errors.ReprocessInputs([1, 2]),
    errors.DecodeError("failed", -3, n_decoded=7, needs_removal=(1, 2)),
    errors.NoKvCacheSlot("full", 1, n_decoded=7, n_tokens=9, n_free=2, n_cells=256),
    errors.DecodeAborted("stopped", 2, n_decoded=7),
    errors.PartialStateError("changed", 3, 41),
    errors.StoreError("short", value=3, limit=16),
    errors.ArgumentError("far", what="n", value=9, limit=8),
    errors.OutOfRangeError("far", what="token", value=9, limit=8),
    errors.CacheValueError("rows", what="rows of keys", value=3, limit=2),
    errors.CacheKeyError("nothing", what="model and tokens", value=("m", 3)),
    errors.NotSupported("no", what="max_sequences", value=2, limit=1),
    errors.NoSlot("full", what="slots", value=2, limit=2),
    errors.GrammarError("long", 1, 2, what="bytes", value=9, limit=8),
    errors.OutputNotFinite("bad", "logits", 3, 7, -float("inf"), n_decoded=2),
    errors.InvalidBatch("bad", index=3, value=99, limit=98),
    errors.StateError("other", what="type_k", value="f16", limit="f32"),
    errors.StateTruncated("short", what="bytes", value=9, limit=99),
    errors.ContextCreateError("few", "n_batch", 4, 9),
    errors.ModelLoadError.of("a.gguf", "it is not a GGUF file"),
    errors.DeviceLost("a:1", "decode", "computing: nothing for 0.5 s"),
    errors.ModelLoadError(2, "cannot load model: No such file or directory", "a.gguf"),
]


@pytest.mark.parametrize("error", FACTS, ids=repr)
def test_facts_are_attributes_and_survive_a_pickle(error: errors.KvCacheError) -> None:
    facts = vars(error)
    assert facts
    for other in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(other) is type(error)
        assert str(other) == str(error)
        assert vars(other) == facts


@pytest.mark.parametrize(
    "name", [n for n in errors.__all__ if n not in ("KvCacheError", "DetailedError")]
)
def test_every_error_is_a_builtin_too(name: str) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, errors.KvCacheError)
    builtins = [c for c in kind.__mro__ if c.__module__ == "builtins"]
    assert builtins[0] is not Exception


@pytest.mark.parametrize(
    ("base", "names"),
    [
        ("CacheFullError", {"KvCacheFull", "NoKvCacheSlot", "NoSlot"}),
        ("UnsupportedError", {"NotSupported", "UnsupportedOperation"}),
    ],
)
def test_errors_of_one_meaning_have_a_common_base(base: str, names: set[str]) -> None:
    kind = getattr(errors, base)
    found = {n for n in errors.__all__ if n != base and issubclass(getattr(errors, n), kind)}
    assert found == names


def ctx_of(make_context: Any) -> LlamaContext:
    ctx: LlamaContext = make_context("llama", n_ctx=256)
    ctx.decode([5, 6, 7])
    return ctx


REFUSED: list[tuple[Callable[[LlamaContext], Any], type[Exception], str, object, object]] = [
    (lambda c: c.logits(9), IndexError, "logits", 9, 1),
    (lambda c: c.model.detokenize([5, 2**30]), IndexError, "tokens[1]", 2**30, None),
    (lambda c: Sampler(top_k=-2), ValueError, "top_k", -2, 0),
    (
        lambda c: Sampler().sample(np.float32([0, np.inf])),
        ValueError,
        "logits[1]",
        np.inf,
        "finite, or -inf",
    ),
    (
        lambda c: Sampler(grammar=" " * 2**20 + "x", model=c.model),
        ValueError,
        "bytes",
        2**20 + 1,
        2**20,
    ),
    (lambda c: c.kv(0).select([7]), IndexError, "tokens", 7, 3),
    (lambda c: c.sequence_state(0)[::2], ValueError, "step", 2, 1),
    (lambda c: LlamaSequence(c, [5]).truncate(3), ValueError, "n", 3, 1),
    (lambda c: c.kv(0, dtype="\ud800"), ValueError, "dtype", "\ud800", None),
    (lambda c: c.kv(0, dtype="i4,("), ValueError, "dtype", "i4,(", None),
    (lambda c: LlamaModel("a\ud800"), ValueError, "path", "a\ud800", 1),
    (lambda c: c.load_llama_file("a\ud800"), ValueError, "path", "a\ud800", 1),
    (
        lambda c: Sampler(grammar="root ::= [a]", grammar_root="\ud800", model=c.model),
        ValueError,
        "grammar_root",
        "\ud800",
        None,
    ),
    (lambda c: LlamaContext(c.model, type_k="f64"), ValueError, "type_k", "f64", None),
]


@pytest.mark.parametrize(("call", "builtin", "what", "value", "limit"), REFUSED)
def test_errors_name_the_value_and_the_limit(
    make_context: Any,
    call: Callable[[LlamaContext], Any],
    builtin: type[Exception],
    what: str,
    value: object,
    limit: object,
) -> None:
    with pytest.raises(errors.DetailedError) as caught:
        call(ctx_of(make_context))
    error = caught.value
    assert isinstance(error, builtin)
    assert (error.what, error.value) == (what, value)
    if limit is not None:
        assert error.limit == limit


def test_no_room_says_how_much_there_is(make_context: Any) -> None:
    ctx = make_context("llama", n_ctx=256)
    with pytest.raises(errors.NoKvCacheSlot) as caught:
        LlamaSequence(ctx, [5] * 300).evaluate()
    assert (caught.value.n_tokens, caught.value.n_cells) == (300, 256)
    with pytest.raises(errors.NoKvCacheSlot) as caught:
        BatchGenerator(ctx).submit([5] * 300, 1)
    assert (caught.value.n_tokens, caught.value.n_cells) == (300, 256)


WRONG: list[Callable[[LlamaContext, Any], Any]] = [
    lambda c, wrong: c.model.token_to_piece(5, special=wrong),
    lambda c, wrong: c.model.detokenize([5], special=wrong),
    lambda c, wrong: c.model.tokenize("a", parse_special=wrong),
    lambda c, wrong: LlamaSequence(c, [5]).save("never", metadata=wrong),
    lambda c, wrong: c.sequence_state(0).to_bytes(checksum=wrong),
    lambda c, wrong: PrefixCache(c).tree(wrong),
    lambda c, wrong: LlamaSequence(c, [5]).generate(1, on_full=wrong),
    lambda c, _: c.set_state(np.array([1], "M8[s]")),
    lambda c, _: MemoryStore().put([(bytes(32), np.array([1], "M8[s]"))]),
]


@pytest.mark.parametrize("call", WRONG)
def test_what_is_not_even_a_value_of_that_kind_is_a_type_error(
    make_context: Any, call: Callable[[LlamaContext, Any], Any]
) -> None:
    """Such values reached NumPy or `dict`, which raised a ValueError about something else."""
    for wrong in (np.zeros(3), ["x"], 3.5):
        with pytest.raises(TypeError):
            call(ctx_of(make_context), wrong)
