"""Wrong arguments and damaged files of the simulator and the cache: one typed error each."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pykvcache import KvCacheError, LlamaContext, PrefixCache
from pykvcache.errors import ArgumentError
from pykvcache.prefix.events import EventLog
from pykvcache.simulate import compare, draw, record, replay, workload
from pykvcache.simulate.traces import Trace, read_trace

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
