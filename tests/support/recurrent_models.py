"""Metadata and tensors of the architectures with a recurrent state, alone or beside attention."""

from __future__ import annotations

from .blueprint import Blueprint, Key, Sizes, matrix, norm, table
from .layers import (
    attention,
    base,
    blocks,
    ends,
    feed_forward,
    mamba,
    mamba2,
    query_key_norms,
    rope,
)

SSM_HEADS, SSM_GROUPS, SSM_DT_RANK = 8, 2, 4


def mamba1(sizes: Sizes, n_vocab: int) -> Blueprint:
    """State-space layers only."""
    plan = base("mamba", sizes)
    plan.keys |= _ssm(sizes, SSM_DT_RANK) | {".attention.head_count": 0}
    ends(plan, sizes, n_vocab)
    for _, prefix in blocks(sizes):
        plan.add(prefix, attn_norm=norm(sizes.n_embd))
        mamba(plan, prefix, sizes, SSM_DT_RANK)
    return plan


def mamba2_only(sizes: Sizes, n_vocab: int) -> Blueprint:
    """State-space layers of the second generation only."""
    plan = base("mamba2", sizes)
    plan.keys |= _ssm(sizes, SSM_HEADS, SSM_GROUPS) | {".attention.head_count": 0}
    ends(plan, sizes, n_vocab)
    for _, prefix in blocks(sizes):
        plan.add(prefix, attn_norm=norm(sizes.n_embd))
        mamba2(plan, prefix, sizes, SSM_HEADS, SSM_GROUPS)
    return plan


def jamba(sizes: Sizes, n_vocab: int) -> Blueprint:
    """Even layers attend (without RoPE), odd layers are state-space."""
    plan = base("jamba", sizes)
    plan.keys |= _ssm(sizes, SSM_DT_RANK) | _mixed_heads(sizes)
    ends(plan, sizes, n_vocab)
    for layer, prefix in blocks(sizes):
        plan.add(prefix, attn_norm=norm(sizes.n_embd))
        if _attends(layer):
            attention(plan, prefix, sizes)
        else:
            mamba(plan, prefix, sizes, SSM_DT_RANK)
            plan.add(
                prefix,
                ssm_dt_norm=norm(SSM_DT_RANK),
                ssm_b_norm=norm(sizes.d_state),
                ssm_c_norm=norm(sizes.d_state),
            )
        feed_forward(plan, prefix, sizes)
    return plan


def granitehybrid(sizes: Sizes, n_vocab: int) -> Blueprint:
    """Even layers attend (with RoPE), odd layers are state-space of the second generation."""
    plan = base("granitehybrid", sizes)
    plan.keys |= _ssm(sizes, SSM_HEADS, SSM_GROUPS) | _mixed_heads(sizes) | rope()
    plan.keys[".rope.dimension_count"] = sizes.head
    ends(plan, sizes, n_vocab)
    _mixed_layers(plan, sizes, has_feed_forward=True)
    return plan


def granite_nope(sizes: Sizes, n_vocab: int) -> Blueprint:
    """As `granitehybrid`, but no layer rotates its K."""
    plan = granitehybrid(sizes, n_vocab)
    plan.keys[".rope.scaling.finetuned"] = False
    return plan


def lfm2(sizes: Sizes, n_vocab: int) -> Blueprint:
    """Even layers attend, odd layers are short convolutions; the output is the token table."""
    plan = base("lfm2", sizes)
    plan.keys |= _mixed_heads(sizes) | rope() | {".shortconv.l_cache": 3}
    plan.add(
        "",
        token_embd=table(n_vocab, sizes.n_embd, 0.8),
        token_embd_norm=norm(sizes.n_embd),
    )
    for layer, prefix in blocks(sizes):
        plan.add(prefix, attn_norm=norm(sizes.n_embd))
        if _attends(layer):
            query_key_norms(plan, prefix, sizes)
            attention(plan, prefix, sizes)
        else:
            plan.tensors[f"{prefix}shortconv.conv.weight"] = matrix(sizes.n_embd, 3, 1.5)
            plan.add(
                f"{prefix}shortconv.",
                in_proj=matrix(3 * sizes.n_embd, sizes.n_embd),
                out_proj=matrix(sizes.n_embd, sizes.n_embd),
            )
        feed_forward(plan, prefix, sizes)
    return plan


def lfm2_swa(sizes: Sizes, n_vocab: int) -> Blueprint:
    """As `lfm2`, with a window on every attention layer."""
    plan = lfm2(sizes, n_vocab)
    plan.keys[".attention.sliding_window"] = sizes.n_swa
    return plan


def nemotron_h(sizes: Sizes, n_vocab: int) -> Blueprint:
    """State-space layers and attention without RoPE in turn, with nothing behind either."""
    plan = base("nemotron_h", sizes)
    plan.keys |= _ssm(sizes, SSM_HEADS, SSM_GROUPS) | {
        ".attention.layer_norm_epsilon": 1e-5,
        # A feed-forward block would be a separate layer.
        ".feed_forward_length": 0,
    }
    plan.keys |= _mixed_heads(sizes)
    ends(plan, sizes, n_vocab)
    _mixed_layers(plan, sizes, has_feed_forward=False)
    return plan


def _mixed_layers(plan: Blueprint, sizes: Sizes, *, has_feed_forward: bool) -> None:
    """Add layers in turn: attention, and state-space of the second generation."""
    for layer, prefix in blocks(sizes):
        plan.add(prefix, attn_norm=norm(sizes.n_embd))
        if _attends(layer):
            attention(plan, prefix, sizes)
        else:
            mamba2(plan, prefix, sizes, SSM_HEADS, SSM_GROUPS)
        if has_feed_forward:
            feed_forward(plan, prefix, sizes)


def _attends(layer: int) -> bool:
    return layer % 2 == 0


def _mixed_heads(sizes: Sizes) -> dict[str, Key]:
    # A zero among the K/V heads is how a hybrid's file marks a recurrent layer.
    n_kv = [sizes.n_head_kv if _attends(layer) else 0 for layer in range(sizes.n_layer)]
    return {".attention.head_count": sizes.n_head, ".attention.head_count_kv": n_kv}


def _ssm(sizes: Sizes, dt_rank: int, n_groups: int | None = None) -> dict[str, Key]:
    keys: dict[str, Key] = {
        ".ssm.conv_kernel": sizes.d_conv,
        ".ssm.inner_size": sizes.d_inner,
        ".ssm.state_size": sizes.d_state,
        ".ssm.time_step_rank": dt_rank,
    }
    return keys if n_groups is None else keys | {".ssm.group_count": n_groups}
