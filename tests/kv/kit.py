"""What the tests of keys and values share."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from pykvcache import LlamaModel
from pykvcache.kv import SequenceKV

N = 50


def words(model: LlamaModel, n: int = N, seed: int = 3) -> npt.NDArray[np.int32]:
    """Tokens that any vocabulary here has."""
    return np.random.default_rng(seed).integers(5, model.n_vocab, n).astype(np.int32)


def pairs(a: SequenceKV, b: SequenceKV) -> Iterator[tuple[str, npt.ArrayLike, npt.ArrayLike]]:
    """Every array of one and the same of the other, with its name."""
    yield "positions", a.positions, b.positions
    assert (a.extended is None) == (b.extended is None)
    if a.extended is not None and b.extended is not None:
        yield "extended", a.extended, b.extended
    for x, y in zip(a.layers, b.layers, strict=True):
        assert x.layer == y.layer
        yield f"keys of layer {x.layer}", x.keys, y.keys
        yield f"values of layer {x.layer}", x.values, y.values
    assert (a.window is None) == (b.window is None)
    if a.window is not None and b.window is not None:
        yield from ((f"window: {name}", x, y) for name, x, y in pairs(a.window, b.window))
    assert (a.recurrent is None) == (b.recurrent is None)
    if a.recurrent is not None and b.recurrent is not None:
        assert a.recurrent.position == b.recurrent.position
        assert a.recurrent.first == b.recurrent.first
        for p, q in zip(a.recurrent.layers, b.recurrent.layers, strict=True):
            yield f"r of layer {p.layer}", p.r, q.r
            yield f"s of layer {p.layer}", p.s, q.s


def different(a: SequenceKV, b: SequenceKV) -> list[str]:
    """Names of the arrays that are not the same bit by bit."""
    return [
        name
        for name, x, y in pairs(a, b)
        if np.asarray(x).dtype != np.asarray(y).dtype or not np.array_equal(x, y)
    ]
