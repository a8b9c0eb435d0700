"""Tokens as keys and values that can be told apart, and attention the slow way."""

from __future__ import annotations

import numpy as np

HEADS, K_DIM, V_DIM = 2, 8, 4
_rng = np.random.default_rng(7)
_TABLE_K = _rng.standard_normal((2048, HEADS, K_DIM)).astype(np.float32)
_TABLE_V = _rng.standard_normal((2048, HEADS, V_DIM)).astype(np.float32)
_TABLE_Q = _rng.standard_normal((2048, HEADS, K_DIM)).astype(np.float32)
# The first channel carries the id itself.
_TABLE_K[:, :, 0] = np.arange(2048)[:, None] / 1024
_TABLE_V[:, :, 0] = np.arange(2048)[:, None]


def _gather(table, rows):
    return np.ascontiguousarray(table[np.asarray(rows)].transpose(0, 2, 1, 3))


def kv(*rows):
    """Keys and values, `(len(rows), HEADS, n, dim)`, of one list of token ids per row."""
    return _gather(_TABLE_K, rows), _gather(_TABLE_V, rows)


def queries(*rows):
    return _gather(_TABLE_Q, rows)


def ids(values, row=0):
    """The token ids that values were made of."""
    return values[row, 0, :, 0].astype(int).tolist()


def stored(cache, row=0):
    """The token ids that a cache holds, as they lie."""
    return ids(cache.state[1], row) if len(cache.state) else []


def attend(q, keys, values, mask=None):
    """Attention of the last ``q.shape[2]`` tokens; `mask` as `make_mask` gives it."""
    n, columns = q.shape[2], keys.shape[2]
    if mask is None:
        mask = np.ones((1, columns), bool)
    elif isinstance(mask, str):
        assert mask == "causal"
        mask = np.tril(np.ones((n, columns), bool), columns - n)
    scores = q.astype(np.float64) @ keys.astype(np.float64).swapaxes(2, 3) / np.sqrt(K_DIM)
    scores = np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True)) @ values.astype(np.float64)


def attend_each(tokens, visible):
    """Attention of tokens, `(HEADS, n, V_DIM)`, each to exactly the tokens that it may see."""
    past = sorted(set().union(*visible))
    columns = {token: i for i, token in enumerate(past)}
    mask = np.zeros((len(tokens), len(past)), bool)
    for row, seen in enumerate(visible):
        assert len(set(seen)) == len(seen)
        mask[row, [columns[token] for token in seen]] = True
    return attend(queries(tokens), *kv(past), mask)[0]


def snapshot(cache):
    """Everything that can be seen of a cache, to compare before and after."""

    def frozen(x):
        if isinstance(x, tuple):
            return tuple(frozen(y) for y in x)
        if isinstance(x, np.ndarray):
            return (x.dtype.str, x.shape, x.tobytes())
        return x

    rope = cache.rope_offset
    return (
        cache.offset, rope.tolist() if isinstance(rope, np.ndarray) else rope,
        frozen(cache.state), cache.meta_state, cache.size(), cache.is_empty(),
    )  # fmt: skip
