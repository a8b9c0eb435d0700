"""What the methods of texts, lists and mappings cost; others cannot be called."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pykvcache._jinja.budget import Budget

__all__ = [
    "charge_format_spec",
    "charge_printf",
    "method_cost",
    "n_lines",
    "replaced",
    "stripped",
    "width_of",
]

Cost = Callable[..., None]
"""Called with the budget, the object and the method's arguments, before the method."""

# What splitlines() splits at; "\r\n" counts twice.
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"

# Flags, width, precision and length of a conversion of the % operator; what follows is its letter.
_CONVERSION = re.compile(r"[#0\- +]*(\*|\d+)?(?:\.(\*|\d+)?)?[hlL]?.?", re.DOTALL)


def n_lines(budget: Budget, text: str) -> int:
    """Return an upper bound of the number of lines."""
    budget.read(text)
    return 1 + sum(text.count(end) for end in _LINE_ENDS)


def width_of(text: str) -> int:
    """Return the bytes of one character."""
    return 1 if text.isascii() else 4


def replaced(budget: Budget, text: str, old: str, new: str, count: int = -1) -> None:
    """Charge a replacement."""
    budget.read(text, old)
    found = text.count(old)
    found = found if count < 0 else min(found, count)
    growth = found * max(0, len(new) - len(old))
    budget.make((len(text) + growth) * max(width_of(text), width_of(new)) + 64)


def padded(budget: Budget, text: str, width: int, fill: str = " ") -> None:
    """Charge a text that is filled up."""
    budget.make(max(len(text), width) * max(width_of(text), width_of(fill)) + 64)


def looked(budget: Budget, text: str, *args: Any) -> None:
    """Charge a pass that makes nothing."""
    for arg in args:
        budget.read(text, arg if isinstance(arg, str) else "")
        if isinstance(arg, tuple):
            budget.step(len(arg) * (1 + len(text) // 4096))
            budget.walk(arg)
    budget.read(text)


def copied(budget: Budget, text: str, *args: Any) -> None:
    """Charge a pass that makes a text of up to three times the size."""
    looked(budget, text, *args)
    budget.make(3 * text.__sizeof__())


def recased(budget: Budget, text: str) -> None:
    """Charge a look at each character, and a text of up to three times the size."""
    budget.scan(text)
    budget.make(3 * text.__sizeof__())


def stripped(budget: Budget, text: str, chars: Any = None) -> None:
    """Charge a search among the characters for each of the text's, and the copy."""
    if isinstance(chars, str):
        budget.step(len(text) * len(chars) >> 10)
    budget.read(text)
    budget.make(text.__sizeof__())


def split(budget: Budget, text: str, sep: str | None = None, maxsplit: int = -1) -> None:
    """Charge the pieces."""
    budget.read(text, sep or "")
    pieces = 1 + (text.count(sep) if sep else len(text) // 2)
    pieces = pieces if maxsplit < 0 else min(pieces, maxsplit + 1)
    budget.make(text.__sizeof__() + 96 * pieces)


def lines(budget: Budget, text: str, keepends: bool = False) -> None:
    """Charge the lines."""
    budget.make(text.__sizeof__() + 96 * n_lines(budget, text))


def tabs(budget: Budget, text: str, tabsize: int = 8) -> None:
    """Charge what tabs become."""
    budget.read(text)
    padded(budget, text, len(text) + text.count("\t") * max(tabsize, 0))


def joined(budget: Budget, text: str, items: Any) -> None:
    """Charge the pieces and what is between them; they have been listed."""
    n = width = size = 0
    for item in items:
        n += 1
        if isinstance(item, str):
            size, width = size + len(item), max(width, width_of(item))
    budget.step(n)
    budget.make((size + n * len(text)) * max(width, width_of(text)) + 64)


def compared(budget: Budget, values: Any, *args: Any) -> None:
    """Charge comparisons with each item."""
    if isinstance(values, range):
        budget.step(len(values))
    budget.walk(values)
    budget.walk(args)


def keyed(budget: Budget, values: Any, key: Any = None, *args: Any) -> None:
    """Charge a hash."""
    budget.key(key)


def shallow(budget: Budget, values: Any) -> None:
    """Charge a copy of a list or a mapping."""
    budget.step(1 + len(values) // 16, 64 + 100 * len(values))


def free(budget: Budget, value: Any) -> None:
    """Charge nothing: views and facts."""


_LOOKS = "count endswith find index rfind rindex startswith"
_COPIES = "partition removeprefix removesuffix rpartition"
_SCANS = (
    "isalnum isalpha isascii isdecimal isdigit isidentifier islower isnumeric isprintable isspace "
    "istitle isupper"
)
_CASES = "capitalize casefold lower swapcase title upper"
_TEXT: dict[str, Cost] = {
    **dict.fromkeys(_LOOKS.split(), looked),
    **dict.fromkeys(_COPIES.split(), copied),
    **dict.fromkeys(_SCANS.split(), Budget.scan),
    **dict.fromkeys(_CASES.split(), recased),
    **dict.fromkeys(("lstrip", "rstrip", "strip"), stripped),
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), padded),
    "expandtabs": tabs,
    "join": joined,
    "replace": replaced,
    "rsplit": split,
    "split": split,
    "splitlines": lines,
}
_COSTS: tuple[tuple[type, dict[str, Cost]], ...] = (
    (str, _TEXT),
    (dict, {"copy": shallow, "get": keyed, "items": free, "keys": free, "values": free}),
    (list, {"copy": shallow, "count": compared, "index": compared}),
    (tuple, {"count": compared, "index": compared}),
    (range, {"count": compared, "index": compared}),
    (float, {"is_integer": free}),
)


def method_cost(owner: object, name: str) -> Cost | None:
    """Return what charges a method, None where templates have no use for it."""
    for kind, costs in _COSTS:
        if isinstance(owner, kind):
            return costs.get(name)
    return None


def conversions(text: str) -> Iterator[tuple[str | None, str | None]]:
    """Yield width and precision of each conversion of the % operator."""
    at = text.find("%")
    while at >= 0:
        at += 1
        if text.startswith("(", at):  # a key, in which parentheses are nested
            depth, at = 1, at + 1
            while depth and at < len(text):
                depth += {"(": 1, ")": -1}.get(text[at], 0)
                at += 1
        found = _CONVERSION.match(text, at)
        assert found is not None  # it matches nothing at all, too
        yield found[1], found[2]
        at = text.find("%", max(found.end(), at))


def charge_printf(budget: Budget, text: str, values: object) -> None:
    """Charge ``text % values``: the widths, and each value as often as it may be written."""
    budget.step(len(text) >> 4)
    n, widths = 0, 0
    for pair in conversions(text):
        n += 1
        for number in pair:
            if number == "*":
                several = values if isinstance(values, tuple) else (values,)
                widths += sum(abs(v) for v in several if isinstance(v, int))
            elif number:
                widths += int(number) if len(number) < 12 else 10**12
    times = n if isinstance(values, Mapping) else 1
    budget.make(4 * (len(text) + widths) + times * budget.walk(values).size)


def charge_format_spec(budget: Budget, value: object, spec: str) -> None:
    """Charge ``format(value, spec)``: every number in it may be a width."""
    size = value.__sizeof__() if isinstance(value, str) else budget.walk(value).size
    numbers = re.findall(r"\d+", spec)
    budget.make(size + 4 * sum(int(n) if len(n) < 12 else 10**12 for n in numbers) + 64)
