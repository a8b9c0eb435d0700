"""Our prefix cache on prompts with shared prefixes."""

from __future__ import annotations

import mmap
import time
from typing import Any

import numpy as np

from benchmarks.harness import rotated
from benchmarks.peers.primitives import Answer
from benchmarks.peers.prompts import play, strangers
from pykvcache import LlamaContext, LlamaModel, LlamaSequence, PrefixCache, Sampler
from pykvcache.prefix.node import MemoryShape, Offer
from pykvcache.prefix.policies import DEFAULT
from pykvcache.prefix.tree import PrefixTree

CACHED, COPIED = "with a cache", "copying the blocks"
ALONE = (CACHED, "without", COPIED)


def places(n_bytes: int, n: int, *, is_new: bool) -> list[Any]:
    """Return memory for n blocks, new or already used."""
    if is_new:
        return [np.frombuffer(mmap.mmap(-1, n_bytes), np.uint8) for _ in range(n)]
    return [np.zeros(n_bytes, np.uint8) for _ in range(n)]


def copy(ctx: LlamaContext, sequence: LlamaSequence, blocks: list[Any], size: int = 64) -> None:
    """Copy all full blocks of a sequence."""
    cells = sequence._cells
    assert ctx.native.get_blocks(cells.ledger.seq_id, 0, size, blocks[: cells.n_fresh // size])


def cell_bytes(ctx: LlamaContext) -> int:
    """Return the bytes of all K and V of a token."""
    return ctx.native.block_bytes("attention") + ctx.native.block_bytes("window")


class Reuse:
    """The requests of the group."""

    model: LlamaModel | None
    ctx: LlamaContext | None

    def do_reuse(self, work: str, ram_mib: int, quick: bool = False) -> Answer:
        """Play a workload with a cache, or without one (-1)."""
        assert self.ctx is not None
        ctx = self.ctx
        cache = PrefixCache(ctx, ram_bytes=ram_mib << 20) if ram_mib >= 0 else None

        def ask(prompt: list[int], n: int) -> tuple[list[int], int]:
            greedy = Sampler(temperature=0)
            if cache is None:
                with LlamaSequence(ctx, prompt) as plain:
                    return list(plain.generate(n, sampler=greedy)), len(prompt)
            with cache.sequence(prompt) as one:
                return list(one.generate(n, sampler=greedy)), one.reuse.evaluated

        answer = play(work, ask, quick)
        answer["cell_bytes"] = cell_bytes(ctx)
        if cache is not None:
            answer["bytes"] = cache.stats().ram_bytes
            cache.close()
        return answer

    def do_strangers(self, ram_mib: int, n_prompts: int, n_tokens: int) -> Answer:
        """Seconds per token of prompts that share nothing, with a cache and without, in turns.

        Opening and closing a sequence is timed separately: it varies far less than a decode.
        Copying the blocks without a cache is the lower bound of any cache that keeps them. A cache
        without room for all of them is filled first: then its blocks reuse memory, and so do the
        copies; otherwise both write to new memory.
        """
        assert self.ctx is not None
        ctx = self.ctx
        took: dict[str, list[float]] = {}
        n_bytes = ctx.native.block_bytes() * 64
        n_blocks = n_tokens // 64 + 1
        is_new = ram_mib << 20 > 2 * n_prompts * n_blocks * n_bytes
        used = places(n_bytes, n_blocks, is_new=False)
        kept: list[list[Any]] = []

        def ask(prompt: list[int], how: str) -> None:
            if how == COPIED and is_new:
                kept.append(places(n_bytes, n_blocks, is_new=True))
            wall, own = time.perf_counter(), time.process_time()
            with cache.sequence(prompt) if how == CACHED else LlamaSequence(ctx, prompt) as one:
                ends = time.perf_counter() - wall
                n = 1 + sum(1 for _ in one.generate(16, sampler=Sampler(temperature=0)))
                if how == COPIED:
                    wall, own = time.perf_counter(), time.process_time()
                    copy(ctx, one, kept[-1] if is_new else used)
                    wall, own = time.perf_counter() - wall, time.process_time() - own
                closing = time.perf_counter()
            if how != COPIED:
                ends += time.perf_counter() - closing
                wall, own = time.perf_counter() - wall, time.process_time() - own
                took.setdefault(f"{how}, begin and close", []).append(ends / n)
            took.setdefault(how, []).append(wall / n)
            took.setdefault(f"{how}, processor", []).append(own / n)

        with PrefixCache(ctx, ram_bytes=ram_mib << 20) as cache:
            prompts = iter(strangers(100, n_tokens))
            while not is_new and not cache.stats().removed:
                with cache.sequence(next(prompts)) as one:
                    one.evaluate()
            for turn in range(n_prompts):
                prompt = next(prompts)
                for how in rotated(ALONE, turn):
                    ask(prompt, how)
        return took

    def do_restore_blocks(self, n: int, block_size: int = 64, slices: int = 9) -> Answer:
        """Return the seconds to restore sequence 0 into 1, from one state and from blocks."""
        assert self.ctx is not None
        native = self.ctx.native
        blocks = []
        for first in range(0, n, block_size):
            block: Any = np.empty(native.block_bytes() * block_size, np.uint8)
            assert native.get_block(0, first, block_size, block)
            blocks.append((block, block_size, block_size))
        state = native.get_state(0, None)
        times: dict[str, list[float]] = {"whole": [], "blocks": []}
        for _ in range(slices + 1):
            for how, took in times.items():
                native.seq_rm(1, None, None)
                begin = time.perf_counter()
                if how == "whole":
                    native.set_state(1, [state], None)
                else:
                    native.set_blocks(1, blocks, known_values=True)  # like a cache
                took.append(time.perf_counter() - begin)
        native.seq_rm(1, None, None)
        return {how: sorted(took[1:])[len(took) // 2 - 1] for how, took in times.items()}

    def do_lookup(self, n_blocks: int = 100_000, slices: int = 200) -> Answer:
        """Return the seconds to look up a prompt of 4,096 tokens among many blocks of 64."""
        draw = np.random.default_rng(0)
        prompts = [draw.integers(0, 32_000, 4096) for _ in range(n_blocks // 64 + 1)]
        tree = filled(prompts)
        assert tree.n_blocks >= n_blocks
        took = []
        for i in range(slices):
            ids = prompts[i * 7 % len(prompts)].astype(np.int32)
            begin = time.perf_counter()
            match = tree.match(ids.tobytes())
            resume = tree.resume(match, match.n)
            took.append(time.perf_counter() - begin)
            assert resume.n == 4096
        return {"seconds": sorted(took)[slices // 2]}

    def do_lookup_new(self, n_blocks: int = 100_000, slices: int = 200) -> Answer:
        """Return the seconds of a lookup for a prompt that shares only the first token."""
        draw = np.random.default_rng(0)

        def prompt() -> Any:
            return np.concatenate([[1], draw.integers(5, 32_000, 4095)])

        tree = filled([prompt() for _ in range(n_blocks // 64 + 1)])
        took = []
        for _ in range(slices):
            tokens = prompt().astype("<u4").tobytes()
            begin = time.perf_counter()
            match = tree.match(tokens)
            resume = tree.resume(match, match.n)
            tree.use(match, resume)
            took.append(time.perf_counter() - begin)
            assert 1 <= resume.n < 64
        return {"seconds": sorted(took)[slices // 2]}


def filled(prompts: list[Any]) -> PrefixTree:
    """Return a tree of prompts without cells."""
    tree = PrefixTree(MemoryShape(64), DEFAULT, max_bytes=1 << 40)
    for ids in prompts:
        tokens = ids.astype("<u4").tobytes()
        match = tree.match(tokens)
        plan = tree.plan(match, Offer(len(ids)))
        assert plan is not None
        tree.insert(tokens, plan, match)
    return tree
