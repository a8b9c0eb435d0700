"""What chat templates have beyond Jinja: functions, ``tojson`` and ``{% generation %}``."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import safe_range
from jinja2.utils import Cycler, Joiner, Namespace

from pykvcache._jinja.budget import Budget

__all__ = ["GenerationTag", "Refused", "TemplateNamespace", "template_globals", "tojson"]


class Refused(Exception):
    """The template itself called ``raise_exception``."""


class GenerationTag(Extension):
    """``{% generation %}``: marks what the model says, and renders as it stands."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        """Read up to ``{% endgeneration %}``; names that are set inside end there."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("as_it_stands"), [], [], body).set_lineno(line)

    def as_it_stands(self, caller: Macro) -> str:
        """Return the text of the block."""
        return caller()


class TemplateNamespace(Namespace):
    """``namespace()``, without the names that the sandbox keeps for itself."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be a name of the template's
        self, given = args[0], dict(*args[1:], **kwargs)
        for name in given:
            _check_name(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError("a namespace takes no names that begin with an underscore")


@pass_context
def tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON, with HTML's characters and other languages' as they are."""
    budget: Budget = context.environment.budget  # type: ignore[attr-defined]
    size, n, depth = budget.walk(value)
    wide = len(indent) if isinstance(indent, str) else max(indent or 0, 0)
    between = sum(len(budget.text(one)) for one in separators or ())
    budget.make(size + 4 * n * (wide * depth + between))
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    budget.made(text)
    return text


def template_globals(budget: Budget) -> dict[str, Callable[..., Any]]:
    """Return the functions that a template may call by name."""

    def raise_exception(message: object = "") -> NoReturn:
        raise Refused(budget.text(message))

    def strftime_now(format: str) -> str:
        budget.make(256 * len(format))  # the most that Python makes of it
        return datetime.now().strftime(format)

    def mapping(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Any, Any]:
        """Return what ``dict()`` does, once the hashes of its keys are charged."""
        args = tuple(one if isinstance(one, dict) else budget.listed(one) for one in args)
        budget.make(200 * (sum(map(len, args)) + len(kwargs)) + 64)
        budget.walk([one for one in args if not isinstance(one, dict)])
        return dict(*args, **kwargs)

    def template_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
        made = mapping(args, kwargs)
        budget.made(made)
        return made

    def fromkeys(keys: Any, value: Any = None, /) -> dict[Any, Any]:
        return template_dict([(key, value) for key in budget.listed(keys)])

    template_dict.fromkeys = fromkeys  # type: ignore[attr-defined]
    fromkeys.is_bounded = True  # type: ignore[attr-defined]

    def namespace(*args: Any, **kwargs: Any) -> TemplateNamespace:
        made = mapping(args, kwargs)
        budget.step(1, 500 + made.__sizeof__())
        return TemplateNamespace(made)

    def cycler(*items: Any) -> Cycler:
        return Cycler(*items)

    def joiner(sep: str = ", ") -> Joiner:
        return Joiner(sep)

    return {
        "cycler": cycler,
        "dict": template_dict,
        "joiner": joiner,
        "namespace": namespace,
        "raise_exception": raise_exception,
        "range": safe_range,
        "strftime_now": strftime_now,
    }
