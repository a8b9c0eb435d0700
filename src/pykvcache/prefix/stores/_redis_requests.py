"""Requests to a Redis server: what goes wrong is counted and ends here."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, TypeVar

from pykvcache.errors import StoreError
from pykvcache.prefix.stores._breaker import Breaker
from pykvcache.prefix.stores._deadline import Deadline, with_deadline
from pykvcache.prefix.stores._replies import NotUnderstood, receive
from pykvcache.prefix.stores.base import BlockStore

_T = TypeVar("_T")

__all__ = ["SCHEMES", "RedisRequests"]

#: How its URLs begin.
SCHEMES = {"redis", "rediss", "unix", "valkey", "valkeys"}
# How long a server may take that did not answer before, until it is left alone again, in seconds.
_TRIAL = 0.1


class RedisRequests(BlockStore):
    """The connections of a `RedisStore`.

    Parameters
    ----------
    url
        Of the server.
    timeout
        How long one request may take with all that it moves, in seconds.
    connect_timeout
        How long a connection may take to be made, in seconds.
    """

    def __init__(self, url: str, timeout: float, connect_timeout: float) -> None:
        self._timeout = timeout
        self._deadline = Deadline()
        # Whether the server answers, and whether it takes writes.
        self._reads = Breaker()
        self._writes = Breaker(first=1.0)
        self._closed = False
        self._client = self._connect(url, connect_timeout)

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
        # redis-py before 5.3 wants the name of a command.
        old = tuple(int(part) for part in redis.__version__.split(".")[:2]) < (5, 3)
        self._old_argument = ("GET",) if old else ()
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
        if not commands or not self._may_ask(writes=writes):
            return []
        limit = time.monotonic() + self._timeout
        answers = self._send(commands, limit if end is None else min(end, limit), errors=errors)
        if writes and answers:
            self._writes.succeeded()
        return answers

    def _may_ask(self, *, writes: bool = False) -> bool:
        if self._closed:
            return False
        may = self._is_reachable() and (not writes or self._writes.allow())
        self.counters.add(skipped=not may)
        return may

    def _is_reachable(self) -> bool:
        """Return whether the server answers, as far as is known; ask shortly where it did not."""
        if not self._reads.allow():
            return False
        return not self._reads.is_open or bool(self._send([("PING",)], time.monotonic() + _TRIAL))

    def _send(
        self, commands: list[tuple[Any, ...]], until: float, *, errors: bool = False
    ) -> list[Any]:
        return self._guarded(lambda: self._execute(commands, errors=errors), until) or []

    def _execute(self, commands: list[tuple[Any, ...]], *, errors: bool) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        answers: list[Any] = pipeline.execute(raise_on_error=not errors)
        return answers

    def _receive(
        self, commands: list[tuple[Any, ...]], views: list[memoryview]
    ) -> tuple[list[int], bool]:
        """Send commands, and receive the answers where they belong."""
        for is_again in (False, True):
            try:
                connection = self._asked(commands)
                is_usable = False
                try:
                    sizes, is_longer = receive(connection.socket, views)
                    is_usable = not is_longer
                    return sizes, is_longer
                finally:
                    self._done(connection, is_usable=is_usable)
            except NotUnderstood:
                break
            except (self._redis.ConnectionError, ConnectionError):
                if is_again:
                    raise
        return self._not_understood(commands, views)

    def _not_understood(
        self, commands: list[tuple[Any, ...]], views: list[memoryview]
    ) -> tuple[list[int], bool]:
        # An error: redis-py says which.
        self._execute(commands, errors=False)
        return [], False

    def _asked(self, commands: list[tuple[Any, ...]]) -> Any:
        """Return a connection over which the commands were sent; it ends with `_done`."""
        connection = self._client.connection_pool.get_connection(*self._old_argument)
        is_usable = False
        try:
            connection.send_packed_command(connection.pack_commands(commands))
            is_usable = True
        finally:
            if not is_usable:
                self._done(connection, is_usable=False)
        return connection

    def _done(self, connection: Any, *, is_usable: bool) -> None:
        if not is_usable:
            connection.disconnect()
        self._client.connection_pool.release(connection)

    def _guarded(self, call: Callable[[], _T], until: float) -> _T | None:
        """Call; what goes wrong is counted and ends here."""
        redis = self._redis
        answered = True
        try:
            self._deadline.until = until
            return call()
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
        except redis.RedisError as error:
            self.counters.add(failed=1, error=error)
        except Exception as error:
            # An answer of another type than the client reads. Others may wait behind it.
            self.counters.add(failed=1, error=error)
            self._drop_idle()
        finally:
            self._deadline.until = float("inf")
            if answered:
                self._reads.succeeded()
            else:
                self._reads.failed()
        return None

    def _drop_idle(self) -> None:
        """Close the connections that nobody uses just now."""
        with contextlib.suppress(Exception):
            self._client.connection_pool.disconnect(inuse_connections=False)

    def close(self) -> None:
        """Close the connections; later calls are misses."""
        self._closed = True
        with contextlib.suppress(Exception):
            self._client.close()
            self._client.connection_pool.disconnect()
