"""What ``help(LlamaContext)`` shows: every name once, by theme, before the details."""

from __future__ import annotations

import inspect
import re

from pykvcache import LlamaContext


def themes() -> dict[str, list[str]]:
    """Return the names of the class docstring by the line above them."""
    text = inspect.getdoc(LlamaContext)
    assert text is not None
    table = text.split("goes on below:")[1].split("Every method takes")[0]
    found = re.findall(r"^(\w.*)\n((?:    .*\n)+)", table, re.MULTILINE)
    return {theme: re.findall(r"`(\w+)`", names) for theme, names in found}


def test_every_name_is_in_one_theme() -> None:
    listed = [name for names in themes().values() for name in names]
    public = [name for name in dir(LlamaContext) if not name.startswith("_")]
    assert sorted(listed) == public


def test_no_theme_is_long() -> None:
    assert 5 < len(themes()) < 10
    assert max(map(len, themes().values())) <= 16


def test_every_name_begins_with_a_sentence() -> None:
    for name in dir(LlamaContext):
        if not name.startswith("_"):
            text = inspect.getdoc(getattr(LlamaContext, name))
            assert text is not None, name
            assert re.match(r"[A-Z].{8,}?[.;,:(]", text), name
