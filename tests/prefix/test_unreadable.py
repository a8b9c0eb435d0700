"""Cells that cannot be read are not kept; nothing else is lost, and what is computed is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memory.kit import SERVED, Case, Fresh, Make, apart, words
from prefix.accounts import check_accounts
from pykvcache import PrefixCache
from pykvcache.errors import UnsupportedOperation
from pykvcache.prefix import tier_link
from pykvcache.prefix.cache import core_of
from pykvcache.prefix.memory import CacheMemory


def fail(*_: Any) -> Any:
    raise UnsupportedOperation("test", "it cannot be read")


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_cells_of_a_sequence_that_closes(
    case: Case, make_context: Make, fresh_logits: Fresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PrefixCache(make_context(case.name, **case.options), block_size=8) as cache:
        known, text = words(1, 40), [*words(1, 30), *words(2, 20)]
        cache.sequence(known).evaluate()
        with monkeypatch.context() as patch:
            patch.setattr(CacheMemory, "read", fail)
            with cache.sequence(text) as sequence:
                sequence.evaluate()
        check_accounts(cache)
        for prompt in (text, known):
            with cache.sequence([*prompt, 7]) as sequence:
                expected = fresh_logits(case.name, [*prompt, 7])
                assert apart(sequence.logits(), expected) < case.tolerance


@pytest.mark.parametrize("case", [c for c in SERVED if c.has_states], ids=str)
def test_cells_that_came_out_of_a_tier(
    case: Case,
    make_context: Make,
    fresh_logits: Fresh,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The request that waited for them holds nothing of them."""
    both: dict[str, Any] = {"block_size": 8, "tiers": [tmp_path], "tier_seconds": 20}
    text = words(1, 50)
    for fails in (False, True, False):
        with (
            PrefixCache(make_context(case.name, **case.options), **both) as cache,
            monkeypatch.context() as patch,
        ):
            if fails:
                patch.setattr(tier_link._LoadedCells, "read", fail)
            for end in (7, 8):
                with cache.sequence([*text, end]) as sequence:
                    expected = fresh_logits(case.name, [*text, end])
                    assert apart(sequence.logits(), expected) < case.tolerance
                check_accounts(cache)


@pytest.mark.parametrize("case", [c for c in SERVED if c.has_states], ids=str)
def test_memory_loses_what_a_search_counted_on(
    case: Case, make_context: Make, fresh_logits: Fresh, tmp_path: Path
) -> None:
    """The tier brings only blocks that memory lacked when the search began."""
    both: dict[str, Any] = {"block_size": 8, "tier_seconds": 20, "checkpoint_bytes": 0}
    known, text = words(1, 60), [*words(1, 45), *words(2, 20)]
    expected = fresh_logits(case.name, [*text, 7])
    with PrefixCache(make_context(case.name, **case.options), tiers=[tmp_path], **both) as cache:
        with cache.sequence(text) as sequence:
            sequence.evaluate()
        assert cache.flush(30)
    with PrefixCache(make_context(case.name, **case.options), tiers=[tmp_path], **both) as cache:
        with cache.sequence(known) as sequence:
            sequence.evaluate()
        core = core_of(cache)
        with core.pool:
            sequence = core.open([*text, 7])
            core.seek(sequence._request)
        search = sequence._request.search
        assert search is not None
        assert search.done.wait(30)
        cache.forget(known)
        with core.pool:
            core.settle(sequence._request)
        assert apart(sequence.logits(), expected) < case.tolerance
        check_accounts(cache)
        sequence.close()
        check_accounts(cache)
        with cache.sequence([*text, 7]) as sequence:
            assert apart(sequence.logits(), expected) < case.tolerance
