"""The meaning of whole sequences: copies, removals, and what a state cannot do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from memory.kit import CASES, WHOLE_ONLY, Bench, Case
from pykvcache.errors import UnsupportedOperation

MakeBench = Callable[..., Bench]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
INT32_MAX = 2**31 - 1


@every_case
def test_an_empty_source_empties_the_destination(case: Case, bench: MakeBench) -> None:
    b = bench(case).with_two()
    b.ctx.copy_kv_cache_seq(3, 1)
    b.held[1] = []
    b.check()
    b.feed(1, 9)
    b.ctx.copy_kv_cache_seq(2, 1, 0, 5)
    b.held[1] = []
    b.check()
    b.ctx.copy_kv_cache_seq(2, 3)
    b.ctx.copy_cache(2, 0, 1)
    b.held[0] = []
    b.positions()
    b.feed(0, 10)
    b.feed(1, 10)
    b.check()


@every_case
def test_a_copy_to_itself_does_nothing(case: Case, bench: MakeBench) -> None:
    b = bench(case).with_two()
    for p0, p1 in [(None, None), (0, 20), (3, 7), (0, 1), (30, 40)]:
        b.ctx.copy_kv_cache_seq(0, 0, p0, p1)
        b.ctx.copy_kv_cache_seq(3, 3, p0, p1)
    b.ctx.copy_cache(1, 1, 3)
    b.check()


@every_case
def test_a_range_that_covers_everything_is_a_whole_copy(case: Case, bench: MakeBench) -> None:
    b = bench(case).with_two()
    for p0, p1 in [(0, 20), (None, 20), (0, None), (0, 21), (0, 256), (0, 1024), (0, INT32_MAX)]:
        b.ctx.copy_kv_cache_seq(0, 2, p0, p1)
        b.held[2] = b.held[0].copy()
        b.check(2)


@every_case
def test_a_covering_removal_always_succeeds(case: Case, bench: MakeBench) -> None:
    for p0, p1 in [(None, None), (0, None), (None, 20), (0, 20), (0, 21), (0, INT32_MAX)]:
        b = bench(case).with_two()
        assert b.ctx.clear_kv_cache_seq(0, p0, p1) is True
        b.held[0] = []
        b.check()
        assert b.ctx.clear_kv_cache_seq(0, p0, p1) is True
        b.feed(0, 9)
        b.check()


@pytest.mark.hazard("M2")
@every_case
def test_all_sequences_can_be_removed_at_once(case: Case, bench: MakeBench) -> None:
    b = bench(case).with_two()
    b.ctx.copy_kv_cache_seq(0, 3)
    for p0, p1 in [(None, None), (0, None), (0, 20), (None, 1000)]:
        assert b.ctx.clear_kv_cache_seq(None, p0, p1) is True
        b.held = {}
        b.positions()
        b.feed(0, 20)
        b.feed(2, 7)
        b.check()
        assert b.ctx.clear_kv_cache_seq() is True
        b.held = {}
        b.feed(0, 18)
        b.feed(1, 3)
        b.positions()


@pytest.mark.parametrize("case", WHOLE_ONLY, ids=str)
def test_operations_that_a_state_cannot_do_change_nothing(case: Case, bench: MakeBench) -> None:
    b = bench(case).with_two()
    for p0, p1 in [(5, None), (0, 19), (None, 1), (19, None), (3, 7), (19, 20), (1, 500)]:
        assert b.ctx.clear_kv_cache_seq(0, p0, p1) is False
        assert b.ctx.clear_kv_cache_seq(None, p0, p1) is False
        with pytest.raises(UnsupportedOperation, match="whole"):
            b.ctx.copy_kv_cache_seq(0, 1, p0, p1)
        with pytest.raises(UnsupportedOperation, match="whole"):
            b.ctx.copy_kv_cache_seq(0, 3, p0, p1)
        b.positions()
    with pytest.raises(UnsupportedOperation):
        b.ctx.copy_cache(0, 1, 19)
    # A removal from all that only one of them cannot do removes nothing of the others.
    assert b.ctx.clear_kv_cache_seq(None, 0, 15) is False
    b.check()


@every_case
def test_an_empty_sequence_can_be_resumed_at_its_start_only(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    b.feed(1, 10)
    for _ in range(2):
        assert b.ctx.can_resume(0, 0) is True
        assert not any(b.ctx.can_resume(0, pos) for pos in (1, 5, 10, 11, 2**31 - 1))
        # Also where another one has been.
        b.feed(0, 8)
        assert b.ctx.clear_kv_cache_seq(0)
        b.held[0] = []
    b.check()
