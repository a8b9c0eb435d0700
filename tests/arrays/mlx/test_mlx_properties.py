"""Each cache against plain lists of tokens, over random calls."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_support import feed, kv, pickled, snapshot, tokens_in

from pykvcache.arrays import (
    BatchKVCache,
    BatchRotatingKVCache,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    from_state,
    load_prompt_cache,
    save_prompt_cache,
)
from support.examples import examples

WINDOWS = st.sampled_from([None, None, 1, 2, 3, 5, 12])
UPDATE = st.tuples(st.just("update"), st.integers(2, 6), WINDOWS, st.booleans())
ONE = st.tuples(st.just("update"), st.just(1), WINDOWS, st.booleans())
CALLS = st.lists(
    st.one_of(
        UPDATE,
        UPDATE,
        ONE,
        ONE,
        ONE,
        st.tuples(st.just("trim"), st.integers(0, 9)),
        st.tuples(st.just("copy"), st.booleans()),
        st.tuples(st.just("rebuild")),
        st.tuples(st.just("restore")),
        st.tuples(st.just("trim_front")),
    ),
    min_size=10,
    max_size=30,
)


class Single:
    """A cache of two equal rows, and the tokens that it was given.

    Token p, in an update that begins at s, sees q if q is kept, or if q is among the newest
    `window` ones and the ring still had it: q > s - max_size + kept.
    """

    def __init__(self, cache: Any, limit: int | None = None, keep: int = 0) -> None:
        self.cache, self.limit = cache, limit
        self.kept = min(keep, limit - 1) if limit is not None else 0
        self.tokens: list[int] = []
        self.start = 0  # of a chunked cache: tokens before it are gone
        self.clock = 1

    def update(self, n: int, window: int | None, return_array: bool) -> None:
        new = list(range(self.clock, self.clock + n))
        self.clock += n
        rows = feed(self.cache, [new, [-token for token in new]], window, return_array)
        s, self.tokens = len(self.tokens), self.tokens + new
        for i in range(n):
            p = s + i
            oldest = max(self.start, p + 1 - (window or self.limit or p + 1))
            if self.limit is not None:
                oldest = max(oldest, s - (self.limit - 1 - self.kept))
            seen = [t for q, t in enumerate(self.tokens[: p + 1]) if q < self.kept or q >= oldest]
            assert sorted(rows[0][i]) == seen
            assert rows[1][i] == [-token for token in rows[0][i]]
        self.check()

    def check(self) -> None:
        total = len(self.tokens)
        assert self.cache.offset == self.cache.rope_offset == total
        assert self.cache.size() == min(total - self.start, self.limit or total)
        assert self.cache.is_empty() is (total == self.start)
        assert self.cache.is_trimmable() is (self.limit is None or total < self.limit)

    def trim(self, n: int) -> None:
        trimmable = self.limit is None or len(self.tokens) < self.limit
        expected = min(n, len(self.tokens) - self.start) if trimmable else 0
        shorter = self.cache._copied(n)
        assert (shorter is None) is (n != expected)
        assert self.cache.trim(n) == expected
        self.tokens = self.tokens[: len(self.tokens) - expected]
        if shorter is not None:
            assert snapshot(shorter) == snapshot(self.cache)
            self.cache = shorter
        self.check()

    def copy(self, pickles: bool) -> None:
        old, self.cache = self.cache, pickled(self.cache) if pickles else self.cache.copy()
        assert type(old) is type(self.cache)
        if not old.is_empty():
            feed(old, [[-7], [7]])  # must not reach the copy

    def rebuild(self) -> None:
        """Go on with a cache made from the state."""
        self.cache = from_state(type(self.cache).__name__, self.cache.state, self.cache.meta_state)

    def restore(self) -> None:
        """Go on with a cache that takes the state over other content."""
        other = self.cache.copy()
        feed(other, [[-7], [7]])
        other.from_serialized(self.cache.state, self.cache.meta_state)
        self.cache = other

    def trim_front(self) -> None:
        if isinstance(self.cache, ChunkedKVCache):
            self.cache.maybe_trim_front()
            self.start = max(self.start, len(self.tokens) - self.cache.chunk_size)
            assert self.cache.start_position == self.start

    def run(self, calls: list[tuple[Any, ...]]) -> None:
        for name, *arguments in calls:
            getattr(self, name)(*arguments)


COMMON = settings(max_examples=examples(100), deadline=None)


@COMMON
@given(calls=CALLS, concatenates=st.booleans())
def test_a_plain_cache_is_a_list(calls: list[tuple[Any, ...]], concatenates: bool) -> None:
    Single(ConcatenateKVCache() if concatenates else KVCache()).run(calls)


@COMMON
@given(calls=CALLS, chunk=st.integers(1, 6))
def test_a_chunked_cache_is_the_end_of_a_list(calls: list[tuple[Any, ...]], chunk: int) -> None:
    Single(ChunkedKVCache(chunk)).run(calls)


@settings(max_examples=examples(200), deadline=None)
@given(calls=CALLS, limit=st.integers(1, 9), keep=st.sampled_from([0, 0, 1, 2, 4]))
def test_a_ring_is_its_visibility_rule(calls: list[tuple[Any, ...]], limit: int, keep: int) -> None:
    Single(RotatingKVCache(limit, keep), limit, keep).run(calls)


@settings(max_examples=15, deadline=None)
@given(calls=CALLS, limit=st.integers(2, 9), layout=st.sampled_from(["0.31", "0.32"]))
def test_caches_continue_from_a_file(calls: list[tuple[Any, ...]], limit: int, layout: Any) -> None:
    singles = [
        Single(KVCache()),
        Single(ChunkedKVCache(limit)),
        Single(RotatingKVCache(limit), limit),
        Single(RotatingKVCache(limit, keep=1), limit, 1),
    ]
    half = len(calls) // 2
    for single in singles:
        single.run(calls[:half])
    with TemporaryDirectory() as folder:
        file = Path(folder) / "cache.safetensors"
        save_prompt_cache(file, [single.cache for single in singles], {"a": "b"}, layout=layout)
        loaded, metadata = load_prompt_cache(file, return_metadata=True)
    assert metadata == {"a": "b"}
    for single, cache in zip(singles, loaded, strict=True):
        assert type(cache) is type(single.cache)
        single.cache = cache
        single.run(calls[half:])


@settings(max_examples=60, deadline=None)
@given(data=st.data(), bits=st.sampled_from([2, 3, 4, 6, 8]), group=st.sampled_from([8, 16, 32]))
def test_a_quantized_cache_is_a_list_within_half_a_step(
    data: st.DataObject, bits: int, group: int
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    cache, history = QuantizedKVCache(group, bits), np.zeros((2, 1, 2, 0, 32), np.float32)
    for _ in range(data.draw(st.integers(1, 6))):
        step = data.draw(st.sampled_from(["update", "update", "trim", "copy", "state"]))
        if step == "update":
            n = data.draw(st.integers(1, 9))
            new = rng.standard_normal((2, 1, 2, n, 32)).astype(np.float32)
            history = np.concatenate([history, new], axis=3)
            for got, want in zip(cache.update(*new), history, strict=True):
                groups = want.astype(float).reshape(1, 2, -1, 32 // group, group)
                half = (groups.max(-1) - groups.min(-1)) / (2**bits - 1) / 2
                error = np.abs(got.astype(float) - want).reshape(groups.shape)
                assert (error <= half[..., None] + 1e-6).all()
        elif step == "trim":
            n = data.draw(st.integers(0, 9))
            dropped = min(n, history.shape[3])
            shorter = cache._copied(n)
            assert cache.trim(n) == dropped
            assert shorter is None or snapshot(shorter) == snapshot(cache)
            cache = shorter if shorter is not None else cache
            history = history[:, :, :, : history.shape[3] - dropped]
        elif step == "copy":
            cache = cache.copy()
        else:
            cache = from_state("QuantizedKVCache", cache.state, cache.meta_state)  # type: ignore
        assert cache.offset == cache.size() == history.shape[3]


# Rows of different lengths -------------------------------------------------------------------

LENGTHS = st.lists(st.integers(0, 7), min_size=3, max_size=3)
BATCH_CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("decode"), st.just(1), WINDOWS),
        st.tuples(st.just("decode"), st.just(1), WINDOWS),
        st.tuples(st.just("decode"), st.just(1), st.none()),
        st.tuples(st.just("decode"), st.integers(2, 5), WINDOWS),
        st.tuples(st.just("right_padded"), LENGTHS, st.integers(2, 9), st.booleans()),
        st.tuples(st.just("filter"), st.lists(st.integers(0, 5), min_size=1, max_size=3)),
        st.tuples(st.just("extend"), LENGTHS, st.integers(0, 8), st.booleans()),
        st.tuples(st.just("extract"), st.integers(0, 5)),
        st.tuples(st.just("trim"), st.integers(0, 3)),
        st.tuples(st.just("copy"), st.booleans()),
        st.tuples(st.just("rebuild")),
        st.tuples(st.just("merge_again")),
    ),
    min_size=6,
    max_size=20,
)


class Batch:
    """A batch cache and the tokens of each of its rows."""

    def __init__(self, lengths: list[int], limit: int | None) -> None:
        self.limit, self.clock = limit, 1
        self.cache, self.rows = self.left_padded(lengths)

    def left_padded(self, lengths: list[int]) -> tuple[Any, list[list[int]]]:
        width = max(*lengths, 1)
        padding = [width - length for length in lengths]
        if self.limit is None:
            cache: Any = BatchKVCache(padding)
        else:
            cache = BatchRotatingKVCache(self.limit, [0] * len(lengths))
            cache.prepare(left_padding=padding)
        rows: list[list[int]] = [[] for _ in lengths]
        assert cache.is_empty()
        assert cache.rope_offset.tolist() == [-pad for pad in padding]
        new = [[0] * pad + self.fresh(width - pad) for pad in padding]
        self.advance(cache, rows, new)
        return cache, rows

    def fresh(self, n: int) -> list[int]:
        self.clock += n
        return list(range(self.clock - n, self.clock))

    def advance(
        self, cache: Any, rows: list[list[int]], new: list[list[int]], window: int | None = None
    ) -> None:
        """Feed columns, in which 0 is padding; every token sees the newest of its row."""
        if self.limit is not None and window is not None:
            window = min(window, self.limit)
        seen = feed(cache, [[token or -1 for token in row] for row in new], window)
        reach = window or self.limit or 10**6
        for row, columns in enumerate(new):
            for i, token in enumerate(columns):
                if token:
                    rows[row].append(token)
                    assert sorted(seen[row][i]) == rows[row][-reach:]

    def check(self) -> None:
        assert self.cache.rope_offset.tolist() == [len(row) for row in self.rows]
        assert self.cache.batch_size == len(self.rows)

    def decode(self, n: int, window: int | None) -> None:
        self.advance(self.cache, self.rows, [self.fresh(n) for _ in self.rows], window)
        self.check()

    def right_padded(self, lengths: list[int], cut: int, filters: bool) -> None:
        """Feed rows of several lengths, in two parts unless the second is a single column."""
        lengths = [lengths[i % 3] for i in range(len(self.rows))]
        width = max(*lengths, 1)
        padding = [width - length for length in lengths]
        if not any(padding):
            return
        self.cache.prepare(lengths=lengths, right_padding=padding)
        new = [self.fresh(n) + [0] * pad for n, pad in zip(lengths, padding, strict=True)]
        if width > 1:
            cut = cut if cut < width - 1 else width
            for part in (slice(0, cut), slice(cut, width)):
                if any(row[part] for row in new):
                    self.advance(self.cache, self.rows, [row[part] for row in new])
            assert self.cache.trim(1) == 0
            if filters:
                self.cache.filter([*range(len(self.rows))])
        self.cache.finalize()
        if width == 1:  # nothing came
            return
        self.check()

    def filter(self, chosen: list[int]) -> None:
        indices = [index % len(self.rows) for index in chosen]
        self.cache.filter(indices)
        self.rows = [[*self.rows[index]] for index in indices]
        self.check()

    def extend(self, lengths: list[int], steps: int, empty: bool) -> None:
        if len(self.rows) > 3:
            return
        if empty:
            singles = [self.alone() for _ in range(2)]
            other, rows = type(singles[0]).merge(singles), [[], []]
        else:
            other, rows = self.left_padded(lengths[:2])
            for _ in range(steps):
                self.advance(other, rows, [self.fresh(1) for _ in rows])
        offset = max(self.cache.offset, other.offset)
        self.cache.extend(other)
        self.rows += rows
        assert self.cache.offset == offset
        self.check()

    def alone(self) -> Any:
        return KVCache() if self.limit is None else RotatingKVCache(self.limit)

    def single(self, row: int) -> Any:
        """Return row `row` as a separate, checked cache."""
        single = self.cache.extract(row % len(self.rows))
        tokens = self.rows[row % len(self.rows)]
        assert type(single) is type(self.alone())
        assert single.offset == len(tokens)
        held = tokens_in(*single.state)[0].tolist() if single.state else []
        assert held == tokens[len(tokens) - len(held) :]
        # A ring orders itself and keeps one column less when several come.
        assert len(held) >= min(len(tokens), len(tokens) if not self.limit else self.limit - 1)
        return single

    def extract(self, row: int) -> None:
        single, tokens = self.single(row), self.rows[row % len(self.rows)]
        for _ in range(2):
            new = self.fresh(1)
            seen = feed(single, [new])[0][0]
            tokens = tokens + new
            assert sorted(seen) == (tokens if self.limit is None else tokens[-self.limit :])

    def trim(self, n: int) -> None:
        if n > min(len(row) for row in self.rows):
            return
        trimmable = self.limit is None or self.cache.offset < self.limit
        assert self.cache.is_trimmable() is trimmable
        done = self.cache.trim(n)
        assert done == (n if trimmable else 0)
        self.rows = [row[: len(row) - done] for row in self.rows]
        self.check()

    def copy(self, pickles: bool) -> None:
        old, self.cache = self.cache, pickled(self.cache) if pickles else self.cache.copy()
        feed(old, [[-7]] * len(self.rows))
        self.check()

    def rebuild(self) -> None:
        name = type(self.cache).__name__
        self.cache = from_state(name, self.cache.state, self.cache.meta_state)
        self.check()

    def merge_again(self) -> None:
        singles = [self.single(row) for row in range(len(self.rows))]
        self.cache = type(singles[0]).merge(iter(singles))
        assert type(self.cache) is (BatchKVCache if self.limit is None else BatchRotatingKVCache)
        self.check()

    def run(self, calls: list[tuple[Any, ...]]) -> None:
        for name, *arguments in calls:
            getattr(self, name)(*arguments)
        self.decode(1, None)
        for row in range(len(self.rows)):
            self.extract(row)


@settings(max_examples=examples(150), deadline=None)
@given(lengths=LENGTHS, calls=BATCH_CALLS)
def test_a_batch_is_lists(lengths: list[int], calls: list[tuple[Any, ...]]) -> None:
    Batch(lengths, None).run(calls)


@settings(max_examples=examples(250), deadline=None)
@given(lengths=LENGTHS, limit=st.integers(1, 9), calls=BATCH_CALLS)
@example(lengths=[1, 1, 1], limit=1, calls=[("right_padded", [0, 0, 2], 2, False)])
def test_a_batch_of_rings_is_the_ends_of_lists(
    lengths: list[int], limit: int, calls: list[tuple[Any, ...]]
) -> None:
    Batch(lengths, limit).run(calls)


def test_the_support_distinguishes_tokens() -> None:
    tokens = [[3, 1], [-2, 5]]
    np.testing.assert_array_equal(tokens_in(*kv(*tokens)), tokens)
