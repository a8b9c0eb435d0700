"""Metadata and tensors of the architectures that only attend."""

from __future__ import annotations

from .blueprint import Blueprint, Sizes, bias, matrix, norm, table
from .layers import ROPE_BASE, attention, base, blocks, ends, feed_forward, heads, rope


def llama(sizes: Sizes, n_vocab: int) -> Blueprint:
    """Plain attention with RoPE on neighbouring pairs."""
    plan = base("llama", sizes)
    plan.keys |= heads(sizes) | rope() | {".rope.dimension_count": sizes.head}
    ends(plan, sizes, n_vocab)
    for _, prefix in blocks(sizes):
        plan.add(prefix, attn_norm=norm(sizes.n_embd))
        attention(plan, prefix, sizes)
        feed_forward(plan, prefix, sizes)
    return plan


def gemma3(sizes: Sizes, n_vocab: int) -> Blueprint:
    """Sliding-window attention in every other layer; the output is the token table."""
    plan = base("gemma3", sizes)
    plan.keys |= (
        heads(sizes)
        | rope()
        | {
            ".attention.key_length": sizes.head,
            ".attention.value_length": sizes.head,
            ".attention.sliding_window": sizes.n_swa,
            ".attention.sliding_window_pattern": 2,
            ".rope.freq_base_swa": ROPE_BASE,
        }
    )
    # The graph multiplies embeddings by sqrt(n_embd), hence the small table and large last norm.
    plan.add(
        "",
        token_embd=table(n_vocab, sizes.n_embd, sizes.n_embd**-0.5),
        output_norm=norm(sizes.n_embd, around=7.0),
    )
    for _, prefix in blocks(sizes):
        plan.add(
            prefix,
            attn_norm=norm(sizes.n_embd),
            post_attention_norm=norm(sizes.n_embd),
            attn_k_norm=norm(sizes.head),
            attn_q_norm=norm(sizes.head),
            post_ffw_norm=norm(sizes.n_embd, around=0.25),
        )
        attention(plan, prefix, sizes)
        feed_forward(plan, prefix, sizes)
    return plan


def llama4(sizes: Sizes, n_vocab: int) -> Blueprint:
    """Chunks of 8,192 positions in three of four layers; the required experts are in no layer."""
    plan = base("llama4", sizes)
    plan.keys |= heads(sizes) | rope()
    plan.keys |= {
        ".rope.dimension_count": sizes.head,
        ".attention.key_length": sizes.head,
        ".attention.value_length": sizes.head,
        ".expert_count": 2,
        ".expert_used_count": 1,
        ".expert_feed_forward_length": sizes.n_ff,
        ".interleave_moe_layer_step": sizes.n_layer + 1,
    }
    ends(plan, sizes, n_vocab)
    for _, prefix in blocks(sizes):
        plan.add(prefix, attn_norm=norm(sizes.n_embd))
        attention(plan, prefix, sizes)
        feed_forward(plan, prefix, sizes)
    return plan


def qwen2vl(sizes: Sizes, n_vocab: int) -> Blueprint:
    """Attention with M-RoPE: three rotated sections for time, height and width."""
    plan = base("qwen2vl", sizes)
    half = sizes.head // 2
    rest = half - half // 4
    sections = [half // 4, rest - rest // 2, rest // 2, 0]
    plan.keys |= heads(sizes) | rope() | {".rope.dimension_sections": sections}
    ends(plan, sizes, n_vocab)
    for _, prefix in blocks(sizes):
        plan.add(
            prefix,
            attn_norm=norm(sizes.n_embd),
            attn_q_b=bias(sizes.n_embd),
            attn_k_b=bias(sizes.n_kv),
            attn_v_b=bias(sizes.n_kv),
        )
        attention(plan, prefix, sizes)
        feed_forward(plan, prefix, sizes)
    return plan


def bert(sizes: Sizes, n_vocab: int) -> Blueprint:
    """An encoder that pools to one embedding per sequence and has no memory."""
    plan = base("bert", sizes, rms_eps=False)
    plan.keys |= {
        ".attention.head_count": sizes.n_head,
        ".attention.layer_norm_epsilon": 1e-5,
        ".attention.causal": False,
        ".pooling_type": 1,
    }
    n = sizes.n_embd
    plan.add(
        "",
        token_embd=table(n_vocab, n),
        token_types=table(2, n, 0.2),
        position_embd=table(sizes.n_ctx_train, n, 0.7),
        token_embd_norm=norm(n),
        token_embd_norm_b=bias(n),
    )
    for layer, prefix in blocks(sizes):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            plan.add(prefix, **{name: matrix(n, n, 1.3), f"{name}_b": bias(n)})
        # The last norm is large because pooling divides what one token changes by their number.
        last = 6.0 if layer == sizes.n_layer - 1 else 1.0
        plan.add(
            prefix,
            attn_output_norm=norm(n),
            attn_output_norm_b=bias(n),
            layer_output_norm=norm(n, around=last),
            layer_output_norm_b=bias(n),
            ffn_up=matrix(sizes.n_ff, n),
            ffn_up_b=bias(sizes.n_ff),
            ffn_down=matrix(n, sizes.n_ff),
            ffn_down_b=bias(n),
        )
    return plan


def t5(sizes: Sizes, n_vocab: int) -> Blueprint:
    """Encoder and decoder with relative position buckets instead of RoPE."""
    buckets = 8
    plan = base("t5", sizes)
    plan.keys |= {
        ".attention.head_count": sizes.n_head,
        ".attention.key_length": sizes.head,
        ".attention.value_length": sizes.head,
        ".attention.relative_buckets_count": buckets,
        ".decoder_start_token_id": 0,
    }
    ends(plan, sizes, n_vocab)
    del plan.tensors["output_norm.weight"]
    for side in ("enc.", "dec."):
        plan.add(side, output_norm=norm(sizes.n_embd))
        for _, prefix in blocks(sizes, side):
            _t5_attention(plan, f"{prefix}attn_", sizes)
            if side == "dec.":
                _t5_attention(plan, f"{prefix}cross_attn_", sizes)
            feed_forward(plan, prefix, sizes)
        plan.tensors[f"{side}blk.0.attn_rel_b.weight"] = table(buckets, sizes.n_head)
    return plan


def _t5_attention(plan: Blueprint, prefix: str, sizes: Sizes) -> None:
    n = sizes.n_embd
    # T5 does not divide its scores by sqrt(head), so the gains are smaller.
    plan.add(
        prefix,
        norm=norm(n),
        q=matrix(n, n, 0.6),
        k=matrix(n, n, 0.6),
        v=matrix(n, n),
        o=matrix(n, n, 2.0),
    )
