"""Grammars: the text follows them, or an error says why it cannot, and where."""

from __future__ import annotations

import contextlib
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import TokenType

from binding.kit import assert_linear, load_vocab, with_tokens, words
from pykvcache import Sampler
from pykvcache._grammar import check_grammar
from pykvcache.errors import GrammarError, UnsupportedOperation
from support.children import forked
from support.sanitizer import SANITIZED
from support.vocab import VOCABS

DIGITS = "root ::= [0-9]+"


def text_of(model: Any, tokens: Any) -> str:
    return b"".join(model.token_to_piece(t) for t in tokens).decode()


def sampled(ctx: Any, grammar: str, n: int, **options: Any) -> str:
    sampler = Sampler(**({"temperature": 0} | options), grammar=grammar, model=ctx.model)
    return text_of(ctx.model, ctx.generate(words(5), n, sampler))


@pytest.mark.parametrize("name", ["llama", "llama_bpe"])
@pytest.mark.parametrize("options", [{}, {"temperature": 5.0, "seed": 3, "top_k": 0}])
def test_the_text_follows_the_grammar(make_context: Any, name: str, options: Any) -> None:
    assert re.fullmatch(r"[0-9]{10}", sampled(make_context(name), DIGITS, 10, **options))


def test_alternatives_repetitions_and_rules(make_context: Any) -> None:
    ctx = make_context("llama")
    grammar = 'list ::= "[" item ("," item){2} "]"\nitem ::= "a" | "b" [0-9] # comment\n'
    options = {"grammar": grammar, "grammar_root": "list", "top_k": 0, "top_p": 1.0}
    sampler = Sampler(temperature=10.0, seed=1, model=ctx.model, **options)  # type: ignore[arg-type]
    for _ in range(5):
        ctx.clear_kv_cache()
        sampler.reset()
        text = text_of(ctx.model, ctx.generate(words(5), 40, sampler))
        assert re.fullmatch(r"\[(a|b[0-9])(,(a|b[0-9])){2}\]", text)


def test_a_finished_grammar_ends_the_text_or_says_so(make_context: Any) -> None:
    assert sampled(make_context("llama"), 'root ::= "ab"', 10) == "ab"
    # Without an end token, all tokens are excluded.
    ctx = make_context("llama_bpe")
    sampler = Sampler(temperature=0, grammar='root ::= "ab"', model=ctx.model)
    tokens = list(ctx.generate(words(5), 10, sampler))
    assert text_of(ctx.model, tokens) == "ab"


def test_a_grammar_needs_a_model_with_a_vocabulary(model: Any) -> None:
    with pytest.raises(UnsupportedOperation):
        Sampler(grammar=DIGITS, model=model("llama_none"))
    for wrong in (5, b"root ::= [0-9]", ["a"], "root ::= [0-9]\0"):
        with pytest.raises((TypeError, ValueError), match="grammar"):
            Sampler(grammar=wrong, model=model("llama"))  # type: ignore[arg-type]
        with pytest.raises((TypeError, ValueError), match="grammar_root"):
            Sampler(grammar=DIGITS, grammar_root=wrong, model=model("llama"))  # type: ignore[arg-type]


@pytest.mark.parametrize(("n", "is_fine"), [(20, True), (50, False), (2000, False)])
def test_nested_repetitions_of_what_may_be_empty_are_bounded(
    model: Any, n: int, is_fine: bool
) -> None:
    """llama.cpp tries every way to skip them: for n = 50 a token takes minutes."""
    grammar = f'root ::= x{{0,{n}}}\nx ::= y{{0,{n}}}\ny ::= "a"?'
    with contextlib.nullcontext() if is_fine else pytest.raises(GrammarError, match="may be empty"):
        Sampler(grammar=grammar, model=model("llama"))


def test_a_grammar_belongs_to_one_vocabulary(make_context: Any, model: Any) -> None:
    # Both have 320 tokens, which stand for different texts.
    ctx = make_context("llama_test")
    ctx.decode(words(5))
    with pytest.raises(ValueError, match="another model"):
        Sampler(grammar=DIGITS, model=model("llama")).sample(ctx)


TOO_DEEP = {
    "nested": lambda n: "root ::= " + "(" * n + "[a]" + ")" * n,
    "open": lambda n: "root ::= " + "(" * n,
    "chained": lambda n: "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(n)),
    "reversed": lambda n: f"root ::= [a]{{{n},2}}",
}

