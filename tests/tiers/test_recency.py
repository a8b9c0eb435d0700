"""What prompts use stays in every tier, and what is trimmed leaves what can be used."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from memory.kit import Case, Fresh, Make, apart, words
from pykvcache import LlamaContext, PrefixCache
from pykvcache.cli import main
from pykvcache.prefix.stores import BlockStore, MemoryStore
from pykvcache.prefix.stores.folder import block_cost
from stores.kinds import SHARED, STORES
from tiers.kit import SIZE, WAIT, clear_memory, evaluate

POPULAR = words(1, 41)


def reusable(ctx: LlamaContext, store: BlockStore, prompt: list[int]) -> int:
    with (
        PrefixCache(ctx, block_size=SIZE, tiers=[store], **WAIT) as cache,
        cache.sequence(prompt) as sequence,
    ):
        return sequence.reuse.disk + sequence.reuse.remote


@pytest.mark.parametrize("name", ["gemma3", "jamba"])
@pytest.mark.parametrize(
    ("ram", "keep"),
    [(0, None), (64 << 20, None), (64 << 20, 0)],
    ids=["read from the tier", "served from memory", "kept none of"],
)
def test_a_popular_prompt_stays_in_a_tier_that_is_full(
    ram: int, keep: int | None, name: str, make_context: Make
) -> None:
    """Reading was no use once: the prompt was first in, first out, however often it came."""
    ctx = make_context(name)
    with (
        MemoryStore() as probe,
        PrefixCache(ctx, block_size=SIZE, tiers=[probe], **WAIT) as cache,
        cache.sequence(POPULAR) as sequence,
    ):
        sequence.evaluate()
        sequence.close()
        assert cache.flush(60)
        room = 8 * sum(entry.size + 320 for entry in probe.entries())
    store = MemoryStore(room)
    with PrefixCache(ctx, block_size=SIZE, tiers=[store], ram_bytes=ram, **WAIT) as cache:
        for i in range(40):
            assert i % 5 or cache.flush(60)  # written, before it is read again
            with cache.sequence(words(10 + i, 41) if i % 5 else POPULAR) as sequence:
                sequence.evaluate()
                if i and not i % 5:
                    assert sequence.reuse.evaluated <= SIZE, i
                    sequence.close(keep=keep)
    assert store.counters.removed > 50
    assert reusable(ctx, store, POPULAR) >= 40 - SIZE


def trim(address: str, n_bytes: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "trim", address, str(n_bytes)]) == 0
    capsys.readouterr()


@pytest.mark.parametrize("where", SHARED)
def test_the_command_trims_what_was_used_longest_ago(
    where: str, make_context: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ctx = make_context("llama")
    prompts = [words(i, 41) for i in range(6)]
    with STORES[where].running(tmp_path) as kind:
        with PrefixCache(ctx, block_size=SIZE, tiers=[kind.open()], **WAIT) as cache:
            for i, prompt in enumerate((*prompts, *prompts[:2])):
                evaluate(cache, prompt)
                if where == "redis" and i in (4, 5):
                    time.sleep(1.05)  # its clock of uses has seconds
            cache._core.link.tiers[0].sealed.store.close()
        with kind.open() as store:
            sizes = [entry.size for entry in store.entries()]
        index = 0
        if where == "folder":  # it counts units of the disk, and its index
            sizes = [block_cost(size) for size in sizes]
            index = (Path(kind.address) / "index.sqlite").stat().st_size
        trim(kind.address, sum(sizes) * 2 // 5 + index, capsys)
        with kind.open() as store:
            left = [reusable(ctx, store, prompt) for prompt in prompts]
        assert left[:2] == [40, 40]
        assert left[2:5] == [0, 0, 0]


class Counting(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[bytes] = set()

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[bytearray]) -> int:  # type: ignore[override]
        n = super().get_into(keys, buffers)
        self.seen.update(keys[:n])
        return n


@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba", "mamba"])
def test_what_a_trim_leaves_can_be_used(name: str, make_context: Make, fresh_logits: Fresh) -> None:
    """Prompts that share beginnings, and stores of every size: more is never worse."""
    dice, base = random.Random(0), words(1, 60)
    prompts = [base[: dice.randrange(10, 60)] + words(10 + i, 20) for i in range(10)]
    ctx, store = make_context(name, n_ctx=1024), Counting()
    with PrefixCache(ctx, block_size=SIZE, tiers=[store], **WAIT) as cache:
        for prompt in (*prompts, *dice.choices(prompts, k=15)):
            with cache.sequence(prompt) as sequence:
                sequence.evaluate()
    size = sum(entry.size + 320 for entry in store.entries())
    evaluated = []
    for tenths in (10, 8, 6, 4, 2, 1):
        store.trim(size * tenths // 10)
        store.seen.clear()
        with PrefixCache(ctx, block_size=SIZE, tiers=[store], ram_bytes=0, **WAIT) as cache:
            cache._core.link.writers[0].offer = lambda chain: None  # type: ignore[method-assign]
            for prompt in prompts:
                with cache.sequence(prompt) as sequence:
                    assert apart(sequence.logits(), fresh_logits(name, prompt)) < 1e-2
            evaluated.append(cache.stats().evaluated)
            clear_memory(cache)
        if name == "llama":
            assert {entry.key for entry in store.entries()} == store.seen, "something is useless"
    assert evaluated == sorted(evaluated)
    assert evaluated[0] <= SIZE * len(prompts)
    assert Case(name).has_states
