"""Jinja's filters and tests, each with what it costs; those that are not here do not exist.

Left out, because no template needs them and their work is not known beforehand: ``pprint``,
``striptags``, ``urlize``, ``wordwrap``, ``xmlattr``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jinja2 import pass_context
from jinja2.filters import FILTERS as JINJA_FILTERS
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context
from jinja2.tests import TESTS as JINJA_TESTS
from markupsafe import Markup

from pykvcache._jinja.budget import Budget, Items
from pykvcache._jinja.methods import charge_printf, n_lines, replaced, stripped

__all__ = ["FILTERS", "TESTS"]

Cost = Callable[..., None]
"""Called with the budget, the value and the filter's arguments, before the filter."""


def free(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    """Charge nothing: one look, whatever the size."""


def times(factor: int) -> Cost:
    """Return what charges a text that many times."""

    def cost(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
        size = value.__sizeof__() if isinstance(value, str) else budget.walk(value).size
        budget.scan(value if isinstance(value, str) else "")
        budget.make(factor * size)

    return cost


def center(budget: Budget, value: Any, width: int = 80) -> None:
    """Charge the width."""
    budget.make(4 * (len(budget.text(value)) + max(width, 0)))


def indent(
    budget: Budget, value: Any, width: Any = 4, first: bool = False, blank: bool = False
) -> None:
    """Charge the width for every line."""
    text = budget.text(value)
    wide = len(width) if isinstance(width, str) else max(width, 0)
    budget.make(24 * (len(text) + wide * n_lines(budget, text)))


def replace(budget: Budget, value: Any, old: Any, new: Any, count: Any = None) -> None:
    """Charge a replacement."""
    texts = (budget.text(value), budget.text(old), budget.text(new))
    replaced(budget, *texts, -1 if count is None else count)


def printf(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    """Charge the widths and the values."""
    budget.scale = 6 if isinstance(value, Markup) else 1
    charge_printf(budget, budget.text(value), kwargs or args)
    budget.scale = 1


def trim(budget: Budget, value: Any, chars: Any = None) -> None:
    """Charge what ``strip`` does."""
    stripped(budget, budget.text(value), chars)


def integer(budget: Budget, value: Any, default: Any = 0, base: Any = 10) -> None:
    """Charge the digits."""
    if isinstance(value, str):
        budget.integer(len(value))


def number(budget: Budget, value: Any, default: Any = 0.0) -> None:
    """Charge the digits, or an error's text that repeats what are none."""
    if isinstance(value, str):
        times(3)(budget, value)


def rounded(budget: Budget, value: Any, precision: int = 0, method: str = "common") -> None:
    """Charge the power of ten; texts and lists are multiplied by it, too."""
    if not isinstance(value, (int, float)):
        raise TypeError(f"round needs a number, not {type(value).__name__}")
    budget.integer(4 * abs(precision))


def looked_up(budget: Budget, n: int, names: Iterable[Any]) -> None:
    """Charge names, or paths, that n items are asked for; what is none is repeated in an error."""
    for name in names:
        size = len(name) if isinstance(name, str) else budget.walk(name).size
        budget.step((size >> 7) + n * size)


def ordered(budget: Budget, values: Any, *args: Any, attribute: Any = "", **kwargs: Any) -> None:
    """Charge comparisons of whole items."""
    n = operator.length_hint(values)
    budget.step(n)
    looked_up(budget, n, (*args, attribute))
    budget.make(300 * n)
    budget.step(budget.walk(values).nodes * n.bit_length())


def mapped(budget: Budget, values: Any, *args: Any, attribute: Any = "", **kwargs: Any) -> None:
    """Charge the path, the filter or the test that is looked up in each item."""
    looked_up(budget, operator.length_hint(values), (*args[:2], attribute))


def batch(budget: Budget, values: Any, linecount: int, fill_with: Any = None) -> None:
    """Charge the filling."""
    if fill_with is not None:
        budget.step(abs(linecount), 8 * abs(linecount))
    budget.make(100 * operator.length_hint(values))


def slices(budget: Budget, values: Any, slices: int, fill_with: Any = None) -> None:
    """Charge the slices, empty ones too."""
    budget.step(abs(slices))
    budget.make(100 * abs(slices))


def pairs(budget: Budget, value: Any) -> None:
    """Charge a pair for each item."""
    if isinstance(value, Mapping):
        budget.step(len(value))
        budget.make(80 * len(value))


def reverse(budget: Budget, value: Any) -> None:
    """Charge a copy."""
    budget.step(operator.length_hint(value))
    budget.make(value.__sizeof__() if isinstance(value, str) else 16 * operator.length_hint(value))


def urlencode(budget: Budget, value: Any) -> None:
    """Charge texts, and pairs of texts."""
    if not isinstance(value, (str, int, float, Mapping, list, tuple, Items)):
        raise TypeError(f"urlencode takes texts and pairs, not {type(value).__name__}")
    times(12)(budget, value)


def join(context: Context, value: Any, d: Any = "", attribute: Any = None) -> str:
    """Join the items' texts."""
    budget: Budget = context.environment.budget  # type: ignore[attr-defined]
    items = budget.listed(value)
    if attribute is not None:
        items = list(map(make_attrgetter(context.environment, attribute), items))
    return budget.joined([budget.text(item) for item in items], budget.text(d))


def total(context: Context, value: Any, attribute: Any = None, start: Any = 0) -> Any:
    """Add the items up, by the operator that is watched."""
    items = context.environment.budget.listed(value)  # type: ignore[attr-defined]
    if attribute is not None:
        items = list(map(make_attrgetter(context.environment, attribute), items))
    if isinstance(start, str):
        raise TypeError("sum cannot add texts: use join")
    for item in items:
        start = context.environment.call_binop(context, "+", start, item)  # type: ignore[attr-defined]
    return start


def lead(function: Any) -> Callable[[Context], tuple[Any, ...]]:
    """Return what makes the arguments that Jinja puts in front of a function's own."""
    wants = getattr(getattr(function, "jinja_pass_arg", None), "name", "")
    return {
        "": lambda context: (),
        "context": lambda context: (context,),
        "eval_context": lambda context: (context.eval_ctx,),
        "environment": lambda context: (context.environment,),
    }[wants]


def charged(given: Iterator[Any], cost: Cost, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """Charge what a generator will do, and run it."""
    cost(*args, **kwargs)
    yield from given


def guarded(name: str, cost: Cost, *, each: int = 0, lazy: bool = False) -> Callable[..., Any]:
    """Return Jinja's filter behind its cost.

    With ``each`` it goes through items, which takes so many steps for each; with ``lazy`` it gives
    a generator, which is run at once: what fails in it is not known before it is read.
    """
    function: Any = JINJA_FILTERS[name]
    before = lead(function)

    @pass_context
    def call(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget: Budget = context.environment.budget  # type: ignore[attr-defined]
        budget.step(1)
        if each:
            # What is false is empty for the filters that select, None too.
            is_empty = name in _SELECT and not value
            value = [] if is_empty else (budget.begun if lazy else budget.listed)(value, each)
        if lazy:
            result = function(*before(context), value, *args, **kwargs)
            result = Items(charged(result, cost, budget, value, *args, **kwargs))
        else:
            cost(budget, value, *args, **kwargs)
            result = function(*before(context), value, *args, **kwargs)
            if name == "reverse" and not isinstance(result, (str, list)):
                result = Items(result)
        is_many = isinstance(result, (list, Items))
        return budget.made(result, 100 * operator.length_hint(result) if is_many else 0)

    return call


def by_operator(name: str) -> Callable[..., bool]:
    """Return a test that compares as the operator does."""

    @pass_context
    def compare(context: Context, value: Any, other: Any) -> bool:
        return bool(context.environment.compare(value, name, other))  # type: ignore[attr-defined]

    return compare


def by_remainder(expected: int | None, by: int = 2) -> Callable[..., bool]:
    """Return a test of a remainder, which is formatting where the value is a text."""

    @pass_context
    def test(context: Context, value: Any, num: Any = by) -> bool:
        rest = context.environment.call_binop(context, "%", value, num)  # type: ignore[attr-defined]
        return bool(rest == expected)

    return test


def by_text(method: Callable[[str], bool]) -> Callable[..., bool]:
    """Return a test of a value's text."""

    @pass_context
    def test(context: Context, value: Any) -> bool:
        budget: Budget = context.environment.budget  # type: ignore[attr-defined]
        text = budget.text(value)
        budget.scan(text)
        return method(text)

    return test


def by_name(table: str) -> Callable[..., bool]:
    """Return a test whether there is a filter, or a test, of that name."""

    @pass_context
    def test(context: Context, value: Any) -> bool:
        return isinstance(value, str) and value in getattr(context.environment, table)

    return test


_SELECT = ("map", "select", "reject", "selectattr", "rejectattr")

_COSTS: dict[str, Cost] = {
    **dict.fromkeys(
        ["abs", "attr", "count", "d", "default", "first", "last", "length", "random"], free
    ),
    **dict.fromkeys(["safe", "string", "truncate"], times(1)),
    **dict.fromkeys(["capitalize", "lower", "upper", "filesizeformat"], times(3)),
    **dict.fromkeys(["e", "escape", "forceescape"], times(6)),
    **{"urlencode": urlencode, "wordcount": times(32), "title": times(64)},
    **{"center": center, "indent": indent, "replace": replace, "format": printf, "trim": trim},
    **{"int": integer, "float": number, "round": rounded, "dictsort": ordered, "reverse": reverse},
}

FILTERS: dict[str, Callable[..., Any]] = {
    **{name: guarded(name, cost) for name, cost in _COSTS.items()},
    **{name: guarded(name, ordered, each=4) for name in ("sort", "groupby", "min", "max")},
    **{name: guarded(name, mapped, each=10, lazy=True) for name in _SELECT},
    "batch": guarded("batch", batch, each=2, lazy=True),
    "items": guarded("items", pairs, lazy=True),
    "join": pass_context(join),
    "list": guarded("list", free, each=1),
    "slice": guarded("slice", slices, each=2, lazy=True),
    "sum": pass_context(total),
    "unique": guarded("unique", ordered, each=4, lazy=True),
}

_OPERATORS = {
    **{"eq": "eq", "==": "eq", "equalto": "eq", "ne": "ne", "!=": "ne", "in": "in"},
    **{"gt": "gt", ">": "gt", "greaterthan": "gt", "ge": "gteq", ">=": "gteq"},
    **{"lt": "lt", "<": "lt", "lessthan": "lt", "le": "lteq", "<=": "lteq"},
}

JINJA: dict[str, Any] = JINJA_TESTS

# Those that look once, whatever the size.
_CHEAP = [
    *("boolean", "callable", "defined", "escaped", "false", "float", "integer", "iterable"),
    *("mapping", "none", "number", "sameas", "sequence", "string", "true", "undefined"),
]

TESTS: dict[str, Callable[..., Any]] = {
    **{name: JINJA[name] for name in _CHEAP},
    **{name: by_operator(one) for name, one in _OPERATORS.items()},
    **{"odd": by_remainder(1), "even": by_remainder(0), "divisibleby": by_remainder(0)},
    **{"lower": by_text(str.islower), "upper": by_text(str.isupper)},
    **{"filter": by_name("filters"), "test": by_name("tests")},
}
