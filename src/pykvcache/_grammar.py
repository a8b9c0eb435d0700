"""Checks of GBNF text that llama.cpp's parser lacks."""

from __future__ import annotations

import re

from pykvcache.errors import GrammarError

__all__ = ["check_grammar"]

#: llama.cpp parses recursively: deeper nesting and longer chains overflow its stack.
BYTES_MAX = 2**20
RULES_MAX = 4096
NESTING_MAX = 256
#: llama.cpp ignores larger bounds (MAX_REPETITION_THRESHOLD).
REPEAT_MAX = 2000

# An unclosed part extends to the end. Parts are unambiguous, so that one pass is enough.
_TOKEN = re.compile(
    r"""
      (?P<skip> \#[^\n]*
              | "[^"\\]* (?:\\.[^"\\]*)* (?:"|\\?\Z)
              | \[[^\]\\]* (?:\\.[^\]\\]*)* (?:\]|\\?\Z) )
    | \{ (?P<repeat> [\s0-9,]* ) \}
    | (?P<rule> ::= )
    | (?P<open> \( )
    | (?P<close> \) )
    """,
    re.VERBOSE | re.DOTALL,
)


def check_grammar(text: str) -> None:
    """Raise `GrammarError` for a grammar that would hang, crash or be misread."""
    if not text.strip():
        raise GrammarError("the grammar is empty: it would allow any text")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise _fault(text, error.start, "this is not a Unicode character") from None
    if size > BYTES_MAX:
        raise GrammarError(
            f"the grammar has {size} bytes: the limit is {BYTES_MAX}",
            what="bytes",
            value=size,
            limit=BYTES_MAX,
        )
    if "\0" in text:
        raise _fault(text, text.index("\0"), "it must not hold NUL")
    rules = depth = 0
    for found in _TOKEN.finditer(text):
        kind = found.lastgroup
        if found["repeat"] is not None:
            _check_repeat(text, found)
        elif kind == "rule":
            rules += 1
        elif kind == "open":
            depth += 1
        elif kind == "close":
            depth -= 1
        if depth > NESTING_MAX:
            raise _fault(
                text,
                found.start(),
                f"more than {NESTING_MAX} nested parentheses",
                depth,
                NESTING_MAX,
            )
        if rules > RULES_MAX:
            raise _fault(text, found.start(), f"more than {RULES_MAX} rules", rules, RULES_MAX)


def _check_repeat(text: str, found: re.Match[str]) -> None:
    bounds = [bound.strip() for bound in found["repeat"].split(",")]
    if len(bounds) > 2 or not all(bound.isdigit() or not bound for bound in bounds):
        return  # not a repetition; llama.cpp's parser reports it
    low, high = _bound(bounds[0]), _bound(bounds[-1])
    if max(low, high) > REPEAT_MAX:
        raise _fault(
            text,
            found.start(),
            f"{_short(found[0])} repeats more than {REPEAT_MAX} times",
            found[0],
            REPEAT_MAX,
        )
    if bounds[-1] and high < low:
        raise _fault(
            text,
            found.start(),
            f"the minimum of {_short(found[0])} is above its maximum",
            low,
            high,
        )


def _bound(digits: str) -> int:
    # Python refuses to read very long numbers.
    return int(digits or 0) if len(digits) < 20 else REPEAT_MAX + 1


def _short(text: str) -> str:
    return text if len(text) <= 20 else f"{text[:18]}.."


def _fault(
    text: str, at: int, why: str, value: object = None, limit: object = None
) -> GrammarError:
    line = text.count("\n", 0, at) + 1
    column = at - text.rfind("\n", 0, at)
    return GrammarError(
        f"the grammar: line {line}, column {column}: {why}", line, column, value=value, limit=limit
    )
