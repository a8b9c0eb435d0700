"""Helpers of these tests."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest
from gguf import TokenType

from pykvcache import LlamaModel
from support.models import finish
from support.sanitizer import SANITIZED
from support.vocab import Vocab

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from pykvcache import LlamaContext


def words(n: int, seed: int = 0) -> NDArray[np.int32]:
    """Tokens that are in every test vocabulary and end no text."""
    return np.random.default_rng(seed).integers(5, 57, n).astype(np.int32)


def differ(a: ArrayLike, b: ArrayLike) -> float:
    return float(np.abs(np.asarray(a) - np.asarray(b)).max())


def resident_bytes() -> int:
    """Return the resident memory of this process; skip the test without /proc."""
    if SANITIZED:
        pytest.skip("AddressSanitizer keeps what was freed")
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("needs /proc to measure memory")
    gc.collect()
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def assert_linear(work: Callable[[int], object], small: int) -> None:
    """Time a work of a size and of 20 times as much: its square would take 400 times as long."""
    seconds = []
    for size in (small, 20 * small):
        start = time.process_time()
        work(size)
        seconds.append(time.process_time() - start)
    assert seconds[1] < 4 * 20 * seconds[0] + 0.5


def lengths(ctx: LlamaContext) -> dict[int, int]:
    ends = {seq: ctx.kv_cache_seq_pos_max(seq) + 1 for seq in range(ctx.n_seq_max)}
    return {seq: end for seq, end in ends.items() if end}


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
    finish(writer)
    return path


def load_vocab(vocab: Vocab, folder: Path, name: str | None = None) -> LlamaModel:
    return LlamaModel(write_vocab(vocab, folder / "vocab.gguf", name), vocab_only=True)


def with_tokens(vocab: Vocab, more: dict[str, TokenType]) -> Vocab:
    """The vocabulary with tokens added at its end, or of another type where it has them."""
    types = dict(zip(vocab.tokens, vocab.types, strict=True))
    types |= {text.encode(): kind for text, kind in more.items()}
    return replace(vocab, tokens=tuple(types), types=tuple(types.values()))
