"""Finding what begins alike, against asking every key, and without it."""

from __future__ import annotations

import random
import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest

from pykvcache.prefix.alike import TokenKeys, common_tokens
from pykvcache.prefix.blocks import token_bytes
from pykvcache.prefix.events import EventLog
from pykvcache.prefix.ram import RamTier


@pytest.mark.parametrize("seed", range(4))
def test_what_is_found_is_what_asking_every_key_finds(seed: int) -> None:
    draw = random.Random(seed)
    # Few tokens, whose bytes are in another order than their numbers.
    tokens = [0, 1, 255, 256, 65536, 2**31 - 1]

    def text() -> bytes:
        return token_bytes([draw.choice(tokens) for _ in range(draw.randrange(6))])

    keys: TokenKeys[int] = TokenKeys()
    for step in range(600):
        if keys and draw.random() < 0.4:
            del keys[draw.choice(list(keys))]
        else:
            keys[text()] = step
        asked = text()
        best, n = keys.nearest(asked)
        assert n == common_tokens(best, asked)
        assert n == max((common_tokens(key, asked) for key in keys), default=0)
        assert best in keys or not keys
        begun = [key for key in keys if asked.startswith(key)]
        assert keys.beginnings(asked) == sorted(begun, key=len, reverse=True)
        longer = [key for key in keys if key.startswith(asked) and key != asked]
        found = keys.continuation(asked)
        assert found in longer or (found is None and not longer)


def calls_of_find(n_prompts: int, length: int) -> int:
    """How many calls looking up a new prompt makes, beside so many others that share a token."""
    rng = np.random.default_rng(1)
    ram = RamTier(8, 1 << 30, "lru", lambda space: b"root", EventLog(0))
    for _ in range(n_prompts):
        tokens = token_bytes(np.concatenate([[1], rng.integers(5, 30_000, length)]))
        ram.add(tokens, "", 1, lambda first, n, n_tail, skip: [np.empty(8, np.uint8)] * n)
    asked = token_bytes(np.concatenate([[1], rng.integers(5, 30_000, length)]))
    ram.find(asked, "", needs_rest=False)  # sorts
    count = 0

    def note(frame: FrameType, event: str, what: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        found = ram.find(asked, "", needs_rest=False)
    finally:
        sys.setprofile(before)
    assert found.n == 1
    return count


def test_a_new_prompt_is_not_compared_with_every_other() -> None:
    assert calls_of_find(600, 15) <= calls_of_find(6, 15) + 20
