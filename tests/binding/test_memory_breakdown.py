"""Bytes of a context by buffer type, compared with other functions."""

from __future__ import annotations

from typing import Any

import pytest

from pykvcache.errors import ClosedError
from pykvcache.introspection import BufferBytes


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba", "jamba", "bert"])
def test_sums_are_those_of_the_memory_and_the_weights(make_context: Any, name: str) -> None:
    ctx = make_context(name)
    found = ctx.memory_breakdown()
    assert all(isinstance(one, BufferBytes) for one in found.values())
    assert sum(one.context for one in found.values()) == ctx.memory_info.bytes_total
    # Buffers are padded, and contain more than the model's weights.
    assert sum(one.model for one in found.values()) >= ctx.model.size
    assert sum(one.compute for one in found.values()) > 0
    places = ("CPU", *ctx.model.devices)
    assert all(any(place in buffer for place in places) for buffer in found)


def test_more_cells_take_more_context_and_the_same_model(make_context: Any) -> None:
    small, large = (make_context("llama", n_ctx=n).memory_breakdown() for n in (256, 1024))
    assert small.keys() == large.keys()
    assert [one.model for one in small.values()] == [one.model for one in large.values()]
    cells = [sum(one.context for one in found.values()) for found in (small, large)]
    assert cells[1] == 4 * cells[0]


def test_a_closed_context_says_so(make_context: Any) -> None:
    ctx = make_context("llama")
    ctx.close()
    with pytest.raises(ClosedError):
        ctx.memory_breakdown()
