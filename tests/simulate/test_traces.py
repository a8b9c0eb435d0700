"""Traces read, made and recorded; files that are none, and wrong arguments of the simulator."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pykvcache import BatchGenerator, KvCacheError, LlamaContext, PrefixCache
from pykvcache.errors import ArgumentError
from pykvcache.prefix.events import EventLog, Lookup
from pykvcache.simulate import Trace, compare, draw, read_trace, record, replay, workload


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


HUGE = 10**5000
TRACE = workload("chat", 20)
WRONG: dict[str, Callable[[], object]] = {
    "trace": lambda: replay(None, "lru", 9),  # type: ignore[arg-type]
    "policy of another type": lambda: replay(TRACE, ["lru"], 9),  # type: ignore[arg-type]
    "no jobs": lambda: compare(TRACE, ["lru"], jobs=0),
    "shares": lambda: compare(TRACE, ["lru"], [float("nan")]),
    "blocks in an array": lambda: replay(TRACE, "lru", np.zeros((2, 2))),  # type: ignore[arg-type]
    "negative blocks": lambda: replay(TRACE, "lru", -1),
    "trace of a table": lambda: compare(None),  # type: ignore[arg-type]
    "policies in no list": lambda: compare(TRACE, np.array("lru")),  # type: ignore[arg-type]
    "size of blocks of no tokens": lambda: read_trace("x", 0),
    "device": lambda: read_trace("/dev/zero"),
    "ids that are lists": lambda: Trace.from_ids("x", [[[]]]),  # type: ignore[list-item]
    "workload": lambda: workload(HUGE),  # type: ignore[arg-type]
    "prompts": lambda: workload("chat", -1),
    "seed": lambda: workload("chat", 1, "\ud800"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments_of_the_simulator_are_typed_errors(what: str) -> None:
    with pytest.raises((TypeError, KvCacheError)) as caught:
        WRONG[what]()
    assert len(str(caught.value)) < 1000
    # Those of somebody else's name nothing that was given.
    assert not re.search("unhashable|object is not|0-d array|only .* arrays", str(caught.value))


def test_what_cannot_be_drawn_leaves_the_file_alone(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    reports: list[Any] = [None, [], "x", [None]]
    for wrong in reports:
        with pytest.raises((TypeError, KvCacheError), match=r"reports (must|to draw)"):
            draw(wrong, tmp_path / "a.svg")
    with pytest.raises(TypeError, match="path must be"):
        draw([compare(TRACE, ["lru"], [0.1])], 5)  # type: ignore[arg-type]
    for name in ("a.foo", "a", ".svg"):
        with pytest.raises(ArgumentError, match=re.escape(name) + r".*\.pdf.*\.png") as caught:
            draw([compare(TRACE, ["lru"], [0.1])], tmp_path / name)
        assert caught.value.value == str(tmp_path / name)
        assert ".svg" in caught.value.limit
    assert not list(tmp_path.iterdir())
    draw([compare(TRACE, ["lru"], [0.1])], tmp_path / "a.SVG")
    named = Trace("$a_$ $\\frac", TRACE.block_size, TRACE.prompts, TRACE.lengths)
    draw([compare(named, ["lru"], [0.1])], tmp_path / "b.png")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.SVG", "b.png"]


def test_damaged_traces_are_refused(tmp_path: Path) -> None:
    line = b'{"hash_ids": [1, 2], "input_length": 1024}\n'
    path, packed = tmp_path / "trace", gzip.compress(line * 50)
    assert len(packed) < 200
    path.write_bytes(packed)
    assert len(read_trace(path).prompts) == 50
    for i in range(2, len(packed)):
        for data in (packed[:i], packed[:i] + bytes([packed[i] ^ 255]) + packed[i + 1 :]):
            path.write_bytes(data)
            try:
                read_trace(path)
            except KvCacheError:
                continue
            assert 3 < i < 10, "only the time and the flags of the header mean nothing"
    path.write_bytes(line + b"\xff\n")
    with pytest.raises(KvCacheError, match="after line"):
        read_trace(path)


def test_arguments_of_a_cache_that_no_number_or_list_holds(
    make_context: Callable[..., LlamaContext],
) -> None:
    wrong: Any
    with PrefixCache(make_context("llama"), block_size=8) as cache:
        for call in (cache.pin, cache.prefetch):
            for wrong, why in (({9, 5, 30}, "in order, not a set"), (None, "token ids, not None")):
                with pytest.raises(TypeError, match=why):
                    call(wrong)
        assert cache.pin(range(5, 20), ttl=HUGE).n_tokens == 0
        assert cache.flush(HUGE)
        for wrong in (-1, -HUGE, float("nan")):
            with pytest.raises(ValueError, match="seconds"):
                cache.flush(wrong)
        with pytest.raises(TypeError, match="seconds"):
            cache.flush("1")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.int32, np.uint64, ">u4", list])
def test_ids_of_any_integers_are_the_same_ids(dtype: Any) -> None:
    rows = [[1, 2, 3, 4], [1, 2, 7, 8], []]
    prompts = [row if dtype is list else np.array(row, dtype) for row in rows]
    trace = Trace("x", 16, prompts, [64, 64, np.int64(5)])
    assert [ids.dtype for ids in trace.prompts] == [np.uint32] * 3
    assert replay(trace, "lru", 100).hit_tokens == 32


@pytest.mark.parametrize(
    ("ids", "length", "error"),
    [
        ([1.0, 2.0], 32, TypeError),
        ([[1, 2]], 16, TypeError),
        ([-1, 2], 32, ValueError),
        ([1, 2**32], 32, ValueError),
        ([1, 2], 32.0, TypeError),
        ([], float("nan"), TypeError),
    ],
)
def test_what_is_no_trace_is_refused(ids: Any, length: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="prompt 0"):
        Trace("x", 16, [ids], [length])


# Recording ----------------------------------------------------------------------------------------

Make = Callable[..., LlamaContext]
SIZE = 8


@pytest.mark.parametrize("name", ["lookups.jsonl", "lookups.jsonl.gz"])
def test_what_a_cache_was_asked_for_is_replayed(
    name: str, tmp_path: Path, make_context: Make
) -> None:
    """The simulator finds, over the same policy and without a limit, what the cache found."""
    ctx = make_context("llama", n_ctx=512, n_seq_max=2)
    rng = np.random.default_rng(1)
    trunk = rng.integers(5, 56, 70)
    found = 0
    with PrefixCache(ctx, block_size=SIZE, policy="lru") as cache:
        waiting: list[Lookup] = []
        with record(cache.events, tmp_path / name):
            cache.events.subscribe_lookups(waiting.append)
            for _ in range(30):
                begin = trunk[: rng.integers(1, 70)]
                prompt = np.concatenate([begin, rng.integers(5, 56, rng.integers(1, 9))])
                with cache.sequence(prompt, namespace=str(rng.integers(2))) as sequence:
                    sequence.evaluate()
                # To whole blocks: the simulator knows no others.
                reuse = sequence.reuse
                known = len(prompt) if "all of it" in reuse.reason else reuse.ram
                found += known // SIZE * SIZE
        cache.sequence(trunk).close()  # is not recorded any more
        assert not any(isinstance(event, Lookup) for event in cache.events)
    trace = read_trace(tmp_path / name)
    assert (len(trace.prompts), trace.block_size) == (30, SIZE)
    assert trace.lengths == [lookup.n_tokens for lookup in waiting[:30]]
    assert len(waiting) == 31
    assert trace.n_blocks == sum(n // SIZE for n in trace.lengths)
    assert replay(trace, "lru", 10**6).hit_tokens == found > 0


def test_requests_of_a_batch_are_looked_up_once(make_context: Make) -> None:
    ctx = make_context("llama", n_ctx=512, n_seq_max=3)
    heard: list[Lookup] = []
    with PrefixCache(ctx, block_size=SIZE) as cache:
        stop = cache.events.subscribe_lookups(heard.append)
        generator = BatchGenerator(cache)
        prompts = [[5 + i, *range(10, 40)] for i in (1, 1, 2)]  # the second waits for the first
        handles = [generator.submit(prompt, 2) for prompt in prompts]
        generator.run()
        del handles
        stop()
        cache.sequence([7, 8])
    assert [lookup.n_tokens for lookup in heard] == [31, 31, 31]
    assert heard[0].block_hashes == heard[1].block_hashes != heard[2].block_hashes


def test_a_file_that_cannot_be_written_raises(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="absent"), record(EventLog(), tmp_path / "absent" / "x"):
        pass
    with pytest.raises(TypeError, match="callable"):
        EventLog().subscribe_lookups(5)  # type: ignore[arg-type]


def test_a_file_that_could_not_be_written_for_a_while_is_said_at_the_end(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource", reason="no limits of files")
    most, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    events, rng = EventLog(), np.random.default_rng(1)

    def work() -> None:
        with record(events, tmp_path / "lookups.jsonl"):
            for limit in (most, 20_000, most):
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
                for _ in range(100):
                    events.looked_up(Lookup((rng.bytes(600),), 16, 16))

    try:
        with pytest.raises(OSError, match="File too large"):
            work()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))


def test_what_is_no_log_of_events_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("mine")
    other: Any = "events"
    with pytest.raises(TypeError, match="EventLog"), record(other, path):
        pass
    assert path.read_text() == "mine"
    with record(EventLog(), path):
        pass
    assert not path.read_text()
