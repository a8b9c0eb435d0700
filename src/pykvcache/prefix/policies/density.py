"""``hit-density``: what it has seen tells how soon blocks like these are used again."""

from __future__ import annotations

import math
import random
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import numpy as np

from pykvcache._native.shadows import N_BUCKETS, Shadow, hit_density
from pykvcache.prefix.policies.base import Policy
from pykvcache.prefix.runs import Run

__all__ = ["HitDensity"]

# Ages are counted in uses of the tree, in buckets of half an octave; the first is 0 to 3.
_BUCKETS: Final = N_BUCKETS
_SMALL: Final = [int(2 * math.log2(age / 8 + 1)) for age in range(4096)]


def _bucket(age: int) -> int:
    return _SMALL[age] if age < 4096 else min(int(2 * math.log2(age / 8 + 1)), _BUCKETS - 1)


# What kind of run it is: how many prompts in a row went on from each other up to it, whether the
# last prompt that came by turned off before it, and how often it was used.
_TURNS, _USES = 6, 6
_CLASSES: Final = _TURNS * 2 * _USES

#: What is kept of a run that left, and all that was learned: measured with tracemalloc.
_GHOST_BYTES: Final = 380
_TABLE_BYTES: Final = 50_000

# How a life ends: as a leaf that is used, unused, or used while others follow.
_USED, _UNUSED, _USED_INSIDE = range(3)


class _Life:
    """What is noted of a run, from its last use on."""

    __slots__ = (
        "began",
        "below",
        "cut",
        "is_over",
        "key",
        "kind",
        "passed",
        "place",
        "start",
        "turn",
        "uses",
    )

    def __init__(self, turn: int, uses: int) -> None:
        self.turn, self.uses = turn, uses
        self.passed = self.cut = self.is_over = False
        self.place = -1
        self.below: _Life | None = None
        self.began = self.kind = self.key = self.start = 0


