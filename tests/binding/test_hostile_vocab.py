"""Vocabularies that lack what their tokenizer counts on: typed errors."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from gguf import TokenType

from pykvcache import LlamaModel
from pykvcache.errors import ModelLoadError, UnsupportedOperation
from support.vocab import VOCABS, Vocab

from .vocab_kit import load_vocab, write_vocab

if TYPE_CHECKING:
    from .conftest import Child

LOAD = """
import sys, pykvcache
try:
    one = pykvcache.LlamaModel(sys.argv[1], vocab_only=True)
    one.tokenize("a hello \\n")
except pykvcache.errors.ModelLoadError as error:
    print(error)
"""


def without(vocab: Vocab, *tokens: bytes) -> Vocab:
    """The vocabulary with some tokens replaced by others that no text has."""
    names = [b"\x7f%d" % i if token in tokens else token for i, token in enumerate(vocab.tokens)]
    assert names != list(vocab.tokens)
    return replace(vocab, tokens=tuple(names))


def of(kind: str, *tokens: bytes) -> Vocab:
    return Vocab(kind, tokens, tuple([TokenType.NORMAL] * len(tokens)))


HOSTILE = {
    # Looked for for ever, by the load itself or by the first text that has it.
    "rwkv, no byte": (of("rwkv", b"s", b"ab", b"\\n"), r"byte \\x61"),
    "rwkv, no line": (of("rwkv", b"s", b"\\n\\n"), r"byte \\x0a"),
    "rwkv, no escaped byte": (of("rwkv", b"s", b"\\n", b"\\xe6\\xbc\\xa2"), r"byte \\xe6"),
    # llama.cpp reads a token without a name as "[EMPTY_2]", which no text need end.
    "rwkv, token without a name": (of("rwkv", b"s", b"\\n", b""), r"byte \x5b"),
    # A tree as deep as the token is long, built and taken down by recursion.
    "rwkv, long token": (of("rwkv", b"\\n", b"x", b"x" * 300_000), "300000 bytes"),
    "t5, long token": (of("t5", b"a", b"b", b"u", b"x" * 300_000), "300000 bytes"),
    "bert, long token": (of("bert", b"a", b"b", b"u", b"x" * 300_000), "300000 bytes"),
    # Every length up to it is looked for from every character: 20 kB of text took 5 seconds.
    "bert, rather long token": (of("bert", b"a", b"b", b"u", b"x" * 401), "the limit is 400"),
    # Its table would have a row for each part of each token.
    "plamo2, long token": (of("plamo2", b"x" * 300_000), "300000 bytes"),
    "plamo2, many long tokens": (of("plamo2", *(b"%05d" % i * 200 for i in range(99))), "cubes"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_vocabulary_that_would_not_be_come_back_from_is_refused(
    tmp_path: Path, forked: Child, what: str
) -> None:
    vocab, reason = HOSTILE[what]
    done = forked(LOAD, write_vocab(vocab, tmp_path / "m.gguf"), timeout=20)
    assert done.returncode == 0, done.stderr[-500:]
    assert "cannot load" in done.stdout
    assert reason.replace("\\\\", "\\") in done.stdout


def test_a_vocabulary_of_no_tokens_is_refused(tmp_path: Path, forked: Child) -> None:
    # llama.cpp divides by their number. The writer leaves an empty list out.
    path = write_vocab(of("test", b"zzz"), tmp_path / "m.gguf")
    data = path.read_bytes()
    one, none = struct.pack("<IIQQ", 9, 8, 1, 3) + b"zzz", struct.pack("<IIQ", 9, 8, 0)
    assert data.count(one) == 1
    path.write_bytes(data.replace(one, none) + bytes(64))
    done = forked(LOAD, path)
    assert done.returncode == 0, done.stderr[-500:]
    assert "tokenizer.ggml.tokens is empty" in done.stdout


def test_a_complete_rwkv_vocabulary_takes_any_bytes(tmp_path: Path) -> None:
    one = load_vocab(VOCABS["rwkv"](), tmp_path)
    text = bytes(range(256)) * 3
    tokens = one.tokenize(text, add_special=False)
    assert b"".join(one.token_to_piece(token) for token in tokens) == text


def test_a_missing_byte_is_named(tmp_path: Path) -> None:
    one = load_vocab(without(VOCABS["spm"](), b"<0xC3>"), tmp_path)
    assert len(one.tokenize("hello")) > 1
    with pytest.raises(UnsupportedOperation, match="<0xC3>"):
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


def test_a_special_token_that_is_to_be_added_and_missing_is_named(tmp_path: Path) -> None:
    vocab = VOCABS["wpm"]()
    kept = [pair for pair in vocab.special if pair[0] not in ("seperator", "bos", "cls")]
    one = load_vocab(replace(vocab, special=tuple(kept)), tmp_path)
    with pytest.raises(UnsupportedOperation, match=r"BOS.*add_special=False"):
        one.tokenize("a")
    assert one.tokenize("a", add_special=False).tolist() == [5]


def charsmap(nodes: dict[int, int], replacements: bytes) -> bytes:
    """SentencePiece's table of replacements: nodes by their place, then texts that end with NUL."""
    array = np.zeros(512, "<u4")
    array[list(nodes)] = list(nodes.values())
    return struct.pack("<I", array.nbytes) + array.tobytes() + replacements


def node(label: str, offset: int, *, is_leaf: bool = False) -> int:
    return offset << 10 | is_leaf << 8 | ord(label)


def test_a_table_of_characters_that_loops_is_refused(tmp_path: Path) -> None:
    # "a" leads to itself: each character of a text of them would be followed to its end.
    loop = charsmap({ord("a"): node("a", ord("a"))}, b"z\0")
    path = write_vocab(VOCABS["ugm"](), tmp_path / "m.gguf", charsmap=loop)
    with pytest.raises(ModelLoadError, match="comes back"):
        LlamaModel(path, vocab_only=True)


def test_a_table_of_characters_whose_branches_meet_does_not_loop(tmp_path: Path) -> None:
    # "ac" and "bc" become "he", by one end that both share.
    meet = charsmap(
        {
            ord("a"): node("a", ord("a") ^ 0x100),
            ord("b"): node("b", ord("b") ^ 0x100),
            0x100 ^ ord("c"): node("c", ord("c") ^ 0x80, is_leaf=True),
            0x180: 1 << 31,
        },
        b"he\0",
    )
    path = write_vocab(VOCABS["ugm"](), tmp_path / "m.gguf", charsmap=meet)
    one = LlamaModel(path, vocab_only=True)
    expected = one.tokenize("he", add_special=False).tolist()
    assert one.tokenize("ac", add_special=False).tolist() == expected
    assert one.tokenize("bc", add_special=False).tolist() == expected
    assert one.tokenize("ad", add_special=False).tolist() != expected
