"""The mlx-style caches against lists of tokens, over random calls."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_kit import feed, keys_of, tokens_in, values_of

from pykvcache.arrays import (
    BatchKVCache,
    BatchRotatingKVCache,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    RotatingKVCache,
    from_state,
    load_prompt_cache,
    save_prompt_cache,
)
from support.examples import examples

COMMON = settings(max_examples=100, deadline=None, derandomize=True)

# One sequence length for the whole batch -----------------------------------------------------

UPDATE = st.tuples(
    st.just("update"), st.integers(1, 6), st.sampled_from([None, 1, 2, 3, 8]), st.booleans()
)
ONE = st.tuples(st.just("update"), st.just(1), st.sampled_from([None, None, 2]), st.booleans())
CALLS = st.lists(
    st.one_of(
        UPDATE,
        UPDATE,
        ONE,
        ONE,
        ONE,
        st.tuples(st.just("trim"), st.integers(0, 9)),
        st.tuples(st.just("copy")),
        st.tuples(st.just("rebuild")),
        st.tuples(st.just("restore")),
        st.tuples(st.just("trim_front")),
    ),
    min_size=10,
    max_size=40,
)


class Single:
    """One cache with a batch of two, and the tokens that it was given."""

    def __init__(self, cache: Any, limit: int | None = None, keep: int = 0) -> None:
        self.cache, self.limit, self.keep = cache, limit, keep
        self.tokens: list[int] = []
        self.start = 0  # of a chunked cache: tokens before it are gone
        self.clock = 1

    def update(self, n: int, window: int | None, return_array: bool) -> None:
        if self.keep or (window is not None and self.limit is not None and window > self.limit):
            window = None  # what a window does to kept tokens, or beyond a ring, is not decided
        new = list(range(self.clock, self.clock + n))
        self.clock += n
        rows = feed(self.cache, [new, [-token for token in new]], window, return_array)
        for i in range(n):
            self.tokens.append(new[i])
            self.check(rows[0][i], n, window)
            assert rows[1][i] == [-token for token in rows[0][i]]
        assert self.cache.offset == len(self.tokens)
        assert self.cache.rope_offset == len(self.tokens)
        assert not self.cache.is_empty()

    def check(self, seen: list[int], n: int, window: int | None) -> None:
        """What the last token sees."""
        stored = self.tokens[self.start :]
        widths = [width for width in (window, self.limit) if width is not None]
        if not self.keep:
            expected = stored[-min(widths) :] if widths else stored
            assert sorted(seen) == expected
            return
        assert self.limit is not None
        kept = self.tokens[: self.keep]
        assert len(set(seen)) == len(seen)
        must = {*kept, *self.tokens[self.keep :][-(self.limit - self.keep) :]}
        may = must if n == 1 else {*must, *self.tokens[-self.limit :]}
        assert must <= set(seen) <= may

    def trim(self, n: int) -> None:
        trimmable = self.limit is None or len(self.tokens) < self.limit
        assert self.cache.is_trimmable() is trimmable
        expected = min(n, len(self.tokens) - self.start) if trimmable else 0
        assert self.cache.trim(n) == expected
        if expected:
            del self.tokens[-expected:]
        assert self.cache.offset == len(self.tokens)

    def copy(self) -> None:
        old, self.cache = self.cache, self.cache.copy()
        assert type(old) is type(self.cache)
        if not old.is_empty():
            feed(old, [[-7], [7]])  # must not reach the copy

    def rebuild(self) -> None:
        """Go on with a cache made from the state, as mlx-lm does."""
        self.cache = from_state(type(self.cache).__name__, self.cache.state, self.cache.meta_state)

    def restore(self) -> None:
        """Go on with a cache that was set by from_serialized, over other content."""
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


@COMMON
@given(calls=CALLS)
def test_plain_cache(calls: list[tuple[Any, ...]]) -> None:
    Single(KVCache()).run(calls)


@COMMON
@given(calls=CALLS)
def test_concatenating_cache(calls: list[tuple[Any, ...]]) -> None:
    Single(ConcatenateKVCache()).run(calls)


@COMMON
@given(calls=CALLS, chunk=st.integers(1, 6))
def test_chunked_cache(calls: list[tuple[Any, ...]], chunk: int) -> None:
    Single(ChunkedKVCache(chunk)).run(calls)


@COMMON
@given(calls=CALLS, limit=st.integers(2, 9))
def test_ring(calls: list[tuple[Any, ...]], limit: int) -> None:
    Single(RotatingKVCache(limit), limit).run(calls)


@COMMON
@given(calls=CALLS, limit=st.integers(2, 9), keep=st.integers(1, 4))
def test_ring_that_keeps_its_first_tokens(
    calls: list[tuple[Any, ...]], limit: int, keep: int
) -> None:
    keep = min(keep, limit - 1)
    Single(RotatingKVCache(limit, keep=keep), limit, keep).run(calls)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(calls=CALLS, limit=st.integers(2, 9))
def test_files_hold_everything(calls: list[tuple[Any, ...]], limit: int) -> None:
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
        save_prompt_cache(file, [single.cache for single in singles], {"who": "me"})
        loaded, metadata = load_prompt_cache(file, return_metadata=True)
    assert metadata == {"who": "me"}
    for single, cache in zip(singles, loaded, strict=True):
        assert type(cache) is type(single.cache)
        single.cache = cache
        single.run(calls[half:])


# A row has its own length --------------------------------------------------------------------

LENGTHS = st.lists(st.integers(1, 7), min_size=3, max_size=3)
BATCH_CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("decode"), st.just(1)),
        st.tuples(st.just("decode"), st.just(1)),
        st.tuples(st.just("decode"), st.just(1)),
        st.tuples(st.just("decode"), st.integers(2, 5)),
        st.tuples(st.just("right_padded"), LENGTHS),
        st.tuples(st.just("filter"), st.lists(st.integers(0, 5), min_size=1, max_size=3)),
        st.tuples(st.just("extend"), LENGTHS, st.integers(0, 8), st.booleans()),
        st.tuples(st.just("extract"), st.integers(0, 5)),
        st.tuples(st.just("trim"), st.integers(0, 3)),
        st.tuples(st.just("copy")),
        st.tuples(st.just("rebuild")),
        st.tuples(st.just("merge_again")),
    ),
    min_size=6,
    max_size=25,
)


class Batch:
    """A batch cache and the tokens of each of its rows."""

    def __init__(self, lengths: list[int], limit: int | None) -> None:
        self.limit, self.clock = limit, 1
        self.cache, self.rows = self.left_padded(lengths)

    def left_padded(self, lengths: list[int]) -> tuple[Any, list[list[int]]]:
        padding = [max(lengths) - length for length in lengths]
        if self.limit is None:
            cache: Any = BatchKVCache(padding)
        else:
            cache = BatchRotatingKVCache(self.limit, padding)
        rows: list[list[int]] = [[] for _ in lengths]
        assert cache.is_empty()
        assert cache.rope_offset.tolist() == [-pad for pad in padding]
        self.advance(cache, rows, [self.fresh(length) for length in lengths], padding)
        return cache, rows

    def fresh(self, n: int) -> list[int]:
        self.clock += n
        return list(range(self.clock - n, self.clock))

    def advance(
        self,
        cache: Any,
        rows: list[list[int]],
        new: list[list[int]],
        left: list[int] | None = None,
    ) -> None:
        """Feed every row its tokens, padded to one length; padding is numbered -1."""
        length = max(len(tokens) for tokens in new)
        padded = []
        for row, tokens in enumerate(new):
            gap = [-1] * (length - len(tokens))
            padded.append(gap + tokens if left is not None and left[row] else tokens + gap)
        seen = feed(cache, padded)
        for row, tokens in enumerate(new):
            first = length - len(tokens) if left is not None else 0
            for i, token in enumerate(tokens):
                rows[row].append(token)
                expected = rows[row] if self.limit is None else rows[row][-self.limit :]
                assert sorted(seen[row][first + i]) == expected

    def check(self) -> None:
        assert self.cache.rope_offset.tolist() == [len(row) for row in self.rows]

    def decode(self, n: int) -> None:
        self.advance(self.cache, self.rows, [self.fresh(n) for _ in self.rows])
        self.check()

    def right_padded(self, lengths: list[int]) -> None:
        lengths = [lengths[i % 3] for i in range(len(self.rows))]
        padding = [max(lengths) - length for length in lengths]
        self.cache.prepare(lengths=lengths, right_padding=padding)
        self.advance(self.cache, self.rows, [self.fresh(length) for length in lengths])
        self.cache.finalize()
        self.check()

    def filter(self, chosen: list[int]) -> None:
        indices = sorted({index % len(self.rows) for index in chosen})
        self.cache.filter(indices)
        self.rows = [self.rows[index] for index in indices]
        self.check()

    def extend(self, lengths: list[int], steps: int, empty: bool) -> None:
        if len(self.rows) > 4:
            return
        other, rows = self.left_padded(lengths[:2])
        for _ in range(steps):
            self.advance(other, rows, [self.fresh(1) for _ in rows])
        self.cache.extend(other)
        self.rows += rows
        self.check()

    def single(self, row: int) -> Any:
        """Row `row` as a cache of its own, checked."""
        single = self.cache.extract(row % len(self.rows))
        tokens = self.rows[row % len(self.rows)]
        assert isinstance(single, KVCache if self.limit is None else RotatingKVCache)
        assert single.offset == len(tokens)
        return single

    def extract(self, row: int) -> None:
        single, tokens = self.single(row), self.rows[row % len(self.rows)]
        for _ in range(2):
            new = self.fresh(1)
            seen = feed(single, [new])[0][0]
            tokens = tokens + new
            assert sorted(seen) == (tokens if self.limit is None else tokens[-self.limit :])

    def trim(self, n: int) -> None:
        if n >= min(len(row) for row in self.rows):
            return
        done = self.cache.trim(n)
        assert done in (0, n)
        assert self.limit is not None or done == n
        if not self.cache.is_trimmable():
            assert done == 0
        if done:
            self.rows = [row[:-done] for row in self.rows]
        self.check()

    def copy(self) -> None:
        old, self.cache = self.cache, self.cache.copy()
        feed(old, [[-7]] * len(self.rows))
        self.check()

    def rebuild(self) -> None:
        name = type(self.cache).__name__
        self.cache = from_state(name, self.cache.state, self.cache.meta_state)
        self.check()

    def merge_again(self) -> None:
        singles = [self.single(row) for row in range(len(self.rows))]
        self.cache = type(singles[0]).merge(singles)
        assert type(self.cache) is (BatchKVCache if self.limit is None else BatchRotatingKVCache)
        self.check()

    def run(self, calls: list[tuple[Any, ...]]) -> None:
        for name, *arguments in calls:
            getattr(self, name)(*arguments)
        self.decode(1)
        for row in range(len(self.rows)):
            self.extract(row)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(lengths=LENGTHS, calls=BATCH_CALLS)
def test_batches(lengths: list[int], calls: list[tuple[Any, ...]]) -> None:
    Batch(lengths, None).run(calls)


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(lengths=LENGTHS, limit=st.integers(2, 9), calls=BATCH_CALLS)
def test_batches_of_rings(lengths: list[int], limit: int, calls: list[tuple[Any, ...]]) -> None:
    Batch(lengths, limit).run(calls)


@COMMON
@given(st.data())
def test_attention_through_a_cache_equals_attention_over_the_history(data: st.DataObject) -> None:
    limit = data.draw(st.none() | st.integers(2, 8))
    counts = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=8))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    n, dim = sum(counts), 4
    q, k, v = (rng.standard_normal((1, 2, n, dim)) for _ in range(3))
    cache: Any = KVCache() if limit is None else RotatingKVCache(limit)
    outputs, start = [], 0
    for count in counts:
        part = np.s_[:, :, start : start + count]
        mask = cache.make_mask(count, return_array=True)
        keys, values = cache.update(k[part], v[part])
        outputs.append(attend(q[part], keys, values, np.array(True) if mask is None else mask))
        start += count
    places = np.arange(n)
    visible = places <= places[:, None]
    if limit is not None:
        visible &= places > places[:, None] - limit
    expected = attend(q, k, v, visible)
    np.testing.assert_allclose(np.concatenate(outputs, axis=2), expected, atol=1e-9)


def attend(q: Any, k: Any, v: Any, visible: Any) -> Any:
    scores = np.where(visible, q @ np.swapaxes(k, 2, 3), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def test_the_kit_distinguishes_tokens() -> None:
    tokens = [[3, 1], [-2, 5]]
    np.testing.assert_array_equal(tokens_in(keys_of(tokens), values_of(tokens)), tokens)
