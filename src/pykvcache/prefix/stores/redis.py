"""RedisStore: blocks in Redis or Valkey, for many machines; what bounds it is the server's own."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pykvcache.errors import StoreError
from pykvcache.prefix.stores._breaker import Breaker
from pykvcache.prefix.stores._deadline import Deadline, with_deadline
from pykvcache.prefix.stores._fork import watch_forks
from pykvcache.prefix.stores.base import (
    KEY_SIZE,
    BlockStore,
    StoreEntry,
    check_items,
    check_keys,
    check_max_bytes,
    check_seconds,
    writable,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["SCHEMES", "RedisStore"]

#: How many bytes a request moves at most, unless one block is larger.
REQUEST_BYTES = 2 << 20
# How many keys one request asks for where no contents are moved.
_MANY = 1024
#: The longest value of a server, as it is set without other configuration.
_MAX_VALUE = 512 << 20
#: How its URLs begin.
SCHEMES = {"redis", "rediss", "unix", "valkey", "valkeys"}
# How long a server may take that did not answer before, until it is left alone again, in seconds.
_TRIAL = 0.1
# Ends a lease if it is still the caller's.
_RELEASE = "if redis.call('get',KEYS[1])==ARGV[1] then return redis.call('del',KEYS[1]) end"


class RedisStore(BlockStore):
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
        self._timeout = check_seconds(timeout, "timeout")
        connect_timeout = check_seconds(connect_timeout, "connect_timeout")
        try:
            self._prefix = prefix.encode()
        except UnicodeEncodeError:
            raise StoreError(f"prefix {prefix!r} is not Unicode text", "prefix", prefix) from None
        self._token = secrets.token_hex(8)
        self._deadline = Deadline()
        # Whether the server answers, and whether it takes writes.
        self._reads = Breaker()
        self._writes = Breaker(first=1.0)
        self._closed = False
        self._client = self._connect(url, connect_timeout)
        self._after_fork()
        watch_forks(self)

    def _connect(self, url: str, connect_timeout: float) -> Any:
        scheme, separator, rest = url.partition("://")
        if not separator or scheme not in SCHEMES:
            known = ", ".join(sorted(SCHEMES))
            raise StoreError(f"the URL begins with none of {known}", value=scheme, limit=known)
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise ImportError(
                f"RedisStore needs redis: pip install 'pykvcache[redis]' ({error})"
            ) from error
        self._redis: Any = redis
        try:
            # A server that was started anew has closed the connections: one more try for those.
            pool = redis.ConnectionPool.from_url(
                f"{scheme.replace('valkey', 'redis')}://{rest}",
                socket_timeout=self._timeout,
                socket_connect_timeout=connect_timeout,
                socket_read_size=1 << 18,
                retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
            )
        except (ValueError, TypeError) as error:
            raise StoreError(f"the URL cannot be used: {error}", value=scheme) from error
        pool.connection_class = with_deadline(pool.connection_class, self._deadline)
        return redis.Redis(connection_pool=pool)

    def _after_fork(self) -> None:
        self._reads.reset_lock()
        self._writes.reset_lock()

    def __repr__(self) -> str:
        return f"RedisStore(prefix={self._prefix.decode()!r})"

    # Reading ----------------------------------------------------------------------------

    def contains(self, keys: Sequence[bytes]) -> int:
        """Return how many of the leading keys are there; see `BlockStore.contains`."""
        keys = check_keys(keys)
        done = 0
        for begin in range(0, len(keys), _MANY):
            group = keys[begin : begin + _MANY]
            found = self._ask([("EXISTS", self._prefix + key) for key in group])
            n = next((i for i, there in enumerate(found) if there != 1), len(found))
            done += n
            if n < len(group):
                break
        return done

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether it is there; see `BlockStore.present`."""
        keys = check_keys(keys)
        there: list[bool] = []
        for begin in range(0, len(keys), _MANY):
            group = keys[begin : begin + _MANY]
            found = self._ask([("EXISTS", self._prefix + key) for key in group])
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
        for group in _groups(pairs):
            found = self._ask([("GET", self._prefix + key) for key, _ in group], end=end)
            n = 0
            for (_, view), data in zip(group, found, strict=False):
                if not isinstance(data, bytes):
                    break
                if len(data) > len(view):
                    self.counters.add(too_large=1)
                    break
                view[: len(data)] = data
                size += len(data)
                n += 1
            done += n
            if n < len(group):
                break
        self.counters.add(hits=done, misses=done < len(pairs), bytes_read=size)
        return done

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark blocks as used now; the server's clock for this has seconds."""
        keys = check_keys(keys)
        for begin in range(0, len(keys), _MANY):
            group = [self._prefix + key for key in keys[begin : begin + _MANY]]
            self._ask([("TOUCH", *group)])

    # Writing ----------------------------------------------------------------------------

    def put(self, items: Iterable[tuple[bytes, Buffer]]) -> int:
        """Store blocks that are not there yet, 2 MiB per request; see `BlockStore.put`."""
        stored = 0
        for group in _groups([one for one in check_items(items) if self._fits(one[1])]):
            commands = [("SET", self._prefix + key, view, "NX") for key, view in group]
            answers = self._ask(commands, writes=True)
            for (_, view), answer in zip(group, answers, strict=False):
                if answer:
                    self.counters.add(written=1, bytes_written=len(view))
                    stored += 1
                else:
                    self.counters.add(known=1)
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
        for begin in range(0, len(keys), _MANY):
            group = [self._prefix + key for key in keys[begin : begin + _MANY]]
            removed += sum(self._ask([("UNLINK", *group)], writes=True))
        self.counters.add(removed=removed)
        return removed

    # For tools: these walk over all keys -------------------------------------------------

    def trim(self, max_bytes: int) -> list[bytes]:
        """Remove blocks, idle for longest first; the server's own eviction makes this a rare need.

        The server knows idle times in seconds only, and none at all under an LFU policy.
        """
        check_max_bytes(max_bytes)
        found = sorted(self.entries(), key=lambda entry: entry.used)
        total = sum(entry.size for entry in found)
        removed = []
        for entry in found:
            if total <= max_bytes:
                break
            removed.append(entry.key)
            total -= entry.size
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
            if not answer:
                return
            ((cursor, keys),) = answer
            keys = [key for key in keys if len(key) == begin + KEY_SIZE and key not in seen]
            seen.update(keys)
            # Unlike STRLEN, this does not count as a use.
            sizes = self._ask([("MEMORY", "USAGE", key) for key in keys])
            idle = self._ask([("OBJECT", "IDLETIME", key) for key in keys], errors=True)
            now = time.time()
            for key, size, seconds in zip(keys, sizes, idle, strict=False):
                # Under an LFU policy the answer is an error.
                used = now - seconds if isinstance(seconds, int) else 0.0
                if size is not None:
                    yield StoreEntry(key[begin:], size, used)
            if int(cursor) == 0:
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
        return not answers or bool(answers[0])

    def release(self, key: bytes) -> None:
        """End a lease of this store."""
        check_keys([key])
        if not self._writes.is_open:
            name = self._prefix + b"lease:" + key
            self._ask([("EVAL", _RELEASE, 1, name, self._token)], errors=True)

    # Requests ---------------------------------------------------------------------------

    def _ask(
        self,
        commands: list[tuple[Any, ...]],
        *,
        end: float | None = None,
        errors: bool = False,
        writes: bool = False,
    ) -> list[Any]:
        """Send commands in one request.

        Returns
        -------
        list
            The answers; none where the server is not asked, or whatever goes wrong.
        """
        if self._closed or not commands:
            return []
        if not self._is_reachable() or (writes and not self._writes.allow()):
            self.counters.add(skipped=1)
            return []
        limit = time.monotonic() + self._timeout
        answers = self._send(commands, limit if end is None else min(end, limit), errors=errors)
        if writes and answers:
            self._writes.succeeded()
        return answers

    def _is_reachable(self) -> bool:
        """Return whether the server answers, as far as is known; ask shortly where it did not."""
        if not self._reads.allow():
            return False
        return not self._reads.is_open or bool(self._send([("PING",)], time.monotonic() + _TRIAL))

    def _send(
        self, commands: list[tuple[Any, ...]], until: float, *, errors: bool = False
    ) -> list[Any]:
        """Send commands; what goes wrong is counted and ends here."""
        redis = self._redis
        answered = True
        try:
            self._deadline.until = until
            pipeline = self._client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            answers: list[Any] = pipeline.execute(raise_on_error=not errors)
            return answers
        except (redis.exceptions.NoPermissionError, redis.ReadOnlyError) as error:
            self._writes.failed()
            self.counters.add(denied=1, error=error)
        except redis.exceptions.OutOfMemoryError as error:
            self._writes.failed()
            self.counters.add(full=1, error=error)
        except (redis.TimeoutError, TimeoutError) as error:
            answered = False
            self.counters.add(timed_out=1, error=error)
        except (redis.ConnectionError, OSError, EOFError) as error:
            # A server that loads its data answers, and is of no use for a while.
            answered = False
            denied = isinstance(error, redis.AuthenticationError)
            self.counters.add(**{"denied" if denied else "failed": 1}, error=error)
        except (redis.RedisError, ValueError, UnicodeError) as error:
            self.counters.add(failed=1, error=error)
        finally:
            self._deadline.until = float("inf")
            if answered:
                self._reads.succeeded()
            else:
                self._reads.failed()
        return []

    def close(self) -> None:
        """Close the connections; later calls are misses."""
        self._closed = True
        with contextlib.suppress(Exception):
            self._client.close()
            self._client.connection_pool.disconnect()


def _groups(
    pairs: list[tuple[bytes, memoryview]],
) -> Iterator[list[tuple[bytes, memoryview]]]:
    """Split a run such that a request moves about 2 MiB."""
    group: list[tuple[bytes, memoryview]] = []
    size = 0
    for pair in pairs:
        if group and (size + len(pair[1]) > REQUEST_BYTES or len(group) >= _MANY):
            yield group
            group, size = [], 0
        group.append(pair)
        size += len(pair[1])
    if group:
        yield group
