"""Metadata and tensors of architectures whose index has pools of cells."""

from __future__ import annotations

from .blueprint import Blueprint, Sizes, Tensor, bias, matrix, norm, table
from .layers import base, blocks, ends, feed_forward
from .sparse_models import (
    INDEX_HEADS,
    INDEX_SIZE,
    KV_RANK,
    Q_RANK,
    SIGMOID,
    STREAMS,
    expert_keys,
    index_keys,
    mixture,
)

POOL = 4


def glm5_next(sizes: Sizes, n_vocab: int) -> Blueprint:
    """Latent attention over pools of four positions, and linear attention, in turn."""
    n = sizes.n_embd
    attends = [1 - layer % 2 for layer in range(sizes.n_layer)]
    plan = base("glm5-next", sizes)
    plan.keys |= expert_keys(sizes, SIGMOID) | index_keys()
    plan.keys |= {
        ".attention.head_count": sizes.n_head,
        ".attention.head_count_kv": attends,
        ".attention.q_lora_rank": Q_RANK,
        ".attention.kv_lora_rank": KV_RANK,
        ".attention.key_length": KV_RANK,
        ".attention.value_length": KV_RANK,
        ".attention.key_length_mla": sizes.head,
        ".attention.value_length_mla": sizes.head,
        ".attention.indexer.kpool": POOL,
        ".rope.dimension_count": 0,
        ".ssm.conv_kernel": sizes.d_conv,
        ".kda.head_dim": sizes.head,
        ".leading_dense_block_count": 1,
        ".hyper_connection.count": STREAMS,
        ".hyper_connection.sinkhorn_iterations": 2,
        ".hyper_connection.epsilon": 1e-6,
    }
    ends(plan, sizes, n_vocab)
    mixed = (2 + STREAMS) * STREAMS
    for layer, prefix in blocks(sizes):
        plan.add(prefix, attn_norm=norm(n))
        for part in ("attn", "ffn"):
            plan.add(
                prefix,
                **{
                    f"hc_{part}_fn": matrix(mixed, STREAMS * n),
                    f"hc_{part}_base": bias(mixed),
                    f"hc_{part}_scale": norm(3),
                },
            )
        if attends[layer]:
            _latent_pools(plan, prefix, sizes)
        else:
            _linear(plan, prefix, sizes)
        if layer == 0:
            feed_forward(plan, prefix, sizes)
        else:
            plan.add(prefix, ffn_norm=norm(n))
            mixture(plan, prefix, sizes)
    return plan


def _latent_pools(plan: Blueprint, prefix: str, sizes: Sizes) -> None:
    n, head = sizes.n_embd, sizes.head
    plan.add(
        prefix,
        attn_q_a=matrix(Q_RANK, n),
        attn_q_a_norm=norm(Q_RANK),
        attn_kv_a_mqa=matrix(KV_RANK, n),
        attn_kv_a_norm=norm(KV_RANK),
        attn_output=matrix(n, n, 2.0),
        indexer_compressor_gate=matrix(INDEX_SIZE, n),
        indexer_compressor_ape=table(POOL, INDEX_SIZE, 0.2),
        **{
            "indexer.k_norm": norm(INDEX_SIZE),
            "indexer.proj": matrix(INDEX_HEADS, n),
            "indexer.attn_k": matrix(INDEX_SIZE, n),
        },
    )
    plan.tensors |= {
        f"{prefix}indexer.k_norm.bias": bias(INDEX_SIZE),
        f"{prefix}attn_q_b.weight": matrix(n, Q_RANK),
        f"{prefix}attn_k_b.weight": Tensor((sizes.n_head, KV_RANK, head), scale=head**-0.5),
        f"{prefix}attn_v_b.weight": Tensor((sizes.n_head, head, KV_RANK), scale=KV_RANK**-0.5),
        f"{prefix}indexer.attn_q_b.weight": matrix(INDEX_HEADS * INDEX_SIZE, Q_RANK),
    }


def _linear(plan: Blueprint, prefix: str, sizes: Sizes) -> None:
    n, head = sizes.n_embd, sizes.head
    for one in "qkv":
        plan.add(prefix, **{f"attn_{one}": matrix(n, n)})
        plan.tensors[f"{prefix}ssm_conv1d_{one}.weight"] = Tensor((n, 1, sizes.d_conv), scale=0.75)
    plan.add(
        prefix,
        attn_output=matrix(n, n, 2.0),
        ssm_f_a=matrix(head, n),
        ssm_g_a=matrix(head, n),
        ssm_beta=matrix(sizes.n_head, n),
        ssm_norm=norm(head),
    )
    plan.tensors |= {
        f"{prefix}ssm_f_b.weight": matrix(n, head),
        f"{prefix}ssm_g_b.weight": matrix(n, head),
        f"{prefix}ssm_a": Tensor((sizes.n_head,), fill="decay"),
        f"{prefix}ssm_dt.bias": bias(n, around=-1.0),
    }
