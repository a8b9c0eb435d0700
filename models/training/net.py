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
    n_ff: int = 384
    n_ctx_train: int = 1024
    # High, so that half the pairs hardly turn within a context: names are matched by those.
    rope_freq_base: float = 1e6
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

    @torch.no_grad()
    def look_for_likeness(self) -> None:
        """Begin with attention that finds like things and copies them.

        Keys start equal to queries, and each head's output turns back what its values did. With
        that ("mimetic" initialization) a net learns to recall in a fraction of the steps.
        """
        shape = self.shape
        quiet = (2 * shape.n_layer) ** -0.5
        repeats = shape.n_head // shape.n_head_kv
        queries = self.attn_q.weight.view(shape.n_head, shape.head_dim, shape.n_embd)
        self.attn_k.weight.copy_(queries[::repeats].flatten(0, 1))
        values = self.attn_v.weight.view(shape.n_head_kv, shape.head_dim, shape.n_embd)
        values = values.repeat_interleave(repeats, dim=0).flatten(0, 1)
        self.attn_output.weight.copy_(quiet * values.T)
        self.ffn_down.weight.mul_(quiet)

    @torch.no_grad()
    def look_back(self, shape: Shape) -> None:
        """Begin with heads that look 1, 2, 3 and 5 tokens back, whatever stands there.

        All embeddings have a part in common. It meets itself under the angle between two
        positions, so a query that is turned back by some tokens finds the key of that distance.
        """
        n_pairs = 12
        common = shape.n_embd**-0.5
        for head, distance in enumerate((1, 2, 3, 5)):
            angles = distance * shape.rope_freq_base ** -(
                2 * torch.arange(n_pairs) / shape.head_dim
            )
            q = torch.zeros(shape.head_dim)
            q[0 : 2 * n_pairs : 2] = angles.cos()
            q[1 : 2 * n_pairs : 2] = -angles.sin()
            rows = slice(head * shape.head_dim, (head + 1) * shape.head_dim)
            self.attn_q.weight[rows] = self.attn_q.weight[rows] / 4 + 0.3 * common * q[:, None]
        k = torch.zeros(shape.head_dim)
        k[0 : 2 * n_pairs : 2] = 1
        k = k.repeat(shape.n_head_kv)
        self.attn_k.weight.copy_(self.attn_k.weight / 4 + 0.3 * common * k[:, None])

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
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.04)
        with torch.no_grad():
            self.token_embd.weight += 0.02
        for block in self.blk:
            block.look_for_likeness()
        self.blk[0].look_back(shape)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits for the token after each of these."""
        n_tokens = tokens.shape[1]
        cos, sin = self.cos[:n_tokens], self.sin[:n_tokens]
        x = self.token_embd(tokens)
        for block in self.blk:
            x = block(x, cos, sin)
        return functional.linear(self.output_norm(x), self.token_embd.weight)
