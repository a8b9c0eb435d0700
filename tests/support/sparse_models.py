"""Metadata and tensors of architectures with uncommon memory classes.

Latent attention with an indexer that picks the cells to attend to, compressed caches,
hyper-connections. Each is as small as its graph allows.
"""

from __future__ import annotations

import numpy as np

from .blueprint import Blueprint, Sizes, Tensor, bias, matrix, norm, table
from .layers import (
    ROPE_BASE,
    attention,
    base,
    blocks,
    ends,
    feed_forward,
    heads,
    query_key_norms,
    rope,
)

EXPERTS = 4
Q_RANK = 32
KV_RANK = 32
ROTATED = 16
INDEX_HEADS = 16
INDEX_SIZE = 64
SIGMOID, SQRT_SOFTPLUS = 2, 4
STREAMS = 4
"""Residual streams of models with hyper-connections."""


def deepseek32(sizes: Sizes, n_vocab: int) -> Blueprint:
    """Latent attention over the cells that an indexer picks; mixture of experts."""
    plan = base("deepseek32", sizes)
    plan.keys |= rope() | _latent(sizes) | expert_keys(sizes, SIGMOID) | index_keys()
    plan.keys[".leading_dense_block_count"] = 1
    ends(plan, sizes, n_vocab)
    for layer, prefix in blocks(sizes):
        _latent_attention(plan, prefix, sizes)
        _latent_indexer(plan, prefix, sizes)
        _feed_forward_or_experts(plan, prefix, sizes, layer)
    return plan


def dots3note(sizes: Sizes, n_vocab: int) -> Blueprint:
    """The same in every other layer, a sliding window in the rest."""
    plan = base("dots3note", sizes)
    plan.keys |= rope() | _latent(sizes) | expert_keys(sizes, SIGMOID) | index_keys()
    full = [layer % 2 for layer in range(sizes.n_layer)]
    plan.keys |= {
        ".leading_dense_block_count": 1,
        ".attention.kv_lora_rank_swa": KV_RANK,
        ".attention.key_length_swa": KV_RANK + ROTATED,
        ".attention.value_length_swa": KV_RANK,
        ".attention.key_length_mla_swa": 2 * ROTATED,
        ".attention.value_length_mla_swa": sizes.head,
        ".rope.freq_base_swa": ROPE_BASE,
        ".rope.dimension_count_swa": ROTATED,
        ".attention.sliding_window": sizes.n_swa,
        ".attention.sliding_window_pattern": [1 - one for one in full],
        ".attention.indexer.types": full,
    }
    ends(plan, sizes, n_vocab)
    for layer, prefix in blocks(sizes):
        _latent_attention(plan, prefix, sizes)
        plan.add(prefix, attn_k_norm=norm(ROTATED), attn_gate=matrix(sizes.n_head, sizes.n_embd))
        if full[layer]:
            _latent_indexer(plan, prefix, sizes)
        _feed_forward_or_experts(plan, prefix, sizes, layer)
    return plan


def minimax_m3(sizes: Sizes, n_vocab: int) -> Blueprint:
    """Grouped-query attention over blocks of positions that an indexer picks."""
    plan = base("minimax-m3", sizes)
    plan.keys |= heads(sizes) | rope() | expert_keys(sizes, SIGMOID) | index_keys()
    plan.keys |= {
        ".leading_dense_block_count": 1,
        ".rope.dimension_count": sizes.head,
        ".attention.key_length": sizes.head,
        ".attention.value_length": sizes.head,
        ".attention.indexer.block_size": 4,
        ".attention.indexer.local_blocks": 1,
        ".attention.indexer.key_length": sizes.head,
        ".attention.indexer.head_count": sizes.n_head_kv,
    }
    ends(plan, sizes, n_vocab)
    for layer, prefix in blocks(sizes):
        attention(plan, prefix, sizes)
        plan.add(prefix, attn_norm=norm(sizes.n_embd))
        query_key_norms(plan, prefix, sizes)
        if layer > 0:
            plan.add(
                prefix,
                **{
                    "indexer.q_proj": matrix(sizes.n_kv, sizes.n_embd),
                    "indexer.k_proj": matrix(sizes.head, sizes.n_embd),
                    "indexer.q_norm": norm(sizes.head),
                    "indexer.k_norm": norm(sizes.head),
                },
            )
        _feed_forward_or_experts(plan, prefix, sizes, layer)
    return plan


