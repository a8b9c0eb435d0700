"""What `tree` and `plot` show: all that is kept, and nothing else."""

from __future__ import annotations

import pytest

from memory.kit import SERVED, Case, Make, words
from pykvcache import PrefixCache
from pykvcache.errors import ClosedError

SIZE = 8


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_the_nodes_are_what_is_kept(case: Case, make_context: Make) -> None:
    ctx = make_context(case.name, **(case.options | {"n_seq_max": 2}))
    with PrefixCache(ctx, block_size=SIZE) as cache:
        assert str(cache.tree()) == "(empty)"
        trunk, texts = words(1, 30), dict[str, list[list[int]]]()
        for space in ("", "other"):
            texts[space] = [trunk + words(seed, 20) for seed in (2, 3)]
            for text in texts[space]:
                with cache.sequence(text, namespace=space) as sequence:
                    sequence.logits()
        used = cache.sequence([*texts["other"][0], 7], namespace="other")
        view = cache.tree()
        assert {node.namespace for node in view} == set(texts)
        for space, prompts in texts.items():
            nodes = list(cache.tree(space))
            assert nodes == [node for node in view if node.namespace == space]
            # Parents come first, and each node goes on where its parent ends.
            ends: list[int] = []
            for node in nodes:
                del ends[node.depth :]
                assert node.start == (ends[-1] if ends else 0)
                ends.append(node.start + node.n_tokens)
            assert sum(node.n_tokens for node in nodes) == len(
                {tuple(text[: n + 1]) for text in prompts for n in range(len(text))}
            )
        stats = cache.stats()
        assert sum(node.n_blocks for node in view) == stats.ram_blocks
        assert sum(node.has_checkpoint for node in view) == stats.ram_checkpoints
        assert sum(node.n_bytes for node in view) <= stats.ram_bytes
        held = [node for node in view if node.is_held]
        assert held
        assert {node.namespace for node in held} == {"other"}
        lines = str(view).splitlines()
        assert len(lines) == len(view) + 2, "a line each, and the two namespaces"
        assert sum("held" in line for line in lines) == len(held)
        used.close()
        assert not any(node.is_held for node in cache.tree())
    with pytest.raises(ClosedError):
        cache.tree()


def test_the_picture_has_a_bar_for_each_node(make_context: Make) -> None:
    pytest.importorskip("matplotlib")
    with PrefixCache(make_context("llama"), block_size=SIZE) as cache:
        cache.plot()  # of nothing
        for seed in (2, 3):
            with cache.sequence([*words(1, 30), *words(seed, 20)]) as sequence:
                sequence.logits()
        figure = cache.plot()
        (axes, *_) = figure.axes
        assert len(axes.patches) >= len(cache.tree())
        stats = cache.stats()
        texts = [text.get_text() for text in figure.findobj(lambda one: hasattr(one, "get_text"))]
        assert any(f"{stats.ram_blocks} blocks of {SIZE} tokens" in text for text in texts)
