"""Reprs fit a line and show the contents."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from binding.kit import words
from pykvcache.kv import LayerKV, LayerState, RecurrentState, SequenceKV

VIEW = pytest.mark.not_on_a_device(reason="the CPU cannot look into its memory")


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba", "jamba", "qwen2vl"])
@pytest.mark.parametrize("copy", [True, pytest.param(False, marks=VIEW)])
def test_reprs_of_results_fit_a_line(make_context: Any, name: str, copy: bool) -> None:
    ctx = make_context(name)
    ctx.decode(words(20))
    arrays = ctx.kv(0, copy=copy)
    shown: list[Any] = [ctx, ctx.model, ctx.cells(), arrays, *arrays.layers, arrays.window]
    shown += [arrays.recurrent, *(arrays.recurrent.layers if arrays.recurrent else ())]
    shown += [ctx.sequences(), ctx.kv(1)]
    for one in shown:
        assert "\n" not in repr(one)
        assert len(repr(one)) < 160 + len(ctx.model.path), one
    if name == "llama":
        view = "" if copy else " view"
        n_layer, heads = ctx.model.n_layer, ctx.model.n_head_kv
        size = arrays.layers[0].keys.shape[2]
        assert repr(arrays) == (
            f"<SequenceKV: 20 tokens at 0..19, {n_layer} layers, K 20x{heads}x{size} float32{view}>"
        )
        assert repr(ctx.cells()) == "<CellTable: 20 cells of 1 sequences>"
        assert repr(ctx.kv(1)).startswith("<SequenceKV: 0 tokens, ")


def test_a_repr_survives_foreign_objects() -> None:
    for junk in (None, 5, "abc", [1, 2], np.zeros((2, 2)), np.float32(1)):
        repr(SequenceKV(junk, junk, junk, junk, junk, junk))  # type: ignore[arg-type]
        repr(SequenceKV(np.arange(2), [junk]))  # type: ignore[list-item]
        repr(LayerKV(junk, junk))  # type: ignore[type-var]
        repr(RecurrentState(junk, junk))  # type: ignore[arg-type]
        repr(LayerState(junk, junk))  # type: ignore[arg-type]
