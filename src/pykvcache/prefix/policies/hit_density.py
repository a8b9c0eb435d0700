"""The default policy: predicts from past reuse how soon a component is used again."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from itertools import chain
from typing import Final

import numpy as np
import numpy.typing as npt

from pykvcache.prefix.node import Component, Kind
from pykvcache.prefix.policies.base import Policy

__all__ = ["HitDensity"]

# Ages are measured on the tree's clock, in buckets of half an octave; the first is 0 to 3.
_BUCKETS: Final = 40
_SMALL: Final = [int(2 * math.log2(age / 8 + 1)) for age in range(4096)]
_WIDTHS: Final = 8 * (2 ** (np.arange(1, _BUCKETS + 1) / 2) - 2 ** (np.arange(_BUCKETS) / 2))


def _bucket(age: int) -> int:
    return _SMALL[age] if age < 4096 else min(int(2 * math.log2(age / 8 + 1)), _BUCKETS - 1)


# A component's class: its uses (0, 1, 2 to 3, 4 to 7, 8 to 15, more), whether it was used since a
# prompt last diverged or ended within its node, and whether it is attention cells, or a window or
# state.
_USES: Final = 6
_CLASSES: Final = 4 * _USES

#: Bytes of a ghost (the history of an evicted component), and of the tables.
_GHOST_BYTES: Final = 280
_TABLE_BYTES: Final = 100_000

# Priors, used while there are few samples.
_PRIOR, _PRIOR_LIVES, _KIND_LIVES = 0.06, 10.0, 2.0

# How a lifetime ends: hit while evictable, without a hit, hit while it has children.
_USED, _UNUSED, _USED_INSIDE = range(3)


class _Life:
    """A lifetime of a component: from its creation or last use to its next use or removal."""

    __slots__ = ("began", "cut", "group", "is_over", "passed", "place", "priority", "uses")

    def __init__(self, uses: int = 0) -> None:
        self.uses = uses
        self.passed = self.cut = self.is_over = False
        self.place = -1
        self.began = self.group = self.priority = 0


class HitDensity(Policy):
    """Evicts the component with the fewest expected hits per byte and time (after LHD, NSDI 2018).

    For each class of components it counts the ages at which they are used again, also for a while
    after their eviction. The density is the maximum, over all horizons, of the probability of a use
    within the horizon divided by the expected time until the use or the horizon (the Gittins
    index). Of a random ``sample`` it evicts the component of least density, in tokens saved per
    byte. So it acts like LRU if recent blocks return, keeps a fixed part of a cyclic scan, and acts
    like LFU if past uses predict future ones. Equal traces and seeds give equal results.
    """

    declines = True
    _ghosts_per_leaf = 4
    _decay = 0.93

    def __init__(self, sample: int = 32, seed: int = 1) -> None:
        self.sample = sample
        self._random = random.Random(seed).random
        self._now = self._next = 0
        self._leaves: dict[int, list[Component]] = {}  # by priority
        self._ghosts: OrderedDict[int, _Life] = OrderedDict()
        # Ended lifetimes: those since the last update, and decayed counts of all.
        self._new: list[int] = []
        self._ended = np.zeros((3, _CLASSES, _BUCKETS))
        # Computed at the first eviction: a cache that never evicts does not need it.
        self._density: list[float] = []

    # Lifetimes ----------------------------------------------------------------------------------

    def _begin(self, life: _Life, component: Component) -> None:
        life.began = self._now
        has_cells = component.kind is Kind.ATTENTION
        uses = min(life.uses.bit_length(), _USES - 1)
        life.group = (2 * has_cells + life.passed) * _USES + uses

    def _end(self, life: _Life, how: int) -> None:
        if not life.is_over:
            place = (how * _CLASSES + life.group) * _BUCKETS
            self._new.append(place + _bucket(self._now - life.began))

    def _tick(self, now: int) -> None:
        self._now = max(self._now, now)
        if self._now >= self._next:
            self._learn()
            self._next = self._now + min(max(self._now // 4, 16), 256)

    def added(self, component: Component) -> None:
        """Begin a lifetime; a component that returns keeps its history."""
        self._tick(component.last_use)
        life = component.notes = _Life()
        if component.kind is Kind.ATTENTION:
            ghost = self._ghosts.pop(component.chunk_key(), None)
            if ghost is not None:
                life.uses = ghost.uses + 1
                self._end(ghost, _USED)
        self._begin(life, component)

    @property
    def n_bytes(self) -> int:  # type: ignore[override]
        """Bytes of the tables and the ghosts."""
        tables = _TABLE_BYTES if self.max_notes is None else min(_TABLE_BYTES, self.max_notes)
        return tables + _GHOST_BYTES * len(self._ghosts)

    def used(self, component: Component) -> None:
        """Count a lifetime that ended with a hit, and begin another."""
        self._tick(component.last_use)
        life = component.notes
        self._end(life, _USED if life.cut or component.is_evictable else _USED_INSIDE)
        life.cut = life.passed = False
        life.uses += 1
        self._begin(life, component)

    def split(self, head: Component, tail: Component) -> None:
        """Copy the lifetime to the head."""
        old = tail.notes
        new = head.notes = _Life(old.uses)
        new.passed, new.began, new.group = old.passed, old.began, old.group
        new.cut = tail.is_evictable

    def passed(self, component: Component) -> None:
        """Count a lifetime that ended without a hit: a prompt diverged before it."""
        life = component.notes
        if component.is_evictable:
            self._end(life, _UNUSED)
        life.passed = True
        self._begin(life, component)

    def evictable(self, component: Component) -> None:
        """Add it to the components that may be drawn."""
        life = component.notes
        if life.place < 0:
            leaves = self._leaves.setdefault(component.priority, [])
            life.priority, life.place = component.priority, len(leaves)
            leaves.append(component)

    def removing(self, component: Component, n_tokens: int) -> None:
        """Add a ghost of what is evicted, to see whether it returns."""
        life, is_whole = component.notes, n_tokens >= component.n_tokens
        if is_whole and life.place >= 0:
            self._withdraw(life)
        if component.kind is not Kind.ATTENTION:
            if is_whole:
                self._end(life, _UNUSED)
            return
        if not is_whole:
            # The lifetime continues with the tokens that stay.
            life = _Life(life.uses)
            life.is_over = True
        key = component.chunk_key(component.n_tokens - n_tokens)  # of the first evicted chunk
        if (older := self._ghosts.pop(key, None)) is not None:
            self._end(older, _UNUSED)
        self._ghosts[key] = life
        most = self._ghosts_per_leaf * (sum(map(len, self._leaves.values())) + 64)
        if self.max_notes is not None:
            most = min(most, self.max_notes // _GHOST_BYTES)
        while len(self._ghosts) > most:
            self._end(self._ghosts.popitem(last=False)[1], _UNUSED)

    # Choosing a victim --------------------------------------------------------------------------

    def _withdraw(self, life: _Life) -> None:
        leaves = self._leaves[life.priority]
        last = leaves.pop()
        if last.notes is not life:
            leaves[life.place] = last
            last.notes.place = life.place
        life.place = -1

    def _may_leave(self, component: Component) -> bool:
        """Return whether a drawn component is evictable at its listed priority; else unlist it."""
        life = component.notes
        if component.is_evictable and component.priority == life.priority:
            return True
        self._withdraw(life)
        if component.is_evictable:
            self.evictable(component)  # a later prompt gave it another priority
        return False

    def _drawn(self) -> list[Component]:
        """Return a sample of the evictable components of the lowest priority."""
        while self._leaves:
            lowest = min(self._leaves)
            leaves, drawn = self._leaves[lowest], list[Component]()
            if len(leaves) <= self.sample:
                drawn = [component for component in list(leaves) if self._may_leave(component)]
            else:
                while leaves and len(drawn) < self.sample:
                    component = leaves[int(self._random() * len(leaves))]
                    if self._may_leave(component):
                        drawn.append(component)
            if drawn:
                return drawn
            del self._leaves[lowest]
        return []

    def victim(self) -> Component | None:
        """Return the component of least density of a sample; among equals the oldest, deepest."""
        if not self._density:
            self._weigh()
        density, now = self._density, self._now
        best, least = None, (math.inf, math.inf, math.inf)
        for component in self._drawn():
            life = component.notes
            value = density[life.group * _BUCKETS + _bucket(now - life.began)]
            worth = (value * component.weight, life.began, -component.end)
            if worth < least:
                best, least = component, worth
        return best

    def _learn(self) -> None:
        counts = np.bincount(np.array(self._new, np.int64), minlength=self._ended.size)
        self._ended += counts.reshape(self._ended.shape)
        self._new = []
        if self._density:
            self._weigh()
        self._ended *= self._decay

    def _weigh(self) -> None:
        ended = self._ended.copy()
        # Lifetimes that have not ended reached their age, too (censored samples).
        leaves = chain.from_iterable(self._leaves.values())
        going_on = [component.notes for component in leaves if component.is_evictable]
        going_on += [life for life in self._ghosts.values() if not life.is_over]
        for life in going_on:
            ended[_UNUSED, life.group, _bucket(self._now - life.began)] += 1
        self._density = hit_density(ended).ravel().tolist()


_Table = npt.NDArray[np.float64]


def _reached(ended: _Table) -> _Table:
    """Return how many lifetimes reached an age: those that ended later, and half of its bucket."""
    later: _Table = np.cumsum(ended[:, ::-1], axis=1)[:, ::-1]
    return later - ended / 2


def hit_density(ended: _Table) -> _Table:
    """Return the expected hits per time for each class and age.

    The probability of a hit at an age is estimated from the leaves of all classes together. Each
    class has one factor for all ages (proportional hazards), estimated from its components with and
    without children, which takes few samples.

    ``ended`` counts lifetimes by how they ended; its shape is (3, classes, buckets).
    """
    used, unused, inside = ended
    # The prior probability decreases with age, which gives LRU.
    guess = _PRIOR * np.exp(-np.arange(_BUCKETS) / 14)
    chance = (used.sum(0) + _PRIOR_LIVES * guess) / (_reached(used + unused).sum(0) + _PRIOR_LIVES)
    chance = np.minimum(chance, 0.9)
    seen = (used + inside).sum(1)
    expected = (_reached(used + unused + inside) * chance).sum(1)
    factor = (seen + _KIND_LIVES) / (expected + _KIND_LIVES)
    hazard = 1 - (1 - chance) ** factor[:, None]  # probability of a hit within each bucket
    density: npt.NDArray[np.float64] = np.zeros_like(hazard)
    left, time = np.ones_like(hazard), np.zeros_like(hazard)
    for later in range(_BUCKETS):
        # For each age with this horizon: the probability of a hit, over the expected time.
        now, ages = hazard[:, later : later + 1], slice(0, later + 1)
        time[:, ages] += left[:, ages] * (1 - now / 2) * _WIDTHS[later]
        left[:, ages] *= 1 - now
        density[:, ages] = np.maximum(density[:, ages], (1 - left[:, ages]) / time[:, ages])
    return density
