"""Tiers that real processes share: one after the other, at once, with other secrets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memory.kit import apart, words
from pykvcache import LlamaContext, LlamaModel, PrefixCache
from pykvcache.prefix.stores import BlockStore, FolderStore, RedisStore
from stores.servers import PATIENT, redis_server
from support.models import EXACT, make_model
from tiers.worker import answer, spawn


def test_a_script_that_is_run_twice_evaluates_its_prompt_once(
    model_folder: Path, tmp_path: Path
) -> None:
    path = make_model("llama", model_folder)
    first, second = (answer(spawn(path, str(tmp_path), 1, 900)) for _ in range(2))
    assert first["evaluated"] == 900
    assert second["evaluated"] == 1
    assert second["disk"] == 899
    assert apart(np.array(first["row"]), np.array(second["row"])) < 1e-3


def test_the_end_of_a_process_waits_for_writes_of_a_dropped_cache(
    model_folder: Path, tmp_path: Path
) -> None:
    code = f"""
import gc, time
from pykvcache import LlamaContext, LlamaModel, PrefixCache
from pykvcache.prefix.stores import FolderStore
class Slow(FolderStore):
    def put(self, items):
        time.sleep(1)
        return super().put(items)
ctx = LlamaContext(LlamaModel({str(make_model("llama", model_folder))!r}), n_ctx=256, n_threads=1)
cache = PrefixCache(ctx, block_size=8, tiers=[Slow({str(tmp_path)!r})])
cache.sequence(list(range(5, 50))).evaluate()
del cache
gc.collect()
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    with FolderStore(tmp_path) as store:
        assert len(list(store.entries())) >= 5


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork()")
def test_a_forked_child_writes_what_its_own_cache_has_at_its_end(
    model_folder: Path, tmp_path: Path
) -> None:
    code = f"""
import os, sys
from pykvcache import LlamaContext, LlamaModel, PrefixCache
def make(folder):
    model = LlamaModel({str(make_model("llama", model_folder))!r})
    ctx = LlamaContext(model, n_ctx=256, n_threads=1)
    return PrefixCache(ctx, block_size=8, tiers=[{str(tmp_path)!r} + folder])
cache = make("/parent")
cache.sequence(list(range(5, 50))).evaluate()
pid = os.fork()
if pid:
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
else:
    mine = make("/child")
    sequence = mine.sequence(list(range(5, 50)))
    sequence.evaluate()
    sys.exit(7)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    for folder in ("parent", "child"):
        with FolderStore(tmp_path / folder) as store:
            assert len(list(store.entries())) >= 5, folder


SECRET, OTHER = "a secret of sixteen bytes", "another one of 16 bytes"


def test_processes_share_with_their_namespace_and_secret_alone(
    model_folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("cryptography", reason="pip install '.[crypto]'")
    path, n = make_model("llama", model_folder), 60
    ways: list[dict[str, Any]] = [
        {"secret": SECRET, "namespace": "a"},
        {"secret": SECRET},
        {"secret": OTHER, "namespace": "a"},
    ]
    with redis_server(tmp_path) as server:
        folder = tmp_path / "tier"
        tiers = f"{folder},{server.url}"
        assert answer(spawn(path, tiers, 1, n, **ways[0]))["evaluated"] == n
        others = [spawn(path, tiers, 1, n, **way) for way in ways[1:]]
        # The same from the server, without the folder.
        same = spawn(path, server.url, 1, n, **ways[0])
        assert [answer(one)["evaluated"] for one in others] == [n, n]
        assert answer(same)["remote"] == n - 1
        stores = FolderStore(folder), RedisStore(server.url, **PATIENT)
        written = [contents(store) for store in stores]
        assert [len(one) for one in written] == [3 * (n // 8 + 1)] * 2
        # Who has no secret finds nothing of it; what they write is readable.
        context = LlamaContext(LlamaModel(path), n_ctx=2048, n_threads=1, **EXACT)
        with PrefixCache(
            context, block_size=8, tier_seconds=20, namespace="a", tiers=list(stores)
        ) as cache:
            sequence = cache.sequence(words(1, n))
            sequence.evaluate()
            assert sequence.reuse.evaluated == n
            native, block = context.native, np.empty(8 * context.native.block_bytes(), np.uint8)
            assert native.get_block(sequence._cells.ledger.seq_id, 0, 8, block)
        parts = [block[i : i + 32].tobytes() for i in range(0, len(block), 512)]
        for store, before in zip(stores, written, strict=True):
            after = contents(store)
            assert before.items() <= after.items()
            new = [content for key, content in after.items() if key not in before]
            for part in parts:
                assert any(part in content for content in new)
                assert not any(part in content for content in before.values())


def contents(store: BlockStore) -> dict[bytes, bytes]:
    found = {}
    for entry in list(store.entries()):
        buffer = bytearray(1 << 16)
        assert store.get_into([entry.key], [buffer]) == 1
        found[entry.key] = bytes(buffer)
    return found
