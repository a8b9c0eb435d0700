"""LoRA adapters and control vectors for the generated models, and the same weights merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from .blueprint import Blueprint, Tensor
from .models import MODELS, finish, write_gguf

Floats = NDArray[np.float32]

#: Weights of attention, feed-forward and recurrent layers that graphs multiply with.
TARGETS = (
    "attn_q.weight",
    "attn_k.weight",
    "attn_v.weight",
    "attn_output.weight",
    "ffn_down.weight",
    "ffn_up.weight",
    "ssm_in.weight",
    "ssm_out.weight",
    "shortconv.in_proj.weight",
)


@dataclass(frozen=True)
class Fixed(Tensor):
    """A tensor with given values."""

    given: Floats | None = None

    def values(self, name: str, seed: int) -> Floats:
        assert self.given is not None
        return self.given


def _plan(name: str) -> Blueprint:
    info = MODELS[name]
    return info.plan(replace(info.sizes), len(info.vocab()))


def pairs(name: str, seed: int, *, rank: int = 4) -> dict[str, tuple[Floats, Floats]]:
    """Return A (rank, n_in) and B (n_out, rank) by tensor, large enough to matter."""
    found = dict[str, tuple[Floats, Floats]]()
    for tensor, plan in _plan(name).tensors.items():
        if len(plan.shape) == 2 and tensor.endswith(TARGETS):
            rng = np.random.default_rng([seed, len(found)])
            n_out, n_in = plan.shape
            a = rng.standard_normal((rank, n_in)) / np.sqrt(n_in)
            b = rng.standard_normal((n_out, rank)) * 0.2
            found[tensor] = a.astype(np.float32), b.astype(np.float32)
    return found


def write_adapter(
    path: Path,
    name: str,
    seed: int = 1,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    invocation: Sequence[int] = (),
    arch: str | None = None,
    dtype: type[np.generic] = np.float32,
) -> Path:
    """Write a LoRA adapter of a generated model, as llama.cpp's converter does."""
    writer = gguf.GGUFWriter(path, arch or MODELS[name].arch)
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    if invocation:
        writer.add_key_value(
            "adapter.alora.invocation_tokens",
            list(invocation),
            gguf.GGUFValueType.ARRAY,
            gguf.GGUFValueType.UINT32,
        )
    for tensor, (a, b) in pairs(name, seed, rank=rank).items():
        writer.add_tensor(f"{tensor}.lora_a", a.astype(dtype))
        writer.add_tensor(f"{tensor}.lora_b", b.astype(dtype))
    finish(writer)
    return path


def write_merged(
    path: Path,
    name: str,
    adapters: Sequence[tuple[int, float]],
    *,
    seed: int = 0,
    rank: int = 4,
    alpha: float = 8.0,
) -> Path:
    """Write a generated model with adapters (seed, scale) added to its weights."""
    plan = _plan(name)
    for one, scale in adapters:
        for tensor, (a, b) in pairs(name, one, rank=rank).items():
            old = plan.tensors[tensor]
            values = old.values(tensor, seed) + np.float32(scale * alpha / rank) * (b @ a)
            plan.tensors[tensor] = Fixed(old.shape, given=values.astype(np.float32))
    write_gguf(path, plan, MODELS[name].vocab(), seed)
    return path


def write_control(path: Path, values: Floats) -> Path:
    """Write a control vector: one direction for each layer from 1 on."""
    writer = gguf.GGUFWriter(path, "controlvector")
    for layer, direction in enumerate(values):
        if layer:
            writer.add_tensor(f"direction.{layer}", direction)
    finish(writer)
    return path
