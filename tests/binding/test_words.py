"""How text is cut into words before a BPE vocabulary sees it."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from binding.kit import assert_linear
from pykvcache import LlamaModel
from pykvcache._native import lib
from support import pretokenizers
from support.models import make_model, with_keys

PATTERNS = pretokenizers.patterns()
TEXTS = min(1000, int(os.environ.get("PYKVCACHE_FUZZ_CALLS", 1000)) // 20)
SEED = int(os.environ.get("PYKVCACHE_FUZZ_SEED", 1))
# What std::regex matched character by character: some 30,000 were enough for its stack.
LONG = {
    "letters": "x",
    "capitals": "X",
    "ideographs": "漢",
    "spaces": " ",
    "lines": "\n",
    "digits": "1",
    "emoji": "😀",
    "marks": "a\u0301",
    "contractions": "'s",
    "words": "Hello world, 123!\n",
}
# Where one look at a run from each of its characters shows.
RUNS = {"spaces": b" %sx", "digits": b"1%sx", "capitals": b"X%s1", "lines": b"\n %sx"}

pytestmark = pytest.mark.skipif(not PATTERNS, reason="needs the sources of llama.cpp")


def split(text: bytes, patterns: list[bytes], *, original: bool = False) -> list[bytes]:
    return lib.split_text(text, patterns, False, original)


@pytest.mark.hazard("N31")
@pytest.mark.parametrize("patterns", PATTERNS, ids=range(len(PATTERNS)))
def test_words_are_those_of_std_regex(patterns: list[bytes]) -> None:
    rng = random.Random(SEED)
    for _ in range(TEXTS):
        text = pretokenizers.random_text(rng)
        assert split(text, patterns) == split(text, patterns, original=True), text
        assert lib.split_text(text, patterns, True, False) == lib.split_text(
            text, patterns, True, True
        )


@pytest.mark.parametrize("kind", LONG)
def test_a_long_run_of_one_kind_has_its_words(kind: str) -> None:
    # Without the first and last words, those of any length are those of a shorter one.
    unit = LONG[kind].encode()
    times = 133 if len(unit) < 9 else 13
    for patterns in PATTERNS:
        short = split(unit * 300, patterns, original=True)
        long = split(unit * 300 * times, patterns)
        assert b"".join(long) == unit * 300 * times
        assert set(map(len, long)) <= set(map(len, short)) or max(map(len, long)) > 300
        assert len(long) <= (len(short) + 1) * times


@pytest.mark.parametrize("kind", RUNS)
def test_the_time_grows_with_the_text_and_not_with_its_square(kind: str) -> None:
    unit, end = RUNS[kind].split(b"%s")

    def cut(size: int) -> None:
        text = unit * (size // len(unit)) + end
        for patterns in PATTERNS:
            assert b"".join(split(text, patterns)) == text

    assert_linear(cut, 5_000)  # a quadratic pattern takes more than all the others


@pytest.mark.parametrize(
    "pattern", ["a*", "(a?)+", "a+?", "(?<=a)b", r"\bab", "[z-a]", "(a", "a)", "*"]
)
def test_a_pattern_that_is_not_understood_is_refused_and_not_guessed(pattern: str) -> None:
    with pytest.raises(ValueError, match="regular expression"):
        split(b"aaa", [pattern.encode()])


def test_invalid_code_points_are_replaced() -> None:
    # llama.cpp decodes them, and throws when it writes them again.
    for patterns in PATTERNS:
        words = split(b"a\xf7\xbf\xbf\xbfb", patterns)
        assert b"".join(words) == "a\ufffd\ufffd\ufffd\ufffdb".encode()


@pytest.mark.hazard("N31")
def test_texts_of_any_length_are_tokenized(model_folder: Path, tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.pre": "deepseek-v3"}
    path = with_keys(make_model("llama_bpe", model_folder), tmp_path / "m.gguf", keys)
    one = LlamaModel(path, vocab_only=True)
    for text in ("x" * 30_000, " " * 30_000, "漢" * 20_000, "1" * 30_000):
        tokens = one.tokenize(text, add_special=False)
        assert b"".join(one.token_to_piece(token) for token in tokens) == text.encode()
