"""Which blocks a tier is known to have, as events: for routers that look beyond the memory."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TypeAlias

from pykvcache.prefix.block_hash import NamedPrompt
from pykvcache.prefix.events import BlockRemoved, CacheEvent, Stored

__all__ = ["Notices", "Sink"]

#: So many blocks are remembered per tier; of those that are forgotten, `BlockRemoved` is sent.
MAX_BLOCKS = 1 << 15

#: How many blocks are looked at again at once: whether they are still there.
LOOK = 64

_MEDIA = {"disk": "DISK"}

#: Takes an event.
Sink: TypeAlias = Callable[[CacheEvent | Stored], object]


class Notices:
    """Send `BlockStored` once for what a tier has, and `BlockRemoved` when it is gone.

    Any thread may call. Events of one tier go out in their order, by one thread at a time, and no
    lock is held then: a callback may call the cache.
    """

    def __init__(self, medium: str, sink: Sink) -> None:
        self.medium = _MEDIA.get(medium, "EXTERNAL")
        self._sink = sink
        # And whether its event was withdrawn: it is said again when it is used again.
        self._known: OrderedDict[bytes, bool] = OrderedDict()
        self._waiting: deque[CacheEvent | Stored] = deque()
        self._lock = threading.Lock()
        self._sending = threading.Lock()

    def stored(self, prompt: NamedPrompt, blocks: Iterable[int]) -> None:
        """Note that blocks of a prompt are there, by their index."""
        with self._lock:
            begin = end = 0
            for at in blocks:
                is_known = self._known.get(prompt.names[at]) is False
                self._known[prompt.names[at]] = False
                self._known.move_to_end(prompt.names[at])
                if is_known:
                    continue
                if at != end:
                    self._note(prompt, begin, end)
                    begin = at
                end = at + 1
            self._note(prompt, begin, end)
            old = [self._known.popitem(last=False)[0] for _ in range(len(self._known) - MAX_BLOCKS)]
            if old:
                self._waiting.append(BlockRemoved(tuple(old), self.medium))
        self._send()

    def _note(self, prompt: NamedPrompt, begin: int, end: int) -> None:
        if begin < end:
            size = prompt.block_size
            parent = prompt.names[begin - 1] if begin else None
            text = prompt.text(begin * size, end * size)
            root = parent or prompt.root
            self._waiting.append(Stored(root, parent, text, size, prompt.namespace, self.medium))

    def removed(self, keys: Iterable[bytes]) -> None:
        """Note that blocks are not there, or not right."""
        with self._lock:
            gone = tuple(key for key in keys if self._known.pop(key, None) is not None)
            if gone:
                self._waiting.append(BlockRemoved(gone, self.medium))
        self._send()

    def oldest(self) -> list[bytes]:
        """Return some that were noted or used longest ago; the next call returns the next ones."""
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
        """Send the waiting events in their order: by one thread at a time, until none is left."""
        while self._waiting and self._sending.acquire(blocking=False):
            try:
                while self._waiting:
                    self._sink(self._waiting.popleft())
            finally:
                self._sending.release()
