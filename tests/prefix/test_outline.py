"""What is kept, as text and as a picture, and as metrics."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pykvcache import LlamaContext, PrefixCache
from pykvcache.errors import ClosedError

Make = Callable[..., LlamaContext]


def words(seed: int, n: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(5, 56, n).tolist()
    return found


def chats(ctx: LlamaContext) -> PrefixCache:
    """Two chats of one beginning, a third that is held, and one of a tenant."""
    cache = PrefixCache(ctx, block_size=8)
    trunk = words(1, 24)
    for more, space in (((2, 20), ""), ((3, 8), ""), ((4, 9), "tenant")):
        with cache.sequence(trunk + words(*more), namespace=space) as sequence:
            sequence.evaluate()
    return cache


def test_the_tree_says_what_is_kept(make_context: Make) -> None:
    cache = chats(make_context("llama"))
    pin = cache.pin(words(1, 24) + words(3, 8))
    tree = cache.tree()
    cell = cache.context.native.block_bytes()
    found = [(x.namespace, x.depth, x.start, x.n_tokens, x.n_blocks, x.is_held) for x in tree]
    assert found == [
        ("", 0, 0, 24, 3, True),
        ("", 1, 24, 16, 2, False),
        ("", 2, 40, 4, 0, False),
        ("", 1, 24, 8, 1, True),
        ("tenant", 0, 0, 32, 4, False),
        ("tenant", 1, 32, 1, 0, False),
    ]
    assert [x.uses for x in tree][:2] == [2, 0]
    assert all(x.n_bytes == x.n_tokens * cell for x in tree)
    assert sum(x.n_blocks for x in tree) == cache.stats().ram_blocks
    assert [x.namespace for x in cache.tree("tenant")] == ["tenant"] * 2
    lines = str(tree).splitlines()
    assert [line[: line.index("[")] for line in lines if "[" in line] == [
        *("└─ ", "   ├─ ", "   │  └─ ", "   └─ ", "└─ ", "   └─ ")
    ]
    assert "[0..23], 3 blocks" in lines[1]
    assert "held" in lines[1]
    assert "tail" in lines[3]
    pin.release()
    cache.clear()
    assert str(cache.tree()) == "(empty)"
    cache.close()
    with pytest.raises(ClosedError):
        cache.tree()


@pytest.mark.parametrize("name", ["gemma3", "mamba", "jamba", "qwen2vl"])
def test_every_memory_has_a_tree(name: str, make_context: Make) -> None:
    cache = chats(make_context(name))
    tree = cache.tree()
    assert sum(x.n_blocks for x in tree) == cache.stats().ram_blocks
    if name != "qwen2vl":
        assert "checkpoint" in str(tree)


def test_a_large_tree_is_cut_short(make_context: Make) -> None:
    cache = PrefixCache(make_context("llama"), block_size=1)
    for i in range(250):
        with cache.sequence([5 + i // 50, 60 + i]) as sequence:
            sequence.evaluate()
    text = str(cache.tree())
    assert len(text.splitlines()) < 210
    assert "more" in text.splitlines()[-1]
    pytest.importorskip("matplotlib")
    (axes,) = cache.plot().axes
    assert "are not shown" in axes.get_title()
    assert len(axes.patches) < 200


def test_the_picture_shows_every_part_once(make_context: Make) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'pykvcache[plot]'")
    cache = chats(make_context("llama"))
    with cache.sequence(words(1, 24) + words(3, 8)) as sequence:
        (axes,) = cache.plot().axes
        assert sequence.reuse.ram
    # (first row, rows, first token, tokens): the trunk is as high as all that follows it.
    boxes = [
        (round(p.get_y() + 0.45), round(p.get_height() + 0.1), p.get_x(), p.get_width())
        for p in axes.patches
    ]
    assert boxes == [
        (0, 2, 0, 24),
        (0, 1, 24, 16),
        (0, 1, 40, 4),
        (1, 1, 24, 8),
        (2, 1, 0, 32),
        (2, 1, 32, 1),
    ]
    colors = [p.get_facecolor()[:3] for p in axes.patches]
    assert sum(colors[0]) < sum(colors[1]), "used more often is darker"
    frames = [p.get_linewidth() > 1 for p in axes.patches]
    assert frames == [True, False, False, True, False, False]
    assert [bool(p.get_hatch()) for p in axes.patches] == [0, 0, 1, 0, 0, 1]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["''", "'tenant'"]
    assert "<svg" in cache.plot("tenant")._repr_svg_()  # type: ignore[attr-defined]
    cache.clear()
    (axes,) = cache.plot().axes
    assert [text.get_text() for text in axes.texts] == ["nothing is kept"]


def test_prometheus_reads_what_stats_says(make_context: Make) -> None:
    client = pytest.importorskip(
        "prometheus_client", reason="pip install 'pykvcache[prometheus]'", exc_type=ImportError
    )
    from pykvcache.prefix.prometheus import CacheCollector

    cache, other = chats(make_context("llama")), PrefixCache(make_context("llama"))
    registry = client.CollectorRegistry()
    collector = CacheCollector(cache, "a")
    collector.add(other, "b")
    registry.register(collector)
    with pytest.raises(ValueError, match="Duplicated"):  # each metric stands there once
        registry.register(CacheCollector(other, "c"))

    def value(name: str, **labels: str) -> float | None:
        found: float | None = registry.get_sample_value(name, {"cache": "a", **labels})
        return found

    stats = cache.stats()
    assert (stats.requests, stats.hits) == (3, 1)
    for field in ("requests", "hits", "stored", "removed"):
        assert value(f"pykvcache_{field}_total") == getattr(stats, field)
    for field in ("ram_bytes", "max_ram_bytes", "ram_blocks", "ram_checkpoints"):
        assert value(f"pykvcache_{field}") == getattr(stats, field)
    sources = ("live", "ram", "disk", "remote", "evaluated")
    counts = [value("pykvcache_prompt_tokens_total", source=source) for source in sources]
    assert counts == [getattr(stats, source) for source in sources]
    text = client.generate_latest(registry).decode()
    assert 'pykvcache_requests_total{cache="b"} 0.0' in text
    about = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(about) == len(set(about)) == 9
    for wrong, name in ((other, "a"), (other, "\ud800"), (None, "c"), (make_context("llama"), "c")):
        with pytest.raises((ValueError, TypeError), match=r"name|cache"):
            collector.add(wrong, name)  # type: ignore[arg-type]
    cache.close()
    assert value("pykvcache_requests_total") is None
    collector.add(PrefixCache(cache.context), "a")  # in the place of the one that was closed
    assert value("pykvcache_requests_total") == 0
    with pytest.raises(TypeError, match="name must be a str"):
        CacheCollector(other, 5)  # type: ignore[arg-type]
