"""Errors in a grammar are in the exception, with line, and not on stderr."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from pykvcache import KvCacheError, Sampler
from pykvcache.errors import GrammarError, UnsupportedOperation

GOOD = "root ::= [0-9]+\n# a comment with é\n"

FAULTS: dict[str, tuple[str, int | None, int | None, str]] = {
    "no rule": ("# nothing", None, None, "no rule"),
    "no assignment": ("root", 1, 5, "expecting ::="),
    "no name": (GOOD + "::= [a]", 3, 1, "expecting name"),
    "range": ("root ::= [0-9", 1, 14, "unexpected end"),
    "text": ('root ::= "a', 1, 12, "unexpected end"),
    "group": (GOOD + "more ::= ( [a]\n  [b] ;", 4, 7, "expecting '\\)' at ';'"),
    "junk": (GOOD + 'more ::= "x" ;;', 3, 14, "expecting newline or end at ';;'"),
    "escape": (GOOD + r'more ::= "é\q"', 3, 12, "unknown escape"),
    "hex": (r"root ::= [\xZZ]", 1, 13, "2 hex chars"),
    "nothing to repeat": ("root ::= *", 1, 11, "preceding item"),
    "bounds": (GOOD + "more ::= [a]{b}", 3, 14, "expecting an int"),
    "token": (GOOD + "more ::= <[12>", 3, 14, "expecting '\\]'"),
    "large token": ("root ::= <[99999999999999999999999]>", 1, 1, "number is too large"),
    "undefined": (GOOD + "more ::= [a] |\n  missing", 4, 3, "rule 'missing' is not defined"),
    "undefined in a group": ("root ::= ([a] | nix)", 1, 17, "rule 'nix' is not defined"),
    "no root": ("other ::= [0-9]", None, None, "no rule 'root' \\(grammar_root\\)"),
    "left recursion": (GOOD + 'sum ::= sum "+" [0-9]', None, None, "rule 'sum' .*left recursion"),
    "left recursion in a group": ('root ::= "a" x\nx ::= (x) | "b"', None, None, "rule 'x'"),
    "repeats": (GOOD + "more ::= [a]{3000}", 3, 13, "3000} repeats more than 2000"),
    "long bound": (GOOD + "more ::= [a]{" + "9" * 5000 + "}", 3, 13, "repeats more"),
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
    assert (caught.value.line, caught.value.column) == (line, column)
    text = str(caught.value)
    if line is not None:
        assert f"line {line}, column {column}" in text
    assert len(text) < 200
    assert capfd.readouterr() == ("", "")


def test_the_error_is_a_value_error_and_can_be_pickled() -> None:
    error = GrammarError("bad", 3, 4)
    assert isinstance(error, ValueError)
    assert isinstance(error, KvCacheError)
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), copied.line, copied.column) == ("bad", 3, 4)


def test_a_model_without_a_vocabulary_is_named(model: Any) -> None:
    with pytest.raises(UnsupportedOperation, match="grammar needs a vocabulary"):
        Sampler(grammar=GOOD, model=model("llama_none"))


@pytest.mark.hazard("N60")
def test_a_good_grammar_prints_nothing(model: Any, capfd: Any) -> None:
    Sampler(grammar=GOOD, model=model("llama"))
    assert capfd.readouterr() == ("", "")
