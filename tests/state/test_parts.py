"""Raw states as arrays and back: `split_state`, `set_parts`, and what that refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from memory.kit import CASES, Case
from pykvcache.errors import StateDamaged, StateLayoutMismatch
from state.kit import WORDS
from support.raw_states import runs


def arrays(ctx: Any, state: Any, *, whole: bool) -> list[list[Any]]:
    """Return the arguments of `set_parts` for a state."""
    result = []
    for part, streams in zip(
        ctx.native.state_layout(), ctx.native.split_state(state, whole), strict=True
    ):
        of_part = []
        for positions, ext, members, places in streams:
            rows = [state[at : at + size] for at, size in places] or [state[:0]] * len(part["rows"])
            of_part.append((positions, None if ext is None else ext.reshape(-1), members, rows))
        result.append(of_part)
    return result


@pytest.mark.parametrize("case", [case for case in CASES if case.has_states], ids=str)
def test_parts_lie_where_the_layout_says_and_make_the_same_state(
    case: Case, make_context: Any
) -> None:
    ctx, other = make_context(case.name, **case.options), make_context(case.name, **case.options)
    ctx.decode(WORDS[:12])
    ctx.decode(WORDS[:5], seq_id=1)
    for seq_id in (0, None):
        whole = seq_id is None
        state = ctx.get_state(seq_id)
        assert len(state) == ctx.state_size(seq_id)
        places = [
            place
            for streams in ctx.native.split_state(state, whole)
            for *_, of_cells in streams
            for place in of_cells
        ]
        documented = [
            (r.offset, r.size) for r in runs(ctx, state, whole=whole) if r.what != "cells"
        ]
        assert places == documented
        other.native.set_parts(seq_id, arrays(ctx, state, whole=whole), None)
        assert other.get_state(seq_id).tobytes() == state.tobytes()


def wrong_arrays(parts: list[list[Any]]) -> dict[str, tuple[Any, type[Exception]]]:
    """Name, and parts of a whole context that do not fit together."""
    ((positions, ext, (offsets, ids), rows),) = parts[0]
    short, nobody = [rows[0][:-1], *rows[1:]], (np.zeros_like(offsets), ids[:0])
    decreasing = offsets.copy()
    decreasing[1] = len(ids) + 1

    def with_cells(*cells: Any) -> list[list[Any]]:
        return [[cells], *parts[1:]]

    members = (offsets, ids)
    return {
        "no part": ([], StateLayoutMismatch),
        "no stream": ([[], *parts[1:]], StateLayoutMismatch),
        "short rows": (with_cells(positions, ext, members, short), StateLayoutMismatch),
        "no rows": (with_cells(positions, ext, members, rows[1:]), StateLayoutMismatch),
        "None as rows": (with_cells(positions, ext, members, [None, *rows[1:]]), ValueError),
        "fewer offsets": (with_cells(positions, ext, (offsets[:-1], ids), rows), ValueError),
        "fewer ids": (with_cells(positions, ext, (offsets, ids[:-1]), rows), StateDamaged),
        "decreasing": (with_cells(positions, ext, (decreasing, ids), rows), StateDamaged),
        "no sequences": (with_cells(positions, ext, nobody, rows), StateDamaged),
        "foreign id": (with_cells(positions, ext, (offsets, ids + 300), rows), StateLayoutMismatch),
        "None as positions": (with_cells(None, ext, members, rows), TypeError),
        "negative position": (with_cells(positions - 50, ext, members, rows), StateDamaged),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "qwen2vl"])
def test_arrays_that_do_not_fit_are_refused_with_nothing_changed(
    name: str, make_context: Any
) -> None:
    ctx = make_context(name)
    ctx.decode(WORDS[:12])
    before = ctx.get_state()
    cases = wrong_arrays(arrays(ctx, before, whole=True))
    if name == "qwen2vl":
        (((positions, _, members, rows),),) = arrays(ctx, before, whole=True)
        cases["no extensions"] = ([[(positions, None, members, rows)]], ValueError)
    for what, (parts, error) in cases.items():
        with pytest.raises(error):
            ctx.native.set_parts(None, parts, None)
        assert ctx.get_state().tobytes() == before.tobytes(), what
    with pytest.raises(StateDamaged, match="begin at -1"):
        ctx.native.set_parts(None, arrays(ctx, before, whole=True), [(0, -1)])
    assert ctx.get_state().tobytes() == before.tobytes()
