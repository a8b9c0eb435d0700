"""Closing, dropping and copying in every order, without crashes, leaks or wrong results."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from binding.kit import differ, resident_bytes, words
from pykvcache import LlamaContext, LlamaModel, Sampler
from pykvcache.errors import ClosedError, ContextCreateError
from support.models import EXACT, RIGHT

OPTIONS: dict[str, Any] = {"n_ctx": 256, "n_seq_max": 4, "n_threads": 1, **EXACT}

#: Arguments for the methods that do not take integers.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "decode": ([5],),
    "encode": ([5],),
    "generate": ([5], 1),
    "kv_cache_seq_div": (0, None, None, 1),
    "set_n_threads": (1,),
    "set_state": (b"", 0),
}
#: What may be called on a closed context.
ALWAYS = {"close", "abort"}


def methods(kind: type) -> dict[str, tuple[Any, ...]]:
    """Every public method with arguments that are right for an open object."""
    found = {}
    for name, function in inspect.getmembers(kind, inspect.isfunction):
        if name.startswith("_"):
            continue
        required = [
            p
            for p in list(inspect.signature(function).parameters.values())[1:]
            if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
        ]
        found[name] = ARGUMENTS.get(name, (0,) * len(required))
    return found


def properties(kind: type) -> list[str]:
    return [n for n, _ in inspect.getmembers(kind, lambda v: isinstance(v, property))]


# Close --------------------------------------------------------------------------------


@pytest.mark.hazard("D38", "L2")
def test_every_method_of_a_closed_context_raises_closed_error(model: Any) -> None:
    ctx = LlamaContext(model("llama"), **OPTIONS)
    ctx.decode([5])
    for _ in range(3):
        ctx.close()
    assert ctx.is_closed
    checked = 0
    for name, args in methods(LlamaContext).items():
        if name in ALWAYS:
            continue
        with pytest.raises(ClosedError):
            list(getattr(ctx, name)(*args))  # a generator does nothing before it is asked
        checked += 1
    assert checked > 20
    assert ctx.abort() is False
    with pytest.raises(ClosedError):
        Sampler().sample(ctx)


def test_properties_of_a_closed_context_are_facts_or_errors(model: Any) -> None:
    ctx = LlamaContext(model("llama"), **OPTIONS)
    facts = {"n_ctx": 256, "n_seq_max": 4, "kv_unified": True, "is_closed": True}
    ctx.close()
    for name in properties(LlamaContext):
        try:
            value = getattr(ctx, name)
        except ClosedError:
            assert name not in facts
        else:
            assert value == facts.get(name, value)
    assert repr(ctx).endswith("(closed)>")


# The order of ends --------------------------------------------------------------------


@pytest.mark.hazard("L1")
def test_a_context_outlives_its_model(path: Path, fresh_logits: Any) -> None:
    model = LlamaModel(path)
    ctx = LlamaContext(model, **OPTIONS)
    tokens = words(20)
    ctx.decode(tokens[:10])
    model.close()
    with pytest.raises(ClosedError):
        LlamaContext(model, **OPTIONS)
    del model
    gc.collect()
    ctx.decode(tokens[10:])
    assert differ(ctx.logits(), fresh_logits("llama", tokens)) < RIGHT
    assert Sampler(temperature=0).sample(ctx) == int(ctx.logits().argmax())
    assert len(list(ctx.generate([5, 6], 5, seq_id=1))) == 5
    ctx.copy_kv_cache_seq(0, 2)
    ctx.kv_cache_seq_add(1, 0, None, 3)
    ctx.decode([5], seq_id=1)
    ctx.close()


def test_a_generator_keeps_its_context_alive(path: Path) -> None:
    tokens = LlamaContext(LlamaModel(path), **OPTIONS).generate([5, 6], 10)
    first = next(tokens)
    gc.collect()
    assert [first, *tokens]
    ctx = LlamaContext(LlamaModel(path), **OPTIONS)
    tokens = ctx.generate([5, 6], 10)
    next(tokens)
    ctx.close()
    with pytest.raises(ClosedError):
        next(tokens)


def test_cycles_are_collected(path: Path) -> None:
    class Holder:
        pass

    gone = []
    for order in (0, 1):
        model = LlamaModel(path)
        ctx = LlamaContext(model, **OPTIONS)
        ctx.decode([5])
        holder = Holder()
        holder.things = (ctx, model) if order else (model, ctx)  # type: ignore[attr-defined]
        holder.self = holder  # type: ignore[attr-defined]
        ctx.holder = holder  # type: ignore[attr-defined]
        model.holder = holder  # type: ignore[attr-defined]
        gone += [weakref.ref(ctx), weakref.ref(model)]
        del model, ctx, holder
    gc.collect()
    assert [ref() for ref in gone] == [None] * 4


# Copies -------------------------------------------------------------------------------


def test_models_and_contexts_cannot_be_pickled_or_copied_deeply(model: Any) -> None:
    with LlamaContext(model("llama"), **OPTIONS) as ctx:
        for one in (ctx, model("llama"), ctx.native, model("llama").native):
            for clone in (pickle.dumps, copy.deepcopy):
                with pytest.raises(TypeError, match=r"pickle|cop"):
                    clone(one)


def test_init_can_be_called_again_and_begins_anew(model: Any) -> None:
    ctx = LlamaContext(model("llama"), **OPTIONS)
    ctx.decode([5, 6])
    ctx.__init__(model("mamba"), **OPTIONS)  # type: ignore[misc]
    assert ctx.memory_kind == "recurrent"
    assert ctx.kv_cache_seq_pos_max(0) == -1
    ctx.close()


# Leaks --------------------------------------------------------------------------------


def grows(work: Callable[[], object], times: int) -> int:
    # The allocator keeps some of what the first ones gave back.
    for _ in range(max(4, times // 4)):
        work()
    before = resident_bytes()
    for _ in range(times):
        work()
    return resident_bytes() - before


def refused_context(model: LlamaModel) -> None:
    # Passes every check and fails inside llama.cpp, when the compute buffer is reserved.
    with pytest.raises((ContextCreateError, MemoryError)):
        LlamaContext(model, n_ctx=600_000, n_batch=2**31 - 1, n_ubatch=2**31 - 1, n_threads=1)


def decode_once(model: LlamaModel) -> None:
    with LlamaContext(model, **OPTIONS) as ctx:
        ctx.decode(words(30))
        Sampler(grammar="root ::= [a-z]+", model=model).sample(ctx)


def drop_unclosed(model: LlamaModel) -> None:
    LlamaContext(model, **OPTIONS).decode([5])


@pytest.mark.parametrize(
    ("work", "times"), [(decode_once, 100), (drop_unclosed, 100), (refused_context, 4)]
)
def test_contexts_leave_no_memory_behind(model: Any, work: Any, times: int) -> None:
    # One context takes more than a megabyte, the refused one some 150.
    assert grows(lambda: work(model("llama")), times) < 30 * 2**20


def test_models_leave_no_memory_behind(path: Path) -> None:
    assert grows(lambda: LlamaModel(path, load_mode="none"), 100) < 20 * 2**20
