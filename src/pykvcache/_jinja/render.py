"""Render a template within bounds; what goes wrong in it is a ChatTemplateError."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import CodeType

from jinja2 import Template

from pykvcache._jinja.budget import Budget, Exhausted
from pykvcache._jinja.compiler import MAX_SOURCE, count_steps
from pykvcache._jinja.environment import ChatEnvironment
from pykvcache._jinja.names import Refused
from pykvcache.errors import ChatTemplateError

__all__ = ["render_template"]

MAX_STEPS = 5_000_000
"""For a small input: some seconds."""

STEPS_PER_VALUE = 2000
SIZE_PER_BYTE = 64

MAX_SIZE = 1 << 28
"""256 MiB, for a small input."""

MAX_MESSAGE = 1000
"""Characters of a template's own words that an exception repeats."""


def _compile(source: str) -> CodeType:
    """Return the code of a template; with transformers' end of lines, Jinja's default."""
    if len(source) > MAX_SOURCE:
        raise Exhausted(f"its text is longer than {MAX_SOURCE} characters", MAX_SOURCE)
    environment = ChatEnvironment(Budget(0, 0))
    tree = environment.parse(source)
    count_steps(tree)
    return environment.compile(tree)


_compiled = lru_cache(maxsize=16)(_compile)


def _run(source: str, variables: Mapping[str, object], budget: Budget) -> str:
    environment = ChatEnvironment(budget)
    template = Template.from_code(environment, _compiled(source), environment.globals)
    return environment.concat(template.root_render_func(template.new_context(dict(variables))))


def render_template(source: str, variables: Mapping[str, object], nodes: int, size: int) -> str:
    """Render a template on plain values; `nodes` and `size` say how large they are.

    The bounds grow with the input: a long conversation may take longer.
    """
    budget = Budget(MAX_STEPS + STEPS_PER_VALUE * nodes, MAX_SIZE + SIZE_PER_BYTE * size)
    try:
        return _run(source, variables, budget)
    except Refused as error:
        raise ChatTemplateError(
            "refused", f"the chat template refused the messages: {str(error)[:MAX_MESSAGE]}"
        ) from None
    except Exhausted as error:
        raise ChatTemplateError(
            "limit", f"the chat template goes too far: {error}", error.limit
        ) from None
    except Exception as error:  # a template is a program: it may fail in any way
        text = f"{type(error).__name__}: {str(error)[:MAX_MESSAGE]}"
        raise ChatTemplateError("error", f"the chat template cannot be rendered: {text}") from error
    finally:
        budget.close()
