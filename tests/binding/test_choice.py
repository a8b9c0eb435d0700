"""The likeliest token in rows of every length: the first of equals, and non-finite values."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pykvcache import Sampler
from pykvcache.errors import DecodeError

LENGTHS = [*range(1, 40), 63, 64, 65, 511, 512, 513, 1023, 1024, 1025, 1540]
WARM = {"temperature": 1e-3, "top_k": 5, "seed": 1}


@pytest.mark.parametrize("settings", [{"temperature": 0}, WARM], ids=["greedy", "warm"])
def test_the_largest_is_found_wherever_it_is(settings: dict[str, float]) -> None:
    rng = np.random.default_rng(1)
    sampler = Sampler(**settings)  # type: ignore[arg-type]
    for n in LENGTHS:
        row = rng.normal(size=n).astype(np.float32)
        for at in {0, n - 1, n // 2, *rng.integers(0, n, 4).tolist()}:
            peaked = row.copy()
            peaked[at] = 9
            assert sampler.sample(peaked) == at, (n, at)
            assert sampler.sample(peaked - 1000) == at, (n, at)
            for wrong in (math.nan, math.inf):
                peaked[at] = wrong
                with pytest.raises(ValueError, match=f"token {at} is"):
                    sampler.sample(peaked)
        if "seed" not in settings:
            assert sampler.sample(np.round(row)) == int(np.round(row).argmax())
        nothing = np.full(n, -math.inf, np.float32)
        with pytest.raises(DecodeError, match="no token is left"):
            sampler.sample(nothing)
        nothing[n // 2] = -3
        assert sampler.sample(nothing) == n // 2


def test_bias_moves_the_largest() -> None:
    rng = np.random.default_rng(2)
    for n in (3, 17, 513):
        row = rng.normal(size=n).astype(np.float32)
        order = np.argsort(-row)
        banned = {int(t): -math.inf for t in order[: n - 1]}
        for bias in ({int(order[0]): -1e6}, {int(order[-1]): 50.0}, banned):
            wanted = row.astype(np.float64)
            for token, value in bias.items():
                wanted[token] += value
            for settings in ({"temperature": 0}, WARM):
                sampler = Sampler(**settings, logit_bias=bias)  # type: ignore[arg-type]
                assert sampler.sample(row) == int(wanted.argmax()), (n, bias)
        with pytest.raises(DecodeError, match="no token is left"):
            Sampler(logit_bias={t: -math.inf for t in range(n)}).sample(row)
