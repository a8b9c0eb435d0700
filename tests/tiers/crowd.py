"""Some of several processes over the same tiers: ``python -m tiers.crowd MODEL TIERS SEED N MORE``.

Each runs N random steps over prompts that all of them draw from one pool, and compares what comes
with a fresh run. MORE is JSON: the bound of folders, a secret, and how many are forked once the
stores are made. The last line that each prints is JSON: what it did.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from memory.kit import apart
from pykvcache import BatchGenerator, LlamaContext, LlamaModel, PrefixCache
from pykvcache.errors import ClosedError
from pykvcache.prefix.stores import BlockStore, FolderStore, open_store
from support.models import EXACT

STEPS = {
    "one": 6,
    "grow": 3,
    "batch": 3,
    "clear": 1,
    "flush": 1,
    "fork": 0.7,
    "leave": 1,
    "new": 0.5,
}


def pool_of_prompts() -> list[list[int]]:
    """What all processes draw from: texts of which some begin alike."""
    rng = np.random.default_rng(0)
    texts: list[list[int]] = []
    for i in range(6):
        begin = texts[i // 2][:40] if i % 2 else []
        texts.append(begin + rng.integers(5, 56, 110 - len(begin)).tolist())
    return texts


class Member:
    """A process's cache, and a context beside it that knows what is right."""

    def __init__(
        self,
        model: LlamaModel,
        stores: list[BlockStore],
        rng: np.random.Generator,
        secret: str | None,
    ) -> None:
        self.model, self.rng, self.stores, self.secret = model, rng, stores, secret
        self.right = LlamaContext(model, n_ctx=256, n_threads=1, **EXACT)
        self.did: Counter[str] = Counter()
        self.pool = pool_of_prompts()
        self.open()

    def open(self) -> None:
        self.ctx = LlamaContext(self.model, n_ctx=512, n_seq_max=4, n_threads=1, **EXACT)
        self.cache = PrefixCache(
            self.ctx,
            block_size=8,
            ram_bytes=int(self.rng.choice([0, 20_000, 300_000])),
            tiers=self.stores,
            tier_seconds=[None, 0.05, 10][int(self.rng.integers(3))],
            secret=self.secret,
        )

    def close(self) -> None:
        for one in self.cache.stats().tiers:
            for name in (
                "read",
                "written",
                "rejected",
                "refused",
                "failed",
                "timed_out",
                "skipped",
            ):
                self.did[name] += getattr(one, name)
        self.cache.close()
        self.ctx.close()

    def prompt(self) -> list[int]:
        text = self.pool[int(self.rng.integers(len(self.pool)))]
        tail: list[int] = self.rng.integers(5, 56, int(self.rng.integers(1, 12))).tolist()
        return text[: int(self.rng.integers(10, len(text)))] + tail

    def fresh(self, tokens: list[int]) -> npt.NDArray[np.float32]:
        self.right.clear_kv_cache()
        self.right.decode(tokens)
        return self.right.logits()

    def look(self, sequence: Any) -> None:
        tokens = sequence.tokens.tolist()
        got = sequence.logits()
        worst = apart(got, self.fresh(tokens))
        assert worst < 1e-3, (worst, tokens, sequence.reuse)

    def step(self) -> None:
        names = list(STEPS)
        weights = np.array(list(STEPS.values()))
        name = str(self.rng.choice(names, p=weights / weights.sum()))
        self.did[name] += 1
        getattr(self, name)()

    def one(self) -> None:
        with self.cache.sequence(self.prompt()) as sequence:
            self.look(sequence)
            report = sequence.reuse
            self.did["from disk"] += report.disk
            self.did["from remote"] += report.remote
            self.did["evaluated"] += report.evaluated

    def grow(self) -> None:
        with self.cache.sequence(self.prompt()) as sequence:
            for _ in sequence.generate(4):
                pass
            self.look(sequence)
            with sequence.fork(len(sequence) // 2) as half:
                self.look(half)

    def batch(self) -> None:
        generator = BatchGenerator(self.cache)
        prompts = [self.prompt() for _ in range(4)]
        handles = [generator.submit(one, 3, logprobs=1) for one in prompts]
        if self.rng.random() < 0.3:
            handles[-1].abort()
        generator.run()
        for prompt, handle in zip(prompts, handles, strict=True):
            assert handle.finish_reason in ("stop", "length", "aborted"), handle
            for i, token in enumerate(handle.tokens):
                row = self.fresh(prompt + list(handle.tokens[:i])).astype(np.float64)
                right = row[token] - row.max() - np.log(np.exp(row - row.max()).sum())
                worst = abs(handle.logprobs[i][token] - right)
                assert worst < 1e-3, (worst, prompt, handle.tokens)
        generator.close()

    def clear(self) -> None:
        self.cache.clear()

    def flush(self) -> None:
        self.did["not flushed"] += not self.cache.flush(20)

    def leave(self) -> None:
        """Begin what nobody evaluates."""
        self.cache.sequence(self.prompt()).close()

    def new(self) -> None:
        self.close()
        self.open()

    def fork(self) -> None:
        """A child closes everything that its parent uses: the parent notices nothing of it."""
        sequence = self.cache.sequence(self.prompt())
        generator = BatchGenerator(self.cache)
        handle = generator.submit(self.prompt(), 2)
        child = os.fork()
        if not child:
            signal.alarm(60)
            try:
                for call in (sequence.logits, generator.step, lambda: self.cache.sequence([7])):
                    try:
                        call()
                        os._exit(3)
                    except ClosedError:
                        pass
                handle.abort()
                generator.close()
                sequence.close()
                self.cache.close()
                for store in self.stores:
                    store.close()
                os._exit(0)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(4)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == 0, f"a forked child ended with {status}"
        self.look(sequence)
        generator.run()
        assert handle.finish_reason in ("stop", "length")
        sequence.close()
        generator.close()


def opened(where: str, max_bytes: int) -> BlockStore:
    """Return a tier with the bound that all processes give it."""
    return open_store(where) if "://" in where else FolderStore(where, max_bytes)


def main() -> None:
    path, where, seed, n, options = sys.argv[1:]
    more = json.loads(options)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    stores = [opened(one, int(more["max_bytes"])) for one in where.split(",")]
    children: list[int] = []
    for i in range(more.get("forked", 0)):
        stores[0].present([bytes(32)])  # connections and handles are there
        if not (child := os.fork()):
            stores = [opened(one, int(more["max_bytes"])) for one in where.split(",")]
            seed, children = f"{seed}{i}", []
            break
        children.append(child)
    with LlamaModel(path) as model:
        member = Member(model, stores, np.random.default_rng(int(seed)), more.get("secret"))
        for _ in range(int(n)):
            member.step()
        member.close()
    for store in stores:
        member.did["failed"] += store.counters.failed
        store.close()
    print(json.dumps(dict(member.did)), flush=True)
    for child in children:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == 0, f"one that was forked ended with {status}"


if __name__ == "__main__":
    main()
