"""All or nothing: memory that is not there, and Ctrl-C at every place."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from mlx_makers import (
    ONE,
    SIX_COLUMNS,
    THREE,
    TWO_ROWS,
    batch,
    copies,
    filled,
    layers,
    padded,
    padded_rings,
    prompts,
    quantized,
    ring,
    rings,
    seen,
    several,
    slots,
)
from mlx_reference import snapshot

from pykvcache.arrays import (
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    trim_prompt_cache,
)
from support.interrupts import InterruptAnywhere

LONGER = filled(KVCache(), [[1, 2, 3, 4]])
BATCH, RINGS = batch(), rings()


def insert(lru, tokens=(1, 2, 3, 4)):
    lru.insert_cache("m", tokens, [LONGER], cache_type="user")


CALLS = {
    "plain": (lambda: filled(KVCache(), [[1, 2]]), lambda c: c.update(*THREE)),
    "plain one": (lambda: filled(KVCache(), [[1, 2]]), lambda c: c.update(*ONE)),
    "plain grows": (lambda: filled(KVCache(), [range(256)]), lambda c: c.update(*ONE)),
    "plain first": (KVCache, lambda c: c.update(*ONE)),
    "concatenate": (lambda: filled(ConcatenateKVCache(), [[1]]), lambda c: c.update(*THREE)),
    "chunked": (lambda: filled(ChunkedKVCache(2), [range(256)]), lambda c: c.update(*THREE)),
    "chunked front": (
        lambda: filled(ChunkedKVCache(2), [[1, 2, 3]]), lambda c: c.maybe_trim_front()
    ),
    "ring one": (lambda: ring(1, 2), lambda c: c.update(*ONE)),
    "ring first": (lambda: ring(), lambda c: c.update(*ONE)),
    "ring full": (lambda: ring(1, 2, 3, 4, 5), lambda c: c.update(*ONE)),
    "ring several": (lambda: ring(1, 2, 3, 4, 5), lambda c: c.update(*THREE)),
    "ring surplus": (lambda: filled(ring(1), [[2, 3, 4, 5, 6]]), lambda c: c.update(*ONE)),
    "ring trim": (lambda: ring(1, 2, 3), lambda c: c.trim(2)),
    "quantized": (quantized, lambda c: c.update(*ONE)),
    "quantized codes": (quantized, lambda c: c.update_quantized(*ONE)),
    "quantized first": (lambda: QuantizedKVCache(4, 8), lambda c: c.update_quantized(*ONE)),
    "quantized trim": (quantized, lambda c: c.trim(2)),
    "batch": (batch, lambda c: c.update(*TWO_ROWS)),
    "batch filter": (batch, lambda c: c.filter([1])),
    "batch extend": (batch, lambda c: c.extend(BATCH)),
    "batch finalize": (padded, lambda c: c.finalize()),
    "rings": (rings, lambda c: c.update(*TWO_ROWS)),
    "rings several": (rings, lambda c: c.update(*SIX_COLUMNS)),
    "rings padded": (padded_rings, lambda c: c.update(*SIX_COLUMNS)),
    "rings filter": (rings, lambda c: c.filter([1])),
    "rings extend": (rings, lambda c: c.extend(RINGS)),
    "rings finalize": (padded_rings, lambda c: c.finalize()),
    "slots filter": (slots, lambda c: c.filter([1])),
    "slots advance": (slots, lambda c: c.advance(1)),
    "list filter": (several, lambda c: c.filter([1])),
    "list state": (several, lambda c: setattr(c, "state", ())),
    "layers trim": (layers, lambda c: trim_prompt_cache(c, 2)),
    "prompts insert": (prompts, insert),
    "prompts replace": (prompts, lambda c: insert(c, [1, 2, 3])),
    "prompts trim": (prompts, lambda c: c.trim_to(n_sequences=1)),
    "prompts fetch": (prompts, lambda c: c.fetch_nearest_cache("m", [1, 2, 3, 9])),
}  # fmt: skip
calls = pytest.mark.parametrize(("make", "call"), CALLS.values(), ids=CALLS.keys())


@calls
def test_an_interrupt_leaves_all_or_nothing(make, call):
    done = make()
    call(done)
    either = seen(make()), seen(done)
    again = copies(make())
    assert seen(again()) == either[0]
    places = 0
    while True:
        places += 1
        cache = again()
        interrupt = InterruptAnywhere(places, ("/arrays/",))
        if not interrupt.run(lambda cache=cache: call(cache)):
            break
        assert seen(cache) in either, places
        # It goes on as if nothing had been.
        if seen(cache) == either[0]:
            call(cache)
            assert seen(cache) == either[1], places
    assert places > 1


class FailingNumPy:
    """NumPy, whose n-th call of a function that makes an array finds no memory."""

    def __init__(self, n):
        self.left = n

    def __getattr__(self, name):
        found = getattr(np, name)
        if isinstance(found, type) or not callable(found) or name in ("errstate", "dtype"):
            return found

        def called(*arguments, **options):
            self.left -= 1
            if self.left == 0:
                raise MemoryError
            return found(*arguments, **options)

        return called


@calls
def test_memory_that_is_not_there_changes_nothing(make, call, monkeypatch):
    ours = [m for name, m in sys.modules.items() if name.startswith("pykvcache.arrays.mlx.")]
    before = seen(make())
    again = copies(make())
    assert seen(again()) == before
    for n in range(1, 1000):
        cache = again()
        failing = FailingNumPy(n)
        with monkeypatch.context() as patch:
            for module in ours:
                if hasattr(module, "np"):
                    patch.setattr(module, "np", failing)
            try:
                call(cache)
            except MemoryError:
                pass
            else:
                break
        assert seen(cache) == before, n
    assert failing.left > 0


def test_a_quantized_cache_that_cannot_be_dequantized_is_as_before(monkeypatch):
    from pykvcache.arrays.mlx import quantized as module

    cache = quantized()
    before = snapshot(cache)

    def fails(*arguments):
        raise MemoryError

    monkeypatch.setattr(module, "dequantize", fails)
    with pytest.raises(MemoryError):
        cache.update(*ONE)
    assert snapshot(cache) == before
