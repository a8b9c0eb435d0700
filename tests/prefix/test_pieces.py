"""What branches have in common of the block in which they part is kept once."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from memory.kit import CASES, Case, apart
from prefix.accounts import check_accounts
from pykvcache import LlamaContext, PrefixCache
from pykvcache.errors import ArgumentError
from pykvcache.prefix import pieces
from pykvcache.prefix.pieces import Buffer, Cells, Joined, Pieces, arrays_of
from pykvcache.prefix.policies import LRU
from pykvcache.prefix.runs import Run
from pykvcache.prefix.stores import MemoryStore

Make = Callable[..., LlamaContext]
SIZE = 16
SERVED = [case for case in CASES if case.info.can_cache]


def words(seed: int, n: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(5, 56, n).tolist()
    return found


def use(cache: PrefixCache, prompt: list[int]) -> None:
    with cache.sequence(prompt) as sequence:
        sequence.evaluate()


TRUNK = words(1, 80)
#: They part in the middle of blocks, some of them where others have parted; two end there.
BRANCHES = [
    TRUNK[:60],
    TRUNK[:40] + words(2, 30),
    TRUNK[:40] + words(3, 30),
    TRUNK[:44] + words(4, 30),
    TRUNK[:35] + words(5, 30),
    TRUNK[:35] + words(5, 3) + words(6, 5),
    TRUNK[:58],
    TRUNK[:52] + words(7, 5),
]


def cells_kept(cache: PrefixCache) -> int:
    """Return how many cells all blocks and tails take together."""
    ram = cache._ram
    cells = [x for run in ram.tree.runs() if not run.is_checkpoint for x in run.payloads]
    cells += [tail.buffer for tail in ram._tails.values()]
    memory = {id(x): x.nbytes for x in arrays_of(cells)}
    return sum(memory.values()) // cache._ctx.native.block_bytes()


def distinct(prompts: list[list[int]]) -> int:
    return len({tuple(prompt[: i + 1]) for prompt in prompts for i in range(len(prompt))})


@pytest.mark.parametrize("order", range(4))
def test_each_token_of_a_tree_is_kept_once(order: int, make_context: Make) -> None:
    ctx = make_context("llama", n_ctx=512, n_seq_max=3)
    prompts = [BRANCHES[i] for i in np.random.default_rng(order).permutation(len(BRANCHES))]
    with PrefixCache(ctx, block_size=SIZE) as cache:
        for i in range(len(prompts)):
            use(cache, prompts[i])
            assert cells_kept(cache) == distinct(prompts[: i + 1])
            check_accounts(cache)


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_logits_are_right_whatever_leaves(case: Case, make_context: Make) -> None:
    fresh = make_context(case.name, n_seq_max=1)
    ctx = make_context(case.name, **(case.options | {"n_seq_max": 3}))
    rng = np.random.default_rng(2)
    prompts = [[token % (case.n_vocab - 7) + 5 for token in one] for one in BRANCHES]
    expected = []
    for prompt in prompts:
        fresh.clear_kv_cache()
        fresh.decode(prompt)
        expected.append(fresh.logits())
    with PrefixCache(ctx, block_size=SIZE, policy="lru") as cache:
        n_joined = 0
        for _ in range(3):
            for i in rng.permutation(len(prompts)):
                use(cache, prompts[i])
            runs = list(cache._ram.tree.runs())
            n_joined += sum(isinstance(run.payloads[0], Joined) for run in runs)
            for i in rng.permutation(len(prompts)):
                with cache.sequence(prompts[i]) as sequence:
                    sequence.park()
                    assert apart(sequence.logits(), expected[i]) < case.tolerance
                ends = [run for run in cache._ram.tree.runs() if run.is_evictable]
                with cache._pool.hold():
                    if ends:
                        cache._ram.tree.remove(ends[rng.integers(len(ends))])
                check_accounts(cache)
        assert n_joined or not ctx.native.block_bytes()
        cache.clear()
        assert cache._ram._pieces.saved == 0


def test_a_parked_sequence_keeps_what_it_began_with(make_context: Make) -> None:
    ctx = make_context("llama", n_ctx=512, n_seq_max=3)
    fresh = make_context("llama", n_seq_max=1)
    fresh.decode(BRANCHES[1])
    with PrefixCache(ctx, block_size=SIZE) as cache:
        for prompt in BRANCHES[:3]:
            use(cache, prompt)
        sequence = cache.sequence(BRANCHES[1])  # parked: nothing was evaluated
        cache.clear()
        check_accounts(cache)
        assert cache._ram._in_use, "what it is to begin with counts"
        assert apart(sequence.logits(), fresh.logits()) < 1e-3
        sequence.close()
        cache.clear()
        assert not cache._ram._in_use


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_shared_blocks_are_whole_in_tiers(name: str, make_context: Make) -> None:
    store = MemoryStore(max_bytes=1 << 24)
    ctx = make_context(name, n_seq_max=3)
    with PrefixCache(ctx, block_size=SIZE, tiers=[store]) as cache:
        for prompt in BRANCHES:
            use(cache, prompt)
        for prompt in BRANCHES:  # written from memory, too: parked, all of it is known
            cache.sequence(prompt).close()
        assert cache.flush(60)
    fresh = make_context(name, n_seq_max=1)
    other = make_context(name, n_seq_max=3)
    with PrefixCache(other, block_size=SIZE, tiers=[store], tier_seconds=60) as cache:
        for prompt in BRANCHES:
            fresh.clear_kv_cache()
            fresh.decode(prompt)
            with cache.sequence(prompt) as sequence:
                assert apart(sequence.logits(), fresh.logits()) < 1e-3
                assert sequence.reuse.evaluated < SIZE + 1
            check_accounts(cache)


def test_what_comes_from_tiers_shares_too(make_context: Make) -> None:
    store = MemoryStore(max_bytes=1 << 24)
    ctx = make_context("llama", n_ctx=512, n_seq_max=3)
    prompts = [prompt[: len(prompt) // SIZE * SIZE] for prompt in BRANCHES]
    with PrefixCache(ctx, block_size=SIZE, tiers=[store]) as cache:
        for prompt in prompts:
            use(cache, prompt)
        assert cache.flush(60)
    with PrefixCache(ctx, block_size=SIZE, tiers=[store], tier_seconds=60) as cache:
        for prompt in prompts:
            assert cache.prefetch(prompt).wait(60)
        assert cells_kept(cache) == distinct(prompts)
        check_accounts(cache)


@pytest.mark.parametrize("options", [{}, {"flash_attn": "disabled"}], ids=["rows", "columns"])
def test_copied_cells_are_those_of_the_context(options: dict[str, str], make_context: Make) -> None:
    ctx = make_context("qwen2vl", n_ctx=256, **options)
    ctx.decode(words(1, 40))
    native = ctx.native
    layout, cell = native.block_layout(), native.block_bytes()

    def cells(first: int, n: int) -> Buffer:
        out = np.empty(cell * n, np.uint8)
        assert native.get_block(0, first, n, out)
        return out

    whole, out = cells(3, 20), np.zeros(cell * 12, np.uint8)
    layout.copy_cells(whole, 4, 5, out, 0)
    layout.copy_cells(whole, 9, 7, out, 5)
    assert (out == cells(7, 12)).all()


def test_cells_that_are_not_there_are_not_copied(make_context: Make) -> None:
    native = make_context("llama").native
    layout, cell = native.block_layout(), native.block_bytes()
    a, b = np.zeros(cell * 8, np.uint8), np.zeros(cell * 4, np.uint8)
    for first, count, at in ((0, 5, 0), (5, 4, 0), (0, 1, 4), (-1, 1, 0), (0, -1, 0), (0, 1, -1)):
        with pytest.raises((ValueError, OverflowError)):
            layout.copy_cells(a, first, count, b, at)
    with pytest.raises(ArgumentError, match="no cells of"):
        layout.copy_cells(a[:-1], 0, 1, b, 0)
    assert not b.any()


@pytest.mark.parametrize("size", [16, 128])
def test_short_beginnings_are_not_worth_it(
    size: int, make_context: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    ctx = make_context("llama", n_ctx=1024, n_seq_max=3)
    with PrefixCache(ctx, block_size=size) as cache:
        least = max(-(-pieces._LEAST_BYTES // ctx.native.block_bytes()), size // 16)
        assert 1 < least < size
        trunk = words(8, 2 * size)
        for n, is_shared in ((least - 1, False), (least, True)):
            cache.clear()
            for seed in (1, 2):
                use(cache, trunk[: size + n] + words(seed, size))
            assert (cache._ram._pieces.saved > 0) is is_shared


@pytest.mark.parametrize("is_chain", [False, True])
def test_overhead_is_counted(is_chain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    cell, n, size = 100, 1000, 64

    def copy(data: Buffer, first: int, count: int, out: Buffer, at: int) -> None:
        out[at * cell : (at + count) * cell] = data[first * cell : (first + count) * cell]

    shared = Pieces(copy)
    kept: list[Cells] = []
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        n_whole = 0
        for i in range(n):
            if not is_chain or i % 20 == 0:
                theirs: Cells = np.empty(cell * size, np.uint8)
                n_whole += 1
            same = 30 + (i % 20 if is_chain else 0)  # each goes on a little further than the last
            rest = np.empty(cell * (size - same), np.uint8)
            mine, theirs = shared.join(rest, size, theirs, size, same)
            kept += [mine, theirs] if not is_chain or i % 20 == 0 else [mine]
            theirs = mine if is_chain else theirs
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    # The array of what was a whole block counts as that of a block.
    counted = len(kept) * cell * size - shared.saved + 120 * n_whole + 8 * len(kept)
    assert 0.9 * counted <= taken <= counted


def test_pieces_are_cut_when_what_used_most_of_them_leaves() -> None:
    def copy(data: Buffer, first: int, count: int, out: Buffer, at: int) -> None:
        out[at : at + count] = data[first : first + count]

    for order in itertools.permutations(range(4)):
        shared = Pieces(copy)
        base = np.arange(16, dtype=np.uint8)
        texts = {
            0: base,
            1: np.r_[base[:10], 101:107].astype(np.uint8),
            2: np.r_[base[:10], 101:104, 201:204].astype(np.uint8),
            3: base[:4],
        }
        cells: dict[int, Cells] = {0: texts[0]}
        for i, (other, same) in enumerate([(0, 10), (1, 13), (0, 4)], 1):
            n = len(texts[other])
            cells[i], cells[other] = shared.join(
                texts[i][same:], len(texts[i]), cells[other], n, same
            )
        for gone in order:
            shared.leave(cells.pop(gone))
            for i, left in cells.items():
                assert (shared.whole(left, len(texts[i])) == texts[i]).all()
                assert isinstance(left, Joined)
                for piece, _ in left.parts:
                    assert piece.data[1] == max(piece.used)
        assert shared.saved == 0


class Raising(LRU):
    """Raises once as a block leaves."""

    is_due = False

    def removing(self, run: Run, n_blocks: int) -> None:
        if self.is_due:
            self.is_due = False
            raise RuntimeError("not now")
        super().removing(run, n_blocks)


def test_a_policy_that_raises_as_a_shared_block_leaves(make_context: Make) -> None:
    ctx = make_context("llama", n_ctx=512, n_seq_max=3)
    policy = Raising()
    with PrefixCache(ctx, block_size=SIZE, policy=policy) as cache:
        for prompt in BRANCHES:
            use(cache, prompt)
        policy.is_due = True
        with pytest.raises(RuntimeError, match="not now"):
            cache.clear()
        cache.stats()
        check_accounts(cache)
        for prompt in BRANCHES:
            use(cache, prompt)
        check_accounts(cache)
        cache.clear()
        assert not cache.stats().ram_blocks


def test_no_memory_for_a_piece_is_no_error(
    make_context: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore(max_bytes=1 << 24)
    ctx = make_context("llama", n_ctx=512, n_seq_max=3)
    prompts = [TRUNK[:24] + words(seed, 8) for seed in (2, 3)]
    with PrefixCache(ctx, block_size=SIZE, tiers=[store]) as cache:
        for prompt in prompts:
            use(cache, prompt)
        assert cache.flush(60)

    def fail(*_: object) -> Buffer:
        raise MemoryError

    with PrefixCache(ctx, block_size=SIZE, tiers=[store], tier_seconds=60) as cache:
        cache.sequence(prompts[0]).close()
        with monkeypatch.context() as patch:
            patch.setattr(Pieces, "part", fail)
            with cache.sequence(prompts[1]) as sequence:
                assert sequence.reuse.evaluated == 1
        check_accounts(cache)
        assert cache.stats().ram_blocks == 3
        assert not cache._ram._pieces.saved


def test_what_a_parked_sequence_took_from_a_tier_counts(make_context: Make) -> None:
    store = MemoryStore(max_bytes=1 << 24)
    ctx = make_context("llama", n_ctx=512, n_seq_max=3)
    prompts = [TRUNK[:24] + words(seed, 8) for seed in range(2, 8)]
    with PrefixCache(ctx, block_size=SIZE, tiers=[store]) as cache:
        for prompt in prompts:
            use(cache, prompt)
        assert cache.flush(60)
    with PrefixCache(ctx, block_size=SIZE, tiers=[store], tier_seconds=60) as cache:
        sequences = [cache.sequence(prompt) for prompt in prompts]  # parked on what was loaded
        used = sum(size for _, size in cache._ram._in_use.values())
        assert used == (len(prompts) - 1) * SIZE * ctx.native.block_bytes()
        for sequence in sequences:
            sequence.close()
        assert not cache._ram._in_use


def test_tails_count_towards_their_quarter_without_what_they_share(make_context: Make) -> None:
    ctx = make_context("llama", n_ctx=512, n_seq_max=3)
    cell = ctx.native.block_bytes()
    with PrefixCache(ctx, block_size=64, ram_bytes=4 * 50 * (8 * cell + 2_000)) as cache:
        for seed in range(50):
            use(cache, TRUNK[:50] + words(seed, 5))
        assert len(cache._ram._tails) == 50
        check_accounts(cache)
