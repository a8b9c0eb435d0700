"""No assertion of the README, the documents or the examples does work: ``python -O`` drops them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Calls that only look. Whatever else is called in an assertion might change something.
LOOKS = {
    *("all", "any", "len", "list", "set", "sorted", "np.allclose", "np.array_equal", "np.tri"),
    *("tolist", "is_empty", "is_trimmable", "make_mask", "k", "get_state", "load_prompt_cache"),
    *("extract", "kv_cache_seq_pos_max", "can_resume"),
}


def texts() -> Iterator[tuple[str, str]]:
    """Yield (name, Python text) of everything that a reader is given to copy."""
    for path in sorted((ROOT / "examples").glob("*.py")):
        yield path.name, path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        blocks = re.findall(
            r"^```python\n(.*?)^```$", path.read_text(encoding="utf-8"), re.M | re.S
        )
        yield from ((f"{path.name}:{k}", block) for k, block in enumerate(blocks))


def name(func: ast.expr) -> str:
    """Return the last name of what is called, with ``np.`` where it is NumPy's."""
    if isinstance(func, ast.Attribute):
        of_numpy = isinstance(func.value, ast.Name) and func.value.id == "np"
        return f"np.{func.attr}" if of_numpy else func.attr
    return ast.unparse(func)


def calls_in_asserts(text: str) -> set[str]:
    """Return the names of what the assertions of a text call."""
    asserts = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Assert))
    calls = (node.func for one in asserts for node in ast.walk(one) if isinstance(node, ast.Call))
    return {name(func) for func in calls}


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in texts()])
def test_assertions_only_look(text: str) -> None:
    assert calls_in_asserts(text) <= LOOKS


def test_the_reader_of_assertions_sees_calls() -> None:
    """Guards the test above."""
    text = (
        "if x:\n    assert not ctx.clear_kv_cache_seq(1, len(y))\nctx.remove(0)\nassert np.tri(3)"
    )
    assert calls_in_asserts(text) == {"clear_kv_cache_seq", "len", "np.tri"}