class HitDensity(Policy):
    """Least hits to be expected per byte and time first (after LHD, NSDI 2018).

    It counts after how many uses of the cache a block was used again, or was not, for each kind of
    block, and goes on counting for a while after a block left. For a block of some kind and age
    this gives the chance of a use within a time from now, divided by the time that it stays until
    then, for the time where that is highest: its density (the Gittins index). Of some blocks drawn
    at random the one with the least density, by tokens saved per byte, leaves. So it is LRU where
    recent blocks come back, keeps a part where everything comes round in turn, and keeps what was
    used often where that tells.

    Parameters
    ----------
    sample
        How many blocks are drawn.
    seed
        Of the draws: equal traces give equal results.
    """

    declines = True
    _ghosts_per_leaf = 4
    _decay = 0.93

    def __init__(self, sample: int = 32, seed: int = 1) -> None:
        self.sample = sample
        self._random = random.Random(seed).random
        self._now = self._next = 0
        self._leaves: list[Run] = []
        self._ghosts: OrderedDict[int, _Life] = OrderedDict()
        # Lives that ended with a use, without one, and with a use while others followed: new ones,
        # and all with the older counting less.
        self._new = array("I")
        self._ended = np.zeros((3, _CLASSES, _BUCKETS), np.float32)
        # Computed from when somebody chooses by it: a cache with room for everything never does.
        self._density = array("d")

    # What happens to runs ---------------------------------------------------------------

    def _begin(self, life: _Life) -> None:
        life.began = self._now
        uses = min(life.uses.bit_length(), _USES - 1)
        life.kind = (min(life.turn, _TURNS - 1) * 2 + life.passed) * _USES + uses

    def _end(self, life: _Life, how: int) -> None:
        place = (how * _CLASSES + life.kind) * _BUCKETS
        self._new.append(place + _bucket(self._now - life.began))

    def _tick(self, now: int) -> None:
        self._now = max(self._now, now)
        if self._now >= self._next:
            self._learn()
            self._next = self._now + min(max(self._now // 4, 16), 256)

    def added(self, run: Run) -> None:
        """Begin a life; a run that comes back keeps the history that it had."""
        self._tick(run.last_use)
        life = run.state = _Life(self._turn(run), 0)
        ghost = self._ghosts.pop(run.key(0), None)
        if ghost is not None:
            life.uses = ghost.uses + 1
        while ghost is not None:
            if not ghost.is_over:
                self._end(ghost, _USED)
                ghost.is_over = True
            life.turn = max(life.turn, ghost.turn + 1)
            ghost = ghost.below
            if ghost is not None:
                at = ghost.start - run.start
                if not 0 <= at < run.n_blocks or run.key(at) != ghost.key:
                    break
        self._begin(life)

    def adopt(self, runs: Sequence[Run]) -> None:
        """Begin lives that began when the runs were used last."""
        for run in sorted(runs, key=lambda run: run.start):
            life = run.state = _Life(self._turn(run), run.uses)
            self._now = max(self._now, run.last_use)
            self._begin(life)
            life.began = run.last_use

    def learn_from(self, other: Shadow) -> None:
        """Begin with the chances that a shadow has learned."""
        ended, density = other.learned()
        if ended:
            self._ended = np.frombuffer(ended, np.float32).reshape(self._ended.shape).copy()
            self._density, self._next = array("d", density), 64

    @property
    def n_bytes(self) -> int:  # type: ignore[override]
        """Bytes of the statistics, and of the lives of runs that were evicted."""
        tables = _TABLE_BYTES if self.max_notes is None else min(_TABLE_BYTES, self.max_notes)
        return tables + _GHOST_BYTES * len(self._ghosts)

    def _turn(self, run: Run) -> int:
        """Return how many prompts in a row went on from each other, this one included."""
        parent = run.parent
        if parent is None or parent.state is None:
            return 0
        if len(parent.children) > 3:
            return 1
        for other in parent.children.values():
            # What the prompt before had more, say a block that was not full, is not another branch.
            short = other.n_blocks <= max(1, run.start // 20)
            passed = other.state is not None and other.state.passed
            if other is not run and not (passed and short):
                return 1
        return int(parent.state.turn) + 1

    def used(self, run: Run) -> None:
        """Count a life that ended with a use, and begin another."""
        self._tick(run.last_use)
        life = run.state
        self._end(life, _USED if life.cut or run.is_evictable else _USED_INSIDE)
        life.cut = life.passed = False
        life.uses += 1
        self._begin(life)

    def split(self, head: Run, tail: Run) -> None:
        """Give the head the same life; the prompt that made the cut passed the tail by."""
        old = tail.state
        new = head.state = _Life(old.turn, old.uses)
        new.passed, new.began, new.kind = old.passed, old.began, old.kind
        if tail.is_evictable:
            new.cut = True
            self._end(old, _UNUSED)
        old.passed = True
        self._begin(old)

    def evictable(self, run: Run) -> None:
        """Add the run to those that may be drawn."""
        if run.state.place < 0:
            run.state.place = len(self._leaves)
            self._leaves.append(run)

    def removing(self, run: Run, n_blocks: int) -> None:
        """Remember what is evicted, to see whether it comes back."""
        if run.is_checkpoint:
            return
        life = run.state
        if n_blocks < run.n_blocks:
            # The life goes on with the blocks that stay.
            life = _Life(life.turn, life.uses)
            life.is_over = True
        elif run.parent is not None and run.parent.state is not None:
            run.parent.state.below = life
        first = run.n_blocks - n_blocks
        life.key, life.start = run.key(first), run.start + first
        self._forget(self._ghosts.pop(life.key, None))
        self._ghosts[life.key] = life
        most = self._ghosts_per_leaf * (len(self._leaves) + 64)
        if self.max_notes is not None:
            most = min(most, self.max_notes // _GHOST_BYTES)
        while len(self._ghosts) > most:
            self._forget(self._ghosts.popitem(last=False)[1])

    def _forget(self, ghost: _Life | None) -> None:
        if ghost is not None:
            ghost.below = None
            if not ghost.is_over:
                self._end(ghost, _UNUSED)
                ghost.is_over = True

    # The choice -------------------------------------------------------------------------

    def _withdraw(self, place: int) -> None:
        last = self._leaves.pop()
        if place < len(self._leaves):
            self._leaves[place].state.place = -1
            self._leaves[place] = last
            last.state.place = place
        else:
            last.state.place = -1

    def _drawn(self) -> list[Run]:
        leaves = self._leaves
        if len(leaves) <= self.sample:
            for place in range(len(leaves) - 1, -1, -1):
                if not leaves[place].is_evictable:
                    self._withdraw(place)
            return leaves
        drawn: list[Run] = []
        while leaves and len(drawn) < self.sample:
            place = int(self._random() * len(leaves))
            if leaves[place].is_evictable:
                drawn.append(leaves[place])
            else:
                self._withdraw(place)
        return drawn

    def victim(self) -> Run | None:
        """Return the one of those drawn that has the least density; the oldest among equals."""
        if not self._density:
            self._weigh()
        density, now = self._density, self._now
        best, least = None, (math.inf, 0)
        for run in self._drawn():
            life = run.state
            value = density[life.kind * _BUCKETS + _bucket(now - life.began)]
            worth = value * run.tokens_saved / run.block_bytes if run.block_bytes else 1e300
            if (worth, life.began) < least:
                best, least = run, (worth, life.began)
        return best

    def _learn(self) -> None:
        """Take in what was counted since the last time; the older counts less from then on."""
        new = np.frombuffer(self._new, np.uint32) if self._new else np.empty(0, np.uint32)
        self._ended += np.bincount(new, minlength=self._ended.size).reshape(self._ended.shape)
        del new  # or its array could not be emptied
        self._new = array("I")
        if self._density:
            self._weigh()
        self._ended *= self._decay

    def _weigh(self) -> None:
        """Compute the density of each kind and age from what was counted."""
        ended = self._ended.copy()
        # Lives that still go on reached their age as well.
        going_on = [run.state for run in self._leaves if run.is_evictable]
        going_on += [life for life in self._ghosts.values() if not life.is_over]
        for life in going_on:
            ended[_UNUSED, life.kind, _bucket(self._now - life.began)] += 1
        self._density = array("d", hit_density(ended.tobytes()))
