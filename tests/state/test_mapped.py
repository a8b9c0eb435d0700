"""Facts of a loaded state stay readable after its file was truncated."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from pykvcache import SequenceState
from pykvcache.state import ContextState
from state.kit import WORDS, cells_of, next_logits

if TYPE_CHECKING:
    from conftest import ContextFactory

pytestmark = pytest.mark.skipif(os.name == "nt", reason="a mapped file cannot be cut there")


def cut(path: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(0)


def facts(state: SequenceState | ContextState) -> list[str]:
    """All that is known without keys and values."""
    facts = [repr(state), repr(state.metadata), repr(state.fingerprint), str(state.n_tokens)]
    if isinstance(state, SequenceState):
        facts += [repr(state.tokens), repr(state.positions), str(state.first), str(len(state))]
    else:
        facts += [repr(state.tokens), repr(dict(state.firsts))]
    return facts


def test_facts_do_not_lie_in_the_file(make_context: ContextFactory, tmp_path: Path) -> None:
    """Reading what was cut away would end the process."""
    ctx = make_context("llama")
    ctx.decode(WORDS[:50])
    ctx.copy_kv_cache_seq(0, 1)
    ctx.save_sequence(tmp_path / "one", 0, WORDS[:50], {"a": 1})
    ctx.save_context(tmp_path / "all", {0: WORDS[:50]})
    one = ctx.load_sequence(tmp_path / "one", 2)
    everything = ctx.load_context(tmp_path / "all")
    before = facts(one), facts(everything)
    cut(tmp_path / "one")
    cut(tmp_path / "all")
    assert (facts(one), facts(everything)) == before


def test_not_mapped_nothing_lies_there(make_context: ContextFactory, tmp_path: Path) -> None:
    ctx = make_context("llama")
    ctx.decode(WORDS[:50])
    held = cells_of(ctx, 0)
    ctx.save_sequence(tmp_path / "one", 0, WORDS[:50])
    ctx.save_context(tmp_path / "all")
    want = next_logits(ctx)
    one = ctx.load_sequence(tmp_path / "one", 0, mapped=False)
    everything = ctx.load_context(tmp_path / "all", mapped=False)
    cut(tmp_path / "one")
    cut(tmp_path / "all")
    ctx.clear_kv_cache()
    ctx.restore_sequence(one, 0)
    assert cells_of(ctx, 0) == held
    ctx.restore_context(everything)
    assert cells_of(ctx, 0) == held
    assert np.array_equal(next_logits(ctx), want)


def test_flags_are_true_or_false(make_context: ContextFactory, tmp_path: Path) -> None:
    ctx = make_context("llama")
    ctx.decode(WORDS[:5])
    with pytest.raises(TypeError, match="sync must be True or False"):
        ctx.save_sequence(tmp_path / "one", 0, sync=1)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
    ctx.save_sequence(tmp_path / "one", 0)
    with pytest.raises(TypeError, match="mapped must be True or False"):
        ctx.load_sequence(tmp_path / "one", 0, mapped=0)  # type: ignore[arg-type]
