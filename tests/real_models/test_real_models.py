"""Forks, rewinds, shifts and embeddings on downloaded models.

How equal is equal. A fork and a rewound sequence lie in the same order and get their tokens in
the same calls as those of the fresh run, so their logits have to be the same to `RIGHT`, on any
weights and any type of cache. A shift rotates keys a second time, which differs in the last bit;
quantised weights round the activations too, so that one bit may flip a step and move a logit by
half a unit. How far is measured, by evaluating the same tokens at other positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from memory.kit import Logits, apart
from support.models import RIGHT

if TYPE_CHECKING:
    from pykvcache import LlamaContext, LlamaModel

    Open = Callable[[LlamaModel], LlamaContext]

pytest.importorskip("pykvcache._native.lib", reason="not built", exc_type=ImportError)

from pykvcache import LlamaBatch, LlamaContext
from pykvcache.errors import ContextCreateError, UnsupportedOperation

TEXT = (
    "Anna has a red boat and lives by the lake. Peter is a baker, and his dog is called Max. "
    "On Monday Anna and Peter sail to the island, where they eat some bread and cheese. "
)
NEXT = "Then it begins to rain, and they"
OTHER = "Peter forgets his hat"

CACHES = {
    "f32": {"type_k": "f32", "type_v": "f32", "flash_attn": "disabled"},
    "f16": {},
    "q8_0": {"type_k": "q8_0", "type_v": "q8_0"},
}


@contextmanager
def opened(model: LlamaModel, cache: str = "f16", **more: Any) -> Iterator[LlamaContext]:
    """A context on a model that writes text; a skip on those that do not."""
    options: dict[str, Any] = {"n_ctx": 512, "n_seq_max": 4, **CACHES[cache], **more}
    try:
        created = LlamaContext(model, **options)
    except ContextCreateError as error:
        if cache != "q8_0":
            raise
        pytest.skip(str(error))
    with created as ctx:
        if ctx.memory_kind == "none":
            pytest.skip("this model keeps no memory")
        yield ctx


def fresh(model: LlamaModel, cache: str, calls: list[Any], start: int = 0) -> Logits:
    """Logits of a new context that gets tokens in these calls, from a position on."""
    with opened(model, cache) as ctx:
        for tokens in calls:
            pos = np.arange(start, start + len(tokens), dtype=np.int32)
            ctx.decode(LlamaBatch.from_arrays(tokens, pos, 0, pos == pos[-1]))
            start += len(tokens)
        return ctx.logits()


@pytest.mark.parametrize("cache", CACHES)
def test_fork_equals_a_fresh_run(real_model: LlamaModel, cache: str) -> None:
    head, tail = real_model.tokenize(TEXT), real_model.tokenize(NEXT, add_special=False)
    with opened(real_model, cache) as ctx:
        ctx.decode(head)
        ctx.copy_kv_cache_seq(0, 1)
        before = ctx.tokens_evaluated
        ctx.decode(tail, seq_id=1)
        assert ctx.tokens_evaluated - before == len(tail)
        assert ctx.kv_cache_seq_pos_max(0) == len(head) - 1
        difference = apart(ctx.logits(), fresh(real_model, cache, [head, tail]))
    assert difference < RIGHT


@pytest.mark.parametrize("cache", CACHES)
def test_rewound_sequence_equals_a_fresh_run(real_model: LlamaModel, cache: str) -> None:
    head, tail = real_model.tokenize(TEXT), real_model.tokenize(NEXT, add_special=False)
    other = real_model.tokenize(OTHER, add_special=False)
    with opened(real_model, cache) as ctx:
        ctx.decode(head)
        ctx.copy_kv_cache_seq(0, 1)
        ctx.decode(tail)
        if ctx.clear_kv_cache_seq(0, len(head)):
            ctx.clear_kv_cache_seq(1)
        else:
            # Refused and nothing changed: the copy from before the tail takes its place.
            assert ctx.memory_kind not in ("attention", "sliding-window")
            assert ctx.kv_cache_seq_pos_max(0) == len(head) + len(tail) - 1
            ctx.copy_kv_cache_seq(1, 0)
        ctx.decode(other)
        difference = apart(ctx.logits(), fresh(real_model, cache, [head, other]))
    assert difference < RIGHT


@pytest.mark.parametrize("cache", ["f32", "f16"])
def test_moved_sequence_equals_one_evaluated_there(real_model: LlamaModel, cache: str) -> None:
    head, tail = real_model.tokenize(TEXT), real_model.tokenize(NEXT, add_special=False)
    with opened(real_model, cache) as ctx:
        ctx.decode(head)
        if not ctx.kv_cache_can_shift():
            with pytest.raises(UnsupportedOperation):
                ctx.kv_cache_seq_add(0, None, None, 64)
            assert ctx.kv_cache_seq_pos_max(0) == len(head) - 1
            return
        ctx.kv_cache_seq_add(0, None, None, 64)
        assert ctx.kv_cache_seq_pos_min(0) >= 64
        ctx.decode(tail)
        moved = ctx.logits()
    there = [fresh(real_model, cache, [head, tail], start) for start in (64, 0, 100, 200)]
    noise = max(apart(there[0], other) for other in there[1:])
    assert apart(moved, there[0]) < max(RIGHT, 3 * noise)
    assert moved.argmax() in there[0].argsort()[-3:]


def test_gap_is_closed_alike_from_both_sides(real_model: LlamaModel) -> None:
    """Moving the rest down and moving the head up give the same distances."""
    words, tail = real_model.tokenize(TEXT), real_model.tokenize(NEXT, add_special=False)
    a, b = 5, 20
    rows = []
    for is_down in (True, False):
        with opened(real_model, "f32") as ctx:
            ctx.decode(words)
            if not ctx.kv_cache_can_shift() or not ctx.clear_kv_cache_seq(0, a, b):
                pytest.skip(f"{ctx.memory_kind} memory cannot drop a part and close the gap")
            if is_down:
                ctx.kv_cache_seq_add(0, b, None, a - b)
            else:
                ctx.kv_cache_seq_add(0, None, a, b - a)
            ctx.decode(tail)
            rows.append(ctx.logits())
    noise = apart(*(fresh(real_model, "f32", [words, tail], start) for start in (0, 64)))
    assert apart(*rows) < max(RIGHT, 3 * noise)
    assert rows[0].argmax() in rows[1].argsort()[-3:]


def test_similar_texts_have_similar_embeddings(real_model: LlamaModel) -> None:
    texts = ("A cat sleeps on the sofa.", "A kitten naps on the couch.", "Taxes rise next year.")
    with LlamaContext(real_model, n_ctx=512, n_seq_max=4, embeddings=True) as ctx:
        if ctx.memory_kind != "none":
            pytest.skip("this model writes text")
        alone = []
        for text in texts:
            ctx.decode(real_model.tokenize(text))
            alone.append(ctx.seq_embeddings(0))
        batch = LlamaBatch()
        for seq, text in enumerate(texts):
            batch.add_sequence(real_model.tokenize(text), seq, logits_all=True)
        ctx.decode(batch)
        together = [ctx.seq_embeddings(seq) for seq in range(len(texts))]
    units = [one / np.linalg.norm(one) for one in alone]
    for one, other in zip(units, together, strict=True):
        # Sequences in one batch do not see each other; rounding aside, each is as if alone.
        assert one @ (other / np.linalg.norm(other)) > 0.999
    assert units[0] @ units[1] > units[0] @ units[2] + 0.2
