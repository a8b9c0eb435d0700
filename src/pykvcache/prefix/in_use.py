"""The sequences of a cache that are in use."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pykvcache.prefix.sequence import CachedSequence

__all__ = ["InUse"]


class InUse:
    """A set of sequences; those that are collected leave it by themselves.

    Every request asks it several times: a `weakref.WeakSet` takes five times as many calls.
    """

    __slots__ = ("_refs",)

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[CachedSequence]] = {}

    def add(self, sequence: CachedSequence) -> None:
        """Take note of a sequence."""
        key = id(sequence)
        # The callback runs before another object can have this id, and no interrupt comes in it.
        self._refs[key] = weakref.ref(sequence, partial(self._refs.pop, key))

    def discard(self, sequence: CachedSequence) -> None:
        """Forget a sequence."""
        self._refs.pop(id(sequence), None)

    def part(self, namespace: str | None, *calls: Callable[[CachedSequence], None]) -> None:
        """Forget those of a namespace, or all, and then make some calls with each."""
        for sequence in self:
            if namespace is None or sequence._namespace == namespace:
                self.discard(sequence)
                for call in calls:
                    call(sequence)

    def clear(self) -> None:
        """Forget all."""
        self._refs.clear()

    def __contains__(self, sequence: CachedSequence) -> bool:
        return id(sequence) in self._refs

    def __len__(self) -> int:
        return len(self._refs)

    def __iter__(self) -> Iterator[CachedSequence]:
        for ref in list(self._refs.values()):
            if (sequence := ref()) is not None:
                yield sequence
