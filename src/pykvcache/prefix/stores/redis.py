"""RedisStore: blocks in Redis or Valkey, for many machines; what bounds it is the server's own."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pykvcache.prefix.stores._arguments import (
    KEY_SIZE,
    check_items,
    check_keys,
    check_max_bytes,
    check_seconds,
    check_text,
    writable,
)
from pykvcache.prefix.stores._redis_requests import SCHEMES, RedisRequests
from pykvcache.prefix.stores.base import StoreEntry

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["MANY", "SCHEMES", "RedisStore", "groups", "least_used"]

#: How many bytes a request moves at most, unless one block is larger.
REQUEST_BYTES = 2 << 20
#: How many keys one request asks for where no contents are moved.
MANY = 1024
#: The longest value of a server, as it is set without other configuration.
_MAX_VALUE = 512 << 20
# Ends a lease if it is still the caller's.
_RELEASE = "if redis.call('get',KEYS[1])==ARGV[1] then return redis.call('del',KEYS[1]) end"


class RedisStore(RedisRequests):
    """Keep blocks in a Redis or Valkey server. Needs the extra ``redis``.

    What the server evicts is a miss. A server that is slow, frozen, full, read-only or gone
    costs at most ``timeout`` seconds once, then nothing for a while, and never an error.
    Nothing is asked of the server before the first call.

    Parameters
    ----------
    url : str
        ``redis://user:password@host:6379/0``, ``rediss://`` for TLS, ``unix:///path``; also
        ``valkey://`` and ``valkeys://``. Options of redis-py may follow, such as
        ``?ssl_ca_certs=ca.pem``.
    prefix : str
        What every key begins with on the server.
    timeout : float
        How long one call may take with all that it moves, in seconds.
    connect_timeout : float
        How long a connection may take to be made, in seconds.

    Raises
    ------
    StoreError
        The URL is of no known kind.
    ImportError
        redis is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "pykvcache:",
        timeout: float = 1.0,
        connect_timeout: float = 0.25,
    ) -> None:
        timeout = check_seconds(timeout, "timeout")
        connect_timeout = check_seconds(connect_timeout, "connect_timeout")
        self._prefix = check_text(prefix, "prefix").encode()
        self._token = secrets.token_hex(8)
        super().__init__(check_text(url, "url"), timeout, connect_timeout)

    def __repr__(self) -> str:
        return f"RedisStore(prefix={self._prefix.decode()!r})"

    # Reading ----------------------------------------------------------------------------

    def contains(self, keys: Sequence[bytes]) -> int:
        """Return how many of the leading keys are there; see `BlockStore.contains`."""
        keys = check_keys(keys)
        done = 0
        for begin in range(0, len(keys), MANY):
            group = keys[begin : begin + MANY]
            found = self._ask(self._each("EXISTS", group))
            n = next((i for i, there in enumerate(found) if there != 1), len(found))
            done += n
            if n < len(group):
                break
        return done

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether it is there; see `BlockStore.present`."""
        keys = check_keys(keys)
        there: list[bool] = []
        for begin in range(0, len(keys), MANY):
            group = keys[begin : begin + MANY]
            found = self._ask(self._each("EXISTS", group))
            there += [n == 1 for n in found] or [False] * len(group)
        return there

    @property
    def n_probes(self) -> int:
        """Thousands."""
        return 4096

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> int:
        """Read the leading run of blocks, 2 MiB per request; see `BlockStore.get_into`."""
        pairs = list(zip(check_keys(keys, buffers), map(writable, buffers), strict=True))
        done = size = 0
        end = time.monotonic() + self._timeout
        for group in groups(pairs):
            sizes = self._get(group, end)
            done += len(sizes)
            size += sum(sizes)
            if len(sizes) < len(group):
                break
        self.counters.add(hits=done, misses=done < len(pairs), bytes_read=size)
        return done

    def _get(self, group: list[tuple[bytes, memoryview]], end: float) -> list[int]:
        """Read blocks in one request; return the lengths of the leading run."""
        commands = self._each("GET", [key for key, _ in group])
        views = [view for _, view in group]
        if not self._may_ask():
            return []
        until = min(end, time.monotonic() + self._timeout)
        sizes, is_longer = self._guarded(lambda: self._receive(commands, views), until) or (
            [],
            False,
        )
        self.counters.add(too_large=is_longer)
        return sizes

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark blocks as used now; the server's clock for this has seconds."""
        keys = check_keys(keys)
        for begin in range(0, len(keys), MANY):
            self._ask(self._of_keys("TOUCH", keys[begin : begin + MANY]))

    # Writing ----------------------------------------------------------------------------

    def put(self, items: Iterable[tuple[bytes, Buffer]]) -> int:
        """Store blocks that are not there yet, 2 MiB per request; see `BlockStore.put`."""
        stored = 0
        for group in groups([one for one in check_items(items) if self._fits(one[1])]):
            commands = [("SET", self._prefix + key, view, "NX") for key, view in group]
            answers = self._ask(commands, writes=True)
            for (_, view), answer in zip(group, answers, strict=False):
                if answer:
                    self.counters.add(written=1, bytes_written=len(view))
                    stored += 1
                else:
                    self.counters.add(known=answer is None)
            if not answers:
                break
        return stored

    def _fits(self, view: memoryview) -> bool:
        if len(view) > _MAX_VALUE:
            self.counters.add(too_large=1)
        return len(view) <= _MAX_VALUE

    def discard(self, keys: Sequence[bytes]) -> int:
        """Remove blocks; see `BlockStore.discard`."""
        keys = check_keys(keys)
        removed = 0
        for begin in range(0, len(keys), MANY):
            commands = self._of_keys("UNLINK", keys[begin : begin + MANY])
            removed += sum(filter(_is_number, self._ask(commands, writes=True)))
        self.counters.add(removed=removed)
        return removed

    def _each(self, command: str, keys: Sequence[bytes]) -> list[tuple[Any, ...]]:
        """Return a command for each key."""
        return [(command, self._prefix + key) for key in keys]

    def _of_keys(self, command: str, keys: Sequence[bytes]) -> list[tuple[Any, ...]]:
        """Return what gives a command many keys."""
        return [(command, *(self._prefix + key for key in keys))]

    # For tools: these walk over all keys -------------------------------------------------

    def trim(self, max_bytes: int) -> list[bytes]:
        """Remove blocks, idle for longest first; the server's own eviction makes this a rare need.

        The server knows idle times in seconds only, and none at all under an LFU policy.
        """
        removed = least_used(self.entries(), check_max_bytes(max_bytes))
        return removed if self.discard(removed) else []

    def entries(self) -> Iterator[StoreEntry]:
        """Yield every block, from a walk over the server's keys."""
        cursor: Any = 0
        begin = len(self._prefix)
        # Square brackets and such have a meaning in patterns.
        pattern = b"".join(b"[%c]" % c if chr(c) in "*?[" else b"%c" % c for c in self._prefix)
        seen: set[bytes] = set()
        while True:
            answer = self._ask([("SCAN", cursor, "MATCH", pattern + b"*", "COUNT", 500)])
            if not answer or (found := _scanned(answer[0])) is None:
                self.counters.add(failed=bool(answer))
                return
            cursor, keys = found
            keys = [key for key in keys if len(key) == begin + KEY_SIZE and key not in seen]
            seen.update(keys)
            # Unlike STRLEN, this does not count as a use.
            sizes = self._ask([("MEMORY", "USAGE", key) for key in keys])
            idle = self._ask([("OBJECT", "IDLETIME", key) for key in keys], errors=True)
            now = time.time()
            for key, size, seconds in zip(keys, sizes, idle, strict=False):
                # Under an LFU policy the answer is an error.
                used = now - seconds if _is_number(seconds) else 0.0
                if _is_number(size):
                    yield StoreEntry(key[begin:], size, used)
            if cursor == 0:
                return

    # Leases -----------------------------------------------------------------------------

    def lease(self, key: bytes, seconds: float) -> bool:
        """Return whether the caller is the one to evaluate; see `BlockStore.lease`.

        Where the server does not answer, or does not let this user write, everybody is.
        """
        check_keys([key])
        milliseconds = max(1, int(check_seconds(seconds) * 1000))
        name = self._prefix + b"lease:" + key
        command = ("SET", name, self._token, "NX", "PX", milliseconds)
        answers = self._ask([command], writes=True)
        # None is the answer where there is one already.
        return not answers or answers[0] is not None

    def release(self, key: bytes) -> None:
        """End a lease of this store."""
        check_keys([key])
        if not self._writes.is_open:
            name = self._prefix + b"lease:" + key
            self._ask([("EVAL", _RELEASE, 1, name, self._token)], errors=True)


