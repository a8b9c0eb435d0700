"""Names of blocks: what they depend on, and what they do not."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import pytest

from memory.kit import Make
from pykvcache.prefix.block_hash import block_names, root_name
from pykvcache.prefix.memory import CacheMemory

DIGESTS: dict[str, Any] = {"model": b"m" * 32, "rope": b"r" * 32, "layout": b"l" * 32}


def test_block_hashes_follow_the_documented_formula() -> None:
    root = root_name(**DIGESTS, block_size=2, namespace="é")
    salt = "é".encode()
    text = b"pykvcache.block.1" + b"m" * 32 + b"r" * 32 + b"l" * 32
    assert root == hashlib.sha256(text + struct.pack("<IQ", 2, len(salt)) + salt).digest()
    first = hashlib.sha256(root + struct.pack("<II", 7, 8)).digest()
    second = hashlib.sha256(first + struct.pack("<II", 9, 70000)).digest()
    tokens = struct.pack("<5I", 7, 8, 9, 70000, 11)
    assert block_names(root, tokens, 8) == [first, second]
    assert block_names(first, tokens[8:], 8) == [second]
    assert block_names(root, tokens[:7], 8) == []


@pytest.mark.parametrize(
    "change",
    [
        {"model": b"M" * 32},
        {"rope": b"R" * 32},
        {"layout": b"L" * 32},
        {"block_size": 3},
        {"namespace": "a"},
        {"namespace": "\0"},
        {"namespace": "\ud800"},
    ],
)
def test_roots_differ_in_everything_that_matters(change: dict[str, Any]) -> None:
    facts = {**DIGESTS, "block_size": 2, "namespace": ""}
    assert root_name(**facts) != root_name(**{**facts, **change})


@pytest.mark.parametrize(
    ("name", "digest"),
    [("llama", "6f65695e3422f84f"), ("gemma3", "70ee748106449844"), ("jamba", "7167910e58e71864")],
)
def test_names_of_stored_blocks_never_change(make_context: Make, name: str, digest: str) -> None:
    """A layout with another digest makes misses of all blocks that earlier versions wrote."""
    ctx = make_context(name, n_seq_max=4, type_k="f32", type_v="f32", flash_attn="disabled")
    assert CacheMemory(ctx, 8, 1 << 20).digests["layout"].hex()[:16] == digest
