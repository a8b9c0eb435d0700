"""States of sparse attention: an index beside the cells, and what only its context knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memory.kit import EVERY_CASE, Case, Make, apart
from pykvcache import LlamaContext, LlamaModel, LlamaSequence, PrefixCache
from pykvcache.errors import NoKvCacheSlot, StateDamaged, StateError, UnsupportedOperation
from state.kit import MakeBench
from support.models import make_model
from support.raw_states import runs

INDEXED = tuple(case for case in EVERY_CASE if case.info.bounded and case.has_states)
UNKNOWN = tuple(case for case in EVERY_CASE if case.info.can_cache and not case.has_states)


def index_of(ctx: LlamaContext, state: np.ndarray[Any, Any], n: int) -> tuple[int, int]:
    """Return where the records of the index's cells begin in a state of n cells, and their size."""
    is_long = {part["part"]: part["extended"] for part in ctx.native.state_layout()}
    extension = [("ext", "<i4", 3)] if is_long["index"] else []
    record = np.dtype([("pos", "<i4"), ("n", "<u4"), *extension, ("seq", "<i4")])
    found = []
    for at in range(len(state) - record.itemsize * n):
        cells = state[at : at + record.itemsize * n].view(record)
        if (cells["n"] == 1).all() and (cells["pos"] == np.arange(n)).all():
            found.append(at)
    # The cells of attention come first.
    return found[is_long["attention"] == is_long["index"]], record.itemsize


@pytest.mark.hazard("N270")
@pytest.mark.parametrize("case", INDEXED, ids=str)
def test_an_index_of_other_cells_is_refused(case: Case, bench: MakeBench) -> None:
    """It says which cells to attend to by their number."""
    b = bench(case)
    b.with_two()
    state = b.ctx.get_state(0)
    at, size = index_of(b.ctx, state, 20)
    spoiled = state.copy()
    first, second = slice(at, at + 4), slice(at + size, at + size + 4)
    spoiled[first], spoiled[second] = state[second], state[first]
    with pytest.raises(StateDamaged, match="index"):
        b.ctx.set_state(spoiled, 1)
    fewer = state.copy()
    fewer[at - 4 : at] = np.frombuffer((19).to_bytes(4, "little"), np.uint8)
    with pytest.raises(StateError):
        b.ctx.set_state(fewer, 1)
    b.check()
    b.ctx.set_state(state, 1)
    b.held[1] = b.held[0][:20]
    b.check(n=2)


@pytest.mark.hazard("N271")
@pytest.mark.parametrize("case", [c for c in INDEXED if c.info.can_remove_partial], ids=str)
def test_a_state_past_the_end_of_the_context_is_refused(
    case: Case, bench: MakeBench, make_context: Make
) -> None:
    """A decode after such a position takes memory for all before it, or ends the process."""
    b = bench(case, n_ctx=2048)
    b.ctx.decode(b.prompt(400), seq_id=0)
    if not b.ctx.clear_kv_cache_seq(0, 10, 350):
        assert not case.swa_full
        return
    state = b.ctx.get_state(0)
    small = make_context(case.name, **(case.options | {"n_ctx": 256 if case.unified else 1024}))
    with pytest.raises(NoKvCacheSlot, match="position 350") as caught:
        small.set_state(state, 0)
    assert caught.value.n_cells == 256
    assert not small.sequences()


@pytest.mark.parametrize("case", UNKNOWN, ids=str)
def test_states_of_unknown_layout_stay_with_their_context(
    case: Case, bench: MakeBench, make_context: Make
) -> None:
    b = bench(case, n_seq_max=3)
    b.with_two()
    state = b.ctx.get_partial_state(0)
    b.feed(0, 30)
    b.ctx.set_partial_state(state)
    b.held[0] = b.held[0][:20]
    b.check(n=2)
    other = make_context(case.name, **case.options)
    for call in (
        lambda: other.native.set_blocks(0, [], state=b.ctx.native.get_state_part(0)),
        lambda: b.ctx.native.set_blocks(0, [], None),
        lambda: b.ctx.get_state(0),
        lambda: PrefixCache(b.ctx, tiers=["memory://"]),
    ):
        with pytest.raises((UnsupportedOperation, ValueError)):
            call()
    with pytest.raises(UnsupportedOperation, match="tiers"):
        PrefixCache(b.ctx, tiers=["/nowhere"])
    b.check(n=2)


@pytest.mark.parametrize("case", UNKNOWN, ids=str)
def test_a_parked_sequence_is_not_evaluated_again(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    tokens = b.prompt(40)
    sequence = LlamaSequence(b.ctx, tokens)
    row = sequence.logits()
    sequence.append([9])
    before = b.ctx.tokens_evaluated
    sequence.park()
    want = b.fresh([*tokens.tolist(), 9])
    assert apart(sequence.logits(), want) < case.tolerance
    assert b.ctx.tokens_evaluated - before == 1
    assert apart(row, b.fresh(tokens)) < case.tolerance


@pytest.mark.hazard("N246")
@pytest.mark.parametrize("wanted", ["q8_0", "f32"])
@pytest.mark.parametrize(("name", "sizes"), [("glm5_next", {}), ("qwen4exp", {"n_embd": 256})])
def test_rows_are_converted_as_the_graph_stores_them(
    name: str, sizes: dict[str, int], wanted: str, make_context: Make, model_folder: Path
) -> None:
    """The caches say of quantised keys that they are rotated; these graphs rotate none."""
    model = LlamaModel(make_model(name, model_folder, **sizes))
    tokens = np.random.default_rng(3).integers(5, 250, 24)
    kinds = ("f32", "q8_0")
    a, b = (
        make_context(model, type_k=t, type_v=t, flash_attn="enabled", n_seq_max=1)
        for t in (kinds if wanted == "q8_0" else kinds[::-1])
    )
    a.decode(tokens)
    b.restore_sequence(a.sequence_state(0), 0, convert=True)
    for token in (7, 8, 9):
        for ctx in (a, b):
            ctx.decode([token])
        assert apart(a.logits(), b.logits()) < 0.5


@pytest.mark.hazard("N247")
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    "case", [c for c in INDEXED if not c.info.can_remove_partial and c.swa_full], ids=str
)
def test_a_state_with_gaps_is_refused(case: Case, whole: bool, bench: MakeBench) -> None:
    """The search for a block covers as many positions as there are cells."""
    b = bench(case, n_ctx=2048)
    b.with_two()
    state = b.ctx.get_state(None if whole else 0).copy()
    extended = {p["part"]: p["extended"] for p in b.ctx.native.state_layout()}
    for run in runs(b.ctx, state, whole=whole):
        at = run.offset
        for _ in range(run.n_cells if run.what == "cells" else 0):
            pos, n_ids = state[at : at + 8].view(np.uint32)
            state[at : at + 4] = np.frombuffer((int(pos) + 400).to_bytes(4, "little"), np.uint8)
            at += 8 + 12 * extended[run.part] + 4 * int(n_ids)
    with pytest.raises(StateDamaged, match="gaps"):
        b.ctx.set_state(state) if whole else b.ctx.set_state(state, 0)
    b.check()
