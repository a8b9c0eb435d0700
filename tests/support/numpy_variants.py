"""The ledger for the other architectures whose memory can be changed in part.

Hybrid and recurrent models fold their past into a state, so only whole-sequence operations
exist for them and a fresh run is the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .ledger import Cells, Floats, Ints, Mask
from .numpy_llama import LedgerLlama, attend, read_model


class RotatesHalves(LedgerLlama):
    """RoPE on pairs of values half a head apart."""

    def rotate(self, x: Floats, pos: Ints) -> Floats:
        half = self.head // 2
        return np.concatenate(self.turn(x[..., :half], x[..., half:], pos), axis=-1)


class LedgerQwen2vl(RotatesHalves):
    """M-RoPE: for text all sections have the same position, so they rotate as one."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        # llama.cpp reads the epsilon of this architecture nowhere and computes with 0.
        self.eps = 0.0


class LedgerGemma3(RotatesHalves):
    """Every second layer sees everything, the others only the window."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.n_swa = int(self._key("attention.sliding_window"))
        self.pattern = int(self._key("attention.sliding_window_pattern"))

    def embed(self, words: Ints) -> Floats:
        x: Floats = super().embed(words) * self.n_embd**0.5
        return x

    def project_qkv(self, h: Floats, block: str) -> tuple[Floats, Floats, Floats]:
        q, k, v = super().project_qkv(h, block)
        return self.norm(q, f"{block}attn_q_norm"), self.norm(k, f"{block}attn_k_norm"), v

    def visible(self, layer: int, positions: Ints, pos: Ints) -> Mask:
        seen = super().visible(layer, positions, pos)
        if layer % self.pattern < self.pattern - 1:
            seen = seen & (positions[:, None] - pos[None, :] < self.n_swa)
        return seen

    def add_attention(self, x: Floats, attended: Floats, block: str) -> Floats:
        return x + self.norm(attended, f"{block}post_attention_norm")

    def add_feed_forward(self, x: Floats, block: str) -> Floats:
        return x + self.norm(gated_gelu(self, x, block), f"{block}post_ffw_norm")


class LedgerT5(LedgerLlama):
    """The decoder: positions count only through distance buckets. `encode` comes first."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.score_scale = 1.0
        self.n_buckets = int(self._key("attention.relative_buckets_count"))
        self.encoded: Floats = np.empty((0, self.n_embd))

    def encode(self, tokens: Sequence[int] | NDArray[np.integer]) -> None:
        """Run the encoder over `tokens`; every later decode attends to the result."""
        x = self.embed(np.asarray(tokens, np.int64))
        pos = np.arange(len(x))
        everything = np.ones((len(x), len(x)), np.bool_)
        for layer in range(self.n_layer):
            block = f"enc.blk.{layer}."
            q, k, v = self.project_qkv(self.norm(x, f"{block}attn_norm"), block)
            bias = self._distance_bias("enc", pos, pos)
            mixed = attend(q, k, v, everything, self.score_scale, bias)
            x = x + self.linear(mixed, f"{block}attn_o")
            x = x + gated_gelu(self, x, block)
        self.encoded = self.norm(x, "enc.output_norm")

    def forward(self, words: Ints, positions: Ints, old: Cells) -> tuple[Floats, Cells]:
        pos = np.concatenate([old.pos, positions])
        bias = self._distance_bias("dec", positions, pos)
        everything = np.ones((len(words), len(self.encoded)), np.bool_)
        keys, values = [], []
        x = self.embed(words)
        for layer in range(self.n_layer):
            block = f"dec.blk.{layer}."
            q, k_new, v_new = self.project_qkv(self.norm(x, f"{block}attn_norm"), block)
            keys.append(np.concatenate([old.k[layer], k_new]))
            values.append(np.concatenate([old.v[layer], v_new]))
            seen = self.visible(layer, positions, pos)
            mixed = attend(q, keys[-1], values[-1], seen, self.score_scale, bias)
            x = x + self.linear(mixed, f"{block}attn_o")
            h = self.norm(x, f"{block}cross_attn_norm")
            q, _, _ = self.project_qkv(h, f"{block}cross_")
            _, k, v = self.project_qkv(self.encoded, f"{block}cross_")
            mixed = attend(q, k, v, everything, self.score_scale)
            x = x + self.linear(mixed, f"{block}cross_attn_o")
            x = x + gated_gelu(self, x, block)
        tokens = np.concatenate([old.tokens, words])
        return x, Cells(tokens, pos, np.stack(keys), np.stack(values))

    def unembed(self, x: Floats) -> Floats:
        return self.linear(self.norm(x, "dec.output_norm"), "output")

    def _distance_bias(self, side: str, positions: Ints, pos: Ints) -> Floats:
        """Learned bias per head and bucket of distance: (n_head, n_tokens, n_cells)."""
        ahead = pos[None, :] - positions[:, None]
        buckets, first = self.n_buckets, np.zeros_like(ahead)
        if side == "enc":
            # Half of the buckets are for what comes later, which a decoder never sees.
            buckets //= 2
            first = np.where(ahead > 0, buckets, 0)
            distance = np.abs(ahead)
        else:
            distance = np.maximum(-ahead, 0)
        exact = buckets // 2
        far = np.log(np.maximum(distance, 1) / exact) / np.log(128 / exact)
        coarse = np.minimum(np.floor(exact + far * (buckets - exact)), buckets - 1)
        index = first + np.where(distance < exact, distance, coarse).astype(np.int64)
        bias: Floats = self.weights[f"{side}.blk.0.attn_rel_b.weight"][index]
        by_head: Floats = np.moveaxis(bias, -1, 0)
        return by_head


def gated_gelu(model: LedgerLlama, x: Floats, block: str) -> Floats:
    """Feed-forward block with a GELU gate, without the residual."""
    h = model.norm(x, f"{block}ffn_norm")
    gate = gelu(model.linear(h, f"{block}ffn_gate")) * model.linear(h, f"{block}ffn_up")
    return model.linear(gate, f"{block}ffn_down")


def gelu(x: Floats) -> Floats:
    """GELU by its tanh formula, rounded to f16 on the way in and out as ggml's table is."""
    x = x.astype(np.float16).astype(np.float64)
    y: Floats = 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * x * (1 + 0.044715 * x * x)))
    return y.astype(np.float16).astype(np.float64)


LEDGERS: dict[str, type[LedgerLlama]] = {
    "llama": LedgerLlama,
    "qwen2vl": LedgerQwen2vl,
    "gemma3": LedgerGemma3,
    "t5": LedgerT5,
}
"""By architecture."""


def make_ledger(path: Path) -> LedgerLlama:
    """Return the ledger for the model at `path`; `KeyError` for an architecture without one."""
    arch = read_model(path).reader.get_field("general.architecture")
    assert arch is not None
    return LEDGERS[str(arch.contents())](path)
