"""Models that are a vocabulary and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
from gguf import TokenType

from pykvcache import LlamaModel
from support.vocab import Vocab


def write_vocab(
    vocab: Vocab, path: Path, name: str | None = None, charsmap: bytes | None = None
) -> Path:
    """Write a GGUF without tensors: it loads with ``vocab_only=True``."""
    writer = gguf.GGUFWriter(path, "llama")
    vocab.write(writer)
    if name is not None:
        writer.add_name(name)
    if charsmap is not None:
        writer.add_precompiled_charsmap(charsmap)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load_vocab(vocab: Vocab, folder: Path, name: str | None = None) -> LlamaModel:
    """Load a vocabulary alone."""
    return LlamaModel(write_vocab(vocab, folder / "vocab.gguf", name), vocab_only=True)


def with_tokens(vocab: Vocab, more: dict[str, TokenType]) -> Vocab:
    """The vocabulary with tokens added at its end, or of another type where it has them."""
    types = dict(zip(vocab.tokens, vocab.types, strict=True))
    types |= {text.encode(): kind for text, kind in more.items()}
    return replace(vocab, tokens=tuple(types), types=tuple(types.values()))
