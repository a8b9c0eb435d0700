"""Checks on GBNF text that llama.cpp's parser does not survive or does not make."""

from __future__ import annotations

import re

__all__ = ["check_grammar"]

#: llama.cpp parses by recursion: deeper nesting and longer chains overflow its stack.
BYTES_MAX = 2**20
RULES_MAX = 4096
NESTING_MAX = 256
#: Above this llama.cpp takes a bound for "no bound" (MAX_REPETITION_THRESHOLD).
REPEAT_MAX = 2000

_TOKEN = re.compile(
    r"""
      (?P<skip> \#[^\n]* | "(?:\\.|[^"\\])*" | \[(?:\\.|[^\]\\])*\] )
    | (?P<repeat> \{ \s* (?P<low>\d*) \s* (?P<comma>,?) \s* (?P<high>\d*) \s* \} )
    | (?P<rule> ::= )
    | (?P<open> \( )
    | (?P<close> \) )
    """,
    re.VERBOSE | re.DOTALL,
)


def check_grammar(text: str) -> None:
    """Raise ``ValueError`` for a grammar that would hang, crash or be taken otherwise."""
    if not text.strip():
        raise ValueError("the grammar is empty: it would allow any text")
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > BYTES_MAX:
        raise ValueError(f"the grammar has {size} bytes: the limit is {BYTES_MAX}")
    rules = depth = 0
    for found in _TOKEN.finditer(text):
        kind = found.lastgroup
        if found["repeat"] is not None:
            _check_repeat(found)
        elif kind == "rule":
            rules += 1
        elif kind == "open":
            depth += 1
        elif kind == "close":
            depth -= 1
        if depth > NESTING_MAX:
            raise ValueError(f"the grammar nests deeper than {NESTING_MAX} parentheses")
        if rules > RULES_MAX:
            raise ValueError(f"the grammar has more than {RULES_MAX} rules")


def _check_repeat(found: re.Match[str]) -> None:
    low = int(found["low"] or 0)
    high = int(found["high"]) if found["high"] else low
    if max(low, high) > REPEAT_MAX:
        raise ValueError(f"the grammar repeats {found[0]}: the limit is {REPEAT_MAX}")
    if found["high"] and high < low:
        raise ValueError(f"the grammar repeats {found[0]}: the minimum is above the maximum")
