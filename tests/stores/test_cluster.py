"""RedisClusterStore against three real nodes: slots that move, nodes that freeze and go."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pykvcache.errors import StoreError
from pykvcache.prefix.stores import BlockStore, RedisClusterStore, cluster, open_store
from pykvcache.prefix.stores._cluster_node import ClusterNode
from pykvcache.prefix.stores._deadline import _Socket
from pykvcache.prefix.stores.conformance import StoreConformance, chain
from stores.servers import (
    PATIENT,
    Cluster,
    free_port,
    freeze,
    kill,
    redis_cluster,
    redis_server,
    start_again,
)

pytest.importorskip("redis", reason="pip install 'pykvcache[redis]'")

# Nodes go on without those that are gone, and replicas are filled at once.
OPTIONS = ("--cluster-require-full-coverage", "no", "--repl-diskless-sync-delay", "0")
BLOCKS = chain(24, "cluster")
KEYS = [key for key, _ in BLOCKS]


def buffers() -> list[bytearray]:
    return [bytearray(len(data)) for _, data in BLOCKS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Cluster]:
    """Three nodes, the first with a replica."""
    with redis_cluster(folder, 3, 1, *OPTIONS) as nodes:
        yield nodes


@pytest.fixture(autouse=True)
def _empty(running: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for client in running.owners:
        client.flushall()
    monkeypatch.setattr(cluster, "_AGAIN", 0.0)


class TestCluster(StoreConformance):
    ordered = False  # the servers' clocks for this have seconds

    @pytest.fixture(autouse=True)
    def _cluster(self, running: Cluster) -> None:
        self.url = running.url

    def make_store(self) -> BlockStore:
        return RedisClusterStore(self.url, **PATIENT)


def test_blocks_are_spread_and_any_node_is_enough(running: Cluster) -> None:
    url = f"redis+cluster://127.0.0.1:{running.servers[1].port}"
    with open_store(url, **PATIENT) as store:
        assert isinstance(store, RedisClusterStore)
        assert store.put(BLOCKS) == len(BLOCKS), (store.counters, store.counters.last_error)
        assert sorted(len(client.keys()) > 3 for client in running.owners) == [True] * 3
        found = buffers()
        assert store.get_into(KEYS, found) == len(BLOCKS)
        assert [bytes(one) for one in found] == [data for _, data in BLOCKS]
        running.clients[0].flushall()
        n = store.contains(KEYS)
        assert n < len(BLOCKS)
        assert store.get_into(KEYS, buffers()) == n
        assert store.present(KEYS).count(True) == len(list(store.entries())) < len(BLOCKS)
        assert store.counters.failed == store.counters.timed_out == 0


@contextlib.contextmanager
def moving(running: Cluster, store: RedisClusterStore) -> Iterator[tuple[int, list[bytes], int]]:
    """Yield a slot, the keys of the blocks on the node that has it, and a node it may move to."""
    slot = store._key_slot(b"pykvcache:" + KEYS[0])
    old = slot * 3 // 16384
    there = [key for key in KEYS if store._key_slot(b"pykvcache:" + key) * 3 // 16384 == old]
    try:
        yield old, there, (old + 1) % 3
    finally:
        for client in running.owners:
            client.flushall()
        # So that all the others believe it, whatever they have heard.
        for i in (old, *range(3)):
            running.clients[i].execute_command("CLUSTER SETSLOT", slot, "NODE", running.ids[old])
        running.clients[old].execute_command("CLUSTER BUMPEPOCH")
        running.wait()


def test_a_slot_that_moves_is_read_and_written_all_the_time(running: Cluster) -> None:
    """While it moves, blocks are on either node (ASK); then, until all know it, MOVED tells."""
    clients, ids, name = running.clients, running.ids, b"pykvcache:" + KEYS[0]
    with RedisClusterStore(running.url, **PATIENT) as store, moving(running, store) as here:
        old, _, new = here
        slot = store._key_slot(name)

        def all_is_there() -> None:
            assert store.present(KEYS) == [True] * len(KEYS)
            found = buffers()
            assert store.get_into(KEYS, found) == len(KEYS)
            assert [bytes(one) for one in found] == [data for _, data in BLOCKS]
            store.touch(KEYS)
            assert store.put(BLOCKS) == 0

        assert store.put(BLOCKS) == len(BLOCKS)
        clients[new].execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[old])
        clients[old].execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[new])
        all_is_there()
        port = running.servers[new].port
        clients[old].execute_command("MIGRATE", "127.0.0.1", port, name, 0, 60000)
        all_is_there()
        assert store.discard(KEYS[:1]) == 1
        assert store.put(BLOCKS[:1]) == 1
        assert clients[old].execute_command("CLUSTER COUNTKEYSINSLOT", slot) == 0
        assert clients[new].execute_command("CLUSTER COUNTKEYSINSLOT", slot) == 1
        all_is_there()
        assert store._owners[slot] is not None
        assert store._owners[slot].host.endswith(f":{running.servers[old].port}")
        for i in (new, old, 3 - old - new):
            clients[i].execute_command("CLUSTER SETSLOT", slot, "NODE", ids[new])
        all_is_there()
        assert store._owners[slot].host.endswith(f":{port}")
        counters = store.counters
        assert counters.failed == counters.timed_out == counters.skipped == counters.rejected == 0
        assert counters.known == 4 * len(BLOCKS)


def test_nodes_that_send_to_each_other_are_a_miss_of_that_block(running: Cluster) -> None:
    with RedisClusterStore(running.url, **PATIENT) as store, moving(running, store) as here:
        old, there, new = here
        slot = store._key_slot(b"pykvcache:" + KEYS[0])
        assert store.put(BLOCKS) == len(BLOCKS)
        running.clients[old].execute_command("CLUSTER SETSLOT", slot, "MIGRATING", running.ids[new])
        running.clients[old].delete(b"pykvcache:" + KEYS[0])
        assert store.present(KEYS) == [False] + [True] * (len(KEYS) - 1)
        assert store.counters.failed >= 1
        assert store.put(BLOCKS[:1]) == 0
        assert store.get_into(KEYS, buffers()) == 0
        rest = dict(zip(KEYS, buffers(), strict=True))
        assert store.get_into(there[1:], [rest[key] for key in there[1:]]) == len(there) - 1
        assert store.lease(KEYS[0], 1.0)


def test_a_server_that_left_the_cluster_is_not_believed(running: Cluster, tmp_path: Path) -> None:
    options = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    with redis_server(tmp_path, *options) as alone:
        url = f"redis+cluster://127.0.0.1:{alone.port},127.0.0.1:{running.servers[0].port}"
        with RedisClusterStore(url, **PATIENT) as store:
            assert store.put(BLOCKS) == len(BLOCKS)
            assert store.contains(KEYS) == len(BLOCKS)


def test_all_nodes_of_a_request_are_asked_before_one_is_waited_for(
    running: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen at the sockets: three are sent to before the first is received from."""
    seen: list[tuple[str, int]] = []
    sendall, recv, recv_into = _Socket.sendall, _Socket.recv, _Socket.recv_into

    def seeing(what: str, call: Any) -> Any:
        def seen_call(self: Any, *args: Any) -> Any:
            if self._timeout != 0:  # else nobody waits
                seen.append((what, self.getpeername()[1]))
            return call(self, *args)

        return seen_call

    with RedisClusterStore(running.url, **PATIENT) as store:
        assert store.put(BLOCKS) == store.contains(KEYS) == len(BLOCKS)
        monkeypatch.setattr(_Socket, "sendall", seeing("send", sendall))
        monkeypatch.setattr(_Socket, "recv", seeing("receive", recv))
        monkeypatch.setattr(_Socket, "recv_into", seeing("receive", recv_into))
        for call in (
            lambda: store.present(KEYS) == [True] * len(KEYS),
            lambda: store.get_into(KEYS, buffers()) == len(KEYS),
            lambda: store.touch(KEYS) is None,
        ):
            seen.clear()
            assert call()
            kinds, ports = zip(*seen, strict=True)
            first = kinds.index("receive")
            assert len(set(ports[:first])) == 3
            assert "send" not in kinds[first:]


