"""What a report says of a prompt: true of the prompt and the known ones as they were then."""

from __future__ import annotations

from pathlib import Path

import pytest

from pykvcache import LlamaContext, LlamaModel, PrefixCache
from support.models import EXACT, make_model

BASE = list(range(5, 45))


@pytest.fixture
def context(model_folder: Path) -> LlamaContext:
    model = LlamaModel(make_model("llama", model_folder))
    return LlamaContext(model, n_ctx=256, n_seq_max=4, n_threads=1, **EXACT)


def test_it_compares_with_the_sequence_that_agrees_most(context: LlamaContext) -> None:
    """What most can be taken from may agree less: here the other one is not evaluated yet."""
    with context, PrefixCache(context, block_size=4) as cache:
        evaluated = cache.sequence([*BASE[:10], *range(50, 80)])
        evaluated.evaluate()
        waiting = cache.sequence([*BASE[:20], 45, 46])
        new = cache.sequence([*BASE[:20], 47, 48])
        assert new.reuse.live == 10
        assert new.reuse.first_difference == 20
        said = "20 tokens are those of a sequence in use, of which it has evaluated 10"
        assert new.reuse.reason.endswith(said)
        waiting.evaluate()
        newer = cache.sequence([*BASE[:20], 49])
        assert newer.reuse.live == 20
        piece = context.model.token_to_piece(45, special=True).decode()
        assert newer.reuse.reason.endswith(f"the nearest known prompt has {piece!r}")
        del evaluated


def test_it_is_of_the_prompt_as_it_was(context: LlamaContext) -> None:
    with context, PrefixCache(context, block_size=4) as cache:
        with cache.sequence(BASE) as first:
            first.evaluate()
        with cache.sequence([*BASE[:21], 50, 51]) as other:
            said = other.reuse
            assert said.reason.startswith("token 21, after ")
            assert other.reuse == said
        one = cache.sequence([*BASE[:21], 50, 51])
        one.truncate(3)
        one.append([60, 61, 62])
        cache.clear()
        assert one.reuse.reason == said.reason
        assert one.reuse.first_difference == 21


def test_after_the_model_was_closed_it_names_ids(context: LlamaContext) -> None:
    with context, PrefixCache(context, block_size=4) as cache:
        with cache.sequence(BASE) as first:
            first.evaluate()
        one = cache.sequence([*BASE[:21], 50])
        context.model.close()
        assert one.reuse.reason == f"token 21 is 50: the nearest known prompt has {BASE[21]}"
