"""RedisClusterStore against a real cluster: slots that move, nodes that freeze, die, come back."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pykvcache.errors import StoreError
from pykvcache.prefix.stores import BlockStore, RedisClusterStore, RedisStore, open_store
from pykvcache.prefix.stores.conformance import StoreConformance, chain
from stores.servers import PATIENT, Cluster, freeze, kill, redis_cluster, redis_server, start_again

pytest.importorskip("redis", reason="pip install '.[redis]'")

BLOCKS = chain(24, "cluster", 5000)
KEYS = [key for key, _ in BLOCKS]
# Nodes go on without those that are gone, and replicas are filled at once.
OPTIONS = ("--cluster-require-full-coverage", "no", "--repl-diskless-sync-delay", "0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Cluster]:
    with redis_cluster(folder, 3, 1, *OPTIONS) as running:
        yield running


@pytest.fixture
def running(cluster: Cluster) -> Cluster:
    for client in cluster.owners:
        client.flushall()
    return cluster


class TestCluster(StoreConformance):
    # Each node has a clock of uses with seconds: blocks of one path may differ by one.
    ordered = keeps_paths = False

    @pytest.fixture(autouse=True)
    def _cluster(self, running: Cluster) -> None:
        self.url = running.url

    def make_store(self) -> BlockStore:
        return RedisClusterStore(self.url, **PATIENT)


def n_read(store: RedisClusterStore) -> int:
    there = store.present(KEYS)
    found = [bytearray(len(data)) for _, data in BLOCKS]
    n = store.get_into(KEYS, found)
    assert [bytes(one) for one in found[:n]] == [data for _, data in BLOCKS[:n]]
    return there.count(True)


def test_blocks_are_spread_and_any_node_is_enough(running: Cluster) -> None:
    with open_store(running.of(1), **PATIENT) as store:
        assert isinstance(store, RedisClusterStore)
        assert store.put(BLOCKS) == n_read(store) == len(BLOCKS)
        assert all(len(client.keys()) > 3 for client in running.owners)
        running.clients[0].flushall()
        n = store.contains(KEYS)
        assert n == store.get_into(KEYS, [bytearray(6000)] * len(KEYS)) < len(BLOCKS)
        assert n_read(store) == len(list(store.entries())) < len(BLOCKS)
        assert store.counters.failed == store.counters.timed_out == 0


def test_a_server_that_refuses_raises_at_once(running: Cluster, tmp_path: Path) -> None:
    with (
        redis_server(tmp_path) as alone,
        pytest.raises(StoreError, match="Cluster mode is not enabled"),
    ):
        RedisClusterStore(alone.url.replace("redis", "redis+cluster"), **PATIENT)
    with pytest.raises(StoreError, match="invalid username-password pair"):
        RedisClusterStore(running.of(0, user="nobody:hidden@"), **PATIENT)
    # A node that lacks the slot of the first question, and is asked without its cluster.
    with pytest.raises(StoreError, match="MovedError"):
        RedisStore(running.servers[0].url, **PATIENT)
    for url, reason in [
        ("redis://127.0.0.1:1", "must be one of"),
        ("redis+cluster://", "names no host"),
        ("redis+cluster://user:hidden@host:port", "cannot be used"),
    ]:
        with pytest.raises(StoreError, match=reason) as caught:
            RedisClusterStore(url)
        assert "hidden" not in str(caught.value)


def test_a_slot_that_moves_is_read_and_written_all_the_time(running: Cluster) -> None:
    """While it moves, blocks are on either node (ASK); then, until all know it, MOVED tells."""
    from redis.crc import key_slot

    clients, ids, name = running.clients, running.ids, b"pykvcache:" + KEYS[0]
    slot = key_slot(name)
    old = slot * 3 // 16384
    new = (old + 1) % 3
    with RedisClusterStore(running.url, **PATIENT) as store:

        def all_is_there() -> None:
            assert n_read(store) == len(KEYS)
            store.touch(KEYS)
            assert store.put(BLOCKS) == 0

        try:
            assert store.put(BLOCKS) == len(BLOCKS)
            clients[new].execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[old])
            clients[old].execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[new])
            all_is_there()
            port = running.servers[new].port
            clients[old].execute_command("MIGRATE", "127.0.0.1", port, name, 0, 60000)
            all_is_there()
            assert store.discard(KEYS[:1]) == store.put(BLOCKS[:1]) == 1
            assert clients[old].execute_command("CLUSTER COUNTKEYSINSLOT", slot) == 0
            assert clients[new].execute_command("CLUSTER COUNTKEYSINSLOT", slot) == 1
            for i in (new, old, 3 - old - new):
                clients[i].execute_command("CLUSTER SETSLOT", slot, "NODE", ids[new])
            all_is_there()
            counters = store.counters
            assert counters.failed == counters.timed_out == counters.skipped == 0
        finally:
            for client in running.owners:
                client.flushall()
            # So that all other nodes believe it, whatever they have heard.
            for i in (old, *range(3)):
                clients[i].execute_command("CLUSTER SETSLOT", slot, "NODE", ids[old])
            clients[old].execute_command("CLUSTER BUMPEPOCH")
            running.wait()


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP")
def test_a_node_that_freezes_makes_misses_of_its_own_blocks_only(running: Cluster) -> None:
    with RedisClusterStore(running.url, **PATIENT) as store:
        store.put(BLOCKS)
    frozen = running.servers[0].process
    with RedisClusterStore(running.url, timeout=1.0, connect_timeout=1.0) as store:
        assert n_read(store) == len(KEYS)
        freeze(frozen)
        try:
            there = n_read(store)
            assert 0 < there < len(KEYS)
            assert store.counters.timed_out >= 1
            began = time.monotonic()
            for _ in range(50):
                assert n_read(store) == there
            assert time.monotonic() - began < 20, "each call waits"
        finally:
            frozen.send_signal(signal.SIGCONT)
        running.wait()
        began = time.monotonic()
        while n_read(store) < len(KEYS):
            assert time.monotonic() < began + 60
            time.sleep(0.1)


def test_blocks_are_found_again_where_a_replica_took_over(running: Cluster, folder: Path) -> None:
    """The last test of this cluster: roles stay as they are then."""
    for client in running.clients:
        rights = ("+@read", "+command", "+cluster|slots", "+asking")
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

        replica.execute_command("CLUSTER FAILOVER", "TAKEOVER")
        until = time.monotonic() + 60
        while n_read(store) < len(BLOCKS) or n_read(reader) < len(BLOCKS):
            assert time.monotonic() < until
            time.sleep(0.1)
        assert store.discard(KEYS) == store.put(BLOCKS) == len(BLOCKS)
        assert reader.put(BLOCKS) == 0
        assert reader.counters.denied >= 1

        start_again(running, folder, 0)
        running.until("INFO", 0, role="slave", master_link_status="up")
        with RedisClusterStore(running.of(0), **PATIENT) as fresh:
            assert n_read(fresh) == n_read(store) == n_read(reader) == len(BLOCKS)
