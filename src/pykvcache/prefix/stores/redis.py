"""RedisStore and RedisClusterStore: blocks in Redis or Valkey servers, which evict them."""

from __future__ import annotations

import contextlib
import functools
import re
import ssl
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from pykvcache._arguments import as_text
from pykvcache.errors import StoreError, how_to_install
from pykvcache.prefix.stores.base import (
    KEY_SIZE,
    StoreEntry,
    check_items,
    check_keys,
    check_max_bytes,
    check_seconds,
    copy_run,
    writable,
)
from pykvcache.prefix.stores.remote import RemoteStore

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["RedisClusterStore", "RedisStore"]

# Maximum bytes and keys per request, unless one block is larger.
_REQUEST_BYTES, _REQUEST_KEYS = 2 << 20, 1024
# The longest value that a server accepts by default.
_MAX_VALUE = 512 << 20
# Maximum number of parallel requests to the nodes of a cluster.
_N_PARALLEL = 8
# Minimum seconds between two refreshes of a cluster's slot map, after failures.
_REFRESH = 2.0
# A command of one key, which is its second item.
_Command = tuple[Any, ...]
# The name of a node, its client, and the indices of its commands.
_Server = tuple[str, Any, list[int]]


class RedisStore(RemoteStore):
    """Keeps blocks in a Redis or Valkey server. Needs the extra ``redis``.

    If a server is slow, full, read-only or gone, its blocks are misses, and one warning is logged.
    A circuit breaker then stops requests for a while. The server itself evicts blocks
    (``maxmemory``). It keeps last-use times to the second, so `trim` removes all blocks last used
    in the same second together.

    Parameters
    ----------
    url : str
        ``redis://user:password@host:6379/0``, ``rediss://`` for TLS, ``unix:///path``; also
        ``valkey://`` and ``valkeys://``. Options of redis-py may follow, such as
        ``?ssl_ca_certs=ca.pem``.
    prefix : str
        Prefix of every key on the server.
    timeout : float
        Seconds without a reply after which a request fails.
    connect_timeout : float
        Seconds after which connecting fails.

    Raises
    ------
    StoreError
        The URL is invalid, or the server refuses: a wrong password, a user who may not read
        these keys, an untrusted certificate. A server that does not answer only causes a warning.
    """

    schemes: ClassVar[frozenset[str]] = frozenset({"redis", "rediss", "unix", "valkey", "valkeys"})
    n_probes = 4096

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "pykvcache:",
        timeout: float = 1.0,
        connect_timeout: float = 0.25,
    ) -> None:
        scheme, separator, rest = as_text(url, "url", StoreError).partition("://")
        self._prefix = as_text(prefix, "prefix", StoreError).encode()
        options: dict[str, Any] = {
            "socket_timeout": check_seconds(timeout, "timeout"),
            "socket_connect_timeout": check_seconds(connect_timeout, "connect_timeout"),
            "socket_read_size": 1 << 18,
            "protocol": 2,
        }
        if not separator or scheme not in self.schemes:
            known = ", ".join(sorted(self.schemes))
            text = f"the scheme of the URL must be one of {known}"
            raise StoreError(text, value=scheme, limit=known)
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            name = type(self).__name__
            text = f"{name} needs redis: {how_to_install('redis')} ({error})"
            raise ImportError(text) from error
        self._redis: Any = redis
        # The circuit breaker decides when to retry.
        options["retry"] = Retry(NoBackoff(), 0)
        url = f"{scheme.removesuffix('+cluster').replace('valkey', 'redis')}://{rest}"
        try:
            parts = urlsplit(url)
            super().__init__(
                f"{scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}", _N_PARALLEL
            )
            self._client = self._make_client(url, options)
        except StoreError:
            raise
        except (ValueError, TypeError) as error:
            raise StoreError(f"the URL cannot be used: {error}", value=scheme) from error
        self._check_server(self._probe)

    def _make_client(self, url: str, options: dict[str, Any]) -> Any:
        return self._redis.Redis.from_url(url, **options)

    def _probe(self) -> None:
        self._client.get(self._prefix + bytes(KEY_SIZE))

    def _kind_of(self, error: Exception) -> str:
        errors = self._redis.exceptions
        chain: list[BaseException] = [error]
        while cause := chain[-1].__cause__ or chain[-1].__context__:
            chain.append(cause)

        def is_one_of(*kinds: type[Exception]) -> bool:
            return any(isinstance(one, kinds) for one in chain)

        if is_one_of(
            *(errors.NoPermissionError, errors.ReadOnlyError, errors.AuthenticationError),
            ssl.SSLCertVerificationError,
        ):
            return "denied"
        if is_one_of(errors.OutOfMemoryError):
            return "full"
        if is_one_of(errors.TimeoutError, TimeoutError):
            return "timed_out"
        # A cluster that is moving slots to another node is unavailable, not refusing.
        is_refusal = is_one_of(errors.ResponseError) and not is_one_of(errors.ClusterDownError)
        return "refused" if is_refusal else "failed"

    # Requests ---------------------------------------------------------------------------

    def _servers(self, commands: Sequence[_Command]) -> list[_Server]:
        """Return the servers, and the commands for each."""
        return [("", self._client, list(range(len(commands))))]

    def _each(self, commands: Sequence[_Command], *, is_write: bool = False) -> list[Any]:
        """Send commands of one key each; return the answers, False for failed ones."""
        answers: list[Any] = [False] * len(commands)

        def ask(server: _Server) -> None:
            node, client, which = server
            for begin in range(0, len(which), _REQUEST_KEYS):
                send = functools.partial(
                    self._send, client, commands, which[begin : begin + _REQUEST_KEYS], answers
                )
                self._ask(send, node, is_write=is_write)

        self._map(ask, self._servers(commands))
        return answers

    def _send(
        self, client: Any, commands: Sequence[_Command], which: list[int], answers: list[Any]
    ) -> None:
        """Send some commands in one request, and store their answers; raise the first error."""
        pipeline = client.pipeline(transaction=False)
        for i in which:
            pipeline.execute_command(*commands[i])
        failure: Exception | None = None
        for i, answer in zip(which, pipeline.execute(raise_on_error=False), strict=True):
            if isinstance(answer, self._redis.exceptions.AskError):  # or its subclass MovedError
                answer = self._follow(commands[i], answer)
            if isinstance(answer, Exception):
                failure = failure or answer
            else:
                answers[i] = answer
        if failure is not None:
            raise failure

    def _follow(self, command: _Command, answer: Exception) -> Any:
        """Return the answer after following a redirection to another node, if there are nodes."""
        return answer

    def _commands(self, name: str, keys: Sequence[bytes]) -> list[_Command]:
        return [(name, self._prefix + key) for key in keys]

    # The five methods -------------------------------------------------------------------

    def contains(self, keys: Sequence[bytes]) -> int:
        """Return how many of the leading keys are stored; see `BlockStore.contains`."""
        there = self.present(keys)
        return there.index(False) if False in there else len(there)

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether it is stored; see `BlockStore.present`."""
        return [n == 1 for n in self._each(self._commands("EXISTS", check_keys(keys)))]

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> int:
        """Read the leading run of blocks, 2 MiB per request; see `BlockStore.get_into`."""
        pairs = list(zip(check_keys(keys, buffers), map(writable, buffers), strict=True))
        values = (
            value if isinstance(value, bytes) else None
            for group in _groups(pairs)
            for value in self._each(self._commands("GET", [key for key, _ in group]))
        )
        return copy_run(self.counters, values, [view for _, view in pairs])

    def put(self, items: Iterable[tuple[bytes, Buffer]]) -> int:
        """Store missing blocks, 2 MiB per request; see `BlockStore.put`."""
        found = check_items(items)
        small = [(key, view) for key, view in found if len(view) <= _MAX_VALUE]
        stored = 0
        for group in _groups(small):
            commands = [("SET", self._prefix + key, view, "NX") for key, view in group]
            answers = self._each(commands, is_write=True)
            for (_, view), answer in zip(group, answers, strict=True):
                if answer:
                    self.counters.add(written=1, bytes_written=len(view))
                    stored += 1
                self.counters.add(known=answer is None)
        self.counters.add(too_large=len(found) - len(small))
        return stored

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark blocks as used now, to the second; see `BlockStore.touch`."""
        # In reverse, so that the first key becomes the most recent.
        self._each(self._commands("TOUCH", check_keys(keys)[::-1]))

    def trim(self, max_bytes: int) -> list[bytes]:
        """Remove the least recently used blocks, to the second; scans all keys of the server.

        A server with an LFU policy does not know when blocks were used.
        """
        check_max_bytes(max_bytes)
        found = sorted(self.entries(), key=lambda entry: entry.used)
        total = sum(entry.size for entry in found)
        removed: list[bytes] = []
        last = float("-inf")
        for entry in found:
            if total <= max_bytes and entry.used > last:
                break
            total -= entry.size
            last = entry.used
            removed.append(entry.key)
        self.discard(removed)
        return removed

    # Optional methods -------------------------------------------------------------------

    def discard(self, keys: Sequence[bytes]) -> int:
        """Remove blocks; see `BlockStore.discard`."""
        answers = self._each(self._commands("UNLINK", check_keys(keys)), is_write=True)
        removed = sum(bool(answer == 1) for answer in answers)
        self.counters.add(removed=removed)
        return removed

    def entries(self) -> Iterator[StoreEntry]:
        """Yield every block; scans all keys of the server."""
        for node, client in self._owners():
            cursor, seen = 0, set[bytes]()
            while True:
                page = self._ask(functools.partial(self._page, client, cursor), node)
                if page is None:
                    break
                cursor, found = page
                yield from (entry for entry in found if entry.key not in seen)
                seen.update(entry.key for entry in found)
                if cursor == 0:
                    break

    def _owners(self) -> list[tuple[str, Any]]:
        return [("", self._client)]

    def _page(self, client: Any, cursor: int) -> tuple[int, list[StoreEntry]]:
        pattern = re.sub(rb"([*?\[\]\\])", rb"\\\1", self._prefix) + b"*"
        cursor, names = client.scan(cursor, match=pattern, count=500)
        size = len(self._prefix) + KEY_SIZE
        names = [name for name in names if len(name) == size]
        pipeline = client.pipeline(transaction=False)
        pipeline.execute_command("INFO", "server")
        for name in names:
            # Unlike STRLEN, neither counts as a use.
            pipeline.execute_command("MEMORY USAGE", name)
            pipeline.execute_command("OBJECT", "IDLETIME", name)
        info, *facts = pipeline.execute(raise_on_error=False)
        now = int(time.time())
        if isinstance(info, dict):  # correct it by the server's LRU clock, seconds in 24 bits
            now -= (now - info.get("lru_clock", now) + 0x800000 & 0xFFFFFF) - 0x800000
        return cursor, [
            StoreEntry(name[-KEY_SIZE:], n_bytes, float(now - idle) if type(idle) is int else 0.0)
            for name, n_bytes, idle in zip(names, facts[::2], facts[1::2], strict=True)
            if type(n_bytes) is int
        ]

    def _finish(self) -> None:
        with contextlib.suppress(Exception):
            self._client.close()


