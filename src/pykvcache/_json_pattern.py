r"""Converts regular expressions of JSON schemas for llama.cpp's converter.

llama.cpp's converter copies classes and dots to the grammar unchanged, so a quote that they allow
ends the JSON string. It does not support ``\d``, nor patterns without ``^`` and ``$``.
"""

from __future__ import annotations

import re

from pykvcache._ranges import Range, gaps, overlaps, union

__all__ = ["UnsupportedPattern", "convertible_pattern", "matches"]

#: Sets of characters, as ranges of code points.
Ranges = list[Range]

END = 0x110000
# Characters that a JSON string contains only escaped, and the others.
_ESCAPED: Ranges = [(0x00, 0x20), (0x22, 0x23), (0x5C, 0x5D), (0x7F, 0x80)]
_PLAIN: Ranges = gaps(_ESCAPED, END)
_CLASSES: dict[str, Ranges] = {
    "d": [(0x30, 0x3A)],
    "w": [(0x30, 0x3A), (0x41, 0x5B), (0x5F, 0x60), (0x61, 0x7B)],
    "s": [(0x20, 0x21)],
}
_SPECIAL = "^$.[](){}|*+?"
_CONTROL = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D, "0": 0x00}
#: llama.cpp drops deeper patterns with a warning.
DEPTH_MAX = 100
_REPEAT = re.compile(r"[*+?]|\{\d+(?:,\d*)?\}")
_HEX = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")


class UnsupportedPattern(Exception):
    """The pattern cannot be converted to a grammar; the message says why."""


def convertible_pattern(pattern: str) -> str:
    """Return a pattern for llama.cpp's converter that allows only texts that `pattern` allows."""
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise UnsupportedPattern(f"it is not a regular expression: {error}") from None
    return _Reader(pattern).read()


#: Number of search steps that take about a tenth of a second.
STEPS_MAX = 10**7
_ESCAPES_AND_CLASSES = re.compile(r"\\.|\[\^?\]?[^\]]*\]|\(\?:")


def matches(pattern: str, text: str) -> bool:
    """Return whether a pattern is found in a text; True also if the search might take too long.

    Python backtracks: a repeated group with choices inside takes exponential time, and k
    repetitions in a row take n**k steps. If the text was generated with a grammar, the grammar has
    enforced the pattern.
    """
    plain = _ESCAPES_AND_CLASSES.sub("x", pattern)
    repeats = len(re.findall(r"[*+]|\{\d+,", plain))
    choices = plain.count("?") + plain.count("|")
    steps = float(len(text) + 1) ** min(repeats, 20) * 2.0 ** min(choices, 40)
    if re.search(r"\)[*+{]", plain) and repeats + choices > 1:
        steps *= 2.0 ** min(len(text), 40)
    return steps > STEPS_MAX or re.search(pattern, text) is not None


class _Reader:
    """A parser that reads a pattern once, from left to right."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.depth = 0
        self.has_choice = False  # outside of groups

    def read(self) -> str:
        begins = self.text.startswith("^")
        self.at = int(begins)
        pieces = []
        while self.at < len(self.text):
            if self.text[self.at] == "$" and self.at == len(self.text) - 1:
                break
            pieces.append(self._piece())
        ends = self.at < len(self.text)
        if self.has_choice and begins != ends:
            raise UnsupportedPattern("an anchor belongs to one of several alternatives")
        body = "".join(pieces)
        rest = _write(_ESCAPED, negated=True) + "*"
        if not (begins and ends):
            body = ("" if begins else rest) + f"({body})" + ("" if ends else rest)
        return f"^{body}$"

    def _piece(self) -> str:
        c = self.text[self.at]
        if c in "^$":
            raise UnsupportedPattern("an anchor is neither at the start nor at the end")
        self.at += 1
        if c == "(":
            return self._open()
        if c == ")":
            self.depth -= 1
            return c + self._repeat()
        if c == "|":
            self.has_choice |= self.depth == 0
            return c
        if c == "[":
            return self._class() + self._repeat()
        if c == ".":
            return _write(_ESCAPED, negated=True) + self._repeat()
        found = self._escape() if c == "\\" else _single(ord(c))
        return _write(found, negated=False) + self._repeat()

    def _open(self) -> str:
        if self.text.startswith("?", self.at):
            if not self.text.startswith("?:", self.at):
                raise UnsupportedPattern("a group begins with '(?'")
            self.at += 2
        self.depth += 1
        if self.depth > DEPTH_MAX:
            raise UnsupportedPattern(f"groups are nested deeper than {DEPTH_MAX}")
        return "("

    def _repeat(self) -> str:
        """Read the repetition of the previous piece, greedy or lazy."""
        found = _REPEAT.match(self.text, self.at)
        if found is None:
            return ""
        self.at = found.end()
        if self.text[self.at : self.at + 1] in ("?", "+"):
            if self.text[self.at] == "+":
                raise UnsupportedPattern("a repetition is possessive")
            self.at += 1
        return found[0]

    def _escape(self) -> Ranges:
        """Read an escape."""
        c = self.text[self.at]
        code = _HEX.match(self.text, self.at)
        if code is not None:
            self.at = code.end()
            return _single(int(next(filter(None, code.groups())), 16))
        self.at += 1
        if c in _CLASSES:
            return _CLASSES[c]
        if c in _CONTROL:
            return _single(_CONTROL[c])
        if c.isalnum():
            raise UnsupportedPattern(f"\\{c} has no equivalent")
        return _single(ord(c))

    def _class(self) -> str:
        negated = self.text.startswith("^", self.at)
        self.at += negated
        ranges: Ranges = []
        first = True
        while first or self.text[self.at] != "]":
            first = False
            low = self._member()
            is_range = self.text.startswith("-", self.at) and self.text[self.at + 1] != "]"
            if is_range and len(low) == 1 and low[0][1] - low[0][0] == 1:
                self.at += 1
                ranges.append((low[0][0], self._member()[0][1]))
            else:
                ranges += low
        self.at += 1
        return _write(ranges, negated=negated)

    def _member(self) -> Ranges:
        c = self.text[self.at]
        self.at += 1
        return self._escape() if c == "\\" else _single(ord(c))


def _single(point: int) -> Ranges:
    return [(point, point + 1)]


def _write(ranges: Ranges, *, negated: bool) -> str:
    """Write a set of characters without those that JSON escapes."""
    excluded = union(ranges + _ESCAPED)
    kept = gaps(excluded, END) if negated else overlaps(union(ranges), _PLAIN)
    if not kept:
        raise UnsupportedPattern("it asks for characters that JSON escapes")
    if len(kept) == 1 and kept[0][1] - kept[0][0] == 1 and kept[0][0] < 0x80:
        c = chr(kept[0][0])
        return f"\\{c}" if c in _SPECIAL else c
    if negated:
        return "[^" + "".join(map(_range, excluded)) + "]"
    return "[" + "".join(map(_range, kept)) + "]"


def _range(pair: Range) -> str:
    low, last = pair[0], pair[1] - 1
    return _code(low) if low == last else f"{_code(low)}-{_code(last)}"


def _code(point: int) -> str:
    c = chr(point)
    if c.isascii() and c.isalnum():
        return c
    return f"\\u{point:04X}" if point < 0x10000 else f"\\U{point:08X}"
