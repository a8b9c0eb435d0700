"""A NumPy forward pass of the ``llama`` architecture over an explicit ledger of cells.

This is the definition of "right" that the memory operations are checked against: a cell
keeps the K and V computed when its token was decoded, K is rotated to the position that the
cell has *now*, and a query sees exactly the cells that its sequence holds, up to its own
position. After a middle removal, a shift or a division no fresh run can stand in for it.

Written from the definition of the model, sharing no code with llama.cpp. Computes in
float64; llama.cpp with an F32 cache and without flash attention differs by about 1e-5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

END = 2**31 - 1
"""As `p1`: to the end of the sequence."""


@dataclass(frozen=True)
class Cells:
    """What one sequence holds, in the order of decoding."""

    tokens: Ints
    """Shape (n,); for the reader of a failing test, the forward pass does not use it."""
    pos: Ints
    """Shape (n,); current positions."""
    k: Floats
    """Shape (n_layer, n, n_head_kv, head); never rotated."""
    v: Floats
    """Shape (n_layer, n, n_head_kv, head)."""

    def select(self, wanted: NDArray[np.bool_]) -> Cells:
        """Only the cells where `wanted`, a mask of shape (n,), is true."""
        return Cells(self.tokens[wanted], self.pos[wanted], self.k[:, wanted], self.v[:, wanted])


class LedgerLlama:
    """A generated ``llama`` model with the memory that each sequence ought to have.

    Sequences never share cells here: a copy is independent, so that an operation on one
    sequence cannot reach another. Ranges are half-open, ``[p0, p1)``.
    """

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self.weights = {t.name: np.asarray(t.data, dtype=np.float64) for t in reader.tensors}

        def key(name: str) -> int | float:
            field = reader.get_field(f"llama.{name}")
            assert field is not None, f"{path} lacks llama.{name}"
            value = field.contents()
            assert isinstance(value, int | float)
            return value

        self.n_layer = int(key("block_count"))
        self.n_head = int(key("attention.head_count"))
        self.n_head_kv = int(key("attention.head_count_kv"))
        self.head = int(key("embedding_length")) // self.n_head
        self.eps = key("attention.layer_norm_rms_epsilon")
        self.rope_base = key("rope.freq_base")
        self.sequences: dict[int, Cells] = {}
        self.logits: Floats = np.empty(0)
        """Of the last token of the last decode, shape (n_vocab,)."""

    def cells(self, seq: int) -> Cells:
        """What `seq` holds."""
        none = np.empty((self.n_layer, 0, self.n_head_kv, self.head))
        nothing = Cells(np.empty(0, np.int64), np.empty(0, np.int64), none, none)
        return self.sequences.get(seq, nothing)

    def pos_max(self, seq: int) -> int:
        """Highest position in `seq`, -1 when it is empty."""
        return int(self.cells(seq).pos.max(initial=-1))

    def decode(self, seq: int, tokens: Sequence[int] | NDArray[np.integer]) -> Floats:
        """Append `tokens` after the highest position; logits of all, (n_tokens, n_vocab)."""
        words = np.asarray(tokens, dtype=np.int64)
        positions = self.pos_max(seq) + 1 + np.arange(len(words))
        old = self.cells(seq)
        all_pos = np.concatenate([old.pos, positions])
        # Shape (n_tokens, n_cells): a query sees its own cell and those before its position.
        visible = all_pos[None, :] <= positions[:, None]

        x = self.weights["token_embd.weight"][words]
        keys, values = [], []
        for layer in range(self.n_layer):
            h = self._norm(x, f"blk.{layer}.attn_norm")
            q = self._project(h, layer, "attn_q").reshape(len(words), self.n_head, self.head)
            k_new = self._project(h, layer, "attn_k").reshape(-1, self.n_head_kv, self.head)
            v_new = self._project(h, layer, "attn_v").reshape(-1, self.n_head_kv, self.head)
            keys.append(np.concatenate([old.k[layer], k_new]))
            values.append(np.concatenate([old.v[layer], v_new]))
            mixed = self._attend(
                self._rotate(q, positions), self._rotate(keys[-1], all_pos), values[-1], visible
            )
            x = x + self._project(mixed, layer, "attn_output")
            h = self._norm(x, f"blk.{layer}.ffn_norm")
            gate = self._project(h, layer, "ffn_gate")
            gate = gate / (1 + np.exp(-gate)) * self._project(h, layer, "ffn_up")
            x = x + self._project(gate, layer, "ffn_down")

        all_tokens = np.concatenate([old.tokens, words])
        self.sequences[seq] = Cells(all_tokens, all_pos, np.stack(keys), np.stack(values))
        logits: Floats = self._norm(x, "output_norm") @ self.weights["output.weight"].T
        self.logits = logits[-1]
        return logits

    def remove(self, seq: int, p0: int = 0, p1: int = END) -> None:
        """Forget the cells of `seq` in the range; the others keep their positions."""
        cells = self.cells(seq)
        self.sequences[seq] = cells.select((cells.pos < p0) | (cells.pos >= p1))

    def copy(self, src: int, dst: int, p0: int = 0, p1: int = END) -> None:
        """Let `dst` hold what `src` holds in the range, and nothing else."""
        if src != dst and p0 < p1:
            cells = self.cells(src)
            self.sequences[dst] = cells.select((cells.pos >= p0) & (cells.pos < p1))

    def add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        """Move the cells in the range by `delta` positions."""
        self._move(seq, p0, p1, self.cells(seq).pos + delta)

    def div(self, seq: int, p0: int, p1: int, d: int) -> None:
        """Divide the positions of the cells in the range, rounding down."""
        self._move(seq, p0, p1, self.cells(seq).pos // d)

    def keep(self, seq: int) -> None:
        """Forget every sequence but `seq`."""
        self.sequences = {seq: self.cells(seq)}

    def clear(self) -> None:
        """Forget everything."""
        self.sequences = {}

    def _move(self, seq: int, p0: int, p1: int, moved: Ints) -> None:
        cells = self.cells(seq)
        pos = np.where((cells.pos >= p0) & (cells.pos < p1), moved, cells.pos)
        assert pos.min(initial=0) >= 0, f"a cell would move to position {pos.min()}"
        self.sequences[seq] = replace(cells, pos=pos)

    def _project(self, x: Floats, layer: int, name: str) -> Floats:
        result: Floats = x @ self.weights[f"blk.{layer}.{name}.weight"].T
        return result

    def _norm(self, x: Floats, name: str) -> Floats:
        mean = np.mean(x * x, axis=-1, keepdims=True)
        result: Floats = x / np.sqrt(mean + self.eps) * self.weights[f"{name}.weight"]
        return result

    def _rotate(self, x: Floats, pos: Ints) -> Floats:
        """RoPE on neighbouring pairs; `x` is (n, heads, head), `pos` is (n,)."""
        speed = self.rope_base ** (-np.arange(0, self.head, 2) / self.head)
        angle = (pos[:, None] * speed)[:, None, :]
        even, odd = x[..., 0::2], x[..., 1::2]
        turned = np.empty_like(x)
        turned[..., 0::2] = even * np.cos(angle) - odd * np.sin(angle)
        turned[..., 1::2] = even * np.sin(angle) + odd * np.cos(angle)
        return turned

    def _attend(self, q: Floats, k: Floats, v: Floats, visible: NDArray[np.bool_]) -> Floats:
        # Each K/V head serves a group of neighbouring query heads.
        group = self.n_head // self.n_head_kv
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        scores = np.einsum("qhd,chd->hqc", q, k) / np.sqrt(self.head)
        scores = np.where(visible, scores, -np.inf)
        share = np.exp(scores - scores.max(axis=-1, keepdims=True))
        share /= share.sum(axis=-1, keepdims=True)
        mixed: Floats = np.einsum("hqc,chd->qhd", share, v)
        return mixed.reshape(len(q), -1)
