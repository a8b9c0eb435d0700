"""Text to tokens and back, of every kind of tokenizer: llama.cpp's tokens, or a typed error."""

from __future__ import annotations

import random
import struct
import unicodedata
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import TokenType

from binding.kit import assert_linear, load_vocab, with_tokens, write_vocab
from pykvcache import LlamaModel
from pykvcache.errors import ModelLoadError, UnsupportedOperation
from pykvcache.model import TEXT_BYTES_MAX
from support import pretokenizers
from support.examples import some
from support.pretokenizers import random_text
from support.vocab import VOCABS, Vocab, bpe

TEXTS = [
    "",
    "Hello world",
    "a",
    " ",
    "  two  spaces ",
    "\n\n",
    "\0",
    "a\0b\0",
    "é漢字😀 ✓",
    "hello world and then " * 5000,
]


@pytest.mark.parametrize("name", ["llama", "llama_bpe"])
@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_a_round_trip(model: Any, name: str, text: str) -> None:
    one = model(name)
    tokens = one.tokenize(text, add_special=False)
    assert tokens.dtype == np.int32
    assert tokens.ndim == 1
    assert one.detokenize(tokens) == text
    # A SentencePiece text starts with the space that detokenize takes away again.
    pieces = b"".join(one.token_to_piece(t) for t in tokens)
    assert pieces.removeprefix(b"" if pieces == text.encode() else b" ") == text.encode()


def test_special_tokens_are_added_and_parsed_when_asked(model: Any) -> None:
    one = model("llama")
    plain = one.tokenize("Hello", add_special=False).tolist()
    assert one.tokenize("Hello").tolist() == [1, *plain]
    assert one.tokenize("").tolist() == [1]
    assert one.tokenize("</s>", add_special=False, parse_special=True).tolist() == [2]
    assert 2 not in one.tokenize("</s>", add_special=False).tolist()
    bert = model("bert")
    tokens = bert.tokenize("hello")
    assert (tokens[0], tokens[-1]) == (2, 3)


def test_special_tokens_are_written_out_when_asked(model: Any) -> None:
    one = model("llama")
    tokens = one.tokenize("Hello")
    # llama_detokenize takes the leading space away only where no BOS stands before it.
    assert one.detokenize(tokens) == " Hello"
    assert one.detokenize(tokens, special=True) == "<s> Hello"
    assert one.token_to_piece(1) == b""
    assert one.token_to_piece(1, special=True) == b"<s>"


def test_bytes_are_taken_as_they_are(model: Any) -> None:
    one = model("llama")
    raw = bytes(range(256))
    tokens = one.tokenize(raw, add_special=False)
    assert b"".join(one.token_to_piece(t) for t in tokens) == b" " + raw
    for text in ("é", "\ud800x"):
        raw = text.encode(errors="surrogatepass")
        assert one.tokenize(raw).tolist() == one.tokenize(text).tolist()


def test_a_character_cut_in_two_becomes_the_replacement(model: Any) -> None:
    one = model("llama")
    tokens = one.tokenize("漢", add_special=False)
    assert one.detokenize(tokens[:-1]) == "\ufffd"
    assert "\ufffd" not in one.detokenize(tokens)


def test_a_text_past_the_limit_is_refused(model: Any) -> None:
    one = model("llama_bpe")
    tokens = one.tokenize("a" * 100)
    assert len(one.native.detokenize(tokens, True, False, 100)) == 100
    with pytest.raises(ValueError, match="100 tokens is too long: the limit is 99 bytes"):
        one.native.detokenize(tokens, True, False, 99)
    assert TEXT_BYTES_MAX == 2**31 - 1


@pytest.mark.hazard("V6")
def test_more_characters_than_the_first_buffer_holds(model: Any) -> None:
    one = model("llama")
    token = int(np.argmax([len(one.token_to_piece(t)) for t in range(one.n_vocab)]))
    piece = one.token_to_piece(token).decode()
    text = one.detokenize([token] * 1000)
    assert text.replace(" ", "") == (piece * 1000).replace(" ", "")


@pytest.mark.hazard("V3", "V4")
def test_what_is_no_token_and_no_text_is_refused(model: Any) -> None:
    one = model("llama")
    for token in (-1, 320):
        with pytest.raises((IndexError, ValueError), match=str(token)):
            one.detokenize(np.array([token, 1]))
    for tokens in (np.zeros(3), np.zeros(3, bool), np.array(["a"]), "abc", b"abc", 5, None):
        with pytest.raises(TypeError):
            one.detokenize(tokens)
    for tokens in (np.zeros((2, 2), np.int32), np.array(5), np.array([2**63], np.uint64)):
        with pytest.raises(ValueError):  # noqa: PT011
            one.detokenize(tokens)
    for text in (None, 5, ["a"], bytearray(b"a"), np.array("a")):
        with pytest.raises(TypeError):
            one.tokenize(text)


