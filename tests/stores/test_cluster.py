"""RedisClusterStore against three real nodes: slots that move, nodes that freeze and go."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from pykvcache.errors import StoreError
from pykvcache.prefix.stores import BlockStore, RedisClusterStore, cluster, open_store
from pykvcache.prefix.stores.conformance import StoreConformance, chain
from stores.servers import PATIENT, Cluster, freeze, redis_cluster

pytest.importorskip("redis", reason="pip install 'pykvcache[redis]'")

BLOCKS = chain(24, "cluster")
KEYS = [key for key, _ in BLOCKS]


def buffers() -> list[bytearray]:
    return [bytearray(len(data)) for _, data in BLOCKS]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with redis_cluster(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


@pytest.fixture(autouse=True)
def _empty(running: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for client in running.clients:
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
        assert store.put(BLOCKS) == len(BLOCKS)
        assert sorted(len(client.keys()) > 3 for client in running.clients) == [True] * 3
        found = buffers()
        assert store.get_into(KEYS, found) == len(BLOCKS)
        assert [bytes(one) for one in found] == [data for _, data in BLOCKS]
        running.clients[0].flushall()
        n = store.contains(KEYS)
        assert n < len(BLOCKS)
        assert store.get_into(KEYS, buffers()) == n
        assert store.present(KEYS).count(True) == len(list(store.entries())) < len(BLOCKS)
        assert store.counters.failed == store.counters.timed_out == 0


def test_a_slot_that_moves_is_a_miss_and_then_found(running: Cluster) -> None:
    """Only the node that had it is asked first: it answers MOVED."""
    clients, block = running.clients, BLOCKS[0]
    with RedisClusterStore(running.url, **PATIENT) as store:
        assert store.put([block]) == 1
        name = next(key for client in clients for key in client.keys())  # noqa: SIM118 (not a dict)
        slot = store._key_slot(name)
        old = next(i for i, client in enumerate(clients) if client.exists(name))
        new = (old + 1) % 3
        ids = [client.execute_command("CLUSTER MYID").decode() for client in clients]
        clients[old].flushall()
        try:
            for i in (new, old, 3 - old - new):
                clients[i].execute_command("CLUSTER SETSLOT", slot, "NODE", ids[new])
            assert store.contains(KEYS[:1]) == 0
            assert store.counters.failed >= 1
            assert store.put([block]) == 1
            assert clients[new].exists(name) == 1
            assert store.get_into(KEYS[:1], [bytearray(len(block[1]))]) == 1
        finally:
            clients[new].flushall()
            for i in (old, new, 3 - old - new):
                clients[i].execute_command("CLUSTER SETSLOT", slot, "NODE", ids[old])
            running.wait()


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
