"""Small models of architectures with one peculiarity each; no tests of caches run on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .blueprint import Blueprint, Sizes, Tensor, bias, matrix, norm, table
from .layers import (
    attention,
    base,
    blocks,
    ends,
    feed_forward,
    heads,
    mamba2,
    query_key_norms,
    rope,
)


def falcon_h1(sizes: Sizes, n_vocab: int, *, n_heads: int = 8) -> Blueprint:
    """Attention beside a state-space mixer of so many heads, in two groups, in each layer."""
    plan = base("falcon-h1", sizes)
    plan.keys |= heads(sizes) | rope()
    plan.keys |= {
        ".ssm.conv_kernel": sizes.d_conv,
        ".ssm.inner_size": sizes.d_inner,
        ".ssm.state_size": sizes.d_state,
        ".ssm.time_step_rank": n_heads,
        ".ssm.group_count": 2,
    }
    ends(plan, sizes, n_vocab)
    for _, prefix in blocks(sizes):
        plan.add(prefix, attn_norm=norm(sizes.n_embd))
        attention(plan, prefix, sizes)
        mamba2(plan, prefix, sizes, n_heads, 2)
        feed_forward(plan, prefix, sizes)
        plan.tensors[f"{prefix}ffn_norm"] = plan.tensors.pop(f"{prefix}ffn_norm.weight")
    return plan


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


def afmoe(sizes: Sizes, n_vocab: int) -> Blueprint:
    """A window in three layers of four, and only dense layers."""
    n = sizes.n_embd
    plan = base("afmoe", sizes)
    plan.keys |= heads(sizes) | rope()
    plan.keys |= {
        ".attention.key_length": sizes.head,
        ".attention.value_length": sizes.head,
        ".attention.sliding_window": sizes.n_swa,
        ".expert_feed_forward_length": sizes.n_ff,
        ".expert_shared_count": 1,
        ".leading_dense_block_count": sizes.n_layer,
    }
    ends(plan, sizes, n_vocab)
    for _, prefix in blocks(sizes):
        query_key_norms(plan, prefix, sizes)
        attention(plan, prefix, sizes)
        feed_forward(plan, prefix, sizes)
        plan.add(
            prefix,
            attn_norm=norm(n),
            post_attention_norm=norm(n),
            attn_gate=matrix(n, n),
            post_ffw_norm=norm(n),
        )
    return plan


def openelm(sizes: Sizes, n_vocab: int) -> Blueprint:
    """One matrix for queries, keys and values, of other numbers of heads in each layer."""
    plan = base("openelm", sizes)
    plan.keys |= heads(sizes) | rope()
    ends(plan, sizes, n_vocab)
    del plan.tensors["output.weight"]
    for _, prefix in blocks(sizes):
        query_key_norms(plan, prefix, sizes)
        plan.add(
            prefix,
            attn_norm=norm(sizes.n_embd),
            attn_qkv=matrix(sizes.n_embd + 2 * sizes.n_kv, sizes.n_embd),
            attn_output=matrix(sizes.n_embd, sizes.n_embd),
        )
        feed_forward(plan, prefix, sizes)
    return plan


def rwkv7(sizes: Sizes, n_vocab: int, *, head: int = 64) -> Blueprint:
    """A recurrent state of matrices, one for each head of so many values."""
    n, rank = sizes.n_embd, 8
    plan = base("rwkv7", sizes)
    plan.keys |= {".attention.layer_norm_epsilon": 1e-5, ".wkv.head_size": head}
    for what in ("decay", "iclr", "value_residual_mix", "gate"):
        plan.keys[f".attention.{what}_lora_rank"] = rank
    ends(plan, sizes, n_vocab)
    plan.add("", token_embd_norm=norm(n), token_embd_norm_b=bias(n), output_norm_b=bias(n))
    for _, prefix in blocks(sizes):
        for name in ("attn_norm", "attn_norm_2", "time_mix_ln"):
            plan.add(prefix, **{name: norm(n), f"{name}_b": bias(n)})
        for name in ("w0", "a0", "v0", "k_k", "k_a", "r_k"):
            plan.add(prefix, **{f"time_mix_{name}": bias(n)})
        for name in ("w", "a", "v", "g"):
            low = {f"time_mix_{name}1": matrix(rank, n), f"time_mix_{name}2": matrix(n, rank)}
            plan.add(prefix, **low)
        for name in ("key", "value", "receptance", "output"):
            plan.add(prefix, **{f"time_mix_{name}": matrix(n, n)})
        plan.add(
            prefix,
            time_mix_lerp_fused=Tensor((6, 1, 1, n), scale=0.1),
            channel_mix_lerp_k=Tensor((1, 1, n), scale=0.1),
            channel_mix_key=matrix(sizes.n_ff, n),
            channel_mix_value=matrix(n, sizes.n_ff),
        )
    return plan


def deci(sizes: Sizes, n_vocab: int, n_ff: list[int]) -> Blueprint:
    """Layers of which each has its own feed-forward part, or none."""
    plan = base("deci", sizes)
    plan.keys |= heads(sizes) | rope() | {".feed_forward_length": n_ff}
    ends(plan, sizes, n_vocab)
    for layer, prefix in blocks(sizes):
        plan.add(prefix, attn_norm=norm(sizes.n_embd))
        attention(plan, prefix, sizes)
        if n_ff[layer]:
            feed_forward(plan, prefix, sizes)
    return plan


def qwen3vl(sizes: Sizes, n_vocab: int, n_deepstack: int) -> Blueprint:
    """Its first layers, so many of them, add a part of a picture's embeddings."""
    plan = base("qwen3vl", sizes)
    plan.keys |= heads(sizes) | rope()
    plan.keys |= {".rope.dimension_sections": [3, 3, 2, 0], ".n_deepstack_layers": n_deepstack}
    ends(plan, sizes, n_vocab)
    for _, prefix in blocks(sizes):
        query_key_norms(plan, prefix, sizes)
        attention(plan, prefix, sizes)
        feed_forward(plan, prefix, sizes)
        plan.add(prefix, attn_norm=norm(sizes.n_embd))
    return plan


def experts(sizes: Sizes, n_vocab: int, used: list[int]) -> Blueprint:
    """Hunyuan's mixture of four experts, of which each layer uses its own number."""
    n, n_ff = sizes.n_embd, sizes.n_ff
    plan = base("hunyuan-moe", sizes)
    plan.keys |= heads(sizes) | rope()
    plan.keys |= {
        ".expert_count": 4,
        ".expert_used_count": used,
        ".expert_feed_forward_length": n_ff,
        ".expert_shared_feed_forward_length": n_ff,
    }
    ends(plan, sizes, n_vocab)
    for _, prefix in blocks(sizes):
        query_key_norms(plan, prefix, sizes)
        attention(plan, prefix, sizes)
        plan.add(
            prefix,
            attn_norm=norm(n),
            ffn_norm=norm(n),
            ffn_gate_inp=matrix(4, n),
            ffn_gate_exps=Tensor((4, n_ff, n), scale=0.1),
            ffn_up_exps=Tensor((4, n_ff, n), scale=0.1),
            ffn_down_exps=Tensor((4, n, n_ff), scale=0.1),
            ffn_gate_shexp=matrix(n_ff, n),
            ffn_up_shexp=matrix(n_ff, n),
            ffn_down_shexp=matrix(n, n_ff),
        )
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
