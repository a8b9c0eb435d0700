"""Checks of a grammar's text before llama.cpp reads it."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import numpy as np
import pytest
from gguf import TokenType

from pykvcache import Sampler
from pykvcache._grammar import check_grammar
from pykvcache.errors import GrammarError, UnsupportedOperation
from support.vocab import VOCABS

from .vocab_kit import load_vocab, with_tokens

# What is not closed, and what could be read in several ways.
PARTS = ["[", "[\\", '"', '"\\', "{", "{ ", "{1 ", "{,", "#", "(", ")", ":", " ", "1"]
STARTS = ["{", "{1,", '"', "[", "#", "x ::= ["]


@pytest.mark.hazard("N14")
@pytest.mark.parametrize("part", PARTS)
def test_the_time_grows_with_the_grammar(part: str) -> None:
    seconds = []
    for size in (5_000, 100_000):
        start = time.process_time()
        for first in ("", *STARTS):
            with contextlib.suppress(GrammarError):
                check_grammar(first + part * (size // len(part)))
        seconds.append(time.process_time() - start)
    # 20 times the text: its square would be 400 times the time, which was minutes.
    assert seconds[1] < 4 * 20 * seconds[0] + 0.5


@pytest.mark.parametrize("good", ["{2}", "{ 2 }", "{2,}", "{,2}", "{ 1 , 2 }", "{2000}", "{0,0}"])
def test_a_repetition_within_bounds_passes(good: str) -> None:
    check_grammar(f'root ::= "a"{good}')


@pytest.mark.parametrize(
    "bad", ["{2001}", "{ 0 , 2001 }", "{3,2}", "{ 3 ,2 }", "{99999999999999999999999}", "{2001,}"]
)
def test_a_repetition_out_of_bounds_is_refused(bad: str) -> None:
    with pytest.raises(GrammarError, match=r"repeats more|above its maximum"):
        check_grammar(f'root ::= "a"{bad}')


def test_quoted_braces_do_not_count_as_repetition() -> None:
    check_grammar('root ::= "{3,2}" [{3,2}\\]{3,2}] # {3,2}')


def test_a_token_that_is_too_long_for_a_grammar_is_named(tmp_path: Path) -> None:
    # 100,000 characters overflow the stack when the grammar is compared with them.
    vocab = VOCABS["spm"]()
    long = with_tokens(vocab, {"x" * 100_000: TokenType.NORMAL})
    one = load_vocab(long, tmp_path)
    with pytest.raises(UnsupportedOperation, match=f"token {len(vocab)} has 100000 bytes"):
        Sampler(grammar="root ::= [x]*", model=one)
    fits = load_vocab(with_tokens(vocab, {"x" * 2048: TokenType.NORMAL}), tmp_path)
    sampler = Sampler(grammar="root ::= [x]*", model=fits, temperature=0)
    logits = np.zeros(fits.n_vocab, np.float32)
    logits[len(vocab)] = 1
    assert sampler.sample(logits) == len(vocab)
