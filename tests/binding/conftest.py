"""Fixtures for the tests of the compiled layer's Python face."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.models import make_model

if TYPE_CHECKING:
    from pykvcache import LlamaModel

TESTS = Path(__file__).resolve().parent.parent

# These tests import the package at the top, so without its compiled layer none can be collected.
if importlib.util.find_spec("pykvcache._native.lib") is None:
    collect_ignore_glob = ["test_*.py"]

needs_timers = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no signal timers")


@pytest.fixture
def path(model_folder: Path) -> Path:
    return make_model("llama", model_folder)


@pytest.fixture(scope="module")
def vocab(binding: Any) -> Iterator[LlamaModel]:
    """The vocabulary of the model that ships with the package."""
    with binding.LlamaModel(binding.embedded_model_path(), vocab_only=True) as model:
        yield model
