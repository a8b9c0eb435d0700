"""A NumPy forward pass of the ``llama`` architecture over a ledger of cells.

Written from the definition of the model, sharing no code with llama.cpp. Computes in
float64; llama.cpp with an F32 cache and without flash attention differs by about 1e-5.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from .ledger import Cells, Floats, Ints, Ledger, Mask


class Read(NamedTuple):
    """Contents of a model's file."""

    reader: gguf.GGUFReader
    weights: dict[str, Floats]


@lru_cache(maxsize=64)
def _read(path: Path, changed: int) -> Read:
    reader = gguf.GGUFReader(path)
    weights = {t.name: np.array(t.data, np.float64, subok=False) for t in reader.tensors}
    for values in weights.values():
        values.flags.writeable = False
    return Read(reader, weights)


def read_model(path: Path) -> Read:
    """Read a model's file, once for all ledgers that are made of it."""
    return _read(path, path.stat().st_mtime_ns)


class LedgerLlama(Ledger):
    """A generated ``llama`` model with the memory that each sequence ought to have."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._reader, self.weights = read_model(path)
        self.n_layer = int(self._key("block_count"))
        self.n_embd = int(self._key("embedding_length"))
        self.n_head = int(self._key("attention.head_count"))
        self.n_head_kv = int(self._key("attention.head_count_kv", self.n_head))
        self.head = self.n_embd // self.n_head
        self.eps = float(self._key("attention.layer_norm_rms_epsilon"))
        self.rope_base = float(self._key("rope.freq_base", 10000.0))
        self.score_scale = self.head**-0.5

    def forward(self, words: Ints, positions: Ints, old: Cells) -> tuple[Floats, Cells]:
        pos = np.concatenate([old.pos, positions])
        keys, values = [], []
        x = self.embed(words)
        for layer in range(self.n_layer):
            block = f"blk.{layer}."
            q, k_new, v_new = self.project_qkv(self.norm(x, f"{block}attn_norm"), block)
            keys.append(np.concatenate([old.k[layer], k_new]))
            values.append(np.concatenate([old.v[layer], v_new]))
            mixed = attend(
                self.rotate(q, positions),
                self.rotate(keys[-1], pos),
                values[-1],
                self.visible(layer, positions, pos),
                self.score_scale,
            )
            x = self.add_attention(x, mixed @ self.weights[f"{block}attn_output.weight"].T, block)
            x = self.add_feed_forward(x, block)
        tokens = np.concatenate([old.tokens, words])
        return x, Cells(tokens, pos, np.stack(keys), np.stack(values))

    # The steps in which the related architectures differ.

    def embed(self, words: Ints) -> Floats:
        return self.weights["token_embd.weight"][words]

    def unembed(self, x: Floats) -> Floats:
        table = self.weights.get("output.weight", self.weights["token_embd.weight"])
        logits: Floats = self.norm(x, "output_norm") @ table.T
        return logits

    def project_qkv(self, h: Floats, block: str) -> tuple[Floats, Floats, Floats]:
        """Q, K and V of the new tokens, not rotated: (n, heads, head)."""
        q, k, v = (
            (self.linear(h, f"{block}attn_{name}")).reshape(len(h), -1, self.head) for name in "qkv"
        )
        return q, k, v

    def rotate(self, x: Floats, pos: Ints) -> Floats:
        """RoPE on neighbouring pairs; `x` is (n, heads, head), `pos` is (n,)."""
        turned = np.empty_like(x)
        turned[..., 0::2], turned[..., 1::2] = self.turn(x[..., 0::2], x[..., 1::2], pos)
        return turned

    def visible(self, layer: int, positions: Ints, pos: Ints) -> Mask:
        """Which cells each query sees: (n_tokens, n_cells)."""
        return pos[None, :] <= positions[:, None]

    def add_attention(self, x: Floats, attended: Floats, block: str) -> Floats:
        return x + attended

    def add_feed_forward(self, x: Floats, block: str) -> Floats:
        h = self.norm(x, f"{block}ffn_norm")
        gate = self.linear(h, f"{block}ffn_gate")
        gate = gate / (1 + np.exp(-gate)) * self.linear(h, f"{block}ffn_up")
        return x + self.linear(gate, f"{block}ffn_down")

    # Arithmetic.

    def linear(self, x: Floats, name: str) -> Floats:
        result: Floats = x @ self.weights[f"{name}.weight"].T
        return result + self.weights.get(f"{name}.bias", 0.0)

    def norm(self, x: Floats, name: str) -> Floats:
        mean: Floats = np.add.reduce(x * x, axis=-1, keepdims=True) / x.shape[-1]
        return x / np.sqrt(mean + self.eps) * self.weights[f"{name}.weight"]

    def turn(self, first: Floats, second: Floats, pos: Ints) -> tuple[Floats, Floats]:
        """Rotate the pairs (first, second), the i-th of them by ``pos * base**(-2i/head)``."""
        speed = self.rope_base ** (-np.arange(0, self.head, 2) / self.head)
        angle = (pos[:, None] * speed)[:, None, :]
        cos, sin = np.cos(angle), np.sin(angle)
        return first * cos - second * sin, first * sin + second * cos

    def _key(self, name: str, default: float | None = None) -> Any:
        arch = self._reader.get_field("general.architecture")
        assert arch is not None
        field = self._reader.get_field(f"{arch.contents()}.{name}")
        value = default if field is None else field.contents()
        assert value is not None, f"the model lacks the key {name}"
        return value


def attend(q: Floats, k: Floats, v: Floats, visible: Mask, scale: float, bias: Any = 0) -> Floats:
    """Softmax attention; each K/V head serves a group of neighbouring query heads.

    `q` is (n_tokens, n_head, head), `k` and `v` are (n_cells, n_head_kv, head), `visible` is
    (n_tokens, n_cells), `bias` is added to the scores (n_head, n_tokens, n_cells).
    """
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    # By head: (h, q, d) @ (h, d, c).
    scores = q.transpose(1, 0, 2) @ k.transpose(1, 2, 0) * scale + bias
    scores = np.where(visible, scores, -np.inf)
    share = np.exp(scores - scores.max(axis=-1, keepdims=True))
    share /= share.sum(axis=-1, keepdims=True)
    mixed: Floats = (share @ v.transpose(1, 0, 2)).transpose(1, 0, 2)
    return mixed.reshape(len(q), -1)
