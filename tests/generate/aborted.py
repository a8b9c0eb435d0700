"""Random programs whose decodes are aborted, each at a certain step of its graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from memory.kit import Case, Logits, apart
from prefix.accounts import check_accounts
from pykvcache import (
    BatchGenerator,
    CheckpointPolicy,
    LlamaContext,
    LlamaSequence,
    PrefixCache,
    Sampler,
)
from pykvcache.errors import DecodeAborted

ODDS = {
    "new": 3, "append": 2, "truncate": 2, "sync": 1, "fork": 2, "discard": 1, "park": 1, "files": 1,
    "close": 2, "look": 4, "evaluate": 2, "generate": 2, "submit": 3, "step": 8, "leave": 1,
}  # fmt: skip
MOST = 90
N_TOKENS = 6


@dataclass(eq=False)
class Held:
    """A sequence, and the tokens that it should have."""

    sequence: LlamaSequence
    tokens: list[int] = field(default_factory=list)


class Aborted:
    """One context, with sequences, a cache and a generator.

    Parameters
    ----------
    case, ctx
        The memory, and a context of it.
    plain
        Another one, where nothing is aborted.
    folder
        For files.
    seed
        Of everything that is drawn.
    """

    def __init__(
        self, case: Case, ctx: LlamaContext, plain: LlamaContext, folder: Path, seed: Any
    ) -> None:
        self.case, self.ctx, self.plain, self.folder = case, ctx, plain, folder
        self.rng = np.random.default_rng(seed)
        points = int(self.rng.choice([0, 1 << 20, 1 << 28]))
        self.policy = CheckpointPolicy(max_bytes=points, spacing=int(self.rng.choice([0, 8])))
        self.cache = self._cache(points)
        chunk = int(self.rng.choice([1, 9, 64]))
        self.generator = BatchGenerator(self.cache or ctx, n_chunk=chunk)
        self.held: list[Held] = []
        self.asked: list[tuple[Any, list[int], int]] = []
        self.trunk = self.words(MOST)
        self.log: list[str] = []
        self.n_aborted = 0
        # How often a call may be stopped; the steps of a graph until then.
        self.reach = int(self.rng.choice([30, 120, 500]))

    def _cache(self, points: int) -> PrefixCache | None:
        if not self.case.has_states or self.rng.random() < 0.3:
            return None
        ram = int(self.rng.choice([0, 1 << 20]))
        keeps = bool(self.rng.random() < 0.4)
        return PrefixCache(
            self.ctx, block_size=8, ram_bytes=ram, checkpoint_bytes=points, keep_logits=keeps
        )

    # What it should be ------------------------------------------------------------------------

    def fresh(self, tokens: list[int]) -> Logits:
        self.plain.clear_kv_cache()
        self.plain.decode(tokens, seq_id=0)
        row: Logits = self.plain.logits()
        return row

    def alone(self, tokens: list[int], n: int, sampler: Sampler | None) -> list[int]:
        self.plain.clear_kv_cache()
        with LlamaSequence(self.plain, tokens) as sequence:
            return list(sequence.generate(n, sampler))

    def words(self, n: int) -> list[int]:
        found: list[int] = self.rng.integers(5, 56, n).tolist()
        return found

    def prompt(self) -> list[int]:
        """Return some tokens, which often begin like others."""
        return self.trunk[: int(self.rng.integers(50))] + self.words(int(self.rng.integers(1, 30)))

    def sampler(self, seed: int) -> Sampler | None:
        """Greedy, or one that counts what it has drawn."""
        return Sampler(temperature=1, top_k=20, repeat_penalty=1.2, seed=seed) if seed else None

    # Aborts -----------------------------------------------------------------------------------

    def until_done(self, call: Callable[[], Any]) -> Any:
        """Call again after each abort; the decodes of a call are stopped a few times at most."""
        native = self.ctx.native
        for _ in range(int(self.rng.integers(3))):
            native.abort_at(int(self.rng.integers(1, self.reach)))
            try:
                return call()
            except DecodeAborted:
                self.n_aborted += 1
                self.log.append("aborted")
                assert native.abort_at(0) == 0, self.log
                if self.rng.random() < 0.3:
                    return None
            finally:
                native.abort_at(0)
        return call()

    # Steps ------------------------------------------------------------------------------------

    def run(self, n_steps: int) -> None:
        names, odds = list(ODDS), np.array(list(ODDS.values())) / sum(ODDS.values())
        for _ in range(n_steps):
            name = str(self.rng.choice(names, p=odds))
            self.log.append(name)
            if name in ("submit", "step", "leave"):
                getattr(self, name)()
            elif name == "new" or not self.held:
                self.new()
            else:
                getattr(self, name)(self.held[int(self.rng.integers(len(self.held)))])
            self.collect()
            if len(self.held) > 5:
                self.close(self.held[0])
        while any(handle.finish_reason is None for handle, *_ in self.asked):
            self.generator.step()  # where each is aborted, one without checkpoints has no end
        self.collect()
        assert not self.asked
        for one in list(self.held):
            self.compare(one)
            one.sequence.close()
        self.generator.close()
        if self.cache is not None:
            check_accounts(self.cache)
            self.cache.close()
        assert not self.ctx.sequences()

    def new(self) -> None:
        tokens = self.prompt()
        if self.cache is not None and self.rng.random() < 0.5:
            sequence: LlamaSequence = self.cache.sequence(tokens)
        else:
            sequence = LlamaSequence(self.ctx, tokens, checkpoints=self.policy)
        self.held.append(Held(sequence, tokens))

    def append(self, one: Held) -> None:
        more = self.words(int(self.rng.integers(1, 20)))[: MOST - len(one.tokens)]
        one.sequence.append(more)
        one.tokens += more

    def truncate(self, one: Held) -> None:
        n = int(self.rng.integers(1, len(one.tokens) + 1))
        one.sequence.truncate(n)
        del one.tokens[n:]

    def sync(self, one: Held) -> None:
        one.tokens = self.prompt()
        one.sequence.sync(one.tokens)

    def fork(self, one: Held) -> None:
        n = int(self.rng.integers(1, len(one.tokens) + 1)) if self.rng.random() < 0.6 else None
        self.held.append(Held(one.sequence.fork(n), one.tokens[:n]))

    def discard(self, one: Held) -> None:
        """By evaluating again: what a shift leaves has no fresh run."""
        if not self.case.info.can_shift:
            begin, end = sorted(self.rng.integers(0, len(one.tokens), 2).tolist())
            one.sequence.discard(begin, end, reevaluate=True)
            del one.tokens[begin:end]

    def park(self, one: Held) -> None:
        one.sequence.park()

    def files(self, one: Held) -> None:
        if self.case.has_states:
            path = self.folder / "sequence"
            one.sequence.save(path, sync=False)
            loaded = LlamaSequence.load(self.ctx, path, checkpoints=self.policy)
            self.held.append(Held(loaded, one.tokens.copy()))

    def close(self, one: Held) -> None:
        self.held.remove(one)
        if self.rng.random() < 0.5:
            one.sequence.close()

    def look(self, one: Held) -> None:
        if self.until_done(one.sequence.logits) is not None:
            self.compare(one)

    def compare(self, one: Held) -> None:
        assert one.sequence.tokens.tolist() == one.tokens, self.log
        difference = apart(one.sequence.logits(), self.fresh(one.tokens))
        assert difference < self.case.tolerance, (difference, self.log)

    def evaluate(self, one: Held) -> None:
        self.until_done(one.sequence.evaluate)

    def generate(self, one: Held) -> None:
        """What was generated before an abort stays; the sampler goes on after it."""
        n = min(N_TOKENS, MOST - len(one.tokens))
        seed = int(self.rng.integers(4))
        wanted, choose = self.alone(one.tokens, n, self.sampler(seed)), self.sampler(seed)
        found: list[int] = []

        def go_on() -> bool:
            for token in one.sequence.generate(n - len(found), choose):
                found.append(token)
            return True

        is_whole = self.until_done(go_on)
        assert found == (wanted if is_whole else wanted[: len(found)]), self.log
        one.tokens += found

    def submit(self) -> None:
        if len(self.asked) < 8:
            prompt, seed = self.prompt(), int(self.rng.integers(4))
            handle = self.generator.submit(prompt, N_TOKENS, self.sampler(seed))
            self.asked.append((handle, prompt, seed))

    def step(self) -> None:
        for _ in range(int(self.rng.integers(1, 4))):
            self.until_done(self.generator.step)

    def leave(self) -> None:
        """Abort a request, and submit it again."""
        if self.asked:
            handle, prompt, seed = self.asked[int(self.rng.integers(len(self.asked)))]
            handle.abort()
            again = self.generator.submit(prompt, N_TOKENS, self.sampler(seed))
            self.asked.append((again, prompt, seed))

    def collect(self) -> None:
        """Check the requests that have ended."""
        for one in [one for one in self.asked if one[0].finish_reason is not None]:
            self.asked.remove(one)
            handle, prompt, seed = one
            wanted, found = self.alone(prompt, N_TOKENS, self.sampler(seed)), handle.tokens.tolist()
            assert handle.error is None, (handle.error, self.log)
            is_whole = handle.finish_reason != "aborted"
            assert found == (wanted if is_whole else wanted[: len(found)]), self.log
