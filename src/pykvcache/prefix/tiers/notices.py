"""Which blocks a tier is known to have, as events: for routers that look beyond the memory."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

import numpy as np

from pykvcache.prefix.events import BlockRemoved, BlockStored, CacheEvent

__all__ = ["Notices", "Place", "Sink", "place"]

#: So many blocks are remembered per tier; of those that are forgotten, `BlockRemoved` is sent.
MAX_BLOCKS = 1 << 15

#: How many blocks are looked at again at once: whether they are still there.
LOOK = 64

_MEDIA = {"disk": "DISK"}

#: Takes an event, and the namespace whose tokens it names.
Sink: TypeAlias = Callable[[CacheEvent, "str | None"], object]


@dataclass(frozen=True)
class Place:
    """Where a block stands in a prompt.

    Attributes
    ----------
    key
        Its name.
    parent
        Name of the block before it; None at the beginning.
    tokens
        Its tokens, as `token_bytes` gives them.
    namespace
        Whose they are.
    """

    key: bytes
    parent: bytes | None
    tokens: bytes
    namespace: str = ""


def place(names: Sequence[bytes], tokens: bytes, size: int, i: int, namespace: str) -> Place:
    """Return the place of one block of a prompt.

    Parameters
    ----------
    names
        Names of the prompt's blocks.
    tokens
        Its tokens, 4 bytes each.
    size
        Tokens per block.
    i
        Which block.
    namespace
        Whose it is.
    """
    step = 4 * size
    parent = names[i - 1] if i else None
    return Place(names[i], parent, tokens[i * step : (i + 1) * step], namespace)


class Notices:
    """Send `BlockStored` once for what a tier has, and `BlockRemoved` when it is gone.

    Any thread may call. Events of one tier go out in their order, by one thread at a time, and no
    lock is held that somebody else waits for: a callback may call the cache.

    Parameters
    ----------
    medium
        That of the store.
    sink
        Takes the events, and the namespace whose tokens each names, or None.
    """

    def __init__(self, medium: str, sink: Sink) -> None:
        self.medium = _MEDIA.get(medium, "EXTERNAL")
        self._sink = sink
        # And whether its event was withdrawn: it is said again when it is used again.
        self._known: OrderedDict[bytes, bool] = OrderedDict()
        self._waiting: deque[tuple[CacheEvent, str | None]] = deque()
        self._lock = threading.Lock()
        self._sending = threading.Lock()

    def stored(self, blocks: Iterable[Place]) -> None:
        """Note that blocks are there."""
        with self._lock:
            run: list[Place] = []
            for block in blocks:
                if self._known.get(block.key) is False:
                    self._known.move_to_end(block.key)
                    continue
                self._known[block.key] = False
                self._known.move_to_end(block.key)
                if run and (
                    block.parent != run[-1].key or len(block.tokens) != len(run[-1].tokens)
                ):
                    self._waiting.append((self._event(run), run[0].namespace))
                    run = []
                run.append(block)
            if run:
                self._waiting.append((self._event(run), run[0].namespace))
            old = [self._known.popitem(last=False)[0] for _ in range(len(self._known) - MAX_BLOCKS)]
            if old:
                self._waiting.append((BlockRemoved(tuple(old), self.medium), None))
        self._send()

    def _event(self, run: list[Place]) -> BlockStored:
        ids = np.frombuffer(b"".join(block.tokens for block in run), "<u4").tolist()
        return BlockStored(
            tuple(block.key for block in run),
            run[0].parent,
            tuple(ids),
            len(run[0].tokens) // 4,
            self.medium,
        )

    def removed(self, keys: Iterable[bytes]) -> None:
        """Note that blocks are not there, or not right."""
        with self._lock:
            gone = tuple(key for key in keys if self._known.pop(key, None) is not None)
            if gone:
                self._waiting.append((BlockRemoved(gone, self.medium), None))
        self._send()

    def oldest(self) -> list[bytes]:
        """Return some of those that were noted or used longest ago; the next call has others."""
        with self._lock:
            keys = list(islice(self._known, LOOK))
            for key in keys:
                self._known.move_to_end(key)
            return keys

    def forget(self) -> None:
        """Forget what was sent: everything was said to be cleared."""
        with self._lock:
            self._known.clear()

    def say_again(self, keys: Iterable[bytes]) -> None:
        """Say of some blocks that they are there when they are used again; and if they go."""
        wanted = set(keys)
        with self._lock:
            self._known.update((key, True) for key in self._known.keys() & wanted)

    def _send(self) -> None:
        """Hand out what waits, in its order: one thread at a time takes what others add, too."""
        while self._waiting and self._sending.acquire(blocking=False):
            try:
                while self._waiting:
                    self._sink(*self._waiting.popleft())
            finally:
                self._sending.release()
