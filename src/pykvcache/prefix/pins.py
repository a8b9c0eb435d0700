"""Pins: cached prefixes that are protected from eviction."""

from __future__ import annotations

import time

from pykvcache.prefix.block_cache import BlockCache
from pykvcache.sequence.pool import SequencePool

__all__ = ["Pin", "Pins"]


class Pin:
    """A cached prefix that is not evicted until it is released or expires."""

    def __init__(self, pins: Pins, n_tokens: int, until: float | None) -> None:
        self._pins, self._n_tokens, self._until = pins, n_tokens, until

    @property
    def n_tokens(self) -> int:
        """Number of protected tokens; 0 after it was released, expired or cleared."""
        if self._is_over(time.monotonic()) or not self._pins.keeps(self):
            return 0
        return self._n_tokens

    def _is_over(self, now: float) -> bool:
        return self._until is not None and self._until <= now

    def release(self) -> None:
        """Release the prefix; a second call does nothing."""
        self._pins.release(self)

    def __repr__(self) -> str:
        return f"<Pin: {self.n_tokens} tokens>"


class Pins:
    """The pins of one cache."""

    def __init__(self, pool: SequencePool, blocks: BlockCache) -> None:
        self._pool, self._blocks = pool, blocks
        #: The pins that keep something.
        self.some: dict[Pin, None] = {}

    def add(self, tokens: bytes, namespace: str, until: float | None) -> Pin:
        """Pin the cached prefix of some tokens; the pool's lock is held."""
        blocks = self._blocks
        with blocks.change():
            match = blocks.tree.match(tokens, namespace)
            resume = blocks.tree.resume(match, match.n)
            pin = Pin(self, resume.n, until)
            if resume.n:
                blocks.tree.use(match, resume)
                blocks.hold(pin, match, resume)
                self.some[pin] = None  # before that nothing keeps it
        return pin

    def keeps(self, pin: Pin) -> bool:
        """Return whether a pin still keeps something."""
        return self._blocks.holds(pin)

    def release(self, pin: Pin) -> None:
        """Release what a pin keeps."""
        with self._pool:
            if self.some.pop(pin, ...) is not ...:
                with self._blocks.change():
                    self._blocks.release(pin)

    def expire(self) -> None:
        """Release the pins whose time is over; the pool's lock is held."""
        if self.some:
            now = time.monotonic()
            for pin in [pin for pin in self.some if pin._is_over(now)]:
                self.release(pin)
