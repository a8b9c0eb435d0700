"""How the rotation of keys is read from the model's graph, whatever a scheduler did to another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pykvcache import LlamaContext
from pykvcache.state.facts import _rotation

Contexts = Callable[..., LlamaContext]

# Every way of keys: rotated, by two bases, by several positions, in a part, or not at all.
NAMES = ["llama", "llama3l", "gemma3", "qwen2vl", "deepseek32", "step35", "jamba", "t5"]


def layers_with_keys(ctx: LlamaContext) -> list[int]:
    layers = range(ctx.model.n_layer)
    return [layer for layer in layers if ctx.native.rope_settings(layer) is not None]


def settings(ctx: LlamaContext, layer: int, everywhere: bool) -> dict[str, Any]:
    found = ctx.native.rope_beside_copies(layer, everywhere)
    assert found is not None
    return found


@pytest.mark.hazard("N50")
@pytest.mark.parametrize("name", NAMES)
def test_copies_in_the_reserved_graph_hide_nothing(name: str, make_context: Contexts) -> None:
    """With a device that takes single operations, the scheduler stores copies there."""
    ctx = make_context(name)
    assert layers_with_keys(ctx)
    for layer in layers_with_keys(ctx):
        np.testing.assert_equal(settings(ctx, layer, False), ctx.native.rope_settings(layer))
        assert settings(ctx, layer, False)["known"]


@pytest.mark.parametrize("name", NAMES)
def test_a_source_that_is_not_understood_is_unknown(name: str, make_context: Contexts) -> None:
    ctx = make_context(name)
    for layer in layers_with_keys(ctx):
        assert not settings(ctx, layer, True)["known"]


def test_what_is_unknown_is_told_apart_by_the_settings(make_context: Contexts) -> None:
    """States of keys whose rotation cannot be read still need the same base and scale."""
    options: list[dict[str, Any]] = [
        {},
        {"rope_freq_base": 5000.0},
        {"rope_freq_scale": 0.25},
        {"rope_scaling_type": "yarn", "rope_freq_scale": 0.25},
    ]
    contexts = [make_context("llama", **some) for some in options]
    records = {_rotation(settings(ctx, 0, True)) for ctx in contexts}
    assert len(records) == len(options)
    for ctx in contexts:
        # The same model with the same settings rotates alike where it can be read, too.
        assert _rotation(settings(ctx, 0, True)) == _rotation(ctx.native.rope_settings(0))