def _is_number(answer: Any) -> bool:
    """Whether a server answered with a count, which fits into 8 bytes."""
    return type(answer) is int and 0 <= answer < 1 << 63


def _scanned(answer: Any) -> tuple[int, list[bytes]] | None:
    """Return the cursor and the keys that a server answered to SCAN; None for something else."""
    try:
        cursor, keys = answer
        return int(cursor), [key for key in keys if isinstance(key, bytes)]
    except (TypeError, ValueError, OverflowError):
        return None


def least_used(entries: Iterable[StoreEntry], max_bytes: int) -> list[bytes]:
    """Return the keys of the blocks that go where so many bytes are to be left."""
    found = sorted(entries, key=lambda entry: entry.used)
    total = sum(entry.size for entry in found)
    removed = []
    for entry in found:
        if total <= max_bytes:
            break
        removed.append(entry.key)
        total -= entry.size
    return removed


def groups(
    pairs: list[tuple[bytes, memoryview]],
) -> Iterator[list[tuple[bytes, memoryview]]]:
    """Split a run such that a request moves about 2 MiB."""
    group: list[tuple[bytes, memoryview]] = []
    size = 0
    for pair in pairs:
        if group and (size + len(pair[1]) > REQUEST_BYTES or len(group) >= MANY):
            yield group
            group, size = [], 0
        group.append(pair)
        size += len(pair[1])
    if group:
        yield group
