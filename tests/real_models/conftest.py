"""Which real models are there: those of models/fetch.py, and any other GGUF beside them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pykvcache import LlamaModel

ROOT = Path(__file__).parents[2]


@cache
def fetch_script() -> ModuleType:
    """models/fetch.py as a module."""
    spec = importlib.util.spec_from_file_location("models_fetch", ROOT / "models" / "fetch.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def fetch() -> ModuleType:
    """models/fetch.py as a module."""
    return fetch_script()


def model_files() -> dict[str, Path]:
    """The models that can be fetched, by name, and what else lies in their folder."""
    script = fetch_script()
    folder = script.default_folder()
    files = {model.name: folder / model.file for model in script.MODELS}
    known = set(files.values())
    files |= {path.stem: path for path in sorted(folder.glob("*.gguf")) if path not in known}
    return files


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give every test that takes ``real_model`` each model in turn, and say what is missing."""
    if "real_model" not in metafunc.fixturenames:
        return
    files = model_files()
    there = [name for name, path in files.items() if path.is_file()]
    params = [pytest.param(name, marks=pytest.mark.real_model) for name in there]
    if absent := [name for name in files if name not in there]:
        command = "python models/fetch.py " + " ".join(absent)
        skip = pytest.mark.skip(reason=f"not downloaded ({command})")
        params.append(pytest.param("absent", marks=[pytest.mark.real_model, skip]))
    metafunc.parametrize("real_model", params, indirect=True, scope="session")


@pytest.fixture(scope="session")
def real_model(binding: ModuleType, request: pytest.FixtureRequest) -> Iterator[LlamaModel]:
    """Return a downloaded model."""
    with binding.LlamaModel(model_files()[request.param]) as model:
        yield model