@pytest.mark.hazard("T4")
def test_threads_may_tokenize_together(model: Any) -> None:
    one = model("llama")
    texts = [f"hello world number {i} " * 50 for i in range(40)]
    expected = [one.tokenize(t).tolist() for t in texts]
    with ThreadPoolExecutor(4) as pool:
        assert [t.tolist() for t in pool.map(one.tokenize, texts)] == expected


KINDS = [kind for kind in VOCABS if kind != "none"]
CONTROL, OWN = TokenType.CONTROL, TokenType.USER_DEFINED

# Overlapping ones, some of one length, some inside others.
SPECIALS = {
    **dict.fromkeys(["<a>", "a><", "<a><b>", "xxx", "<|x|>", "\n\t", "b>x", "yx"], CONTROL),
    **dict.fromkeys(["<b>", "><b", "xx", "xxxxx", "<", "\n\n", "\n\n\n", "é", ">xx"], OWN),
    **dict.fromkeys(["[MASK] ", "xy"], OWN),
}


def specials_of(kind: str) -> Vocab:
    return with_tokens(VOCABS[kind](), SPECIALS)


PIECES = [*SPECIALS, "<a", "b>", "x", " ", "  ", "hello ", "\n", "\t", "the", "y", "é", "\x00"]
PIECES += ["</s>", "[MASK]"]


def overlapping(rng: random.Random) -> bytes:
    pieces = rng.sample(PIECES, rng.choice([2, 4, len(PIECES)]))
    return "".join(rng.choice(pieces) for _ in range(rng.randint(0, 25))).encode()


def words_around_others(rng: random.Random) -> bytes:
    known = [b"hello", b"the", b"world and"]
    words = b" ".join(rng.choice(known) for _ in range(rng.randint(0, 9)))
    return words + random_text(rng) + words


def three_letters(rng: random.Random) -> bytes:
    return "".join(rng.choice("abc ") for _ in range(rng.randint(1, 40))).encode()


def of_three_letters(seed: int) -> Vocab:
    rng = random.Random(seed)
    texts = {"".join(rng.choice("abc") for _ in range(rng.randint(2, 4))) for _ in range(40)}
    return with_tokens(VOCABS["bpe"](), {t: rng.choice([CONTROL, OWN]) for t in sorted(texts)})


MASKS = ["<mask>", "[MASK]", "<|end|>x", "</s>", "<unk>", "<s>", "<|endoftext|>"]


def white_space(rng: random.Random) -> bytes:
    pieces = [*MASKS, "<|end|>", " ", "\n", "  ", "a", "\t"]
    return "".join(rng.choice(pieces) for _ in range(rng.randint(1, 15))).encode()


def stripping(pre: str) -> Vocab:
    return with_tokens(bpe(pre), {**dict.fromkeys(MASKS, CONTROL), "\n": OWN})


