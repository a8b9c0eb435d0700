"""RedisClusterStore while nodes of a real cluster are killed and replaced by their replicas."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

from pykvcache.prefix.stores import RedisClusterStore
from pykvcache.prefix.stores.conformance import chain
from stores.servers import kill, redis_cluster, start_again

pytest.importorskip("redis", reason="pip install 'pykvcache[redis]'")

BLOCKS = chain(24, "failover", 5000)
KEYS = [key for key, _ in BLOCKS]
# Nodes go on without those that are gone, and replicas are filled at once.
OPTIONS = ("--cluster-require-full-coverage", "no", "--repl-diskless-sync-delay", "0")


def n_read(store: RedisClusterStore) -> int:
    """Read; return how many blocks are there. What came is right."""
    there = store.present(KEYS)
    found = [bytearray(len(data)) for _, data in BLOCKS]
    n = store.get_into(KEYS, found)
    assert [bytes(one) for one in found[:n]] == [data for _, data in BLOCKS[:n]]
    return there.count(True)


@pytest.mark.slow
def test_nodes_are_killed_and_come_back_while_everybody_works(tmp_path: Path) -> None:
    """Three nodes with a replica each, which vote; readers and writers in four threads."""
    timeout = ("--cluster-node-timeout", "500")
    with (
        redis_cluster(tmp_path, 3, 3, *OPTIONS, *timeout) as running,
        RedisClusterStore(running.url) as store,
    ):
        assert store.put(BLOCKS) == len(BLOCKS)
        over, errors, n = threading.Event(), [], [0] * 4

        def work(i: int) -> None:
            chance = random.Random(i)
            try:
                while not over.is_set():
                    begin = time.monotonic()
                    if chance.random() < 0.2:
                        store.put(BLOCKS)
                        store.touch(KEYS)
                    n_read(store)
                    assert time.monotonic() - begin < 20
                    n[i] += 1
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        try:
            for i in (0, 1, 2):
                for j in range(i, 3):
                    running.until("INFO", 3 + j, master_link_status="up")
                kill(running, i)
                running.until("INFO", 3 + i, role="master")
                until = time.monotonic() + 60
                while n_read(store) < len(BLOCKS) and not errors:
                    assert time.monotonic() < until
                    time.sleep(0.05)
                start_again(running, tmp_path, i)
                running.until("INFO", i, role="slave", master_link_status="up")
                assert n_read(store) == len(BLOCKS)
        finally:
            over.set()
            for thread in threads:
                thread.join()
        assert not errors, errors
        assert min(n) > 10
