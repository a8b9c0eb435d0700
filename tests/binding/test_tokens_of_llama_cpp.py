"""Every tokenizer, special tokens included: the tokens of llama.cpp, in time by the length."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from gguf import TokenType

from support.pretokenizers import random_text
from support.vocab import VOCABS, bpe

from .vocab_kit import load_vocab, with_tokens

KINDS = [kind for kind in VOCABS if kind != "none"]
CONTROL, OWN = TokenType.CONTROL, TokenType.USER_DEFINED

# Overlapping ones, some of one length, some inside others.
SPECIALS = {
    **dict.fromkeys(["<a>", "a><", "<a><b>", "xxx", "<|x|>", "\n\t", "b>x", "yx"], CONTROL),
    **dict.fromkeys(["<b>", "><b", "xx", "xxxxx", "<", "\n\n", "\n\n\n", "é", ">xx"], OWN),
    **dict.fromkeys(["[MASK] ", "xy"], OWN),
}
PIECES = [*SPECIALS, "<a", "b>", "x", " ", "  ", "hello ", "\n", "\t", "the", "y", "é", "\x00"]
PIECES += ["</s>", "[MASK]"]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_llama_cpp(tmp_path: Path, kind: str) -> None:
    one = load_vocab(with_tokens(VOCABS[kind](), SPECIALS), tmp_path)
    rng = random.Random(3)
    found = 0
    for _ in range(400):
        pieces = rng.sample(PIECES, rng.choice([2, 4, len(PIECES)]))
        text = "".join(rng.choice(pieces) for _ in range(rng.randint(0, 25))).encode()
        for add, parse in ((False, False), (False, True), (True, True)):
            tokens = one.tokenize(text, add_special=add, parse_special=parse)
            whole = one._native.tokenize_whole(text, add, parse)
            assert tokens.tolist() == whole.tolist(), (text, add, parse)
            found += len(tokens)
    assert found > 4000


@pytest.mark.parametrize("seed", range(2))
def test_the_order_of_specials_of_one_length_is_llama_cpps(tmp_path: Path, seed: int) -> None:
    # Three letters, lengths of 1 to 4: nearly everything overlaps.
    rng = random.Random(seed)
    texts = {"".join(rng.choice("abc") for _ in range(rng.randint(2, 4))) for _ in range(40)}
    specials = {text: rng.choice([CONTROL, OWN]) for text in sorted(texts)}
    one = load_vocab(with_tokens(VOCABS["bpe"](), specials), tmp_path)
    for _ in range(300):
        text = "".join(rng.choice("abc ") for _ in range(rng.randint(1, 40))).encode()
        for parse in (False, True):
            tokens = one.tokenize(text, add_special=False, parse_special=parse)
            assert tokens.tolist() == one._native.tokenize_whole(text, False, parse).tolist()


@pytest.mark.parametrize(
    ("name", "pre"), [("phi-3", "gpt-2"), ("modern-bert", "gpt-2"), ("", "jina-v2-de")]
)
def test_white_space_next_to_a_special_token_follows_the_model(
    tmp_path: Path, name: str, pre: str
) -> None:
    # By these names llama.cpp strips white space before or after some tokens.
    specials = ["<mask>", "[MASK]", "<|end|>x", "</s>", "<unk>", "<s>", "<|endoftext|>"]
    more = {**dict.fromkeys(specials, CONTROL), "\n": OWN}
    one = load_vocab(with_tokens(bpe(pre), more), tmp_path, name or None)
    rng = random.Random(5)
    pieces = [*specials, "<|end|>", " ", "\n", "  ", "a", "\t"]
    for _ in range(300):
        text = "".join(rng.choice(pieces) for _ in range(rng.randint(1, 15))).encode()
        tokens = one.tokenize(text, parse_special=True)
        assert tokens.tolist() == one._native.tokenize_whole(text, True, True).tolist(), text


# Long and random texts -------------------------------------------------------------------

UNITS = ["x", " ", "the ", "漢", "Hello world, 123!\n", "\n", "<a><b>he<|x|>"]


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


@pytest.mark.hazard("N32", "N34")
@pytest.mark.parametrize("kind", KINDS)
def test_the_time_grows_with_the_text(tmp_path: Path, kind: str) -> None:
    one = load_vocab(with_tokens(VOCABS[kind](), SPECIALS), tmp_path)
    for unit in UNITS:
        seconds = []
        for size in (10_000, 200_000):
            text = unit * (size // len(unit.encode()))
            start = time.process_time()
            one.tokenize(text, parse_special=True)
            seconds.append(time.process_time() - start)
        # 20 times the text. What copied all tokens for each character took 20 s of 200 kB.
        assert seconds[1] < 4 * 20 * seconds[0] + 0.5, unit
