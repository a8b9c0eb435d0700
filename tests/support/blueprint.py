"""Plan of a generated model: sizes, metadata keys, and tensors with their distributions.

Shapes are in NumPy order (rows first), the reverse of ggml's, so a weight that maps
``n_in`` values to ``n_out`` has the shape ``(n_out, n_in)``.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

#: An array stands for 64-bit integers.
Key = bool | int | float | str | Sequence[int] | NDArray[np.uint64]
Fill = Literal["normal", "norm", "decay"]


@dataclass(frozen=True)
class Sizes:
    """The sizes that a test may override."""

    n_ctx_train: int = 512
    n_embd: int = 64
    n_layer: int = 2
    n_ff: int = 96
    n_head: int = 4
    n_head_kv: int = 2
    n_swa: int = 32
    d_conv: int = 4
    d_state: int = 16

    @property
    def head(self) -> int:
        """Values per attention head."""
        return self.n_embd // self.n_head

    @property
    def n_kv(self) -> int:
        """Values in one K or V row over all its heads."""
        return self.head * self.n_head_kv

    @property
    def d_inner(self) -> int:
        """Channels of a state-space layer; the loader accepts twice the embedding only."""
        return 2 * self.n_embd


@dataclass(frozen=True)
class Tensor:
    """Shape and distribution of one F32 tensor."""

    shape: tuple[int, ...]
    scale: float = 1.0
    shift: float = 0.0
    fill: Fill = "normal"

    def values(self, name: str, seed: int) -> NDArray[np.float32]:
        """Weights that depend on `seed` and `name` alone, not on the other tensors."""
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        if self.fill == "decay":
            # State-space A: negative, spread over slow and fast forgetting.
            data = -np.exp(rng.uniform(np.log(0.02), np.log(1.0), self.shape))
        else:
            data = self.shift + self.scale * rng.standard_normal(self.shape)
        return data.astype(np.float32)


@dataclass
class Blueprint:
    """One model before its weights are drawn."""

    arch: str
    keys: dict[str, Key] = field(default_factory=dict)
    """Metadata; a leading dot stands for the architecture's name."""
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def add(self, prefix: str, **tensors: Tensor) -> None:
        """Add ``{prefix}{name}.weight`` for each, or ``.bias`` for a name ending in ``_b``."""
        for name, tensor in tensors.items():
            suffix = "bias" if name.endswith("_b") else "weight"
            self.tensors[f"{prefix}{name.removesuffix('_b')}.{suffix}"] = tensor


def matrix(n_out: int, n_in: int, gain: float = 1.0) -> Tensor:
    """Weights that keep the variance of their input, times `gain` squared."""
    return Tensor((n_out, n_in), scale=gain / n_in**0.5)


def table(n_rows: int, n_cols: int, scale: float = 1.0) -> Tensor:
    """An embedding table."""
    return Tensor((n_rows, n_cols), scale=scale)


def norm(*shape: int, around: float = 1.0) -> Tensor:
    """Norm weights near `around`."""
    return Tensor(shape, scale=0.1 * around, shift=around)


def bias(n: int, around: float = 0.0, scale: float = 0.1) -> Tensor:
    """Bias values near `around`."""
    return Tensor((n,), scale=scale, shift=around)
