"""Copies of native objects: refused, or the same object by another name."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from binding.test_lifecycle import OPTIONS
from pykvcache import LlamaContext
from pykvcache.errors import ClosedError


def test_models_and_contexts_cannot_be_pickled_or_copied_deeply(model: Any) -> None:
    with LlamaContext(model("llama"), **OPTIONS) as ctx:
        for one in (ctx, model("llama"), ctx.native, model("llama").native):
            for clone in (pickle.dumps, copy.deepcopy):
                with pytest.raises(TypeError, match=r"pickle|cop"):
                    clone(one)


def test_a_shallow_copy_is_refused_or_the_same_context(model: Any) -> None:
    with LlamaContext(model("llama"), **OPTIONS) as ctx:
        try:
            twin = copy.copy(ctx)
        except TypeError:
            return
        twin.decode([5, 6])
        assert ctx.kv_cache_seq_pos_max(0) == 1
        twin.close()
        with pytest.raises(ClosedError):
            ctx.decode([5])


def test_init_can_be_called_again_and_begins_anew(model: Any) -> None:
    ctx = LlamaContext(model("llama"), **OPTIONS)
    ctx.decode([5, 6])
    ctx.__init__(model("mamba"), **OPTIONS)  # type: ignore[misc]
    assert ctx.memory_kind == "recurrent"
    assert ctx.kv_cache_seq_pos_max(0) == -1
    ctx.close()
