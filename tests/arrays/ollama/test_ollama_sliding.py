"""The sliding window: what it drops, what can be resumed, and what a cut may not pull it over."""

from __future__ import annotations

from typing import Any

import pytest
from ollama_support import add_shift, fill, forward, made, seen

from pykvcache.arrays import CausalCache, ChunkedAttentionCache, SWACache, SWAMemCache
from pykvcache.errors import CacheValueError, NotSupported, PositionError


def held(cache: Any, positions: int = 40) -> list[int]:
    """Return from which positions sequence 0 can be resumed."""
    return [pos for pos in range(positions) if cache.can_resume(0, pos)]


# A.1 updateSlidingWindow: cells below lowest - memory go, and become free.
def test_sliding_window_drops_what_lies_below_the_memory() -> None:
    cache = made(SWAMemCache(2, 4), max_batch=2)
    fill(cache, 10)
    # The last batch began at 9: 5 and above are kept, so that 7 is the first to be resumed.
    assert held(cache) == [7, 8, 9, 10]
    # 4 + 2 cells serve a sequence of any length.
    fill(cache, 30, start=10)
    assert held(cache) == [37, 38, 39]


# A.1 updateSlidingWindow: the lowest position of the sequence in the batch counts.
def test_sliding_window_is_that_of_the_lowest_position_in_the_batch() -> None:
    cache = made(SWACache(2), max_batch=4)
    fill(cache, 4, step=4)
    _, mask = forward(cache, [6, 4, 5], [0, 0, 0], [6, 4, 5])
    assert sum(entry == 0 for entry in mask[1]) == 3
    # 2 is still there for the token at 4; the token at 6 sees 4, 5 and itself.
    assert held(cache, 8) == [4, 5, 6, 7]
    assert [sum(entry == 0 for entry in row) for row in mask] == [3, 3, 3]


# A.1 updateSlidingWindow: sequences outside the batch slide too, to their last position + 1.
def test_sliding_window_moves_for_sequences_outside_the_batch() -> None:
    cache = made(SWACache(3), sequences=2, max_batch=8)
    fill(cache, 8, step=8)
    assert held(cache, 9) == list(range(9))
    forward(cache, [0], [1], [0])
    # The memory is 4 here: tokens 4 to 7 of sequence 0 are left for a token at 8.
    assert held(cache, 9) == [7, 8]


# A.1 updateSlidingWindow: the history covers only what the batch's window needs.
def test_history_covers_only_the_window_of_the_batch() -> None:
    cache = made(SWAMemCache(1, 8), capacity=32, max_batch=1)
    fill(cache, 8)
    assert forward(cache, [8], [0], [8]) == ([7, 8], [[0, 0]])
    # Sequences that are not in the batch do not widen it.
    cache = made(SWAMemCache(1, 4), sequences=2, capacity=32, max_batch=4)
    fill(cache, 3, sequence=1)
    fill(cache, 3)
    assert forward(cache, [9], [1], [3])[0] == [2, 0, 1, 2, 9]
    assert forward(cache, [9], [0], [3])[0] == [2, 9, 9]


# A.1 updateSlidingWindow: a shared cell is free when no sequence is left.
def test_sliding_window_drops_only_its_own_reference() -> None:
    cache = made(SWACache(2), sequences=2, max_batch=4)
    fill(cache, 3, step=3)
    cache.copy_prefix(0, 1, 3)
    fill(cache, 6, start=3)
    assert seen(cache, 1, 3) == [0.5, 1, 2]


# A.1 CanResume: no sliding means always, for unknown sequences too.
def test_can_resume_without_sliding_is_always_true() -> None:
    for cache in (CausalCache(), ChunkedAttentionCache(2), SWACache(16)):
        made(cache)
        assert cache.can_resume(7, 0)
        fill(cache, 3)
        assert cache.can_resume(0, 12)


# A.1 CanResume: unknown or empty sequences cannot be resumed in a sliding cache.
def test_can_resume_needs_a_sequence_in_a_sliding_cache() -> None:
    cache = made(SWACache(4), max_batch=4)
    assert not cache.can_resume(0, 0)
    fill(cache, 4)
    cache.remove(0, 0)
    assert not cache.can_resume(0, 0)
    cache.copy_prefix(0, 1, 4)
    assert not cache.can_resume(1, 0)


# A.1 CanResume: max(0, pos - window) >= first stored and pos <= last + 1.
def test_can_resume_needs_the_whole_window() -> None:
    cache = made(SWAMemCache(3, 5), capacity=32, max_batch=1)
    fill(cache, 4)
    assert held(cache) == [0, 1, 2, 3, 4]
    fill(cache, 6, start=4)
    # Kept: 4 to 9.
    assert held(cache) == [7, 8, 9, 10]
    # A.1 the window moves at the start of a batch, not with the tokens that it drops.
    cache.remove(0, 8)
    assert held(cache) == [7, 8]


@pytest.mark.parametrize(
    ("seq", "pos", "error"), [(-1, 0, CacheValueError), (0, -1, PositionError)]
)
def test_can_resume_refuses_negative_numbers(seq: int, pos: int, error: type) -> None:
    with pytest.raises(error):
        made(CausalCache()).can_resume(seq, pos)


# A.1 the documented hole: a removal that pulls the window over dropped tokens is refused.
def test_remove_that_pulls_the_window_over_dropped_tokens_is_refused() -> None:
    cache = made(SWAMemCache(3, 5, add_shift), capacity=32, max_batch=1)
    fill(cache, 12)
    # Kept: 6 to 11. Without 2 of them the next token, at 10, attends back to 7.
    with pytest.raises(NotSupported, match="at 8 attends back to 5, but the tokens below 6"):
        cache.remove(0, 7, 11)
    cache.remove(0, 7, 9)
    assert seen(cache, 0, 10) == [0.5, 7, 8, 9]


# A.1 the documented hole: tokens that were dropped may be removed, and a copy inherits the hole.
def test_dropped_tokens_count_where_they_are() -> None:
    cache = made(SWAMemCache(3, 5, add_shift), sequences=2, capacity=32, max_batch=1)
    fill(cache, 12)
    cache.remove(0, 1, 4)
    assert seen(cache, 0, 9) == [0.5, 6, 7, 8]
    cache.remove(0, 9)
    # 1 to 9 gone, of which 1 and 2 were dropped long ago: 0 is missing before the next token.
    with pytest.raises(NotSupported, match="below 1 were dropped"):
        cache.remove(0, 1, 8)
    # Position 0 itself may go with them: then nothing is missing.
    cache.remove(0, 0, 8)
    assert seen(cache, 0, 1) == [0, 0.5]


# A.1 the documented hole, for copies.
def test_copies_know_what_was_dropped() -> None:
    cache = made(SWAMemCache(2, 4, add_shift), sequences=2, capacity=32, max_batch=1)
    fill(cache, 8)
    cache.copy_prefix(0, 1, 8)
    cache.remove(0, 0)
    with pytest.raises(NotSupported, match="dropped"):
        cache.remove(1, 3, 7)
    cache.remove(1, 4, 7)
