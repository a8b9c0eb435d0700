"""Random programs over a PrefixCache, and what must be true after each of their steps."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memory.kit import Case, Logits, apart
from prefix.accounts import check_accounts
from pykvcache import BatchGenerator, LlamaContext, PrefixCache
from pykvcache.errors import UnsupportedOperation
from pykvcache.prefix.block_cache import Pin
from pykvcache.prefix.events import BlockRemoved, BlockStored, CacheEvent, Stored
from pykvcache.prefix.policies import POLICIES
from pykvcache.prefix.report import ReuseReport
from pykvcache.prefix.sequence import CachedSequence
from pykvcache.prefix.stores import MemoryStore

Fresh = Callable[[list[int]], Logits]
SPACES = ("", "a", "b")
STEPS = {
    "new": 8,
    "append": 2,
    "truncate": 2,
    "fork": 2,
    "close": 3,
    "drop": 1,
    "park": 1,
    "discard": 0.3,
    "pin": 1,
    "release": 1,
    "clear": 0.6,
    "clear all": 0.1,
    "batch": 1,
    "events": 0.5,
    "forget": 0.5,
    "prefetch": 0.7,
    "restart": 0.7,
}
MOST = 90  # tokens of a sequence


@dataclass(eq=False)
class Open:
    """A sequence of the program."""

    sequence: CachedSequence
    space: str
    is_shared: bool = True  # not since before its namespace was cleared
    is_shifted: bool = False
    evaluated: list[int] = field(default_factory=list)  # its tokens when they last were


def common(a: list[int], b: list[int]) -> int:
    """Return how many leading tokens agree."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def total(report: ReuseReport) -> int:
    """Return the tokens that a report speaks of."""
    return report.live + report.ram + report.disk + report.remote + report.evaluated