class RedisClusterStore(RedisStore):
    """Keeps blocks in a Redis or Valkey cluster. Needs the extra ``redis``.

    A block is stored on the node that has its key's slot. If a node is slow or gone, its blocks
    are misses until another node takes over its slots. Other arguments and errors are those of
    `RedisStore`, for each node.

    Parameters
    ----------
    url : str
        ``redis+cluster://user:password@host:6379,other:6379``, ``rediss+cluster://`` for TLS; also
        ``valkey+cluster://`` and ``valkeys+cluster://``. Any nodes: the others are discovered from
        them. Options of redis-py may follow. User, password and options apply to every node.

    Raises
    ------
    StoreError
        The URL names no host, or a server that is not part of a cluster.
    """

    schemes: ClassVar[frozenset[str]] = frozenset(
        f"{scheme}+cluster" for scheme in ("redis", "rediss", "valkey", "valkeys")
    )

    def _make_client(self, url: str, options: dict[str, Any]) -> Any:
        """Prepare the client, which requests the slot map when it is created; return None."""
        parts, cluster = urlsplit(url), self._redis.cluster
        login, at, hosts = parts.netloc.rpartition("@")
        if not (names := [name for name in hosts.split(",") if name]):
            raise StoreError("the URL names no host", value=parts.scheme, limit="host:port")
        nodes = [urlsplit(f"//{name}") for name in names]
        self._connect = functools.partial(
            cluster.RedisCluster,
            url=parts._replace(netloc=f"{login}{at}{names[0]}", path="").geturl(),
            startup_nodes=[cluster.ClusterNode(n.hostname or "", n.port or 6379) for n in nodes],
            require_full_coverage=False,
            **options,
        )
        self._refreshed_at, self._has_gaps = float("-inf"), False

    def _probe(self) -> None:
        self._client = self._connect()
        super()._probe()

    def _is_connected(self) -> bool:
        """Return whether the slot map is known; refresh it after failures."""
        if self._client is None:
            self._client = self._ask(self._connect)
        elif time.monotonic() > self._refreshed_at + _REFRESH and (
            self._has_gaps or any(breaker.has_failed for breaker in [*self._breakers.values()])
        ):
            self._refreshed_at, self._has_gaps = time.monotonic(), False
            self._ask(self._client.nodes_manager.initialize)
            # A node without slots gets no more requests, so its breaker would stay open.
            for name in {*self._breakers} - {node.name for node in self._client.get_primaries()}:
                self._breakers.pop(name, None)
        return self._client is not None

    def _servers(self, commands: Sequence[_Command]) -> list[_Server]:
        servers: dict[str, _Server] = {}
        for i, command in enumerate(commands if self._is_connected() else ()):
            try:
                node = self._client.get_node_from_key(command[1])
            except self._redis.exceptions.RedisClusterException as error:  # no node has its slot
                self._has_gaps = True
                self.counters.add(failed=1, error=error)
                continue
            client = self._client.get_redis_connection(node)
            servers.setdefault(node.name, (node.name, client, []))[2].append(i)
        return list(servers.values())

    def _follow(self, command: _Command, answer: Exception) -> Any:
        try:
            return self._client.execute_command(*command)
        except Exception as error:
            return error

    def _owners(self) -> list[tuple[str, Any]]:
        if not self._is_connected():
            return []
        client = self._client
        return [(node.name, client.get_redis_connection(node)) for node in client.get_primaries()]

    def _finish(self) -> None:
        with contextlib.suppress(Exception):
            self._client.disconnect_connection_pools()


def _groups(pairs: list[tuple[bytes, memoryview]]) -> Iterator[list[tuple[bytes, memoryview]]]:
    group: list[tuple[bytes, memoryview]] = []
    size = 0
    for pair in pairs:
        if group and (size + len(pair[1]) > _REQUEST_BYTES or len(group) >= _REQUEST_KEYS):
            yield group
            group, size = [], 0
        group.append(pair)
        size += len(pair[1])
    if group:
        yield group
