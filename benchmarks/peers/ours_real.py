"""Our caches on a real model with sliding windows: tokens evaluated again."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.peers.ours_reuse import cell_bytes
from benchmarks.peers.primitives import Answer
from benchmarks.peers.prompts import words
from pykvcache import LlamaContext, LlamaModel, LlamaSequence, PrefixCache, Sampler

GREEDY = Sampler(temperature=0)


class Real:
    """The requests of the group."""

    model: LlamaModel | None
    ctx: LlamaContext | None

    def _counted(self, sequence: LlamaSequence) -> int:
        """Return the number of tokens evaluated until a sequence has logits."""
        ctx = sequence.context
        before = ctx.tokens_evaluated
        sequence.logits()
        return ctx.tokens_evaluated - before

    def do_another_question(self, n: int, ram_mib: int) -> Answer:
        """Ask two questions about a text of n tokens."""
        assert self.ctx is not None
        draw = random.Random(4)
        text = words(draw, n)
        with PrefixCache(self.ctx, ram_bytes=ram_mib << 20) as cache:
            for _ in range(2):
                with cache.sequence(text + words(draw, 12)) as one:
                    evaluated = self._counted(one)
        return {"evaluated": evaluated, "total": n + 12, "ideal": 12}

    def do_shared_prefix(self, n_prompts: int, n_shared: int, n_own: int) -> Answer:
        """Cache prompts that share a prefix, and count bytes."""
        assert self.ctx is not None
        draw = random.Random(5)
        shared, evaluated = words(draw, n_shared), 0
        with PrefixCache(self.ctx, ram_bytes=1 << 30) as cache:
            for _ in range(n_prompts):
                with cache.sequence(shared + words(draw, n_own)) as one:
                    evaluated += self._counted(one)
            taken = cache.stats().ram_bytes
        distinct = n_shared + n_prompts * n_own
        return {
            "evaluated": evaluated,
            "ideal": distinct,
            "distinct": distinct,
            "total": n_prompts * (n_shared + n_own),
            "bytes": taken,
            "cell_bytes": cell_bytes(self.ctx),
        }

    def do_folder(self, n: int, folder_mib: int) -> Answer:
        """Ask two questions about a text, with only a folder tier in between."""
        assert self.ctx is not None
        from pykvcache.prefix.stores import FolderStore

        draw = random.Random(6)
        text = words(draw, n)
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(2):
                store = FolderStore(folder, max_bytes=folder_mib << 20)
                with (
                    LlamaContext(self.ctx.model, **self.shape()) as ctx,
                    PrefixCache(ctx, tiers=[store], tier_seconds=60) as cache,
                    cache.sequence(text + words(draw, 12)) as one,
                ):
                    evaluated = self._counted(one)
        return {"evaluated": evaluated, "total": n + 12, "ideal": 12}

    def do_take_back(self, n: int, n_back: int) -> Answer:
        """Save a sequence, load it into a new context, and truncate its last tokens."""
        assert self.ctx is not None
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "one.kv"
            with LlamaSequence(self.ctx, words(random.Random(7), n)) as one:
                one.evaluate()
                one.save(path)
            with (
                LlamaContext(self.ctx.model, **self.shape()) as ctx,
                LlamaSequence.load(ctx, path) as one,
            ):
                one.truncate(n - n_back)
                evaluated = self._counted(one)
        return {"evaluated": evaluated, "total": n - n_back, "ideal": 1}

    def do_rewind(self, n_turns: int, n_new: int) -> Answer:
        """Chat, save, load into a new context, undo the last turn and continue."""
        assert self.ctx is not None
        draw = random.Random(8)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "chat.kv"
            with LlamaSequence(self.ctx, words(draw, 700)) as one:
                for _ in range(n_turns):
                    begin = len(one.tokens)
                    one.append(words(draw, 40))
                    list(one.generate(60, sampler=GREEDY))
                one.save(path)
            with (
                LlamaContext(self.ctx.model, **self.shape()) as ctx,
                LlamaSequence.load(ctx, path) as one,
            ):
                one.truncate(begin)
                one.append(words(draw, n_new))
                evaluated = self._counted(one)
        return {"evaluated": evaluated, "total": begin + n_new, "ideal": n_new}

    def shape(self) -> dict[str, Any]:
        """Return the options of the open context."""
        assert self.ctx is not None
        return {"n_ctx": self.ctx.n_ctx, "n_seq_max": self.ctx.n_seq_max, "n_threads": 2}
