"""Small models of architectures with one peculiarity each; no tests of caches run on them."""

from __future__ import annotations

from .blueprint import Blueprint, Sizes, bias, matrix, norm, table
from .layers import attention, base, blocks, ends, feed_forward, heads, mamba2, rope


def falcon_h1(sizes: Sizes, n_vocab: int) -> Blueprint:
    """Attention beside a state-space mixer in each layer."""
    plan = base("falcon-h1", sizes)
    plan.keys |= heads(sizes) | rope()
    plan.keys |= {
        ".ssm.conv_kernel": sizes.d_conv,
        ".ssm.inner_size": sizes.d_inner,
        ".ssm.state_size": sizes.d_state,
        ".ssm.time_step_rank": 8,
        ".ssm.group_count": 2,
    }
    ends(plan, sizes, n_vocab)
    for _, prefix in blocks(sizes):
        plan.add(prefix, attn_norm=norm(sizes.n_embd))
        attention(plan, prefix, sizes)
        mamba2(plan, prefix, sizes, 8, 2)
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
        attention(plan, prefix, sizes)
        feed_forward(plan, prefix, sizes)
        plan.add(
            prefix,
            attn_norm=norm(n),
            post_attention_norm=norm(n),
            attn_q_norm=norm(sizes.head),
            attn_k_norm=norm(sizes.head),
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
        plan.add(
            prefix,
            attn_norm=norm(sizes.n_embd),
            attn_qkv=matrix(sizes.n_embd + 2 * sizes.n_kv, sizes.n_embd),
            attn_q_norm=norm(sizes.head),
            attn_k_norm=norm(sizes.head),
            attn_output=matrix(sizes.n_embd, sizes.n_embd),
        )
        feed_forward(plan, prefix, sizes)
    return plan