IN_A_CHILD = """
import sys
from pykvcache import LlamaModel, Sampler
try:
    import resource
    if sys.argv[2] == "limited":
        resource.setrlimit(resource.RLIMIT_AS, (2 ** 33, 2 ** 33))
except ImportError:
    pass
model = LlamaModel(sys.argv[1])
try:
    Sampler(grammar=sys.stdin.read(), model=model)
except ValueError as error:
    assert "grammar" in str(error)
    print("refused")
"""


@pytest.mark.hazard("N14")
@pytest.mark.parametrize("kind", TOO_DEEP)
def test_no_grammar_ends_the_process(model: Any, kind: str) -> None:
    # AddressSanitizer takes terabytes of addresses for itself.
    limited = "free" if SANITIZED else "limited"
    grammar = TOO_DEEP[kind](200_000)
    done = forked(IN_A_CHILD, model("llama").path, limited, stdin=grammar, timeout=20)
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr[-500:]


GOOD = "root ::= [0-9]+\n# a comment with é\n"

FAULTS: dict[str, tuple[str, int | None, int | None, str]] = {
    "no rule": ("# nothing", None, None, "no rule"),
    "no name": (GOOD + "::= [a]", 3, 1, "expecting name"),
    "empty": (" \n", None, None, "is empty"),
    "range": ("root ::= [0-9", 1, 14, "unexpected end"),
    "group": (GOOD + "more ::= ( [a]\n  [b] ;", 4, 7, "expecting '\\)' at ';'"),
    "junk": (GOOD + 'more ::= "x" ;;', 3, 14, "expecting newline or end at ';;'"),
    "escape": (GOOD + r'more ::= "é\q"', 3, 12, "unknown escape"),
    "hex": (r"root ::= [\xZZ]", 1, 13, "2 hex chars"),
    "nothing to repeat": ("root ::= *", 1, 11, "preceding item"),
    "bounds": (GOOD + "more ::= [a]{b}", 3, 14, "expecting an int"),
    "large token": ("root ::= <[99999999999999999999999]>", 1, 1, "number is too large"),
    "undefined": (GOOD + "more ::= [a] |\n  missing", 4, 3, "rule 'missing' is not defined"),
    "undefined in a group": ("root ::= ([a] | nix)", 1, 17, "rule 'nix' is not defined"),
    "no root": ("other ::= [0-9]", None, None, "no rule 'root' \\(grammar_root\\)"),
    "left recursion": (GOOD + 'sum ::= sum "+" [0-9]', None, None, "rule 'sum' .*left recursion"),
    "left recursion in a group": ('root ::= "a" x\nx ::= (x) | "b"', None, None, "rule 'x'"),
    "repeats": (GOOD + "more ::= [a]{3000}", 3, 13, "3000} repeats more than 2000"),
    "reversed": (GOOD + "more ::= [a]{3,2}", 3, 13, r"minimum of \{3,2\}"),
    "surrogate": (GOOD + 'more ::= "\ud800"', 3, 11, "not a Unicode character"),
    "NUL": (GOOD + 'more ::= "a\0"', 3, 12, "NUL"),
    "depth": (GOOD + "more ::= " + "(" * 300 + "[a]" + ")" * 300, 3, 266, "256 nested"),
    "rules": ("".join(f"r{i} ::= [a]\n" for i in range(5000)), 4097, 7, "4096 rules"),
    "size": ("root ::= [a] #" + " " * 2**20, None, None, "1048590 bytes"),
}


@pytest.mark.hazard("N60")
@pytest.mark.parametrize("name", FAULTS)
def test_the_reason_and_the_place_are_in_the_error(name: str, model: Any, capfd: Any) -> None:
    grammar, line, column, said = FAULTS[name]
    with pytest.raises(GrammarError, match=said) as caught:
        Sampler(grammar=grammar, model=model("llama"))
    assert isinstance(caught.value, ValueError)
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert (error.line, error.column) == (line, column)
    text = str(caught.value)
    if line is not None:
        assert f"line {line}, column {column}" in text
    assert len(text) < 200
    Sampler(grammar=GOOD, model=model("llama"))
    assert capfd.readouterr() == ("", "")


# What is not closed, and what could be read in several ways.
PARTS = ["[", "[\\", '"', "{", "{1 ", "{,", "#", "(", ":", "1"]
STARTS = ["{", "{1,", '"', "[", "#", "x ::= ["]


@pytest.mark.hazard("N14")
@pytest.mark.parametrize("part", PARTS)
def test_the_time_grows_with_the_grammar(part: str) -> None:
    def check(size: int) -> None:
        for first in ("", *STARTS):
            with contextlib.suppress(GrammarError):
                check_grammar(first + part * (size // len(part)))

    assert_linear(check, 5_000)


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
