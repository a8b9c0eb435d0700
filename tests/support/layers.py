"""Building blocks that several architectures share.

The gains make the logits depend clearly on every cell: attention scores spread enough to
prefer some cells, the output of attention weighs more than the token's own embedding.
"""

from __future__ import annotations

from collections.abc import Iterator

from .blueprint import Blueprint, Key, Sizes, Tensor, bias, matrix, norm, table

LOGIT_GAIN = 7.0
"""Standard deviation of the logits of the models with an output matrix of their own."""

ROPE_BASE = 10.0


def base(arch: str, sizes: Sizes, *, rms_eps: bool = True) -> Blueprint:
    """Keys that every architecture has."""
    plan = Blueprint(arch)
    plan.keys |= {
        ".context_length": sizes.n_ctx_train,
        ".embedding_length": sizes.n_embd,
        ".block_count": sizes.n_layer,
        ".feed_forward_length": sizes.n_ff,
    }
    if rms_eps:
        plan.keys[".attention.layer_norm_rms_epsilon"] = 1e-5
    return plan


def blocks(sizes: Sizes, side: str = "") -> Iterator[tuple[int, str]]:
    """Each layer's number and the prefix of its tensors' names."""
    for layer in range(sizes.n_layer):
        yield layer, f"{side}blk.{layer}."


def ends(plan: Blueprint, sizes: Sizes, n_vocab: int) -> None:
    """Token table, last norm and output matrix."""
    plan.add(
        "",
        token_embd=table(n_vocab, sizes.n_embd),
        output_norm=norm(sizes.n_embd),
        output=matrix(n_vocab, sizes.n_embd, LOGIT_GAIN),
    )


def attention(plan: Blueprint, prefix: str, sizes: Sizes) -> None:
    """The four projections of grouped-query attention."""
    plan.add(
        prefix,
        attn_q=matrix(sizes.n_embd, sizes.n_embd),
        attn_k=matrix(sizes.n_kv, sizes.n_embd),
        attn_v=matrix(sizes.n_kv, sizes.n_embd),
        attn_output=matrix(sizes.n_embd, sizes.n_embd, 2.0),
    )


def query_key_norms(plan: Blueprint, prefix: str, sizes: Sizes) -> None:
    """Norms of the heads' queries and keys."""
    plan.add(prefix, attn_q_norm=norm(sizes.head), attn_k_norm=norm(sizes.head))


def feed_forward(plan: Blueprint, prefix: str, sizes: Sizes) -> None:
    """Gated feed-forward block with its norm."""
    plan.add(
        prefix,
        ffn_norm=norm(sizes.n_embd),
        ffn_gate=matrix(sizes.n_ff, sizes.n_embd),
        ffn_up=matrix(sizes.n_ff, sizes.n_embd),
        ffn_down=matrix(sizes.n_embd, sizes.n_ff),
    )


def mamba(plan: Blueprint, prefix: str, sizes: Sizes, dt_rank: int) -> None:
    """First-generation state-space mixer."""
    inner, state = sizes.d_inner, sizes.d_state
    plan.add(
        prefix,
        ssm_in=matrix(2 * inner, sizes.n_embd),
        ssm_conv1d=matrix(inner, sizes.d_conv, 1.5),
        ssm_conv1d_b=bias(inner),
        ssm_x=matrix(dt_rank + 2 * state, inner, 1.5),
        ssm_dt=matrix(inner, dt_rank, 0.5),
        ssm_dt_b=bias(inner, around=-1.0),
        ssm_out=matrix(sizes.n_embd, inner, 2.0),
    )
    # These two carry no ".weight" suffix.
    plan.tensors[f"{prefix}ssm_a"] = Tensor((inner, state), fill="decay")
    plan.tensors[f"{prefix}ssm_d"] = norm(inner)


def mamba2(plan: Blueprint, prefix: str, sizes: Sizes, n_heads: int, n_groups: int) -> None:
    """Second-generation state-space mixer: one decay per head, grouped B and C."""
    inner = sizes.d_inner
    convolved = inner + 2 * n_groups * sizes.d_state
    plan.add(
        prefix,
        ssm_in=matrix(inner + convolved + n_heads, sizes.n_embd),
        ssm_conv1d=matrix(convolved, sizes.d_conv, 1.5),
        ssm_conv1d_b=bias(convolved),
        ssm_dt_b=bias(n_heads, around=-1.0),
        ssm_norm=norm(n_groups, inner // n_groups),
        ssm_out=matrix(sizes.n_embd, inner, 2.0),
    )
    plan.tensors[f"{prefix}ssm_a"] = Tensor((n_heads, 1), fill="decay")
    plan.tensors[f"{prefix}ssm_d"] = norm(n_heads, 1)


def heads(sizes: Sizes) -> dict[str, Key]:
    """Keys of grouped-query attention, the same in every layer."""
    return {".attention.head_count": sizes.n_head, ".attention.head_count_kv": sizes.n_head_kv}


def rope() -> dict[str, Key]:
    """Keys of RoPE; the base is small so that moving a cell by one position shows."""
    return {".rope.freq_base": ROPE_BASE}
