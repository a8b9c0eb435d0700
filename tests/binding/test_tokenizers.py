"""Every kind of tokenizer over broken vocabularies and hostile texts: tokens, or a typed error."""

from __future__ import annotations

import struct
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import TokenType

from pykvcache import LlamaModel
from pykvcache.errors import ModelLoadError, UnsupportedOperation
from support import pretokenizers
from support.examples import some
from support.vocab import VOCABS, Vocab

from .vocab_kit import load_vocab, write_vocab

SPACES = "".join(chr(c) for c in range(0x110000) if chr(c).isspace())
UNASSIGNED = "".join(
    [chr(c) for c in range(0x40000) if unicodedata.category(chr(c)) == "Cn"][::999]
)
TEXTS = {
    "spaces": b" ",
    "lines": b"\r\n\t\v\f",
    "white space": SPACES.encode(),
    "NUL": b"\0",
    "surrogates": "\ud800\udfff\udbff\ud800".encode("utf-8", "surrogatepass"),
    "unassigned": ("".join(UNASSIGNED) + "\uffff\U0010ffff").encode(),
    "marks": "\u0301a\u0300\u0bbe\u200d\ufeff\u2581".encode(),
    "no Unicode": b"\x80\xc2\xf0\xc0\x80\xf7\xbf\xbf\xbfa\xfe\xff\xe6\xbc\xf8\x88\x80\x80\x80",
    "scripts": "xX1é漢ᄀ\u1161İß\u0660😀's!?.,;".encode(),
    "names": b"<0x0A><dna>ACGTN</dna><s><|end|>",
}


def bpe(kind: str = "gpt2", pre: str = "gpt-2", *more: bytes) -> Vocab:
    one = VOCABS["bpe"]()
    types = one.types + (TokenType.NORMAL,) * len(more)
    return replace(one, kind=kind, pre=pre, tokens=one.tokens + more, types=types)


KINDS: dict[str, Callable[[], Vocab]] = {
    **{kind: make for kind, make in VOCABS.items() if kind != "none"},
    "hybriddna": lambda: bpe("hybriddna", "gpt-2", b"<dna>", b"</dna>", b"<oov>"),
    "whitespace": lambda: bpe("whitespace", "whitespace"),
    # Of these, words are not written in GPT-2's characters.
    "gpt2, whitespace": lambda: bpe(pre="whitespace"),
    "gpt2, gemma4": lambda: bpe(pre="gemma4"),
    "gpt2, sarvam-moe": lambda: bpe(pre="sarvam-moe"),
}


def broken(vocab: Vocab) -> Iterator[Vocab]:
    """The vocabulary, and what a damaged or forged file makes of it."""
    tokens, types = vocab.tokens, vocab.types
    yield vocab
    for gone in (
        lambda t: len(t) == 6 and t.startswith(b"<0x"),
        lambda t: len(t.decode(errors="replace")) == 1,
    ):
        yield replace(
            vocab, tokens=tuple(b"\x7f%d" % i if gone(t) else t for i, t in enumerate(tokens))
        )
    others = tuple(pair for pair in vocab.special if pair[0] not in ("unknown", "bos"))
    for special in ((), (("unknown", 2**32 - 1),), (("unknown", 2**31), ("bos", 10**6))):
        yield replace(vocab, special=others + special, add_bos=bool(special))
    for change in (
        lambda i, t: b"" if i % 3 == 0 else t,
        lambda i, t: tokens[5] if i % 7 == 6 else t,
        lambda i, t: b" " * i if i > len(tokens) - 6 else t,
        lambda i, t: t + b"\xff" if i % 5 == 0 else t,
    ):
        yield replace(vocab, tokens=tuple(change(i, t) for i, t in enumerate(tokens)))
    for kind in TokenType:
        yield replace(vocab, types=(kind,) * len(types))
    merges = vocab.merges and ("a a",)
    yield replace(vocab, tokens=(b"a",), types=(TokenType.NORMAL,), merges=merges, special=())
    if vocab.merges:
        yield replace(vocab, merges=("a", " ", "", "  ", "a b c", "zz yy"))


def survives(one: LlamaModel, size: int) -> int:
    """The number of texts that become tokens; each that does not is a typed error."""
    good = 0
    for text in TEXTS.values():
        for special in (False, True):
            try:
                tokens = one.tokenize(text * (size // len(text) + 1), parse_special=special)
            except UnsupportedOperation as error:
                if "the vocabulary has no" not in error.reason:
                    raise
                continue
            assert ((tokens >= 0) & (tokens < one.n_vocab)).all()
            assert isinstance(one.detokenize(tokens, special=special), str)
            good += 1
    for token in range(one.n_vocab):
        one.token_to_piece(token, special=bool(token % 2))
    return good


# Out of scope: llama.cpp never returns from an RWKV vocabulary without a token for each byte.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "rwkv"])
def test_a_broken_vocabulary_gives_tokens_or_names_its_fault(tmp_path: Path, kind: str) -> None:
    good = []
    for vocab in broken(KINDS[kind]()):
        try:
            one = load_vocab(vocab, tmp_path)
        except ModelLoadError:
            continue
        good.append(survives(one, 60))
    assert good[0] == 2 * len(TEXTS)
    assert len(good) >= 6


@pytest.mark.parametrize("pre", some(pretokenizers.names(), *pretokenizers.names()[::4]))
def test_every_pre_tokenizer_takes_every_text(tmp_path: Path, pre: str) -> None:
    one = load_vocab(bpe(pre=pre), tmp_path)
    assert survives(one, 60) == 2 * len(TEXTS)


@pytest.mark.hazard("N71")
def test_spaces_of_a_text_in_plain_characters_are_looked_up_one_by_one(tmp_path: Path) -> None:
    # No merge has a space, which llama.cpp asserts: two in a row ended in InternalError.
    one = load_vocab(bpe("gpt2", "whitespace", b" "), tmp_path)
    space = len(one.tokenize("", add_special=False)) + one.n_vocab - 1
    assert one.tokenize("  ", add_special=False).tolist() == [space] * 2
    word = one.tokenize("Hello", add_special=False).tolist()
    both = one.tokenize("Hello   Hello", add_special=False).tolist()
    assert both == [*word, space, space, space, *word]
    assert np.array_equal(both, one.native.tokenize_whole(b"Hello   Hello", False, False))


# Incomplete vocabularies ------------------------------------------------------------------


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
