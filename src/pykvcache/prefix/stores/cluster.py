"""RedisClusterStore: blocks spread over the nodes of a Redis or Valkey cluster."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pykvcache.errors import StoreError
from pykvcache.prefix.stores._fork import watch_forks
from pykvcache.prefix.stores.base import (
    BlockStore,
    StoreEntry,
    check_items,
    check_keys,
    check_max_bytes,
    check_seconds,
    writable,
)
from pykvcache.prefix.stores.redis import RedisStore, least_used

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["CLUSTER_SCHEMES", "RedisClusterStore"]

#: How its URLs begin.
CLUSTER_SCHEMES = {f"{scheme}+cluster" for scheme in ("redis", "rediss", "valkey", "valkeys")}
_N_SLOTS = 16384
# Who has which slots is asked again after something went wrong, but not more often, in seconds.
_AGAIN = 1.0


class _Node(RedisStore):
    """One server of a cluster: no command may have keys of several slots."""

    def _of_keys(self, command: str, keys: list[bytes]) -> list[tuple[Any, ...]]:
        return [(command, key) for key in keys]


class RedisClusterStore(BlockStore):
    """Keep blocks in a Redis or Valkey cluster. Needs the extra ``redis``.

    Each block lies on the node that has its key's slot, and each node is a `RedisStore` of its own:
    one that is slow, frozen or gone makes misses of its blocks, and leaves those of the others.
    Who has which slots is asked before the first call, and again, once a second at most, after
    anything went wrong: blocks whose slot has moved are misses until then.

    Parameters
    ----------
    url : str
        ``redis+cluster://user:password@host:6379,other:6379``, ``rediss+cluster://`` for TLS; also
        ``valkey+cluster://`` and ``valkeys+cluster://``. Any of the nodes; the others are found.
        Options of redis-py may follow. User, password and options are those of every node.
    prefix, timeout, connect_timeout
        As in `RedisStore`, of each node.

    Raises
    ------
    StoreError
        The URL is of no known kind, or names no host.
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
        scheme, separator, _ = url.partition("://")
        if not separator or scheme not in CLUSTER_SCHEMES:
            known = ", ".join(sorted(CLUSTER_SCHEMES))
            raise StoreError(f"the URL begins with none of {known}", value=scheme, limit=known)
        parts = urlsplit(url)
        who, at, hosts = parts.netloc.rpartition("@")
        self._before = f"{scheme.removesuffix('+cluster')}://{who}{at}"
        self._after = f"/0?{parts.query}"
        self._options: dict[str, Any] = {
            "prefix": prefix,
            "timeout": check_seconds(timeout, "timeout"),
            "connect_timeout": check_seconds(connect_timeout, "connect_timeout"),
        }
        if not (seeds := [host for host in hosts.split(",") if host]):
            raise StoreError("the URL names no host", value=scheme, limit="host:port")
        self._nodes = {host: self._node(host) for host in seeds}
        from redis.crc import key_slot

        self._key_slot = key_slot
        self._prefix = prefix.encode()
        self._owners: list[str | None] = [None] * _N_SLOTS
        self._asked_at = float("-inf")
        self._problems = 0
        self._closed = False
        self._after_fork()
        watch_forks(self)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"RedisClusterStore(prefix={self._prefix.decode()!r})"

    # Who has what -----------------------------------------------------------------------

    def _node(self, host: str) -> RedisStore:
        node = _Node(f"{self._before}{host}{self._after}", **self._options)
        node.counters = self.counters
        return node

    def _n_problems(self) -> int:
        counters = self.counters
        return counters.failed + counters.timed_out + counters.skipped

    def _look(self) -> None:
        """Ask who has which slots, where that is not known or something went wrong."""
        now = time.monotonic()
        with self._lock:
            if self._closed or now - self._asked_at < _AGAIN:
                return
            if None not in self._owners and self._problems == self._n_problems():
                return
            self._asked_at = now
        # Those first that answered last time.
        nodes = sorted(self._nodes.items(), key=lambda item: item[1]._reads.is_open)
        for host, node in nodes:
            answers = node._ask([("CLUSTER", "SLOTS")])
            try:
                owners, nodes_now = self._read_slots(answers[0], host)
            except (LookupError, TypeError, ValueError, AttributeError, StoreError):
                continue  # it did not answer, or nothing that could be understood
            with self._lock:
                if not self._closed:
                    self._owners, self._nodes = owners, nodes_now
            break
        with self._lock:
            self._problems = self._n_problems()

    def _read_slots(
        self, ranges: Any, asked: str
    ) -> tuple[list[str | None], dict[str, RedisStore]]:
        """Return the owners that ``CLUSTER SLOTS`` tells, and all nodes that were known so far."""
        owners: list[str | None] = [None] * _N_SLOTS
        nodes = dict(self._nodes)
        for first, last, owner, *_ in ranges:
            if not 0 <= first <= last < _N_SLOTS:
                raise StoreError("no such slots", value=(first, last), limit=_N_SLOTS - 1)
            # A node that does not know its own name leaves it out.
            name = owner[0].decode() if owner[0] not in (None, b"", b"?") else ""
            name = name or asked.rpartition(":")[0].strip("[]")
            host = f"[{name}]:{owner[1]}" if ":" in name else f"{name}:{owner[1]}"
            if host not in nodes:
                nodes[host] = self._node(host)
            owners[first : last + 1] = [host] * (last + 1 - first)
        return owners, nodes

    def _groups(self, keys: Sequence[bytes]) -> list[tuple[RedisStore, list[int]]]:
        """Return for each node which of the keys it has; those that nobody has are left out."""
        self._look()
        groups: dict[str, list[int]] = {}
        owners, nodes = self._owners, self._nodes
        for i, key in enumerate(keys):
            owner = owners[self._key_slot(self._prefix + key)]
            if owner is not None:
                groups.setdefault(owner, []).append(i)
        return [(nodes[owner], found) for owner, found in groups.items()]

    def _owner(self, key: bytes) -> RedisStore | None:
        """Return the node that has a key's lease."""
        self._look()
        owner = self._owners[self._key_slot(self._prefix + b"lease:" + key)]
        return None if owner is None else self._nodes[owner]

    # Reading ----------------------------------------------------------------------------

    def contains(self, keys: Sequence[bytes]) -> int:
        """Return how many of the leading keys are there; see `BlockStore.contains`."""
        there = self.present(keys)
        return there.index(False) if False in there else len(there)

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether it is there; see `BlockStore.present`."""
        keys = check_keys(keys)
        there = [False] * len(keys)
        for node, which in self._groups(keys):
            for i, one in zip(which, node.present([keys[i] for i in which]), strict=True):
                there[i] = one
        return there

    @property
    def n_probes(self) -> int:
        """Thousands."""
        return 4096

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> int:
        """Read the leading run of blocks, a request per node; see `BlockStore.get_into`."""
        keys = check_keys(keys, buffers)
        views = [writable(buffer) for buffer in buffers]
        come = [False] * len(keys)
        for node, which in self._groups(keys):
            n = node.get_into([keys[i] for i in which], [views[i] for i in which])
            for i in which[:n]:
                come[i] = True
        return come.index(False) if False in come else len(come)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark blocks as used now; the servers' clocks for this have seconds."""
        keys = check_keys(keys)
        for node, which in self._groups(keys):
            node.touch([keys[i] for i in which])

    # Writing ----------------------------------------------------------------------------

    def put(self, items: Iterable[tuple[bytes, Buffer]]) -> int:
        """Store blocks that are not there yet; see `BlockStore.put`."""
        found = check_items(items)
        groups = self._groups([key for key, _ in found])
        return sum(node.put([found[i] for i in which]) for node, which in groups)

    def discard(self, keys: Sequence[bytes]) -> int:
        """Remove blocks; see `BlockStore.discard`."""
        keys = check_keys(keys)
        return sum(node.discard([keys[i] for i in which]) for node, which in self._groups(keys))

    def trim(self, max_bytes: int) -> list[bytes]:
        """Remove blocks, idle for longest first; see `RedisStore.trim`."""
        removed = least_used(self.entries(), check_max_bytes(max_bytes))
        return removed if self.discard(removed) else []

    def entries(self) -> Iterator[StoreEntry]:
        """Yield every block, from a walk over the keys of all nodes that have slots."""
        self._look()
        nodes = self._nodes
        owners = sorted({owner for owner in self._owners if owner is not None})
        return chain.from_iterable(nodes[owner].entries() for owner in owners)

    # Leases -----------------------------------------------------------------------------

    def lease(self, key: bytes, seconds: float) -> bool:
        """Return whether the caller is the one to evaluate; see `RedisStore.lease`."""
        check_keys([key])
        check_seconds(seconds)
        node = self._owner(key)
        return node is None or node.lease(key, seconds)

    def release(self, key: bytes) -> None:
        """End a lease of this store."""
        check_keys([key])
        if (node := self._owner(key)) is not None:
            node.release(key)

    def close(self) -> None:
        """Close the connections; later calls are misses."""
        with self._lock:
            self._closed = True
            nodes = list(self._nodes.values())
        for node in nodes:
            node.close()
