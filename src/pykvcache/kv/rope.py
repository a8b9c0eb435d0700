"""RoPE on arrays as ggml computes it: rotate keys, or undo the rotation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from pykvcache.enums import RopeType
from pykvcache.errors import UnsupportedOperation

__all__ = ["rotate"]

Floats = npt.NDArray[np.float32]


def rotate(
    keys: Floats,
    positions: npt.NDArray[np.int32],
    facts: dict[str, Any] | None,
    *,
    undo: bool,
    operation: str,
) -> Floats:
    """Rotate keys (tokens, heads, head_dim) to their positions, or undo the rotation.

    `facts` come from ``lib.Context.rope``; None means a layer without RoPE.
    """
    if facts is None:
        return keys
    if not facts["known"]:
        raise UnsupportedOperation(
            operation, "the rotation of this model's keys is not known: read keys with rope=True"
        )
    if facts["type"] not in (RopeType.NORM, RopeType.NEOX):
        raise UnsupportedOperation(
            operation, "M-RoPE rotates by several positions per token: read keys with rope=True"
        )
    with np.errstate(all="ignore"):  # options that produce NaN also do so in llama.cpp
        return _rotated(keys, positions, facts, undo)


def _rotated(
    keys: Floats, positions: npt.NDArray[np.int32], facts: dict[str, Any], undo: bool
) -> Floats:
    kind, n_rot, offset = facts["type"], facts["n_rot"], facts["offset"]
    cos, sin = _turns(positions, facts)
    if undo:
        # A rotation times a scale: the inverse rotates back and divides.
        square = np.float32(_length(facts) ** 2)
        cos, sin = cos / square, -sin / square
    cos, sin = cos[:, None], sin[:, None]
    result: Floats = keys.copy()
    part = result[..., offset : offset + n_rot]
    if kind == RopeType.NORM:
        first, second = part[..., 0::2], part[..., 1::2]
    else:
        first, second = part[..., : n_rot // 2], part[..., n_rot // 2 :]
    turned = first * cos - second * sin, first * sin + second * cos
    first[...], second[...] = turned
    return result


def _turns(positions: npt.NDArray[np.int32], facts: dict[str, Any]) -> tuple[Floats, Floats]:
    """Return cosine and sine of each pair's angle, scaled; shape (tokens, n_rot / 2).

    In float32 and ggml's order of operations: at high positions rounding changes angles.
    """
    pairs = facts["n_rot"] // 2
    step = np.float32(facts["freq_base"]) ** np.float32(-2.0 / facts["n_rot"])
    angles = np.full((len(positions), pairs), step, np.float32)
    angles[:, 0] = positions
    angles = np.multiply.accumulate(angles, axis=1, dtype=np.float32)
    if len(facts["freq_factors"]):
        angles = angles / facts["freq_factors"][:pairs]
    scale = np.float32(facts["freq_scale"])
    if facts["ext_factor"] == 0:
        angles = scale * angles
    else:
        mix = _ramp(pairs, facts) * np.float32(facts["ext_factor"])
        angles = scale * angles * (1 - mix) + angles * mix
    length = np.float32(_length(facts))
    return np.cos(angles) * length, np.sin(angles) * length


def _length(facts: dict[str, Any]) -> float:
    """Return YaRN's scale for the length of keys."""
    length = np.float64(facts["attn_factor"])
    if facts["ext_factor"] != 0:
        length *= 1 + 0.1 * np.log(1 / np.float64(facts["freq_scale"]))
    return float(length)


def _ramp(pairs: int, facts: dict[str, Any]) -> Floats:
    """Return YaRN's share of extrapolation per pair: 1 for fast ones, 0 for slow ones."""

    def dim(turns: float) -> float:
        """Return the dimension whose pair makes `turns` turns over the original context."""
        per_turn = np.float64(facts["n_ctx_orig"]) / (turns * 2 * math.pi)
        place = facts["n_rot"] * np.log(per_turn) / (2 * np.log(np.float64(facts["freq_base"])))
        return float(place)

    low = max(0.0, float(np.floor(dim(facts["beta_fast"]))))
    high = min(facts["n_rot"] - 1.0, float(np.ceil(dim(facts["beta_slow"]))))
    position = (np.arange(pairs, dtype=np.float32) - low) / max(0.001, high - low)
    ramp: Floats = (1 - np.clip(position, 0, 1)).astype(np.float32)
    return ramp
