"""Prefixes that are kept, whatever the policy would evict."""

from __future__ import annotations

import time

from pykvcache.prefix.ram import RamTier
from pykvcache.prefix.runs import Run
from pykvcache.sequence.pool import SequencePool

__all__ = ["Pin", "Pins"]


class Pin:
    """A prefix that is kept until it is released, or its time is over."""

    def __init__(
        self, pins: Pins, pool: SequencePool, run: Run | None, n_tokens: int, until: float | None
    ) -> None:
        self._pins, self._pool, self._run, self._until = pins, pool, run, until
        self._n_tokens = n_tokens

    @property
    def n_tokens(self) -> int:
        """How many tokens are kept, in blocks; 0 once it was released, expired or cleared."""
        run = self._run
        if run is None or run.parent is None or self._is_over(time.monotonic()):
            return 0
        return self._n_tokens

    def _is_over(self, now: float) -> bool:
        return self._until is not None and self._until <= now

    def release(self) -> None:
        """Release the prefix; a second call does nothing."""
        with self._pool.hold():
            self._pins.release(self)

    def __repr__(self) -> str:
        return f"<Pin: {self.n_tokens} tokens>"


class Pins:
    """The pins of one cache. The pool's lock is held."""

    def __init__(self, ram: RamTier, *, needs_rest: bool = False) -> None:
        self._ram, self._needs_rest = ram, needs_rest
        self._pins: dict[Pin, None] = {}

    def add(self, pool: SequencePool, tokens: bytes, namespace: str, until: float | None) -> Pin:
        """Hold what is known of some tokens."""
        found = self._ram.find(tokens, namespace, needs_rest=self._needs_rest, is_prompt=False)
        # Without a checkpoint the blocks serve nobody; it keeps those before it.
        run, begun = found.run, found.begun
        if self._needs_rest:
            run = found.points[0] if found.points else None
        if run is not None and run.is_root:
            run = None
        end = begun or run
        # What follows the last block is not held.
        n = 0 if end is None else min(found.n, end.end * self._ram.block_size)
        pin = Pin(self, pool, end, n, until)
        if end is not None:
            self._ram.hold(pin, run, *([] if begun is None else [begun]))
            self._pins[pin] = None  # before that nothing keeps it
        return pin

    def release(self, pin: Pin) -> None:
        """Release what a pin holds."""
        self._ram.check()
        self._ram.release(pin)
        self._pins.pop(pin, None)
        pin._run = None

    def expire(self) -> None:
        """Release the pins whose time is over."""
        now = time.monotonic()
        for pin in [pin for pin in self._pins if pin._is_over(now)]:
            self.release(pin)
