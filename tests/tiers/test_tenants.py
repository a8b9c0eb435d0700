"""Two processes on one folder and one server: other namespaces or secrets share nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pykvcache import LlamaContext, LlamaModel, PrefixCache
from pykvcache.prefix.stores import BlockStore, FolderStore, RedisStore
from stores.servers import PATIENT, redis_server
from support.models import EXACT, make_model
from tiers.test_tiers import words
from tiers.worker import answer, spawn

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
    """Return all bytes that a reader of the store can see."""
    found = {}
    for entry in list(store.entries()):
        buffer = bytearray(1 << 16)
        assert store.get_into([entry.key], [buffer]) == 1
        found[entry.key] = bytes(buffer)
    return found