class Program:
    """Draws steps, takes them, and checks after each.

    Parameters
    ----------
    case, ctx
        The memory, and a context of it for the cache.
    fresh
        Logits of a fresh run over some tokens.
    rng
        What is drawn from.
    options
        Of the cache.
    """

    def __init__(
        self,
        case: Case,
        ctx: LlamaContext,
        fresh: Fresh,
        rng: np.random.Generator,
        options: dict[str, Any],
    ) -> None:
        self.case, self.ctx, self.fresh, self.rng = case, ctx, fresh, rng
        self.options, self.has_tier = options, "tiers" in options
        self.limit: int = options["ram_bytes"]
        self.is_ample = self.limit > 1 << 24
        self.open: list[Open] = []
        self.pins: list[Pin] = []
        # Of each namespace what was evaluated since it was cleared, and may be found again.
        self.known: dict[str, list[list[int]]] = {space: [] for space in SPACES}
        self.taken: Counter[str] = Counter()
        self.make_cache()

    def make_cache(self) -> None:
        """Make a cache, and what a reader of its events thinks: of a small one a subscriber."""
        self.cache = PrefixCache(self.ctx, **self.options)
        self.stored: set[bytes] = set()
        self.heard: deque[CacheEvent] = deque()
        if not self.is_ample:
            self.cache.events.subscribe(self.heard.append)

    def words(self, n: int) -> list[int]:
        """Return n random tokens."""
        found: list[int] = self.rng.integers(5, self.case.n_vocab - 2, n).tolist()
        return found

    def pick(self, n: int) -> int:
        """Return a random number below n."""
        return int(self.rng.integers(n))

    def prompt(self, space: str) -> list[int]:
        """Return a prompt that often begins like one before it, also of another namespace."""
        texts = self.known[space if self.rng.random() < 0.8 else SPACES[self.pick(3)]]
        begin = texts[self.pick(len(texts))] if texts and self.rng.random() < 0.85 else []
        begin = begin[: self.pick(len(begin) + 1)] if self.rng.random() < 0.6 else begin
        return (begin + self.words(self.pick(25) + (not begin)))[:MOST]

    # Steps ------------------------------------------------------------------------------------

    def step(self) -> None:
        """Take one step, and look at everything."""
        weights = np.array(list(STEPS.values()))
        name = str(self.rng.choice(list(STEPS), p=weights / weights.sum()))
        if name in ("append", "truncate", "fork", "close", "drop", "park", "discard"):
            if not self.open:
                name = "new"
            one = self.open[self.pick(len(self.open))] if self.open else None
        self.taken[name] += 1
        if name == "new":
            self.new()
        elif name == "batch":
            self.batch()
        elif name == "pin":
            self.pin()
        elif name == "release" and self.pins:
            self.pins.pop(self.pick(len(self.pins))).release()
        elif name == "clear":
            self.clear(SPACES[self.pick(3)])
        elif name == "clear all":
            self.clear(None)
        elif name == "events":
            self.read_events()
        elif name == "forget":
            space = SPACES[self.pick(3)]
            self.cache.forget(self.prompt(space), namespace=space)
        elif name == "prefetch":
            space = SPACES[self.pick(3)]
            assert self.cache.prefetch(self.prompt(space), namespace=space).wait(60)
        elif name == "restart":
            self.restart()
        elif name != "release":
            assert one is not None
            self.change(name, one)
        while len(self.open) > 5:
            self.open.pop(self.pick(6)).sequence.close()
        self.check()

    def new(self) -> None:
        """Begin a sequence: it knows no more than was evaluated in its namespace."""
        space = SPACES[self.pick(3)]
        prompt = self.prompt(space)
        before = self.ctx.tokens_evaluated
        sequence = self.cache.sequence(prompt, namespace=space)
        report = sequence.reuse
        assert self.ctx.tokens_evaluated == before, "making a sequence evaluates nothing"
        assert total(report) == report.n_tokens == len(prompt)
        most = max((common(prompt, text) for text in self.known[space]), default=0)
        assert len(prompt) - report.evaluated <= most, "reuses tokens that no sequence gave it"
        if not self.case.info.has_rest:
            here = [one for one in self.open if one.space == space and one.is_shared]
            texts = [one.evaluated for one in here if not one.is_shifted]
            texts += self.known[space] if self.is_ample and not self.taken["discard"] else []
            live = max((common(prompt, text) for text in texts), default=0)
            if not any(self.taken[one] for one in ("truncate", "clear", "forget", "restart")):
                assert report.evaluated <= max(1, len(prompt) - live), "live tokens are not used"
        one = Open(sequence, space)
        self.open.append(one)
        if self.rng.random() < 0.9:
            self.look(one)
            assert self.ctx.tokens_evaluated - before == report.evaluated, "as it was reported"

    def look(self, one: Open) -> None:
        """Compare the next logits with those of a fresh run."""
        tokens = one.sequence.tokens.tolist()
        if not tokens:
            return
        logits = one.sequence.logits()
        if one.is_shifted:
            return
        assert apart(logits, self.fresh(tokens)) < self.case.tolerance
        one.evaluated = tokens
        if one.is_shared:
            self.known[one.space].append(tokens)

    def change(self, name: str, one: Open) -> None:
        """Edit, fork or end a sequence."""
        sequence, n = one.sequence, len(one.sequence)
        if name == "append":
            sequence.append(self.words(self.pick(12) + 1)[: MOST - n])
        elif name == "truncate" and n > 1:
            sequence.truncate(self.pick(n - 1) + 1)
            one.evaluated = one.evaluated[: len(sequence)]
        elif name == "fork" and n:
            child = sequence.fork(self.pick(n) + 1)
            one = Open(child, one.space, one.is_shared, one.is_shifted)
            self.open.append(one)
        elif name == "park":
            sequence.park()
        elif name == "discard" and n > 20:
            try:
                sequence.discard(5, 9)
            except UnsupportedOperation:
                return
            one.is_shifted, one.evaluated = True, one.evaluated[:5]
        elif name in ("close", "drop"):
            self.open.remove(one)
            if name == "close":
                sequence.close()
            return
        if self.rng.random() < 0.6:
            self.look(one)

    def batch(self) -> None:
        """Send some prompts at once: each gets the likeliest token after it."""
        generator = BatchGenerator(self.cache, n_chunk=16)
        prompts = [self.prompt("") or [7] for _ in range(self.pick(3) + 1)]
        handles = [generator.submit(prompt, 2) for prompt in prompts]
        self.known[""] += prompts
        generator.run()
        for prompt, handle in zip(prompts, handles, strict=True):
            made = handle.tokens.tolist()
            self.known[""].append(prompt + made)
            if made:
                logits = self.fresh(prompt)
                assert logits[made[0]] > logits.max() - self.case.tolerance
        generator.close()

    def pin(self) -> None:
        """Pin what is known of a prompt, for ever, for long, or until now."""
        space = SPACES[self.pick(3)]
        ttl = (None, 0, 1000)[self.pick(3)]
        if (prompt := self.prompt(space)) and len(self.pins) < 3:
            pin = self.cache.pin(prompt, ttl=ttl, namespace=space)
            assert pin.n_tokens <= (len(prompt) if ttl != 0 else 0)
            self.pins.append(pin)

    def restart(self) -> None:
        """Close the cache with its sequences, and make another one: tiers have what it had."""
        for one in self.open:
            one.sequence.close()
        if self.has_tier:
            assert self.cache.flush(60)
        else:
            self.known = {space: [] for space in SPACES}
        self.cache.close()
        self.open.clear()
        self.pins.clear()
        self.make_cache()

    def clear(self, space: str | None) -> None:
        """Forget a namespace: nothing of it is left in memory, or comes back without tiers."""
        self.cache.clear(space)
        for name in SPACES if space is None else (space,):
            if not self.has_tier:
                self.known[name].clear()
            for one in self.open:
                one.is_shared &= one.space != name
            assert not list(self.cache._core.blocks.tree.nodes(name))
        for event, *_ in self.cache.events._events if not self.has_tier else ():
            assert not isinstance(event, BlockStored)
            if isinstance(event, Stored):
                assert space is not None
                assert event.space != space, "the tokens of what was cleared wait"
        self.read_events()
        assert self.stored == self.names()

    def read_events(self) -> None:
        """Follow the events: they tell which blocks are there."""
        events = [*self.cache.events] if self.is_ample else [*self.heard]
        self.heard.clear()
        for event in events:
            if getattr(event, "medium", "CPU") != "CPU":
                continue
            if isinstance(event, BlockStored):
                self.stored |= set(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                assert set(event.block_hashes) <= self.stored
                self.stored -= set(event.block_hashes)
            else:
                assert not self.stored

    def names(self) -> set[bytes]:
        """Return the names of all blocks that are there."""
        size = self.cache.block_size
        return {name for node in self.cache._core.blocks.tree.nodes() for name in node.names(size)}

    # What is always true ------------------------------------------------------------------------

    def check(self) -> None:
        """Budgets and counts."""
        if self.has_tier:  # whose thread tells of what it wrote
            assert self.cache.flush(60)
        check_accounts(self.cache)

    def end(self) -> None:
        """Let go of everything: the budget is kept, and nothing is held."""
        while self.open:
            self.open.pop().sequence.close()
        while self.pins:
            self.pins.pop().release()
        self.check()
        assert self.cache.stats().ram_bytes <= self.limit
        nodes = self.cache._core.blocks.tree.nodes()
        assert not any(one.held for node in nodes for one in node.components())
        assert not self.ctx.n_cells_used
        self.read_events()
        assert self.stored == self.names()
        self.cache.close()


def run(
    case: Case, ctx: LlamaContext, fresh: Fresh, seed: int, n_steps: int, *, has_tier: bool
) -> Counter[str]:
    """Run one program; what fails says how to run it again."""
    rng = np.random.default_rng([seed, sum(map(ord, str(case)))])
    cell = max(64, ctx.native.block_bytes())
    options: dict[str, Any] = {
        "block_size": int(rng.choice([4, 8, 16])),
        "ram_bytes": int(rng.choice([0, 3_000, 60 * cell, 400 * cell, 1 << 30])),
        "policy": str(rng.choice(list(POLICIES))),
        "keep_logits": bool(rng.random() < 0.4),
        "checkpoint_bytes": int(rng.choice([0, 1 << 28, 1 << 28])),
    }
    if has_tier:
        options |= {"tiers": [MemoryStore()], "tier_seconds": 60}
    program = Program(case, ctx, fresh, rng, options)
    at = 0
    try:
        for at in range(n_steps):  # noqa: B007
            program.step()
        program.end()
    except Exception as error:
        program.cache.close()
        raise AssertionError(f"{case}, seed {seed}, step {at}, {options}: {error}") from error
    return program.taken
