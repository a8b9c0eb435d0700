"""How a cache ends: closed, or at interpreter exit, where it writes what it has to its tiers."""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from pykvcache._closing import Closing
from pykvcache.context import LlamaContext
from pykvcache.errors import ClosedError, DeviceLost
from pykvcache.prefix.buffers import BufferPool
from pykvcache.prefix.in_use import InUse
from pykvcache.prefix.prefetch import Queue
from pykvcache.prefix.ram import RamTier
from pykvcache.prefix.tiers.stack import Tiers
from pykvcache.sequence.pool import SequencePool

if TYPE_CHECKING:
    from pykvcache.prefix.sequence import CachedSequence

__all__ = ["EndMethods", "close_at_exit"]


class Closable(Protocol):
    """An object with a `close` method."""

    def close(self) -> None:
        """Write what waits."""


# With the process that made each: a forked child has none of its threads.
_open: weakref.WeakKeyDictionary[Closable, int] = weakref.WeakKeyDictionary()


def close_at_exit(thing: Closable) -> None:
    """Close something at the end of the interpreter, if it is still there."""
    _open[thing] = os.getpid()


@atexit.register
def _close_all() -> None:
    for thing, pid in list(_open.items()):
        if pid == os.getpid():
            with contextlib.suppress(Exception):
                thing.close()


class EndMethods(Closing):
    """Closing a cache; part of `PrefixCache`."""

    _ctx: LlamaContext
    _pool: SequencePool
    _ram: RamTier
    _tiers: Tiers
    _open: InUse
    _buffers: BufferPool
    _prefetches: Queue
    _closed: bool
    _has_ended: bool
    _failed: Exception | None = None

    _keep: Callable[[CachedSequence], None]
    _end_search: Callable[[CachedSequence], None]

    def close(self) -> None:
        """Forget everything; its sequences go on as plain ones. Twice does nothing.

        Tiers get what the sequences in use have evaluated, and what waits is written, for 30
        seconds at most.
        """
        if self._ctx.native.is_inherited:
            self._closed = True
            return
        with self._pool.hold():
            if self._has_ended:
                return
            if not self._closed:
                self._ram.need_quiet()
                if len(self._tiers):
                    for sequence in self._open:
                        self._end(sequence)
                self._clear_all()
                self._closed = True
            self._prefetches.cancel()
            self._open.clear()
            self._buffers.close()
        self._tiers.close()
        self._has_ended = True  # after an interrupt a second call does the rest
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def _clear_all(self) -> None:
        try:
            self._ram.clear(None)
        except Exception as error:  # of a policy of the user's
            self._failed = error
            self._ram.clear_without_policy()

    def _end(self, sequence: CachedSequence) -> None:
        """Keep what a sequence has evaluated; `close` raises the last failure at its end."""
        try:
            if not sequence.is_closed:
                self._keep(sequence)
            self._end_search(sequence)
        except DeviceLost:
            pass  # there is nothing left to give
        except Exception as error:  # of a policy of the user's
            self._failed = error

    @property
    def is_closed(self) -> bool:
        """Whether it, or its context, was closed."""
        return self._closed or self._ctx.is_closed

    def _check_open(self) -> None:
        if self._ctx.is_closed:
            raise ClosedError("the context of this cache is closed")
        if self._closed:
            raise ClosedError("the cache is closed")
