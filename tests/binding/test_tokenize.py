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
    "x" * 5000,
]
HOSTILE_INTS = [-1, 320, 2**31 - 1, 2**31, -(2**31), 2**63, -(2**63) - 1, 10**40]


@pytest.mark.parametrize("name", ["llama", "llama_bpe", "qwen2vl", "gemma3"])
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


@pytest.mark.parametrize("name", ["llama", "llama_bpe", "bert"])
def test_a_long_text_needs_no_limit(model: Any, name: str) -> None:
    one = model(name)
    text = "hello world and then " * 5000
    tokens = one.tokenize(text)
    assert len(tokens) > 20_000
    assert one.detokenize(tokens).strip() == text.strip()


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


@pytest.mark.hazard("V1", "V2", "V3")
@pytest.mark.parametrize("token", HOSTILE_INTS)
def test_a_token_outside_the_vocabulary_is_refused_by_its_number(model: Any, token: int) -> None:
    one = model("llama")
    with pytest.raises(IndexError, match=str(token)):
        one.token_to_piece(token)
    with pytest.raises(IndexError, match=str(token)):
        one.is_eog(token)
    with pytest.raises((IndexError, ValueError), match=str(token)):
        one.detokenize([1, token])
    if abs(token) < 2**31:
        with pytest.raises(IndexError, match=str(token)):
            one.detokenize(np.array([token, 1]))


@pytest.mark.parametrize("token", [True, np.True_, 1.0, "1", None, [1], b"1", np.float32(1)])
def test_tokens_of_other_types_are_type_errors(model: Any, token: Any) -> None:
    one = model("llama")
    for use in (one.token_to_piece, one.is_eog, lambda t: one.detokenize([t])):
        with pytest.raises(TypeError):
            use(token)


@pytest.mark.parametrize(
    "dtype", [np.int8, np.uint8, np.int16, np.uint32, np.int64, np.uint64, ">i4"]
)
def test_any_integer_dtype_is_taken(model: Any, dtype: Any) -> None:
    one = model("llama")
    tokens = np.array([72, 105, 110, 120]).astype(dtype)
    expected = one.detokenize([72, 105, 110, 120])
    assert one.detokenize(tokens) == expected
    assert one.detokenize(np.repeat(tokens, 3)[::3]) == expected
    assert one.detokenize([np.int64(t) for t in tokens.tolist()]) == expected


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        (np.zeros((2, 2), np.int32), ValueError),
        (np.array(5), ValueError),
        (np.zeros(3), TypeError),
        (np.zeros(3, bool), TypeError),
        (np.array(["a"]), TypeError),
        (np.array([None]), TypeError),
        (np.array([2**40]), ValueError),
        (np.array([2**63], np.uint64), ValueError),
        ("abc", TypeError),
        (b"abc", TypeError),
        (5, TypeError),
        (None, TypeError),
    ],
)
def test_values_that_are_not_vectors_of_integers_are_refused(
    model: Any, tokens: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        model("llama").detokenize(tokens)


@pytest.mark.hazard("V4")
@pytest.mark.parametrize(
    "text", [None, 5, 1.5, ["a"], bytearray(b"a"), memoryview(b"a"), np.array("a")]
)
def test_values_that_are_not_text_are_refused(model: Any, text: Any) -> None:
    with pytest.raises(TypeError):
        model("llama").tokenize(text)


@pytest.mark.hazard("T4")
def test_threads_may_tokenize_together(model: Any) -> None:
    one = model("llama")
    texts = [f"hello world number {i} " * 50 for i in range(40)]
    expected = [one.tokenize(t).tolist() for t in texts]
    with ThreadPoolExecutor(4) as pool:
        assert [t.tolist() for t in pool.map(one.tokenize, texts)] == expected
