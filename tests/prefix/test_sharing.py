"""Blocks do not depend on how large a context is, nor on how its cells are laid out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memory.kit import Fresh, Make, apart, words
from pykvcache import PrefixCache

SIZE = 8
OPTIONS: tuple[dict[str, Any], ...] = (
    {"n_ctx": 256, "n_seq_max": 1},
    {"n_ctx": 1024, "n_seq_max": 4},
    {"n_ctx": 1024, "n_seq_max": 2, "kv_unified": False},
    {"n_ctx": 512, "n_seq_max": 2, "swa_full": False},
    {"n_ctx": 1024, "n_seq_max": 4, "kv_unified": False, "swa_full": False},
)


@pytest.mark.parametrize("writer", range(len(OPTIONS)))
@pytest.mark.parametrize("name", ["gemma3", "jamba"])
def test_contexts_share_a_folder(
    name: str, writer: int, make_context: Make, fresh_logits: Fresh, tmp_path: Path
) -> None:
    """Every one reads all that another one wrote: where a prompt went on, and after it."""
    text, both = words(1, 90), {"block_size": SIZE, "tiers": [tmp_path], "tier_seconds": 20}
    with PrefixCache(make_context(name, **OPTIONS[writer]), **both) as cache:
        with cache.sequence(text) as sequence:
            sequence.logits()
            answer = list(sequence.generate(3))
        assert cache.flush(30)
    for at, options in enumerate(OPTIONS):
        with PrefixCache(make_context(name, **options), **both) as cache:
            prompt = [*text, *answer[:2], *words(at, 4)]
            with cache.sequence(prompt) as sequence:
                assert sequence.reuse.evaluated == 4
                assert apart(sequence.logits(), fresh_logits(name, prompt)) < 1e-2