Text = Callable[[random.Random], bytes]
# By some names llama.cpp strips white space before or after some tokens.
CASES: dict[str, tuple[Callable[[], Vocab], Text]] = {
    **{f"{kind} with specials": (partial(specials_of, kind), overlapping) for kind in KINDS},
    **{kind: (VOCABS[kind], words_around_others) for kind in KINDS},
    **{f"letters {seed}": (partial(of_three_letters, seed), three_letters) for seed in (0, 1)},
    "phi-3": (partial(stripping, "gpt-2"), white_space),
    "modern-bert": (partial(stripping, "gpt-2"), white_space),
    "jina-v2-de": (partial(stripping, "jina-v2-de"), white_space),
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_llama_cpp(tmp_path: Path, name: str) -> None:
    vocab, text_of = CASES[name]
    one, rng, found = load_vocab(vocab(), tmp_path, name), random.Random(3), 0
    for _ in range(300):
        text = text_of(rng)
        for add, parse in ((False, False), (False, True), (True, True)):
            tokens = one.tokenize(text, add_special=add, parse_special=parse)
            whole = one._native.tokenize_whole(text, add, parse)
            assert tokens.tolist() == whole.tolist(), (text, add, parse)
            found += len(tokens)
    assert found > 3000


UNITS = ["x", " ", "the ", "漢", "Hello world, 123!\n", "\n", "<a><b>he<|x|>"]


@pytest.mark.hazard("N32", "N34")
@pytest.mark.parametrize("kind", KINDS)
def test_the_time_grows_with_the_text(tmp_path: Path, kind: str) -> None:
    one = load_vocab(specials_of(kind), tmp_path)
    for unit in UNITS:
        n = len(unit.encode())
        # What copied all tokens for each character took 20 s of 200 kB.
        assert_linear(lambda size: one.tokenize(unit * (size // n), parse_special=True), 10_000)  # noqa: B023


SPACES = "".join(chr(c) for c in range(0x110000) if chr(c).isspace())
UNASSIGNED = "".join(
    [chr(c) for c in range(0x40000) if unicodedata.category(chr(c)) == "Cn"][::999]
)
HOSTILE = {
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


def gpt2(kind: str = "gpt2", pre: str = "gpt-2", *more: bytes) -> Vocab:
    one = VOCABS["bpe"]()
    types = one.types + (TokenType.NORMAL,) * len(more)
    return replace(one, kind=kind, pre=pre, tokens=one.tokens + more, types=types)


FORMS: dict[str, Callable[[], Vocab]] = {
    **{kind: make for kind, make in VOCABS.items() if kind != "none"},
    "hybriddna": lambda: gpt2("hybriddna", "gpt-2", b"<dna>", b"</dna>", b"<oov>"),
    "whitespace": lambda: gpt2("whitespace", "whitespace"),
    # Of these, words are not written in GPT-2's characters.
    "gpt2, whitespace": lambda: gpt2(pre="whitespace"),
    "gpt2, gemma4": lambda: gpt2(pre="gemma4"),
    "gpt2, sarvam-moe": lambda: gpt2(pre="sarvam-moe"),
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
    for text in HOSTILE.values():
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


@pytest.mark.hazard("V5")
# Out of scope: llama.cpp never returns from an RWKV vocabulary without a token for each byte.
@pytest.mark.parametrize("kind", [kind for kind in FORMS if kind != "rwkv"])
def test_a_broken_vocabulary_gives_tokens_or_names_its_fault(tmp_path: Path, kind: str) -> None:
    good = []
    for vocab in broken(FORMS[kind]()):
        try:
            one = load_vocab(vocab, tmp_path)
        except ModelLoadError:
            continue
        good.append(survives(one, 60))
    assert good[0] == 2 * len(HOSTILE)
    assert len(good) >= 6


@pytest.mark.parametrize("pre", some(pretokenizers.names(), *pretokenizers.names()[::4]))
def test_every_pre_tokenizer_takes_every_text(tmp_path: Path, pre: str) -> None:
    one = load_vocab(gpt2(pre=pre), tmp_path)
    assert survives(one, 60) == 2 * len(HOSTILE)


@pytest.mark.hazard("N71")
def test_spaces_of_a_text_in_plain_characters_are_looked_up_one_by_one(tmp_path: Path) -> None:
    # No merge has a space, which llama.cpp asserts: two in a row ended in InternalError.
    one = load_vocab(gpt2("gpt2", "whitespace", b" "), tmp_path)
    space = len(one.tokenize("", add_special=False)) + one.n_vocab - 1
    assert one.tokenize("  ", add_special=False).tolist() == [space] * 2
    word = one.tokenize("Hello", add_special=False).tolist()
    both = one.tokenize("Hello   Hello", add_special=False).tolist()
    assert both == [*word, space, space, space, *word]
    assert np.array_equal(both, one.native.tokenize_whole(b"Hello   Hello", False, False))


def without(vocab: Vocab, *tokens: bytes) -> Vocab:
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


def without_special(*names: str) -> Vocab:
    wpm = VOCABS["wpm"]()
    return replace(wpm, special=tuple(pair for pair in wpm.special if pair[0] not in names))


@pytest.mark.parametrize(
    ("vocab", "fine", "options", "text", "said"),
    [
        (without(VOCABS["spm"](), b"<0xC3>"), "hello", {}, "hé", "no token for a byte"),
        # Without an unknown token llama.cpp answers with -1 for what has no token.
        (of("rwkv", b"\\n", b"a"), "a", {}, "漢", "no unknown token"),
        (without_special("unknown"), "a", {}, "漢", "no unknown token"),
        (
            without_special("seperator", "bos", "cls"),
            "a",
            {"add_special": True},
            "a",
            "use add_special=False",
        ),
    ],
)
def test_what_a_vocabulary_has_no_token_for_is_a_typed_error(
    tmp_path: Path, vocab: Vocab, fine: str, options: Any, text: str, said: str
) -> None:
    one = load_vocab(vocab, tmp_path)
    assert len(one.tokenize(fine, add_special=False)) >= 1
    with pytest.raises(UnsupportedOperation, match=said):
        one.tokenize(text, **({"add_special": False} | options))
