"""RedisClusterStore: blocks spread over the nodes of a Redis or Valkey cluster."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlsplit

from pykvcache.errors import StoreError
from pykvcache.prefix.stores._arguments import (
    check_items,
    check_keys,
    check_max_bytes,
    check_seconds,
    check_text,
    writable,
)
from pykvcache.prefix.stores._cluster_node import ClusterNode
from pykvcache.prefix.stores.base import BlockStore, StoreEntry
from pykvcache.prefix.stores.redis import least_used

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["CLUSTER_SCHEMES", "RedisClusterStore"]

#: How its URLs begin.
CLUSTER_SCHEMES = {f"{scheme}+cluster" for scheme in ("redis", "rediss", "valkey", "valkeys")}
_N_SLOTS = 16384
# Who has which slots is asked again after something went wrong, but not more often, in seconds.
_AGAIN = 1.0


class RedisClusterStore(BlockStore):
    """Keep blocks in a Redis or Valkey cluster. Needs the extra ``redis``.

    Each block lies on the node that has its key's slot, and each node is a `RedisStore` of its own:
    one that is slow, frozen or gone makes misses of its blocks, and leaves those of the others.
    The nodes of one reading request are asked at the same time. Who has which slots is asked
    before the first call, and again, once a second at most, after anything went wrong: blocks
    whose node is gone are misses until another one has its slots. A node that answers that a slot
    is elsewhere, or on its way, is believed at once.

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
        scheme, separator, _ = check_text(url, "url").partition("://")
        if not separator or scheme not in CLUSTER_SCHEMES:
            known = ", ".join(sorted(CLUSTER_SCHEMES))
            raise StoreError(f"the URL begins with none of {known}", value=scheme, limit=known)
        parts = urlsplit(url)
        who, at, hosts = parts.netloc.rpartition("@")
        self._before = f"{scheme.removesuffix('+cluster')}://{who}{at}"
        self._after = f"/0?{parts.query}"
        self._options: dict[str, Any] = {
            "prefix": check_text(prefix, "prefix"),
            "timeout": check_seconds(timeout, "timeout"),
            "connect_timeout": check_seconds(connect_timeout, "connect_timeout"),
        }
        if not (seeds := [host for host in hosts.split(",") if host]):
            raise StoreError("the URL names no host", value=scheme, limit="host:port")
        self._seeds = {host: self._node(host) for host in seeds}
        self._nodes = dict(self._seeds)
        from redis.crc import key_slot

        self._key_slot = key_slot
        self._prefix = prefix.encode()
        # Always a whole new list or one new entry: other threads read it as it is.
        self._owners: list[ClusterNode | None] = [None] * _N_SLOTS
        self._asked_at = float("-inf")
        self._n_asked = 0
        self._problems = 0
        self._has_moved = False
        self._closed = False
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"RedisClusterStore(prefix={self._prefix.decode()!r})"

    # Who has what -----------------------------------------------------------------------

    def _node(self, host: str) -> ClusterNode:
        url = f"{self._before}{host}{self._after}"
        node = ClusterNode(url, host, self._redirected, **self._options)
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
            is_known = None not in self._owners and not self._has_moved
            if is_known and self._problems == self._n_problems():
                return
            self._asked_at = now
            self._has_moved = False
            # Another one first each time: one that was cut off from the others knows old things.
            begin = self._n_asked % len(self._nodes)
            self._n_asked += 1
            nodes = [*self._nodes.values()]
        # Those first that answered last time.
        nodes = sorted(nodes[begin:] + nodes[:begin], key=lambda node: node.is_silent)
        fewest = _N_SLOTS + 1
        for node in nodes:
            if fewest <= _N_SLOTS and node.is_silent:
                break
            try:
                owners, known = self._read_slots(node.slots(), node)
            except (LookupError, TypeError, ValueError, AttributeError, StoreError):
                continue  # it did not answer, or nothing that could be understood
            if owners.count(None) < fewest:
                fewest = owners.count(None)
                with self._lock:
                    if not self._closed:
                        self._owners, self._nodes = owners, known
            if not fewest:
                break
        with self._lock:
            self._problems = self._n_problems()

    def _read_slots(
        self, ranges: Any, asked: ClusterNode
    ) -> tuple[list[ClusterNode | None], dict[str, ClusterNode]]:
        """Return the owners that ``CLUSTER SLOTS`` tells, and all nodes that may be asked."""
        owners: list[ClusterNode | None] = [None] * _N_SLOTS
        # What is in use is found again by its name; what has left the cluster is let go.
        nodes = dict(self._seeds)
        for first, last, *servers in ranges:
            if not 0 <= first <= last < _N_SLOTS:
                raise StoreError("no such slots", value=(first, last), limit=_N_SLOTS - 1)
            # The owner, and its replicas: one of them may have to be asked when it is gone.
            for place, (name, port, *_) in enumerate(servers):
                # A node that does not know its own name leaves it out.
                known = name.decode() if name not in (None, b"", b"?") else ""
                host = _address(known, port, asked)
                if host not in nodes:
                    nodes[host] = self._nodes.get(host) or self._node(host)
                if place == 0:
                    owners[first : last + 1] = [nodes[host]] * (last + 1 - first)
        return owners, nodes

    def _redirected(self, answer: Any, asked: ClusterNode) -> ClusterNode | None:
        """Return the node that a MOVED or ASK names, and remember what a MOVED says."""
        from redis.exceptions import MovedError

        if not 0 <= answer.slot_id < _N_SLOTS:
            return None
        host = _address(answer.host if answer.host != "?" else "", answer.port, asked)
        with self._lock:
            node = self._nodes.get(host)
        try:
            node = node or self._node(host)
        except StoreError:
            return None
        with self._lock:
            if self._closed:
                return None
            node = self._nodes.setdefault(host, node)
            if isinstance(answer, MovedError):
                self._owners[answer.slot_id] = node
                self._has_moved = True  # and perhaps others
        return node

    def _groups(self, keys: Sequence[bytes]) -> list[tuple[ClusterNode, list[int]]]:
        """Return for each node which of the keys it has; those that nobody has are left out."""
        self._look()
        groups: dict[ClusterNode, list[int]] = {}
        owners = self._owners
        for i, key in enumerate(keys):
            owner = owners[self._key_slot(self._prefix + key)]
            if owner is not None:
                groups.setdefault(owner, []).append(i)
        return list(groups.items())

    def _owner(self, key: bytes) -> ClusterNode | None:
        """Return the node that has a key's lease."""
        self._look()
        slot: int = self._key_slot(self._prefix + b"lease:" + key)
        return self._owners[slot]

    # Reading ----------------------------------------------------------------------------

    def contains(self, keys: Sequence[bytes]) -> int:
        """Return how many of the leading keys are there; see `BlockStore.contains`."""
        there = self.present(keys)
        return there.index(False) if False in there else len(there)

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether it is there; see `BlockStore.present`."""
        keys = check_keys(keys)
        there = [False] * len(keys)
        groups = self._groups(keys)
        with _all_sent(groups, "EXISTS", keys) as nodes:
            for node, which, of_node, _ in nodes:
                for i, one in zip(which, node.present(of_node), strict=True):
                    there[i] = one
        return there

    @property
    def n_probes(self) -> int:
        """Thousands."""
        return 4096

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> int:
        """Read the leading run of blocks, from all nodes at once; see `BlockStore.get_into`."""
        keys = check_keys(keys, buffers)
        views = [writable(buffer) for buffer in buffers]
        come = [False] * len(keys)
        groups = self._groups(keys)
        with _all_sent(groups, "GET", keys, views) as nodes:
            for node, which, of_node, into in nodes:
                for i in which[: node.get_into(of_node, into)]:
                    come[i] = True
        return come.index(False) if False in come else len(come)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark blocks as used now; the servers' clocks for this have seconds."""
        keys = check_keys(keys)
        with _all_sent(self._groups(keys), "TOUCH", keys) as nodes:
            for node, _, of_node, _ in nodes:
                node.touch(of_node)

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
        owners = {owner.host: owner for owner in self._owners if owner is not None}
        return chain.from_iterable(owners[host].entries() for host in sorted(owners))

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


def _address(name: str, port: int, asked: ClusterNode) -> str:
    """Return where a node is; without a name, it is that of the node that was asked."""
    name = name or urlsplit(f"//{asked.host}").hostname or ""
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


# A node, which of the keys it has, these keys, and their buffers.
_Part: TypeAlias = tuple[ClusterNode, list[int], list[bytes], list[memoryview]]


@contextlib.contextmanager
def _all_sent(
    groups: Sequence[tuple[ClusterNode, list[int]]],
    command: str,
    keys: Sequence[bytes],
    views: Sequence[memoryview] = (),
) -> Iterator[list[_Part]]:
    """Send the first request of each node before the first answer is waited for."""
    parts: list[_Part] = [
        (node, which, [keys[i] for i in which], [views[i] for i in which] if views else [])
        for node, which in groups
    ]
    try:
        if len(parts) > 1:
            for node, _, of_node, into in parts:
                node.ahead(command, of_node, into)
        yield parts
    finally:
        for node, *_ in parts:
            node.drop()
