"""Readers of traces: each format, and files that are none."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from pykvcache.errors import ArgumentError
from pykvcache.simulate import Trace, read_trace


def write(path: Path, rows: list[Any], *, packed: bool = False) -> Path:
    text = "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    return path


def ids(trace: Trace) -> list[list[int]]:
    return [x.tolist() for x in trace.prompts]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("block_size", [16, 512])
def test_hash_ids(tmp_path: Path, block_size: int, packed: bool) -> None:
    rows = [
        {"timestamp": 0, "input_length": 3 * block_size, "hash_ids": [9, 8, 7]},
        {"timestamp": 1, "input_length": block_size + 1, "hash_ids": [9, 2**40]},
        {"timestamp": 1, "input_length": block_size // 2, "turn": 2, "hash_ids": []},
    ]
    trace = read_trace(write(tmp_path / "a.jsonl.gz", rows, packed=packed))
    assert trace.name == "a"
    assert trace.block_size == block_size
    assert ids(trace) == [[0, 1, 2], [0, 3], []]
    assert trace.lengths == [3 * block_size, block_size + 1, block_size // 2]
    assert (trace.n_blocks, trace.n_unique(), trace.n_tokens) == (5, 4, sum(trace.lengths))
    assert ids(trace.head(1)) == [[0, 1, 2]]
    assert read_trace(tmp_path / "a.jsonl.gz", 7).block_size == 7


def test_our_own_events(tmp_path: Path) -> None:
    rows = [
        {"type": "BlockStored", "block_hashes": ["x"]},
        {"type": "Lookup", "n_tokens": 130, "block_size": 64, "block_hashes": ["a", "b"]},
        "",
        {"type": "Lookup", "n_tokens": 70, "block_size": 64, "block_hashes": ["a"]},
        {"type": "AllBlocksCleared"},
    ]
    trace = read_trace(write(tmp_path / "events.jsonl", rows))
    assert (trace.name, trace.block_size) == ("events", 64)
    assert ids(trace) == [[0, 1], [0]]
    assert trace.lengths == [130, 70]


LOOKUP = {"type": "Lookup", "n_tokens": 4, "block_size": 2, "block_hashes": ["a"]}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["{"], "line 1 is not JSON"),
        (["[" * 100_000], "line 1 is not JSON"),
        ([LOOKUP, "[]"], "line 2 is not an object"),
        (["{}"], "no prompts"),
        ([], "no prompts"),
        ([LOOKUP | {"n_tokens": -1}], "n_tokens is -1"),
        ([LOOKUP | {"n_tokens": True}], "n_tokens is True"),
        ([LOOKUP | {"block_size": 0}], "block_size is 0"),
        ([LOOKUP | {"block_hashes": "ab"}], "not a list"),
        ([LOOKUP | {"block_hashes": [[1]]}], "not a list"),
        ([LOOKUP, LOOKUP | {"block_size": 4}], r"several sizes of blocks: \[2, 4\]"),
        ([{"hash_ids": [1, 2], "input_length": 1}], "lengths do not tell"),
        ([{"hash_ids": [1, 2]}], "input_length is None"),
    ],
)
def test_files_without_a_trace_raise(tmp_path: Path, rows: list[Any], message: str) -> None:
    path = write(tmp_path / "x.jsonl", rows)
    with pytest.raises(ValueError, match=message) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)


def test_what_is_no_name_of_a_file_is_an_argument_error() -> None:
    with pytest.raises(ArgumentError, match="character 1 is none that a file name can hold"):
        read_trace("a\0b")
