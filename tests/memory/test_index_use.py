"""MiniMax M3 asks its index in some contexts, and attends to all cells in the others.

Flash attention rounds, and by rounding the index may choose other cells: what is compared here is
decoded in the same parts.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memory.kit import Make
from pykvcache import LlamaContext, LlamaModel, LlamaSequence, PrefixCache
from pykvcache.errors import StateLayoutMismatch
from pykvcache.prefix.stores import FolderStore

FLASH = {"flash_attn": "enabled", "n_ctx": 768}
ASKS = {
    "one sequence": FLASH | {"n_seq_max": 1},
    "streams": FLASH | {"n_seq_max": 3, "kv_unified": False},
}
DENSE = {
    "one pool": FLASH | {"n_seq_max": 3, "kv_unified": True},
    "no flash attention": {"n_ctx": 768, "n_seq_max": 1, "flash_attn": "disabled"},
    "streams without it": {"n_ctx": 768, "n_seq_max": 3, "kv_unified": False},
}
SIZE = 16
NEAR = 0.1
# Keys and values of the two ways differ from the third layer on.
LAYERS = 4


@pytest.fixture
def make_minimax(make_context: Make, model: Callable[..., LlamaModel]) -> Make:
    return partial(make_context, model("minimax_m3", n_layer=LAYERS))


def words(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 58, n).tolist()


def in_parts(ctx: LlamaContext, parts: list[list[int]], seq_id: int = 0) -> Any:
    ctx.clear_kv_cache()
    for part in parts:
        ctx.decode(part, seq_id=seq_id)
    return ctx.logits().copy()


def test_each_way_computes_something_else(make_minimax: Make) -> None:
    prompt = words(1, 100)
    asks = [in_parts(make_minimax(**ASKS[name]), [prompt]) for name in ASKS]
    dense = [in_parts(make_minimax(**DENSE[name]), [prompt]) for name in DENSE]
    assert np.abs(asks[0] - asks[1]).max() < NEAR
    assert np.abs(dense[0] - dense[1]).max() < 0.1 > np.abs(dense[0] - dense[2]).max()
    assert np.abs(asks[0] - dense[0]).max() > 0.5


@pytest.mark.parametrize("name", DENSE)
def test_a_context_that_leaves_the_index_out_says_so(
    name: str, make_minimax: Make, caplog: pytest.LogCaptureFixture
) -> None:
    for how, count in ((DENSE[name], 1), (ASKS["streams"], 0)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "pykvcache"):
            make_minimax(**how)
        mine = [one for one in caplog.records if one.name == "pykvcache"]
        assert len(mine) == count
        assert all("kv_unified=False" in one.getMessage() for one in mine)


@pytest.mark.parametrize("dense", DENSE)
@pytest.mark.parametrize("asks", ASKS)
def test_states_stay_where_they_are_right(
    asks: str, dense: str, make_minimax: Make, tmp_path: Path
) -> None:
    prompt = words(2, 90)
    pair = [make_minimax(**ASKS[asks]), make_minimax(**DENSE[dense])]
    for source, other in (pair, pair[::-1]):
        source.decode(prompt)
        other.decode(words(3, 5))
        before = other.logits().copy()
        with pytest.raises(StateLayoutMismatch, match="index"):
            other.restore_sequence(source.sequence_state(0), 0)
        with pytest.raises(StateLayoutMismatch, match="index"):
            other.restore_sequence(source.sequence_state(0), 0, convert=True)
        with pytest.raises(StateLayoutMismatch, match="index"):
            other.restore_context(source.context_state())
        assert np.array_equal(other.logits(), before)
        assert other.kv_cache_seq_pos_max(0) == 4
        for ctx in pair:
            ctx.clear_kv_cache()
        path = tmp_path / "talk"
        with LlamaSequence(source, prompt) as sequence:
            sequence.save(path)
        with pytest.raises(StateLayoutMismatch, match="index"):
            LlamaSequence.load(other, path)
        with pytest.raises(StateLayoutMismatch, match="index"):
            LlamaSequence.load(other, path, convert=True)


@pytest.mark.parametrize("way", ["one sequence", "one pool"])
def test_a_state_that_does_not_say_how_it_was_computed_is_refused(
    way: str, make_minimax: Make
) -> None:
    """Like states of versions without this entry, which looked alike in both modes."""
    ctx = make_minimax(**{**ASKS, **DENSE}[way])
    ctx.decode(words(2, 90))
    said = ctx.sequence_state(0)
    old = {name: value for name, value in said.fingerprint.rope.items() if name != "index"}
    assert len(old) == len(said.fingerprint.rope) - 1
    with pytest.raises(StateLayoutMismatch, match="not recorded"):
        replace(said.fingerprint, rope=old, rope_digest="0" * 64).check(said.fingerprint)
    odd = replace(said.fingerprint, rope=old | {"index": 7.0})
    with pytest.raises(StateLayoutMismatch, match="not recorded"):
        odd.check(said.fingerprint)


def test_contexts_that_use_the_index_continue_from_each_others_states(make_minimax: Make) -> None:
    prompt, rest = words(4, 90), words(5, 8)
    one = make_minimax(**ASKS["one sequence"])
    other = make_minimax(**ASKS["streams"])
    one.decode(prompt)
    other.decode(words(6, 40))
    other.restore_sequence(one.sequence_state(0), 2)
    for token in rest:
        one.decode([token])
        other.decode([token], seq_id=2)
        assert np.abs(one.logits() - other.logits()).max() < NEAR


def test_blocks_go_only_to_contexts_of_the_same_way(make_minimax: Make, tmp_path: Path) -> None:
    ways = {**ASKS, **DENSE}
    head = words(7, 6 * SIZE)
    found: dict[tuple[str, str], int] = {}
    for i, (writer, how) in enumerate(ways.items()):
        folder = tmp_path / str(i)
        ctx = make_minimax(**how)
        with PrefixCache(ctx, block_size=SIZE, tiers=[FolderStore(folder)]) as cache:
            with cache.sequence(head) as sequence:
                sequence.evaluate()
            cache.flush()
        for reader, there in ways.items():
            prompt = head + words(8, 9)
            ctx = make_minimax(**there)
            copy = tmp_path / f"{i} {reader}"
            shutil.copytree(folder, copy)
            tiers = [FolderStore(copy)]
            with (
                PrefixCache(ctx, block_size=SIZE, tiers=tiers, tier_seconds=60) as cache,
                cache.sequence(prompt) as sequence,
            ):
                n = sequence.reuse.disk
                found[writer, reader] = n
                fresh = make_minimax(**there)
                parts = [part for part in (prompt[:n], prompt[n:]) if part]
                assert np.abs(sequence.logits() - in_parts(fresh, parts)).max() < NEAR
    for (writer, reader), n in found.items():
        # Flash attention lays values out otherwise, too.
        if (writer in ASKS) != (reader in ASKS):
            assert n == 0, (writer, reader)
        if writer == reader or {writer, reader} <= ASKS.keys():
            assert n == len(head), (writer, reader)
