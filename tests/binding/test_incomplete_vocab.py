"""Vocabularies that lack what their tokenizer counts on: typed errors."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import TokenType

from pykvcache import LlamaModel
from pykvcache.errors import ModelLoadError, UnsupportedOperation
from support.vocab import VOCABS, Vocab

from .vocab_kit import load_vocab, write_vocab


def without(vocab: Vocab, *tokens: bytes) -> Vocab:
    """The vocabulary with some tokens replaced by others that no text has."""
    names = [b"\x7f%d" % i if token in tokens else token for i, token in enumerate(vocab.tokens)]
    assert names != list(vocab.tokens)
    return replace(vocab, tokens=tuple(names))


def of(kind: str, *tokens: bytes) -> Vocab:
    return Vocab(kind, tokens, tuple([TokenType.NORMAL] * len(tokens)))


def test_a_vocabulary_of_no_tokens_is_refused(tmp_path: Path) -> None:
    # llama.cpp divides by their number. The writer leaves an empty list out.
    path = write_vocab(of("test", b"zzz"), tmp_path / "m.gguf")
    data = path.read_bytes()
    one, none = struct.pack("<IIQQ", 9, 8, 1, 3) + b"zzz", struct.pack("<IIQ", 9, 8, 0)
    assert data.count(one) == 1
    path.write_bytes(data.replace(one, none) + bytes(64))
    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.tokens is empty"):
        LlamaModel(path, vocab_only=True)


def test_a_complete_rwkv_vocabulary_takes_any_bytes(tmp_path: Path) -> None:
    one = load_vocab(VOCABS["rwkv"](), tmp_path)
    text = bytes(range(256)) * 3
    tokens = one.tokenize(text, add_special=False)
    assert b"".join(one.token_to_piece(token) for token in tokens) == text


def test_a_missing_byte_is_a_typed_error(tmp_path: Path) -> None:
    one = load_vocab(without(VOCABS["spm"](), b"<0xC3>"), tmp_path)
    assert len(one.tokenize("hello")) > 1
    with pytest.raises(UnsupportedOperation, match="no token for a byte"):
        one.tokenize("hé")


def test_invalid_tokens_never_come_out(tmp_path: Path) -> None:
    # Without an unknown token llama.cpp answers with -1 for what has no token.
    wpm = VOCABS["wpm"]()
    kept = [pair for pair in wpm.special if pair[0] != "unknown"]
    for vocab in (of("rwkv", b"\\n", b"a"), replace(wpm, special=tuple(kept))):
        one = load_vocab(vocab, tmp_path)
        assert len(one.tokenize("a", add_special=False)) == 1
        with pytest.raises(UnsupportedOperation, match="no unknown token"):
            one.tokenize("漢", add_special=False)


def test_a_special_token_that_is_missing_cannot_be_added(tmp_path: Path) -> None:
    vocab = VOCABS["wpm"]()
    kept = [pair for pair in vocab.special if pair[0] not in ("seperator", "bos", "cls")]
    one = load_vocab(replace(vocab, special=tuple(kept)), tmp_path)
    with pytest.raises(UnsupportedOperation, match="use add_special=False"):
        one.tokenize("a")
    assert one.tokenize("a", add_special=False).tolist() == [5]
