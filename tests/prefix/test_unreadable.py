"""Cells that cannot be read are not kept; nothing else is lost, and what is computed is right."""

from __future__ import annotations

from typing import Any

import pytest

from memory.kit import SERVED, Case, Fresh, Make, apart, words
from prefix.accounts import check_accounts
from pykvcache import PrefixCache
from pykvcache.errors import UnsupportedOperation
from pykvcache.prefix.memory import CacheMemory


def fail(*_: Any) -> Any:
    raise UnsupportedOperation("test", "it cannot be read")


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_unreadable_cells_are_not_stored(
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
