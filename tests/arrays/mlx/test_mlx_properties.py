"""Each cache against a plain list of tokens, and attention through it against the full history."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_reference import attend, attend_each, ids, kv, queries, stored

from pykvcache.arrays import (
    BatchKVCache,
    BatchRotatingKVCache,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    from_state,
)
from support.examples import examples

sizes = st.one_of(st.just(1), st.integers(1, 9))
windows = st.none() | st.integers(1, 12)


def check_attention(cache, new, visible, window=None, return_array=False):
    """Feed `new` tokens to a cache of one row; `visible(i)` lists what token `i` may see."""
    mask = cache.make_mask(len(new), window, return_array)
    keys, values = cache.update(*kv(new))
    if isinstance(mask, np.ndarray):
        assert mask.shape[-1] == keys.shape[2]
    out = attend(queries(new), keys, values, mask)
    expected = attend_each(new, [visible(i) for i in range(len(new))])
    assert np.allclose(out[0], expected, atol=1e-5)


class History:
    """Fresh token ids, so that no two places can be mixed up."""

    def __init__(self):
        self.next = 1
        self.tokens = []

    def more(self, n):
        new = [*range(self.next, self.next + n)]
        self.next += n
        return new


@settings(max_examples=100, deadline=None)
@given(data=st.data(), kind=st.sampled_from([KVCache, ConcatenateKVCache]))
def test_plain_cache_is_a_list_of_tokens(data, kind):
    """KVCache and ConcatenateKVCache against a list, with trims, copies, states, windows."""
    cache, history = kind(), History()
    for _ in range(data.draw(st.integers(1, 8))):
        step = data.draw(st.sampled_from(["update", "update", "trim", "copy", "state"]))
        if step == "update":
            new, window = history.more(data.draw(sizes)), data.draw(windows)
            past = history.tokens
            history.tokens = past + new

            def visible(i, past=past, new=new, window=window):
                seen = past + new[: i + 1]
                return seen if window is None else seen[-window:]

            check_attention(cache, new, visible, window, data.draw(st.booleans()))
        elif step == "trim":
            n = data.draw(st.integers(0, 12))
            assert cache.trim(n) == min(n, len(history.tokens))
            history.tokens = history.tokens[: max(len(history.tokens) - n, 0)]
        elif step == "copy":
            cache = cache.copy()
        else:
            cache = from_state(kind.__name__, cache.state, cache.meta_state)
        assert stored(cache) == history.tokens
        assert cache.offset == cache.size() == len(history.tokens)
        assert cache.is_empty() == (not history.tokens)


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data(), max_size=st.integers(1, 9), keep=st.integers(0, 4))
def test_ring_is_its_visibility_rule(data, max_size, keep):
    """RotatingKVCache: attention equals attention over the full history with the same rule.

    Token p, in a block that begins at s, sees q if q is kept, or if q is among the newest
    `window` ones and the ring still had it: q > s - max_size + kept.
    """
    cache, history = RotatingKVCache(max_size, keep), History()
    kept = min(keep, max_size - 1)
    for _ in range(data.draw(st.integers(1, 10))):
        step = data.draw(st.sampled_from(["update"] * 4 + ["trim", "copy", "state"]))
        if step == "update":
            new, window = history.more(data.draw(sizes)), data.draw(windows)
            s = len(history.tokens)
            history.tokens = history.tokens + new

            def visible(i, s=s, window=window):
                p = s + i
                oldest = max(p - (window or max_size) + 1, s - (max_size - 1 - kept))
                tokens = history.tokens[: p + 1]
                return [t for q, t in enumerate(tokens) if q < kept or q >= oldest]

            check_attention(cache, new, visible, window, data.draw(st.booleans()))
        elif step == "trim":
            n = data.draw(st.integers(0, 6))
            total = len(history.tokens)
            expected = min(n, total) if total < max_size else 0
            assert cache.is_trimmable() == (total < max_size)
            assert cache.trim(n) == expected
            history.tokens = history.tokens[: total - expected]
        elif step == "copy":
            cache = cache.copy()
        else:
            cache = from_state("RotatingKVCache", cache.state, cache.meta_state)
        total = len(history.tokens)
        assert cache.offset == total
        assert cache.size() == min(total, max_size)
        here = sorted(stored(cache))
        assert here == history.tokens[: min(kept, len(here))] + here[kept:]
        newest = len(here) - min(kept, len(here))
        assert newest == 0 or here[kept:] == history.tokens[-newest:]


@settings(max_examples=100, deadline=None)
@given(data=st.data(), chunk=st.integers(1, 8))
def test_chunked_cache_is_the_end_of_a_list(data, chunk):
    """ChunkedKVCache against a list: fronts dropped, trims, states, windows."""
    cache, history, start = ChunkedKVCache(chunk), History(), 0
    for _ in range(data.draw(st.integers(1, 10))):
        step = data.draw(st.sampled_from(["update", "update", "front", "trim", "copy", "state"]))
        if step == "update":
            new, window = history.more(data.draw(sizes)), data.draw(windows)
            past = history.tokens[start:]
            history.tokens = history.tokens + new

            def visible(i, past=past, new=new, window=window):
                seen = past + new[: i + 1]
                return seen if window is None else seen[-window:]

            check_attention(cache, new, visible, window, data.draw(st.booleans()))
        elif step == "front":
            cache.maybe_trim_front()
            start = max(start, len(history.tokens) - chunk)
        elif step == "trim":
            n = min(data.draw(st.integers(0, 9)), len(history.tokens) - start)
            assert cache.trim(n) == n
            history.tokens = history.tokens[: len(history.tokens) - n]
        elif step == "copy":
            cache = cache.copy()
        else:
            cache = from_state("ChunkedKVCache", cache.state, cache.meta_state)
            # An empty state has no tokens to count, but its place survives.
        assert stored(cache) == history.tokens[start:]
        assert (cache.start_position, cache.offset) == (start, len(history.tokens))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), bits=st.sampled_from([2, 3, 4, 6, 8]), group=st.sampled_from([8, 16, 32]))
def test_quantized_cache_is_a_list_within_half_a_step(data, bits, group):
    """QuantizedKVCache against a list: every element within half a step of its group."""
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    cache, history = QuantizedKVCache(group, bits), np.zeros((2, 1, 2, 0, 32), np.float32)
    for _ in range(data.draw(st.integers(1, 6))):
        step = data.draw(st.sampled_from(["update", "update", "trim", "copy", "state"]))
        if step == "update":
            new = rng.standard_normal((2, 1, 2, data.draw(sizes), 32)).astype(np.float32)
            history = np.concatenate([history, new], axis=3)
            for got, want in zip(cache.update(*new), history, strict=True):
                groups = want.astype(float).reshape(1, 2, -1, 32 // group, group)
                half = (groups.max(-1) - groups.min(-1)) / (2**bits - 1) / 2
                error = np.abs(got.astype(float) - want).reshape(groups.shape)
                assert (error <= half[..., None] + 1e-6).all()
        elif step == "trim":
            n = data.draw(st.integers(0, 9))
            dropped = min(n, history.shape[3])
            assert cache.trim(n) == dropped
            history = history[:, :, :, : history.shape[3] - dropped]
        elif step == "copy":
            cache = cache.copy()
        else:
            cache = from_state("QuantizedKVCache", cache.state, cache.meta_state)
        assert cache.offset == history.shape[3]


def draw_block(data, rows, next_id):
    """Draw a block of right-padded rows: tokens, padding and fresh ids."""
    lengths = [data.draw(st.integers(0, 5)) for _ in range(rows)]
    width = max(max(lengths), 1)
    block = []
    for length in lengths:
        block.append([*range(next_id, next_id + length)] + [0] * (width - length))
        next_id += length
    return lengths, block, next_id


def check_batch_attention(cache, block, rows, limit, window=None):
    """Feed a block; `rows` are the tokens of each row so far, padding (0) not among them."""
    n = len(block[0])
    mask = cache.make_mask(n, window)
    keys, values = cache.update(*kv(*block))
    assert mask.shape == (len(block), 1, n, keys.shape[2])
    for row, (new, past) in enumerate(zip(block, rows, strict=True)):
        places = [i for i, token in enumerate(new) if token]
        visible = []
        for i in places:
            seen = past + [t for t in new[: i + 1] if t]
            reach = min(x for x in (len(seen), window, limit) if x is not None)
            lies = np.array(ids(values, row))[mask[row, 0, i]]
            assert sorted(lies.tolist()) == sorted(seen[-reach:])
            visible.append(seen[-reach:])
        if places:
            tokens = [new[i] for i in places]
            own = slice(row, row + 1)
            out = attend(queries(tokens), keys[own], values[own], mask[row, 0, places])
            assert np.allclose(out[0], attend_each(tokens, visible), atol=1e-5)
        past.extend(t for t in new if t)


def batch_walk(data, make, merge_from, limit):
    """Drive a batch cache and lists side by side."""
    count = data.draw(st.integers(1, 3))
    cache, rows, next_id = make(count), [[] for _ in range(count)], 1
    for _ in range(data.draw(st.integers(1, 9))):
        choices = [
            "block",
            "one",
            "one",
            "filter",
            "extend",
            "merge",
            "copy",
            "state",
            "trim",
            "alone",
        ]
        step = data.draw(st.sampled_from(choices))
        window = data.draw(st.none() | st.integers(1, limit or 12))
        if step == "block":
            lengths, block, next_id = draw_block(data, len(rows), next_id)
            width = len(block[0])
            if any(length != width for length in lengths):
                cache.prepare(lengths=lengths, right_padding=[width - n for n in lengths])
                # In two parts if the ring allows a part of several columns at the end.
                cut = data.draw(st.integers(2, width)) if width > 3 else width
                cut = width if width - cut == 1 else cut
                if width == 1:
                    cache.finalize()
                    continue
                for part in (slice(0, cut), slice(cut, width)):
                    if any(row[part] for row in block):
                        check_batch_attention(cache, [r[part] for r in block], rows, limit, window)
                cache.finalize()
            else:
                check_batch_attention(cache, block, rows, limit, window)
        elif step == "one":
            block = [[next_id + i] for i in range(len(rows))]
            next_id += len(rows)
            check_batch_attention(cache, block, rows, limit, window)
        elif step == "filter":
            index = st.integers(0, len(rows) - 1)
            chosen = data.draw(st.lists(index, min_size=1, max_size=3))
            cache.filter(chosen)
            rows = [[*rows[i]] for i in chosen]
        elif step in ("extend", "merge"):
            new = [[*range(next_id + 10 * i, next_id + 10 * i + data.draw(st.integers(0, 7)))]
                   for i in range(data.draw(st.integers(1, 2)))]  # fmt: skip
            next_id += 20
            other = merge_from(new)
            if step == "extend" and len(rows) < 4:
                cache.extend(other)
                rows = rows + new
            else:
                cache, rows = other, new
        elif step == "copy":
            cache = cache.copy()
        elif step == "alone":
            cache = type(cache).merge([cache.extract(i) for i in range(len(rows))])
        elif step == "state":
            name = type(cache).__name__
            cache = from_state(name, cache.state, cache.meta_state)
        elif cache.is_trimmable() and rows:
            n = data.draw(st.integers(0, min(len(row) for row in rows)))
            assert cache.trim(n) == n
            for row in rows:
                del row[len(row) - n :]
        for i, row in enumerate(rows):
            assert cache.rope_offset[i] == len(row)
            alone = stored(cache.extract(i))
            alone = sorted(alone)
            assert alone == row[len(row) - len(alone) :]
            assert len(alone) >= min(len(row), len(row) if limit is None else limit - 1)


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data())
def test_batch_is_lists_of_tokens(data):
    """BatchKVCache against lists: right padding, filters, extends, merges, trims, states."""

    def merge_from(rows):
        return BatchKVCache.merge([plain(tokens) for tokens in rows])

    def plain(tokens):
        cache = KVCache()
        if tokens:
            cache.update(*kv(tokens))
        return cache

    batch_walk(data, lambda n: BatchKVCache([0] * n), merge_from, None)


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data(), limit=st.integers(1, 7))
def test_batch_ring_is_lists_of_tokens(data, limit):
    """BatchRotatingKVCache against lists: no padding is seen, no valid token is hidden."""

    def merge_from(rows):
        return BatchRotatingKVCache.merge([ring(tokens) for tokens in rows])

    def ring(tokens):
        cache = RotatingKVCache(limit)
        for token in tokens:
            cache.update(*kv([token]))
        return cache

    batch_walk(data, lambda n: BatchRotatingKVCache(limit, [0] * n), merge_from, limit)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), limit=st.none() | st.integers(1, 6))
def test_left_padded_batches_see_their_tokens(data, limit):
    """Left padding: no row ever sees it, in a plain batch and in a ring."""
    lengths = data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=3))
    width = max(lengths)
    padding = [width - n for n in lengths]
    cache = BatchKVCache(padding) if limit is None else BatchRotatingKVCache(limit, padding)
    rows: list[list[int]] = [[] for _ in lengths]
    block = [[0] * p + [*range(1 + 10 * i, 1 + 10 * i + n)]
             for i, (p, n) in enumerate(zip(padding, lengths, strict=True))]  # fmt: skip
    cut = data.draw(st.integers(1, width))
    for part in (slice(0, cut), slice(cut, width)):
        if any(row[part] for row in block):
            check_batch_attention(cache, [row[part] for row in block], rows, limit)
    for n in range(100, 100 + data.draw(st.integers(0, 6)) * len(rows), len(rows)):
        check_batch_attention(cache, [[n + i] for i in range(len(rows))], rows, limit)
    assert cache.rope_offset.tolist() == [len(row) for row in rows]
