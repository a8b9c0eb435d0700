"""Jinja's environment with every operation behind a charge."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import LoopControlExtension
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import (
    ImmutableSandboxedEnvironment,
    SandboxedEscapeFormatter,
    SandboxedFormatter,
)
from jinja2.utils import Cycler, Joiner
from markupsafe import Markup

from pykvcache._jinja.budget import VIEWS, Budget, Items
from pykvcache._jinja.compiler import ChatGenerator, ChatParser
from pykvcache._jinja.filters import FILTERS, TESTS
from pykvcache._jinja.methods import charge_format_spec, charge_printf, method_cost, width_of
from pykvcache._jinja.names import GenerationTag, template_globals, tojson

__all__ = ["ChatEnvironment"]

# What `in` looks into, besides mappings; a loop's own object shows its items to nobody.
_SEARCHED = (str, list, tuple, range, Items, Undefined)

_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
    "in": lambda a, b: a in b,
    "notin": lambda a, b: a not in b,
}
# Jinja's own objects, whose calls run the template or a line of Python.
_RUNS = (Macro, LoopContext, BlockReference, Joiner, Undefined)
_OWNERS = (LoopContext, Cycler, GenerationTag)


class _Formatter(SandboxedFormatter):
    """``str.format``, with each field charged before it is written."""

    factor = 1

    def format_field(self, value: Any, format_spec: str) -> Any:
        budget: Budget = self._env.budget  # type: ignore[attr-defined]
        for _ in range(self.factor):
            charge_format_spec(budget, value, format_spec)
        return super().format_field(value, format_spec)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        budget: Budget = self._env.budget  # type: ignore[attr-defined]
        if conversion is not None:
            budget.make(budget.walk(value).size)
        return super().convert_field(value, conversion)


class _EscapeFormatter(_Formatter, SandboxedEscapeFormatter):
    """The same for text that is marked as safe: what is put in is escaped."""

    factor = 6


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """One rendering: the environment of transformers' chat templates, and a budget."""

    code_generator_class = ChatGenerator
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, budget: Budget) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constants are computed when there is a budget
            finalize=budget.text,
            extensions=[GenerationTag, LoopControlExtension],
        )
        self.budget = budget
        self.step = budget.step
        self.filters = {**FILTERS, "tojson": tojson}
        self.tests = dict(TESTS)
        self.globals = dict(template_globals(budget))
        self._functions = set(self.globals.values())

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return ChatParser(self, source, name, filename).parse()

    # What the generated code calls ----------------------------------------------------------

    def compare(self, left: Any, name: str, right: Any) -> Any:
        """Return ``left <name> right``."""
        if type(left) is str and isinstance(right, str):
            self.budget.read(right, left if name in ("in", "notin") else "")
        elif type(right) is not int and right is not None:
            self._charge_comparison(left, name, right)
        return _COMPARE[name](left, right)

    def _charge_comparison(self, left: Any, name: str, right: Any) -> None:
        if name in ("in", "notin"):
            if isinstance(right, dict):
                self.budget.key(left)
                return
            if not isinstance(right, (*_SEARCHED, *VIEWS)):
                raise TypeError(f"argument of type {type(right).__name__!r} is not iterable")
            if isinstance(right, range):
                self.budget.step(len(right))
            if isinstance(right, str) and isinstance(left, str):
                self.budget.read(right, left)
        self.budget.walk(left)
        self.budget.walk(right)

    def compare_chain(self, left: Any, *others: tuple[str, Callable[[], Any]]) -> Any:
        """Return ``left < a < b``; what comes after a False is not computed."""
        result: Any = True
        for name, make in others:
            right = make()
            result = self.compare(left, name, right)
            if not result:
                break
            left = right
        return result

    def hashed(self, key: Any) -> Any:
        """Return a key of a mapping, after its hash was charged."""
        self.budget.key(key)
        return key

    def joined(self, values: tuple[Any, ...]) -> str:
        """Return ``a ~ b ~ c``."""
        return self.budget.joined([self.budget.text(value) for value in values])

    def concat(self, parts: Iterable[str]) -> str:
        """Return what a block, a macro or the template wrote."""
        return self.budget.joined(list(parts))

    def sliced(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """Return ``value[start:stop:step]``."""
        part = slice(start, stop, step)
        if isinstance(value, (str, list, tuple)):
            n = len(range(*part.indices(len(value))))
            self.budget.make(64 + n * (width_of(value) if isinstance(value, str) else 8))
        return self.budget.made(value[part])

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return an item, or an attribute."""
        if type(argument) is not int:
            self.budget.key(argument)
        if isinstance(argument, str) and len(argument) > 1000:
            self.budget.make(20 * len(argument))  # an error's text may show it
        return super().getitem(obj, argument)

    # Operators ----------------------------------------------------------------------------

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute a binary operator on what it is meant for."""
        if isinstance(left, (int, float)) and isinstance(right, (int, float)):
            self._charge_numbers(operator, left, right)
        elif operator == "+" and isinstance(left, (str, list, tuple)):
            size = left.__sizeof__() + (right.__sizeof__() if isinstance(right, type(left)) else 0)
            escapes = isinstance(left, Markup) or isinstance(right, Markup)
            self.budget.make(6 * (size + right.__sizeof__()) if escapes else size)
        elif operator == "*" and (isinstance(left, int) or isinstance(right, int)):
            many, times = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(many, (str, list, tuple)):
                self.budget.make(64 + max(times, 0) * (many.__sizeof__() if many else 1))
        elif operator == "%" and isinstance(left, str):
            self.budget.scale = 6 if isinstance(left, Markup) else 1
            charge_printf(self.budget, left, right)
            self.budget.scale = 1
        elif not isinstance(left, Undefined) and not isinstance(right, Undefined):
            names = f"{type(left).__name__!r} and {type(right).__name__!r}"
            raise TypeError(f"unsupported operand types for {operator}: {names}")
        return self.budget.made(super().call_binop(context, operator, left, right))

    def _charge_numbers(self, operator: str, left: float, right: float) -> None:
        if isinstance(left, int) and isinstance(right, int):
            bits, other = left.bit_length(), right.bit_length()
            self.budget.integer(max(bits, other))
            if operator == "*":
                self.budget.integer(bits + other)
            elif operator == "**" and right > 0 and bits > 1:
                self.budget.integer(bits * right)
            elif operator in "+-":
                self.budget.integer(max(bits, other) + 1)
        self.budget.step(1, 32)

    # Calls --------------------------------------------------------------------------------

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return ``str.format`` and ``str.format_map`` with their fields charged."""
        is_method = isinstance(value, (MethodType, BuiltinMethodType))
        if not is_method or value.__name__ not in ("format", "format_map"):
            return None
        text = value.__self__
        if not isinstance(text, str):
            return None
        is_map, kind = value.__name__ == "format_map", type(text)
        formatter = (
            _EscapeFormatter(self, escape=text.escape)
            if isinstance(text, Markup)
            else _Formatter(self)
        )

        def format(*args: Any, **kwargs: Any) -> str:
            if is_map:
                (kwargs,), args = args, ()
            self.budget.make(text.__sizeof__())
            made = kind(formatter.vformat(text, args, kwargs))
            self.budget.made(made)
            return made

        format.is_bounded = True  # type: ignore[attr-defined]
        self.budget.step(2, 300)
        return format

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call methods with a known cost, Jinja's objects and our functions."""
        budget = self.budget
        budget.step(3 + len(args) + len(kwargs))
        owner = getattr(obj, "__self__", None) if type(obj) in _METHODS else None
        if isinstance(owner, (str, dict, list, tuple, range, float)):
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            return self._call_method(owner, obj, args, kwargs)
        if isinstance(owner, LoopContext):
            budget.walk(args)  # changed() compares
        is_ours = type(obj) is FunctionType and (
            obj in self._functions or hasattr(obj, "is_bounded")
        )
        if not is_ours and not isinstance(obj, _RUNS) and not isinstance(owner, _OWNERS):
            raise SecurityError(f"{type(obj).__name__} objects cannot be called in a template")
        budget.enter()
        try:
            return budget.made(context.call(obj, *args, **kwargs))
        finally:
            budget.leave()

    def _call_method(
        self, owner: Any, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        name = method.__name__
        cost = method_cost(owner, name)
        if cost is None:
            raise SecurityError(f"{type(owner).__name__}.{name}() cannot be called in a template")
        if name == "join" and len(args) == 1:
            args = (self.budget.listed(args[0]),)
        self.budget.scale = 6 if isinstance(owner, Markup) else 1
        cost(self.budget, owner, *args, **kwargs)
        self.budget.scale = 1
        result = method(*args, **kwargs)
        pieces = owner.__sizeof__() + 56 * len(result) if isinstance(result, list) else 0
        return self.budget.made(result, pieces)


_METHODS: tuple[type, ...] = (BuiltinMethodType, MethodType)
