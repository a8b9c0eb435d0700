"""Every tokenizer on long texts: the tokens of llama.cpp, in time that grows with the text."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from support.pretokenizers import random_text
from support.vocab import VOCABS

from .vocab_kit import load_vocab

KINDS = [kind for kind in VOCABS if kind != "none"]
UNITS = ["x", " ", "the ", "漢", "hello", "Hello world, 123!\n", "\n", "\0"]


@pytest.mark.parametrize("kind", KINDS)
def test_random_texts_have_the_tokens_of_llama_cpp(tmp_path: Path, kind: str) -> None:
    one = load_vocab(VOCABS[kind](), tmp_path)
    rng = random.Random(11)
    for _ in range(300):
        words = b" ".join(
            rng.choice([b"hello", b"the", b"world and"]) for _ in range(rng.randint(0, 9))
        )
        text = words + random_text(rng) + words
        tokens = one.tokenize(text, add_special=False)
        assert tokens.tolist() == one._native.tokenize_whole(text, False, False).tolist(), text


@pytest.mark.hazard("N34")
@pytest.mark.parametrize("kind", KINDS)
def test_the_time_grows_with_the_text(tmp_path: Path, kind: str) -> None:
    one = load_vocab(VOCABS[kind](), tmp_path)
    for unit in UNITS:
        seconds = []
        for size in (10_000, 200_000):
            text = unit * (size // len(unit.encode()))
            start = time.process_time()
            one.tokenize(text)
            seconds.append(time.process_time() - start)
        # 20 times the text. What copied all tokens for each character took 20 s of 200 kB.
        assert seconds[1] < 4 * 20 * seconds[0] + 0.5, unit


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ten_megabytes(tmp_path: Path, kind: str) -> None:
    one = load_vocab(VOCABS[kind](), tmp_path)
    for unit in UNITS:
        text = unit * (10_000_000 // len(unit.encode()))
        tokens = one.tokenize(text, add_special=False)
        assert ((tokens >= 0) & (tokens < one.n_vocab)).all()
