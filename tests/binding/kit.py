"""What several of these tests need."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pykvcache import LlamaContext

HELD = {0: 20, 1: 5}
"""Sequences and their lengths after `fill`."""


def words(n: int, seed: int = 0) -> NDArray[np.int32]:
    """Tokens that are in every test vocabulary and end no text."""
    return np.random.default_rng(seed).integers(5, 57, n).astype(np.int32)


def fill(ctx: LlamaContext) -> None:
    """Give sequences 0 and 1 the lengths of `HELD`."""
    for seq, n in HELD.items():
        ctx.decode(words(n, seq), seq_id=seq)


def lengths(ctx: LlamaContext) -> dict[int, int]:
    """Sequences that hold anything, and how far they reach."""
    ends = {seq: ctx.kv_cache_seq_pos_max(seq) + 1 for seq in range(ctx.n_seq_max)}
    return {seq: end for seq, end in ends.items() if end}


def with_keys(source: Path, target: Path, values: Mapping[str, str | int]) -> Path:
    """Copy a GGUF with keys added or replaced."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", *values):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, inner)
    for key, value in values.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