def test_what_is_interrupted_leaves_no_answers_to_the_next_request(
    running: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> list[bool]:
        raise KeyboardInterrupt

    with RedisClusterStore(running.url, **PATIENT) as store:
        store.put(BLOCKS[1:])
        with monkeypatch.context() as patch:
            patch.setattr(ClusterNode, "present", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.present(KEYS)
        store.put(BLOCKS[:1])
        assert store.present(KEYS) == [True] * len(KEYS)
        assert store.get_into(KEYS, buffers()) == len(KEYS)


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP")
def test_a_node_that_freezes_makes_misses_of_its_own_blocks_only(running: Cluster) -> None:
    with RedisClusterStore(running.url, **PATIENT) as store:
        store.put(BLOCKS)
    frozen = running.servers[0].process
    freeze(frozen)
    try:
        with RedisClusterStore(running.url, timeout=0.3, connect_timeout=0.3) as store:
            there = store.present(KEYS)
            assert 0 < there.count(True) < len(KEYS)
            assert store.counters.timed_out >= 1
            begin = time.monotonic()
            for _ in range(5):
                assert store.present(KEYS) == there
                assert store.get_into(KEYS, buffers()) <= there.index(False)
            assert time.monotonic() - begin < 5 * 0.3 + 1
            assert store.lease(KEYS[0], 1.0) in (True, False)
    finally:
        frozen.send_signal(signal.SIGCONT)
    running.wait()


def test_a_lease_is_one_in_the_whole_cluster(running: Cluster) -> None:
    with (
        RedisClusterStore(running.url, **PATIENT) as one,
        RedisClusterStore(running.url, **PATIENT) as two,
    ):
        for key in KEYS:
            assert one.lease(key, 60)
            assert not two.lease(key, 60)
            two.release(key)
            assert not two.lease(key, 60)
            one.release(key)
            assert two.lease(key, 60)


def test_no_cluster_is_a_miss_and_what_cannot_be_one_is_refused(running: Cluster) -> None:
    with RedisClusterStore("redis+cluster://127.0.0.1:1", connect_timeout=0.2) as store:
        assert store.put(BLOCKS) == 0
        assert store.contains(KEYS) == 0
        assert store.lease(KEYS[0], 1)
        assert store.counters.failed >= 1
    for answer in (
        [],
        [[0, 1]],
        [[0, 99999, [b"h", 1]]],
        [["a", 1, [b"h", 1]]],
        [[0, 1, [7, 1]]],
        5,
    ):
        with RedisClusterStore(running.url, **PATIENT) as store:
            for node in store._nodes.values():
                node._ask = lambda *_, a=answer, **__: [a]  # type: ignore[method-assign,misc]
            assert store.contains(KEYS) == 0
    with pytest.raises(StoreError, match="begins with none of"):
        RedisClusterStore("redis://127.0.0.1:1")
    with pytest.raises(StoreError, match="names no host"):
        RedisClusterStore("redis+cluster://")
    with pytest.raises(StoreError, match="cannot be used"):
        RedisClusterStore("redis+cluster://host:port")


def n_read(store: RedisClusterStore) -> int:
    """Read, and return how many blocks are there; what comes is right."""
    found = buffers()
    n = store.get_into(KEYS, found)
    assert [bytes(one) for one in found[:n]] == [data for _, data in BLOCKS[:n]]
    return store.present(KEYS).count(True)


def test_blocks_are_found_again_where_a_replica_took_over(running: Cluster, folder: Path) -> None:
    """A person, not a vote, lets it take over, which is quick; see test_failover.py.

    The last one here: roles stay as they are then.
    """
    for client in running.clients:
        rights = ("+@read", "+cluster|slots", "+asking")
        client.execute_command("ACL SETUSER", "reader", "on", ">secret", "~pykvcache:*", *rights)
    old, replica = running.clients[0], running.clients[3]
    with (
        RedisClusterStore(running.of(0, 1), **PATIENT) as store,
        RedisClusterStore(running.of(1, user="reader:secret@"), **PATIENT) as reader,
    ):
        assert store.put(BLOCKS) == n_read(store) == n_read(reader) == len(BLOCKS)
        until = time.monotonic() + 60
        while replica.dbsize() < old.dbsize():  # what was not copied yet is lost
            assert time.monotonic() < until
        kill(running, 0)

        left = n_read(store)
        assert 0 < left == n_read(reader) < len(BLOCKS)
        assert store.counters.failed >= 1
        assert store.put(BLOCKS) == 0
        assert [store.lease(key, 0.001) for key in KEYS].count(True) == len(KEYS)
        assert n_read(store) == n_read(reader) == left

        replica.execute_command("CLUSTER FAILOVER", "TAKEOVER")
        until = time.monotonic() + 60
        while n_read(store) < len(BLOCKS) or n_read(reader) < len(BLOCKS):
            assert time.monotonic() < until
        assert store.discard(KEYS) == len(KEYS)
        assert store.put(BLOCKS) == len(BLOCKS)
        assert reader.put(BLOCKS) == 0
        assert reader.counters.denied >= 1

        start_again(running, folder, 0)
        running.until("INFO", 0, role="slave", master_link_status="up")
        with RedisClusterStore(running.of(0), **PATIENT) as fresh:
            assert n_read(fresh) == n_read(store) == n_read(reader) == len(BLOCKS)
