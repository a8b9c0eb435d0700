"""Ranges mean the same in every method that takes one; the table is in docs/ranges.md."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memory.kit import CASES, Bench
from pykvcache import LlamaContext
from pykvcache.errors import P1TooLarge, PositionError, SeqIdTooLarge, SequenceIdError

MakeBench = Callable[..., Bench]
Call = Callable[[LlamaContext, Any, Any], object]
BY_NAME = {str(case): case for case in CASES}
INT32_MAX = 2**31 - 1
DOCUMENT = Path(__file__).parents[2] / "docs" / "ranges.md"

#: Sequence 0 holds positions 0 to 6 and sequence 1 two tokens.
HELD = 7

RANGED: dict[str, Call] = {
    "copy_kv_cache_seq": lambda ctx, p0, p1: ctx.copy_kv_cache_seq(0, 1, p0, p1),
    "clear_kv_cache_seq": lambda ctx, p0, p1: ctx.clear_kv_cache_seq(0, p0, p1),
    "clear_kv_cache_seq of all": lambda ctx, p0, p1: ctx.clear_kv_cache_seq(None, p0, p1),
    "kv_cache_seq_add": lambda ctx, p0, p1: ctx.kv_cache_seq_add(0, p0, p1, 3),
    "kv_cache_seq_div": lambda ctx, p0, p1: ctx.kv_cache_seq_div(0, p0, p1, 2),
    "remove": lambda ctx, p0, p1: ctx.remove(0, p0, p1),
}
PREFIXED: dict[str, Callable[[LlamaContext, Any], object]] = {
    "copy_cache": lambda ctx, n: ctx.copy_cache(0, 1, n),
    "copy_prefix": lambda ctx, n: ctx.copy_prefix(0, 1, n),
}
COPIES = {"copy_kv_cache_seq", *PREFIXED}


@pytest.fixture
def ctx(make_context: Any) -> LlamaContext:
    one: LlamaContext = make_context("llama")
    one.decode([11, 12, 13, 14, 15, 16, 17])
    one.decode([21, 22], seq_id=1)
    return one


def held(ctx: LlamaContext) -> dict[int, list[int]]:
    """Positions by sequence."""
    table = ctx.cells()
    return {
        seq: sorted(table.pos[table.members[:, seq]].tolist())
        for seq in range(ctx.n_seq_max)
        if table.members[:, seq].any()
    }


BEFORE = {0: [0, 1, 2, 3, 4, 5, 6], 1: [0, 1]}


def test_every_method_with_a_range_is_here() -> None:
    takes = set()
    for name, method in inspect.getmembers(LlamaContext, inspect.isfunction):
        if not name.startswith("_") and {"p0", "p1"} <= set(inspect.signature(method).parameters):
            takes.add(name)
    assert takes == {name.partition(" ")[0] for name in RANGED}


@pytest.mark.hazard("N62")
@pytest.mark.parametrize("name", RANGED)
def test_a_range_that_runs_backwards_is_refused(ctx: LlamaContext, name: str) -> None:
    for p0, p1 in [(1, 0), (7, 3), (60, 50), (INT32_MAX, 0)]:
        with pytest.raises(PositionError, match=rf"\[{p0}, {p1}\) runs backwards") as caught:
            RANGED[name](ctx, p0, p1)
        assert (caught.value.p0, caught.value.p1) == (p0, p1)
    assert held(ctx) == BEFORE


@pytest.mark.parametrize("name", RANGED)
def test_a_range_without_tokens_selects_nothing(ctx: LlamaContext, name: str) -> None:
    for p0, p1 in [(0, 0), (None, 0), (3, 3), (7, 7), (50, 60), (7, None), (50, INT32_MAX)]:
        assert RANGED[name](ctx, p0, p1) in (None, True)
        # A copy replaces, here by nothing.
        assert held(ctx) == ({0: BEFORE[0]} if name in COPIES else BEFORE)
        ctx.clear_kv_cache_seq(1)
        ctx.decode([21, 22], seq_id=1)


AFTER: dict[str, dict[int, list[int]]] = {
    "copy_kv_cache_seq": {0: BEFORE[0], 1: [4, 5, 6]},
    "clear_kv_cache_seq": {0: [0, 1, 2, 3], 1: [0, 1]},
    "clear_kv_cache_seq of all": {0: [0, 1, 2, 3], 1: [0, 1]},
    "kv_cache_seq_add": {0: [0, 1, 2, 3, 7, 8, 9], 1: [0, 1]},
    "kv_cache_seq_div": {0: [0, 0, 1, 1, 2, 2, 3], 1: [0, 1]},
    "remove": {0: [0, 1, 2, 3], 1: [0, 1]},
}


@pytest.mark.parametrize("name", RANGED)
@pytest.mark.parametrize("p1", [7, INT32_MAX, None])
def test_an_end_beyond_the_tokens_is_their_end(
    ctx: LlamaContext, name: str, p1: int | None
) -> None:
    begin = 0 if name == "kv_cache_seq_div" else 4
    assert RANGED[name](ctx, begin, p1) in (None, True)
    assert held(ctx) == AFTER[name]


@pytest.mark.parametrize("name", PREFIXED)
def test_a_length_is_clipped_to_the_sequence(ctx: LlamaContext, name: str) -> None:
    for n in (0, 1, 6, 7, 8, 999):
        PREFIXED[name](ctx, n)
        assert held(ctx) == {0: BEFORE[0], **({1: BEFORE[0][:n]} if n else {})}


@pytest.mark.parametrize(("name", "what"), [("copy_cache", "size"), ("copy_prefix", "n")])
def test_a_length_is_refused_by_its_name(ctx: LlamaContext, name: str, what: str) -> None:
    for value, kind in [(-1, PositionError), (None, TypeError), (1.0, TypeError)]:
        with pytest.raises(kind, match=f"^{what} "):
            PREFIXED[name](ctx, value)
    with pytest.raises(P1TooLarge):
        PREFIXED[name](ctx, 2**31)
    with pytest.raises(PositionError, match=r"^pos is -1"):
        ctx.can_resume(0, -1)
    with pytest.raises(TypeError, match=r"^pos must be"):
        ctx.can_resume(0, None)  # type: ignore[arg-type]
    assert held(ctx) == BEFORE


def test_the_sequence_is_looked_at_first(ctx: LlamaContext) -> None:
    for call in (ctx.copy_kv_cache_seq, ctx.remove, ctx.clear_kv_cache_seq):
        args = (0,) if call == ctx.copy_kv_cache_seq else ()
        with pytest.raises(SequenceIdError):
            call(*args, 99, 7, 3)  # type: ignore[operator]
        with pytest.raises(SeqIdTooLarge):
            call(*args, 2**31, 7, 3)  # type: ignore[operator]


@pytest.mark.hazard("N62")
@pytest.mark.parametrize("case", BY_NAME)
def test_every_memory_agrees_on_empty_and_reversed_ranges(case: str, bench: MakeBench) -> None:
    b = bench(BY_NAME[case])
    b.feed(0, 20)
    b.feed(1, 5)
    mrope = b.case.info.has_mrope
    for name, call in RANGED.items():
        with pytest.raises(PositionError):
            call(b.ctx, 5, 4)
        if not (mrope and name.startswith("kv_cache_seq")):
            assert call(b.ctx, 50, 60) in (None, True), name
        if name in COPIES:
            b.held[1] = b.held[1][:0]
            b.check()
            b.feed(1, 5)
    for prefix in PREFIXED.values():
        prefix(b.ctx, 0)
        b.held[1] = b.held[1][:0]
        b.check()
        b.feed(1, 5)
    b.check()


def test_the_table_names_every_method() -> None:
    named = set(re.findall(r"^\| `(\w+)\(", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE))
    assert {name.partition(" ")[0] for name in RANGED} | set(PREFIXED) <= named
