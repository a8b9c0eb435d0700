"""The top level is a page of names that can all be had; the rest is in its modules."""

from __future__ import annotations

import importlib
import inspect

import pytest

import pykvcache
from pykvcache import errors

# What a user imports from, beside the top level.
MODULES = [
    *("arrays", "chat_format", "enums", "errors", "generate", "introspection", "kv"),
    *("prefix.policies", "prefix.report", "prefix.stores", "sequence", "simulate", "state"),
]


def test_every_public_name_is_there_once() -> None:
    assert len(set(pykvcache.__all__)) == len(pykvcache.__all__)
    for name in pykvcache.__all__:
        assert getattr(pykvcache, name) is not None
    assert dir(pykvcache) == sorted(pykvcache.__all__)


def test_the_top_level_is_a_page() -> None:
    """Choices of options and return types are in their modules, and most errors."""
    assert len(pykvcache.__all__) <= 40
    assert sum(name in errors.__all__ for name in pykvcache.__all__) <= 10
    assert not [name for name in dir(pykvcache) if name[0] == "_" and name != "__version__"]
    for name in set(pykvcache.__all__) - set(errors.__all__):
        one = getattr(pykvcache, name)
        if inspect.ismodule(one):
            assert one.__name__ == f"pykvcache.{name}"
            assert one.__all__
        else:
            assert name not in pykvcache.enums.__all__


def test_names_loaded_on_use_are_public() -> None:
    """What `__getattr__` can give and ``__all__`` lists are kept in two places, in step."""
    assert set(pykvcache._HOMES) <= set(pykvcache.__all__)


@pytest.mark.parametrize("name", MODULES)
def test_what_a_module_lists_is_there(name: str) -> None:
    module = importlib.import_module(f"pykvcache.{name}")
    assert len(set(module.__all__)) == len(module.__all__)
    for each in module.__all__:
        assert getattr(module, each) is not None


def test_a_wrong_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LlamaModle'"):
        pykvcache.LlamaModle  # noqa: B018
