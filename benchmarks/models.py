"""The models for measurements, written on demand."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "bench"
STORIES = ROOT / "models" / "stories.gguf"

#: 30 million parameters: 8 layers, 384 wide, 6 heads of 64, 4 of them for K and V.
WIDE = {"n_embd": 384, "n_layer": 8, "n_ff": 1600, "n_head": 6, "n_head_kv": 3}
N_VOCAB = 32_000
#: 135 million parameters, with the sizes of SmolLM2-135M.
SMALLEST = {"n_embd": 576, "n_layer": 30, "n_ff": 1536, "n_head": 9, "n_head_kv": 3}
SMALLEST_VOCAB = 49_152
#: Weight types of `medium`.
WEIGHTS = ("f16", "q8_0", "q4_0")


def _tests() -> None:
    """Make the generator of the tests' models importable."""
    tests = str(ROOT / "tests")
    if tests not in sys.path:
        sys.path.insert(0, tests)


def tiny() -> Path:
    """Write the tests' tiny llama, whose decode is mostly overhead."""
    _tests()
    from support.models import make_model

    return make_model("llama", BUILD / "models")


def many_bytes() -> Path:
    """Write a llama with 32 KiB per cell, as with some billions of parameters: 16 layers."""
    _tests()
    from support.models import make_model

    sizes = {"n_embd": 512, "n_head": 4, "n_head_kv": 4, "n_layer": 16}
    return make_model("llama", BUILD / "models", **sizes)


def medium(weights: str = "f16") -> Path:
    """Write a llama of 30 million random weights, 8 layers and 32,000 tokens."""
    return random_llama("llama-30m", WIDE, N_VOCAB, weights)


def smallest() -> Path:
    """Write a llama of 135 million random weights, 30 layers and 49,152 tokens."""
    return random_llama("llama-135m", SMALLEST, SMALLEST_VOCAB)


def random_llama(name: str, sizes: dict[str, int], n_vocab: int, weights: str = "f16") -> Path:
    """Write a llama with tied embeddings, as in many small models."""
    path = BUILD / "models" / f"{name}{'' if weights == 'f16' else '-' + weights}.gguf"
    if path.exists():
        return path
    _tests()
    import gguf
    import numpy as np

    from support import attention_models, vocab
    from support.blueprint import Sizes

    base = vocab.spm()
    more = n_vocab - len(base)
    words = vocab.Vocab(
        base.kind,
        base.tokens + tuple(f"▁w{i}".encode() for i in range(more)),
        base.types + (gguf.TokenType.NORMAL,) * more,
        special=base.special,
        add_bos=True,
    )
    plan = attention_models.llama(Sizes(n_ctx_train=65_536, **sizes), n_vocab)
    del plan.tensors["output.weight"]
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".part")
    writer = gguf.GGUFWriter(draft, plan.arch)
    for key, value in plan.keys.items():
        name = f"{plan.arch}{key}" if key.startswith(".") else key
        if isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
    writer.add_file_type(getattr(gguf.LlamaFileType, f"MOSTLY_{weights.upper()}"))
    kind = getattr(gguf.GGMLQuantizationType, weights.upper())
    words.write(writer)
    for name, tensor in plan.tensors.items():
        values = tensor.values(name, 0)
        if values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            packed = gguf.quants.quantize(values.astype(np.float32), kind)
            writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    draft.replace(path)
    return path


def n_parameters() -> int:
    """Count the weights of `medium`."""
    import gguf

    return sum(int(t.n_elements) for t in gguf.GGUFReader(medium()).tensors)
