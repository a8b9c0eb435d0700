"""After copies, removals, keep and clear, sequences go on as fresh runs over what they hold.

Mostly close, not bit for bit: a cell elsewhere in the cache changes the order in which attention
adds. Where the same cells are computed again in the same shapes, the tests ask for equal bits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from memory.kit import CASES, PARTIAL, Bench, Case

MakeBench = Callable[..., Bench]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
partial_case = pytest.mark.parametrize("case", PARTIAL, ids=str)
unified_partial_case = pytest.mark.parametrize("case", [c for c in PARTIAL if c.unified], ids=str)


@every_case
def test_clear_and_redo_gives_the_same_bits(case: Case, bench: MakeBench) -> None:
    # An empty cache is filled from its first cell again, by the same graph.
    b = bench(case)
    tokens = b.prompt(40)
    b.ctx.decode(tokens)
    first = b.ctx.logits()
    b.ctx.copy_kv_cache_seq(0, 1)
    b.ctx.clear_kv_cache()
    b.positions()
    b.ctx.decode(tokens)
    np.testing.assert_array_equal(b.ctx.logits(), first)
    b.held[0] = tokens.tolist()
    b.check()


@every_case
def test_removing_a_sequence_and_redoing_it(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    b.feed(0, 20)
    b.feed(1, 20)
    for _ in range(3):
        assert b.ctx.clear_kv_cache_seq(0)
        b.held[0] = []
        b.positions()
        b.feed(0, 25)
    b.check(n=2)


@every_case
def test_a_whole_copy_continues_like_its_source(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    tokens = b.feed(0, 40)
    b.ctx.copy_kv_cache_seq(0, 1)
    b.held[1] = tokens.tolist()
    b.ctx.copy_cache(0, 2, 40)
    b.held[2] = tokens.tolist()
    b.ctx.copy_kv_cache_seq(2, 3, 0, 1000)
    b.held[3] = tokens.tolist()
    b.check(n=2)


@pytest.mark.hazard("N26")
@every_case
def test_forks_that_diverge_stay_apart(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    b.feed(0, 20)
    for dst in (1, 2, 3):
        b.ctx.copy_kv_cache_seq(dst - 1, dst)
        b.held[dst] = b.held[dst - 1].copy()
        b.feed(dst, 3)
        b.feed(dst - 1, 2)
    b.check()
    # Forks outlive their source.
    assert b.ctx.clear_kv_cache_seq(0)
    b.held[0] = []
    b.check(n=2)
    b.feed(0, 30)
    b.check()


@pytest.mark.hazard("M10")
@every_case
def test_a_copy_replaces_its_destination(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    b.feed(0, 20)
    b.feed(1, 33)
    b.ctx.copy_kv_cache_seq(0, 1)
    b.held[1] = b.held[0].copy()
    b.check(n=2)
    b.ctx.copy_kv_cache_seq(1, 0)
    b.held[0] = b.held[1].copy()
    b.check(n=2)


@every_case
def test_keep_leaves_one_sequence_in_every_mode(case: Case, bench: MakeBench) -> None:
    for kept in (0, 2):
        b = bench(case)
        for seq in range(4):
            b.feed(seq, 10 + seq)
        b.ctx.copy_kv_cache_seq(2, 3)
        b.ctx.kv_cache_seq_keep(kept)
        b.held = {kept: b.held[kept]}
        b.check()
        # What was dropped can be used anew, from position 0.
        for seq in range(4):
            b.feed(seq, 8)
        b.check()


@partial_case
def test_a_removed_tail_that_is_replayed_gives_the_same_bits(case: Case, bench: MakeBench) -> None:
    # The freed cells are the ones that the same tokens are put into again.
    b = bench(case)
    tokens = b.prompt(40)
    b.ctx.decode(tokens[:25])
    b.ctx.decode(tokens[25:])
    first = b.ctx.logits()
    assert b.ctx.clear_kv_cache_seq(0, 25)
    b.held[0] = tokens[:25].tolist()
    b.positions()
    b.ctx.decode(tokens[25:])
    np.testing.assert_array_equal(b.ctx.logits(), first)


@partial_case
@pytest.mark.parametrize("left", [39, 20, 1])
def test_a_rewound_sequence_continues_differently(case: Case, bench: MakeBench, left: int) -> None:
    b = bench(case)
    b.feed(1, 9)
    b.feed(0, 40)
    assert b.ctx.clear_kv_cache_seq(0, left)
    b.held[0] = b.held[0][:left]
    b.check()
    b.feed(0, 30)
    b.check()


@unified_partial_case
def test_a_prefix_copy_continues_from_its_end(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    tokens = b.feed(0, 40).tolist()
    b.feed(2, 11)
    b.ctx.copy_kv_cache_seq(0, 1, 0, 25)
    b.ctx.copy_cache(0, 2, 1)
    b.ctx.copy_kv_cache_seq(0, 3, None, 39)
    b.held |= {1: tokens[:25], 2: tokens[:1], 3: tokens[:39]}
    b.check(n=2)
    # The source may be cut below, and refilled, without the copies noticing.
    assert b.ctx.clear_kv_cache_seq(0, 10)
    b.held[0] = b.held[0][:10]
    b.feed(0, 35)
    b.check()


@pytest.mark.parametrize("case", [c for c in PARTIAL if not c.unified], ids=str)
def test_in_streams_a_prefix_is_a_copy_and_a_removal(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    tokens = b.feed(0, 40).tolist()
    b.ctx.copy_kv_cache_seq(0, 1)
    assert b.ctx.clear_kv_cache_seq(1, 25)
    b.held[1] = tokens[:25]
    b.check(n=2)


@every_case
def test_update_between_changes_nothing(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    b.ctx.kv_cache_update()
    b.feed(0, 20)
    b.ctx.kv_cache_update()
    b.ctx.copy_kv_cache_seq(0, 1)
    b.held[1] = b.held[0].copy()
    b.ctx.kv_cache_update()
    b.ctx.kv_cache_update()
    b.check()


@every_case
def test_a_pending_copy_has_the_source_as_of_the_call(case: Case, bench: MakeBench) -> None:
    # With streams the data moves later; changes of the source until then must not count.
    b = bench(case)
    tokens = b.feed(0, 20).tolist()
    b.ctx.copy_kv_cache_seq(0, 1)
    assert b.ctx.clear_kv_cache_seq(0)
    b.held = {1: tokens}
    b.feed(0, 30)
    b.check()
    b.ctx.copy_kv_cache_seq(1, 2)
    b.held[2] = b.held[1].copy()
    b.ctx.copy_kv_cache_seq(0, 1)
    b.held[1] = b.held[0].copy()
    b.check()


@every_case
def test_copies_in_a_row_before_a_decode(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    b.feed(0, 20)
    b.feed(1, 12)
    for src, dst in [(0, 2), (1, 0), (2, 1), (1, 3), (0, 2)]:
        b.ctx.copy_kv_cache_seq(src, dst)
        b.held[dst] = b.held[src].copy()
    b.check()
    b.ctx.copy_kv_cache_seq(0, 2)
    b.ctx.clear_kv_cache()
    b.held = {}
    b.feed(2, 15)
    b.feed(0, 15)
    b.check()
