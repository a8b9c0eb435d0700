"""Small models with one peculiarity each; no tests of caches run on them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .blueprint import Blueprint, Sizes, Tensor, bias, matrix, norm, table
from .layers import base, blocks, ends, feed_forward, rope
from .models import MODELS, with_keys, write_gguf


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


def make_breaking(folder: Path, tokens: Collection[int] | None = None) -> Path:
    """Write a model whose decode fails an assertion inside of llama.cpp.

    For these tokens, or for all, its table names experts that do not exist.
    """
    info = MODELS["deepseek4"]
    words = info.vocab()
    plan = info.plan(info.sizes, len(words))
    plan.keys[".hash_layer_count"] = 1
    del plan.tensors["blk.0.exp_probs_b.bias"]
    draft = folder / "draft.gguf"
    write_gguf(draft, plan, words, 0)
    experts = np.tile(np.arange(2, dtype=np.int32), (len(words), 1))
    experts[slice(None) if tokens is None else list(tokens)] = 77
    more = {"blk.0.ffn_gate_tid2eid.weight": experts}
    return with_keys(draft, folder / "experts.gguf", {}, more=more)
