"""Text to tokens and back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from pykvcache.model import TEXT_BYTES_MAX

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
    assert one.tokenize("é".encode()).tolist() == one.tokenize("é").tolist()


@pytest.mark.hazard("V5")
@pytest.mark.parametrize("name", ["llama", "llama_bpe", "bert", "llama_test"])
@pytest.mark.parametrize(
    "text", [b"\xff\xfe\x80abc", b"\xe2\x9c", b"\xf0", b"\xed\xa0\x80", "\ud800x"]
)
def test_invalid_unicode_is_tokenized_without_harm(model: Any, name: str, text: Any) -> None:
    one = model(name)
    tokens = one.tokenize(text)
    assert ((tokens >= 0) & (tokens < one.n_vocab)).all()
    assert isinstance(one.detokenize(tokens), str)


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


@pytest.mark.parametrize("name", ["llama", "llama_bpe", "bert", "llama_test", "t5"])
def test_every_token_has_a_piece(model: Any, name: str) -> None:
    one = model(name)
    for token in range(one.n_vocab):
        assert isinstance(one.token_to_piece(token, special=True), bytes)
        assert isinstance(one.detokenize([token], special=True), str)


@pytest.mark.hazard("V1", "V2", "V3", "V4")
def test_what_is_no_token_and_no_text_is_refused(model: Any) -> None:
    one = model("llama")
    for token in (-1, 320, 2**31, -(2**31), 2**63, 10**40):
        for use in (one.token_to_piece, one.is_eog):
            with pytest.raises(IndexError, match=str(token)):
                use(token)
        with pytest.raises((IndexError, ValueError), match=str(token)):
            one.detokenize([1, token])
        if abs(token) < 2**31:
            with pytest.raises((IndexError, ValueError), match=str(token)):
                one.detokenize(np.array([token, 1]))
    for wrong in (True, np.True_, 1.0, "1", None, [1], b"1"):
        for use in (one.token_to_piece, one.is_eog, lambda t: one.detokenize([t])):
            with pytest.raises(TypeError):
                use(wrong)
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
