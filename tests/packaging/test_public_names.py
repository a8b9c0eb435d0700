"""Names that are listed can all be had."""

from __future__ import annotations

import importlib

import pytest

import pykvcache

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


@pytest.mark.parametrize("name", MODULES)
def test_what_a_module_lists_is_there(name: str) -> None:
    module = importlib.import_module(f"pykvcache.{name}")
    assert len(set(module.__all__)) == len(module.__all__)
    for each in module.__all__:
        assert getattr(module, each) is not None


def test_a_wrong_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LlamaModle'"):
        pykvcache.LlamaModle  # noqa: B018
