"""Small models of architectures with one peculiarity each; no tests of caches run on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .blueprint import Blueprint, Sizes, Tensor, bias, matrix, norm, table
from .layers import base, blocks, ends, feed_forward, rope


def cogvlm(sizes: Sizes, n_vocab: int) -> Blueprint:
    """Two sets of weights, of text and of pictures; the graph leaves no token out."""
    n = sizes.n_embd
    plan = base("cogvlm", sizes)
    plan.keys |= {".attention.head_count": sizes.n_head} | rope()
    ends(plan, sizes, n_vocab)
    for _, prefix in blocks(sizes):
        plan.add(prefix, attn_norm=norm(n))
        plan.add(
            prefix,
            attn_qkv=matrix(3 * n, n),
            attn_output=matrix(n, n),
            vis_attn_qkv=matrix(3 * n, n),
            vis_attn_output=matrix(n, n),
            vis_gate=matrix(sizes.n_ff, n),
            vis_up=matrix(sizes.n_ff, n),
            vis_down=matrix(n, sizes.n_ff),
        )
        feed_forward(plan, prefix, sizes)
    return plan


def gpt2(sizes: Sizes, n_vocab: int) -> Blueprint:
    """A learned table of positions, which nothing rotates."""
    n = sizes.n_embd
    plan = base("gpt2", sizes, rms_eps=False)
    plan.keys |= {".attention.head_count": sizes.n_head, ".attention.layer_norm_epsilon": 1e-5}
    ends(plan, sizes, n_vocab)
    plan.add("", output_norm_b=bias(n), position_embd=table(sizes.n_ctx_train, n, 0.7))
    for _, prefix in blocks(sizes):
        for name, n_out, n_in in (
            ("attn_qkv", 3 * n, n),
            ("attn_output", n, n),
            ("ffn_up", sizes.n_ff, n),
            ("ffn_down", n, sizes.n_ff),
        ):
            plan.add(prefix, **{name: matrix(n_out, n_in), f"{name}_b": bias(n_out)})
        for name in ("attn_norm", "ffn_norm"):
            plan.add(prefix, **{name: norm(n), f"{name}_b": bias(n)})
    return plan


@dataclass(frozen=True)
class Stored(Tensor):
    """A weight of another type than F32."""

    dtype: type[np.generic] = np.float16

    def values(self, name: str, seed: int) -> NDArray[Any]:
        """Draw them as F32, and round."""
        return super().values(name, seed).astype(self.dtype)


def stored(plan: Blueprint, name: str, dtype: type[np.generic]) -> Blueprint:
    """`plan` with one weight of another type."""
    weight = plan.tensors[name]
    plan.tensors[name] = Stored(weight.shape, weight.scale, weight.shift, weight.fill, dtype)
    return plan