def deepseek4(sizes: Sizes, n_vocab: int) -> Blueprint:
    """A window of raw cells, and compressed cells for older tokens."""
    ratios = [(0, 0, 4, 128)[layer % 4] for layer in range(sizes.n_layer)]
    n, groups, rank = sizes.n_embd, 2, 16
    plan = base("deepseek4", sizes)
    plan.keys |= rope() | expert_keys(sizes, SQRT_SOFTPLUS) | index_keys()
    plan.keys |= {
        ".attention.head_count": sizes.n_head,
        ".attention.head_count_kv": 1,
        ".attention.key_length": sizes.head,
        ".attention.value_length": sizes.head,
        ".attention.q_lora_rank": Q_RANK,
        ".attention.sliding_window": sizes.n_swa,
        ".attention.output_group_count": groups,
        ".attention.output_lora_rank": rank,
        ".attention.compress_ratios": ratios,
        ".attention.compress_rope_freq_base": ROPE_BASE,
        ".rope.dimension_count": sizes.head // 2,
        ".hyper_connection.count": STREAMS,
        ".hyper_connection.sinkhorn_iterations": 2,
        ".hyper_connection.epsilon": 1e-6,
        ".hash_layer_count": 0,
        ".swiglu_clamp_exp": 10.0,
    }
    ends(plan, sizes, n_vocab)
    plan.add(
        "",
        output_hc_fn=matrix(STREAMS, STREAMS * n),
        output_hc_base=bias(STREAMS),
        output_hc_scale=norm(1),
    )
    mixed = (2 + STREAMS) * STREAMS
    for layer, prefix in blocks(sizes):
        plan.add(
            prefix,
            attn_norm=norm(n),
            attn_sinks=bias(sizes.n_head),
            attn_q_a=matrix(Q_RANK, n),
            attn_q_a_norm=norm(Q_RANK),
            attn_kv=matrix(sizes.head, n),
            attn_kv_a_norm=norm(sizes.head),
            attn_output_a=Tensor((groups, rank, n // groups), scale=(groups / n) ** 0.5),
        )
        plan.tensors[f"{prefix}attn_q_b.weight"] = matrix(n, Q_RANK)
        plan.tensors[f"{prefix}attn_output_b.weight"] = matrix(n, groups * rank, 2.0)
        for part in ("attn", "ffn"):
            plan.add(
                prefix,
                **{
                    f"hc_{part}_fn": matrix(mixed, STREAMS * n),
                    f"hc_{part}_base": bias(mixed),
                    f"hc_{part}_scale": norm(3),
                },
            )
        if ratios[layer]:
            _compressor(plan, f"{prefix}attn_compressor_", n, sizes.head, ratios[layer])
        if ratios[layer] == 4:
            _compressor(plan, f"{prefix}indexer_compressor_", n, INDEX_SIZE, 4)
            plan.add(prefix, **{"indexer.proj": matrix(INDEX_HEADS, n)})
            _index_query(plan, prefix)
        plan.add(prefix, ffn_norm=norm(n))
        mixture(plan, prefix, sizes)
    return plan


def qwen4exp(sizes: Sizes, n_vocab: int) -> Blueprint:
    """Linear attention and indexed attention in turn, over several residual streams."""
    n, rank, head = sizes.n_embd, 8, 32
    # One layer of each kind; the recurrent one has as many value channels as the embedding.
    groups = n // head
    convolved = 3 * n
    plan = base("qwen4exp", sizes)
    plan.keys |= heads(sizes) | rope() | index_keys()
    plan.keys |= {
        ".attention.key_length": sizes.head,
        ".attention.value_length": sizes.head,
        ".expert_count": EXPERTS,
        ".expert_used_count": 2,
        ".expert_feed_forward_length": sizes.n_ff // 2,
        ".expert_shared_feed_forward_length": sizes.n_ff // 2,
        ".rope.dimension_count": sizes.head,
        ".rope.dimension_sections": [sizes.head // 4, sizes.head // 8, sizes.head // 8, 0],
        ".ssm.conv_kernel": sizes.d_conv,
        ".ssm.inner_size": n,
        ".ssm.state_size": head,
        ".ssm.time_step_rank": groups,
        ".ssm.group_count": groups,
        ".hyper_connection.count": STREAMS,
        ".hyper_connection.low_rank": rank,
        ".hyper_connection.sinkhorn_iterations": 2,
        ".hyper_connection.epsilon": 1e-6,
        ".attention.compress_ratios": [4] * sizes.n_layer,
        ".full_attention_interval": 2,
        # Embeddings of pairs of tokens, whose convolution is a state of its own.
        ".embedding_length_per_layer_input": n // 2,
        ".ple.layers": [0],
        ".ple.ngram_size": 2,
        ".ple.heads_per_ngram": 2,
        ".ple.conv_kernel": 2,
        ".ple.eos_token_id": 2,
        ".ple.layer_multipliers": np.array([3, 5], np.uint64),
        ".ple.head_offsets": np.array([0, 31], np.uint64),
        ".ple.head_vocab_sizes": np.array([31, 29], np.uint64),
    }
    plan.add("", per_layer_token_embd=table(60, n // 2))
    plan.add(
        "blk.0.",
        ple_key=matrix(STREAMS * n, n),
        ple_value=matrix(n, n),
        ple_norm_key=norm(STREAMS, n),
        ple_norm_query=norm(STREAMS, n),
        ple_norm_conv=norm(STREAMS, n),
        ple_conv1d=matrix(STREAMS * n, 2),
    )
    plan.add(
        "",
        token_embd=table(n_vocab, n),
        output=matrix(n_vocab, n, 7.0),
        output_hc_norm=norm(STREAMS, n),
        output_hc_down=matrix(rank, STREAMS * n),
        output_hc_up=matrix(STREAMS * n, rank),
    )
    for layer, prefix in blocks(sizes):
        for part in ("attn", "ffn"):
            plan.add(
                prefix,
                **{
                    f"hc_{part}_norm": norm(STREAMS, n),
                    f"hc_{part}_down": matrix(rank, STREAMS * n),
                    f"hc_{part}_up": matrix(STREAMS * n, rank),
                    f"hc_{part}_inject": matrix(STREAMS, STREAMS * n),
                },
            )
        if layer % 2:
            plan.add(
                prefix,
                attn_q=matrix(2 * n, n),
                attn_k=matrix(sizes.n_kv, n),
                attn_v=matrix(sizes.n_kv, n),
                attn_output=matrix(n, n, 2.0),
                attn_q_norm=norm(sizes.head),
                attn_k_norm=norm(sizes.head),
                **{
                    "indexer.q_proj": matrix(INDEX_HEADS * INDEX_SIZE, n),
                    "indexer.k_proj": matrix(INDEX_SIZE, n),
                    "indexer.q_norm": norm(INDEX_SIZE),
                    "indexer.k_norm": norm(INDEX_SIZE),
                },
            )
        else:
            plan.add(
                prefix,
                attn_qkv=matrix(convolved, n),
                attn_gate=matrix(n, n),
                ssm_conv1d=matrix(convolved, sizes.d_conv, 1.5),
                ssm_dt_b=bias(groups, around=-1.0),
                ssm_beta=matrix(groups, n),
                ssm_alpha=matrix(groups, n),
                ssm_norm=norm(head),
                ssm_out=matrix(n, n, 2.0),
            )
            plan.tensors[f"{prefix}ssm_a"] = Tensor((groups,), fill="decay")
        _experts_of(plan, prefix, sizes)
        plan.add(prefix, ffn_gate_inp_shexp=Tensor((n,), scale=n**-0.5))
    return plan


def step35(sizes: Sizes, n_vocab: int) -> Blueprint:
    """A window in every other layer, and rotary sizes that differ between layers."""
    pattern = [layer % 2 for layer in range(sizes.n_layer)]
    plan = base("step35", sizes)
    plan.keys |= heads(sizes) | rope()
    plan.keys |= {
        ".rope.dimension_count": sizes.head,
        ".rope.dimension_count_swa": sizes.head,
        ".rope.freq_base_swa": ROPE_BASE,
        ".attention.key_length": sizes.head,
        ".attention.value_length": sizes.head,
        ".expert_count": EXPERTS,
        ".expert_used_count": 2,
        ".expert_feed_forward_length": sizes.n_ff // 2,
        ".attention.sliding_window": sizes.n_swa,
        ".attention.sliding_window_pattern": pattern,
    }
    ends(plan, sizes, n_vocab)
    for _, prefix in blocks(sizes):
        plan.add(prefix, attn_norm=norm(sizes.n_embd))
        attention(plan, prefix, sizes)
        feed_forward(plan, prefix, sizes)
    return plan


def _latent(sizes: Sizes) -> dict[str, int]:
    return {
        ".attention.head_count": sizes.n_head,
        ".attention.head_count_kv": 1,
        ".attention.q_lora_rank": Q_RANK,
        ".attention.kv_lora_rank": KV_RANK,
        ".attention.key_length": KV_RANK + ROTATED,
        ".attention.value_length": KV_RANK,
        ".attention.key_length_mla": 2 * ROTATED,
        ".attention.value_length_mla": sizes.head,
        ".rope.dimension_count": ROTATED,
    }


def _latent_attention(plan: Blueprint, prefix: str, sizes: Sizes) -> None:
    plan.add(
        prefix,
        attn_norm=norm(sizes.n_embd),
        attn_q_a=matrix(Q_RANK, sizes.n_embd),
        attn_q_a_norm=norm(Q_RANK),
        attn_kv_a_mqa=matrix(KV_RANK + ROTATED, sizes.n_embd),
        attn_kv_a_norm=norm(KV_RANK),
        attn_output=matrix(sizes.n_embd, sizes.n_embd, 2.0),
    )
    # Not biases, in spite of their names.
    plan.tensors |= {
        f"{prefix}attn_q_b.weight": matrix(sizes.n_head * 2 * ROTATED, Q_RANK),
        f"{prefix}attn_k_b.weight": Tensor((sizes.n_head, KV_RANK, ROTATED), scale=ROTATED**-0.5),
        f"{prefix}attn_v_b.weight": Tensor(
            (sizes.n_head, sizes.head, KV_RANK), scale=KV_RANK**-0.5
        ),
    }


def index_keys() -> dict[str, int | float | bool]:
    """Keys of an index that picks sixteen cells."""
    return {
        ".attention.indexer.head_count": INDEX_HEADS,
        ".attention.indexer.key_length": INDEX_SIZE,
        ".attention.indexer.top_k": 16,
    }


def _latent_indexer(plan: Blueprint, prefix: str, sizes: Sizes) -> None:
    plan.add(
        prefix,
        **{
            "indexer.k_norm": norm(INDEX_SIZE),
            "indexer.k_norm_b": bias(INDEX_SIZE),
            "indexer.proj": matrix(INDEX_HEADS, sizes.n_embd),
            "indexer.attn_k": matrix(INDEX_SIZE, sizes.n_embd),
        },
    )
    _index_query(plan, prefix)


def _index_query(plan: Blueprint, prefix: str) -> None:
    plan.tensors[f"{prefix}indexer.attn_q_b.weight"] = matrix(INDEX_HEADS * INDEX_SIZE, Q_RANK)


def _compressor(plan: Blueprint, prefix: str, n: int, width: int, ratio: int) -> None:
    both = 2 * width if ratio == 4 else width
    plan.add(
        prefix,
        kv=matrix(both, n),
        gate=matrix(both, n),
        ape=table(ratio, both, 0.2),
        norm=norm(width),
    )


def expert_keys(sizes: Sizes, gating: int) -> dict[str, int | float | bool]:
    """Keys of mixtures of experts."""
    return {
        ".expert_count": EXPERTS,
        ".expert_used_count": 2,
        ".expert_shared_count": 1,
        ".expert_feed_forward_length": sizes.n_ff // 2,
        ".expert_gating_func": gating,
        ".expert_weights_scale": 1.0,
        ".expert_weights_norm": True,
    }


def _feed_forward_or_experts(plan: Blueprint, prefix: str, sizes: Sizes, layer: int) -> None:
    """The first layer is dense, the others are mixtures."""
    if layer == 0:
        feed_forward(plan, prefix, sizes)
        return
    plan.add(prefix, ffn_norm=norm(sizes.n_embd))
    mixture(plan, prefix, sizes)


def mixture(plan: Blueprint, prefix: str, sizes: Sizes) -> None:
    """Experts, and the bias by which they are chosen."""
    _experts_of(plan, prefix, sizes)
    plan.tensors[f"{prefix}exp_probs_b.bias"] = bias(EXPERTS)


def _experts_of(plan: Blueprint, prefix: str, sizes: Sizes) -> None:
    n, width = sizes.n_embd, sizes.n_ff // 2
    up = Tensor((EXPERTS, width, n), scale=n**-0.5)
    plan.add(
        prefix,
        ffn_gate_inp=matrix(EXPERTS, n),
        ffn_gate_exps=up,
        ffn_up_exps=up,
        ffn_down_exps=Tensor((EXPERTS, n, width), scale=width**-0.5),
        ffn_gate_shexp=matrix(width, n),
        ffn_up_shexp=matrix(width, n),
        ffn_down_shexp=matrix(n, width),
    )
