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
    assert read_trace(tmp_path / "a.jsonl.gz", block_size).block_size == block_size


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


LOOKUP = {"type": "Lookup", "n_tokens": 4, "block_size": 2, "block_hashes": ["a", "b"]}


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
        ([{"hash_ids": [1, 2], "input_length": 1}], "cannot be derived from the lengths"),
        ([{"hash_ids": [1, 2]}], "input_length is None"),
    ],
)
def test_files_without_a_trace_raise(tmp_path: Path, rows: list[Any], message: str) -> None:
    path = write(tmp_path / "x.jsonl", rows)
    with pytest.raises(ValueError, match=message) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)


MOONCAKE = [{"hash_ids": list(range(n)), "input_length": 512 * n - 5} for n in range(1, 20)]
WITHOUT_LAST = [row | {"hash_ids": row["hash_ids"][:-1]} for row in MOONCAKE]  # type: ignore[index]


@pytest.mark.parametrize(
    ("length", "n_ids", "message"),
    [
        (1000, 3, "line 20: 1,000 tokens in blocks of 512 have 1 or 2 ids, not 3"),
        (1024, 3, "line 20: 1,024 tokens in blocks of 512 have 2 ids, not 3"),
        (100_000, 2, "line 20: 100,000 tokens in blocks of 512 have 195 or 196 ids, not 2"),
        (0, 1, "line 20: 0 tokens in blocks of 512 have 0 ids, not 1"),
        (1000, 1, None),
        (1000, 2, None),
        (1024, 2, None),
        (0, 0, None),
        (1000, 0, None),  # nothing of it is kept
    ],
)
def test_lengths_that_the_ids_contradict_raise(
    tmp_path: Path, length: int, n_ids: int, message: str | None
) -> None:
    wrong = {"hash_ids": list(range(n_ids)), "input_length": length}
    path = write(tmp_path / "x.jsonl", [*MOONCAKE, wrong, *WITHOUT_LAST])
    if message is None:
        assert read_trace(path, 512).lengths[19] == length
        return
    with pytest.raises(ArgumentError, match=message) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)
    assert (caught.value.value, caught.value.limit) == (n_ids, (length, 512))


def test_a_size_that_the_lines_contradict_raises(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", MOONCAKE)
    with pytest.raises(ArgumentError, match="line 1: 507 tokens in blocks of 64 have 7 or 8 ids"):
        read_trace(path, 64)
    path = write(tmp_path / "y.jsonl", [LOOKUP])
    with pytest.raises(ArgumentError, match="has blocks of 2 tokens, not of 4"):
        read_trace(path, 4)
    wrong = LOOKUP | {"n_tokens": 6, "block_hashes": ["a", "b"]}
    with pytest.raises(ArgumentError, match="line 2: 6 tokens in blocks of 2 have 3 ids, not 2"):
        read_trace(write(path, [LOOKUP, wrong]))


def test_a_trace_that_is_made_is_checked_too() -> None:
    with pytest.raises(ArgumentError, match="x, prompt 1: 31 tokens in blocks of 10 have 3 or 4"):
        Trace.from_ids("x", [[1, 2], [1, 2]], [15, 31], block_size=10)
    with pytest.raises(ArgumentError, match="x: 2 prompts, but 1 lengths"):
        Trace.from_ids("x", [[1, 2], [1, 2]], [15], block_size=10)


def test_what_is_no_name_of_a_file_is_an_argument_error() -> None:
    with pytest.raises(ArgumentError, match="character 1 cannot be part of a file name"):
        read_trace("a\0b")
