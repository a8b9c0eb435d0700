"""The network: a llama (RMSNorm, rotary positions, grouped queries, SwiGLU) in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """The sizes of a network; names as in GGUF metadata."""

    n_vocab: int
    n_embd: int = 256
    n_layer: int = 4
    n_head: int = 4
    n_head_kv: int = 2
    n_ff: int = 576
    n_ctx_train: int = 1024
    rope_freq_base: float = 10000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Numbers per attention head."""
        return self.n_embd // self.n_head


def rope_table(shape: Shape) -> tuple[Tensor, Tensor]:
    """Return cosines and sines by position, for neighbouring pairs of numbers, as in llama.cpp."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    angles = torch.outer(
        torch.arange(shape.n_ctx_train, dtype=torch.float64), shape.rope_freq_base**-exponents
    )
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of numbers by its position's angle."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class Block(nn.Module):
    """One transformer layer. Module names are those of GGUF tensors."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.n_embd, shape.n_head_kv * shape.head_dim
        self.attn_norm = nn.RMSNorm(width, eps=shape.norm_eps)
        self.attn_q = nn.Linear(width, width, bias=False)
        self.attn_k = nn.Linear(width, kv_width, bias=False)
        self.attn_v = nn.Linear(width, kv_width, bias=False)
        self.attn_output = nn.Linear(width, width, bias=False)
        self.ffn_norm = nn.RMSNorm(width, eps=shape.norm_eps)
        self.ffn_gate = nn.Linear(width, shape.n_ff, bias=False)
        self.ffn_up = nn.Linear(width, shape.n_ff, bias=False)
        self.ffn_down = nn.Linear(shape.n_ff, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attention, then the feed-forward net, each added to its input."""
        n_batch, n_tokens, _ = x.shape

        def heads(y: Tensor, n_head: int) -> Tensor:
            return y.view(n_batch, n_tokens, n_head, self.shape.head_dim).transpose(1, 2)

        y = self.attn_norm(x)
        q = rotate(heads(self.attn_q(y), self.shape.n_head), cos, sin)
        k = rotate(heads(self.attn_k(y), self.shape.n_head_kv), cos, sin)
        v = heads(self.attn_v(y), self.shape.n_head_kv)
        repeats = self.shape.n_head // self.shape.n_head_kv
        k, v = (t.repeat_interleave(repeats, dim=1) for t in (k, v))
        q, k = q.to(v.dtype), k.to(v.dtype)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_output(y.transpose(1, 2).reshape(n_batch, n_tokens, -1))
        y = self.ffn_norm(x)
        return x + self.ffn_down(functional.silu(self.ffn_gate(y)) * self.ffn_up(y))


class Net(nn.Module):
    """The language model; input and output share one embedding table."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embd = nn.Embedding(shape.n_vocab, shape.n_embd)
        self.blk = nn.ModuleList(Block(shape) for _ in range(shape.n_layer))
        self.output_norm = nn.RMSNorm(shape.n_embd, eps=shape.norm_eps)
        cos, sin = rope_table(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                into_stream = name.endswith(("attn_output.weight", "ffn_down.weight"))
                std = 0.04 / (2 * shape.n_layer) ** 0.5 if into_stream else 0.04
                nn.init.normal_(weight, std=std)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits for the token after each of these."""
        n_tokens = tokens.shape[1]
        cos, sin = self.cos[:n_tokens], self.sin[:n_tokens]
        x = self.token_embd(tokens)
        for block in self.blk:
            x = block(x, cos, sin)
        return functional.linear(self.output_norm(x), self.token_embd.weight)
