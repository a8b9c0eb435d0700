"""A model whose decode fails an assertion inside of llama.cpp: for some tokens, or for all."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import gguf
import numpy as np

from support.models import MODELS, write_gguf


def make_breaking(folder: Path, tokens: Collection[int] | None = None) -> Path:
    """Write a model whose table names experts that do not exist, for these tokens or for all."""
    info = MODELS["deepseek4"]
    words = info.vocab()
    plan = info.plan(info.sizes, len(words))
    plan.keys[".hash_layer_count"] = 1
    del plan.tensors["blk.0.exp_probs_b.bias"]
    path = folder / "experts.gguf"
    draft = folder / "draft.gguf"
    write_gguf(draft, plan, words, 0)
    reader, writer = gguf.GGUFReader(draft), gguf.GGUFWriter(path, plan.arch)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data.copy())
    table = np.tile(np.arange(2, dtype=np.int32), (len(words), 1))
    table[slice(None) if tokens is None else list(tokens)] = 77
    writer.add_tensor("blk.0.ffn_gate_tid2eid.weight", table)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
