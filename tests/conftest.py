"""Fixtures that every test may use: generated models, contexts that get closed, fresh runs."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from numpy.typing import NDArray

from support import models
from support.models import EXACT, MODELS, make_model, shared_folder

# Read when the compiled layer is loaded: OpenMP threads that spin while they wait make tests
# on a busy machine several times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Contexts come and go by the thousand, and glibc gives each one's memory back to the system: to get
# it again is a seventh of all the time. What is used again is not zero, either, as it is in long
# runs. Processes that tests start do as they always do.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
with contextlib.suppress(AttributeError, OSError, TypeError):  # another system
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 32 << 20)
    ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, 256 << 20)

# How slow a machine is today is no property of the code. The database would make two runs differ.
settings.register_profile(
    "all",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
# `support.examples` scales what tests draw: `make test` takes a quarter, `make fuzz` 25 times.
settings.register_profile("suite", settings.get_profile("all"), max_examples=25)
settings.register_profile("fuzz", settings.get_profile("all"), max_examples=2500)
settings.load_profile("all" if models.EVERY_MODEL else "suite")

# The array caches are tested without the compiled layer too, so nothing here imports it at once.
if TYPE_CHECKING:
    from pykvcache import LlamaContext, LlamaModel

    ModelFactory = Callable[..., LlamaModel]
    ContextFactory = Callable[..., LlamaContext]

FreshLogits = Callable[..., NDArray[np.float32]]

ENCODER_INPUT = np.arange(10, 30, dtype=np.int32)
"""What encoder-decoder models are given before they decode."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=["own", "rpc"],
        help="put every layer of every model on a device: one of this build's own, or the CPU of "
        "another process over RPC on loopback",
    )


def pytest_configure(config: pytest.Config) -> None:
    """State the tolerance before the tests import it."""
    if config.getoption("--device") == "own":
        models.RIGHT = models.RIGHT_ON_A_DEVICE


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what cannot be on a device, with its reason."""
    for item in items if config.getoption("--device") else []:
        for mark in item.iter_markers("not_on_a_device"):
            item.add_marker(pytest.mark.skip(reason=f"on a device: {mark.kwargs['reason']}"))


def pytest_collection_finish() -> None:
    """Leave the 12,000 tests out of every garbage collection: one took a quarter of a second."""
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _small_collections() -> None:
    """Leave what earlier modules have made out of the collections of this one."""
    gc.collect()
    gc.freeze()


# Servers end with this process, not before: models are freed at its very end.
_kept: list[Any] = []


@pytest.fixture(scope="session", autouse=True)
def _device(request: pytest.FixtureRequest) -> Iterator[None]:
    """With ``--device``, models are loaded to it unless a test says otherwise."""
    kind = request.config.getoption("--device")
    if kind is None:
        yield
        return
    from pykvcache import LlamaModel
    from pykvcache._native import lib

    if kind == "rpc":
        from devices.rpc_kit import Served

        _kept.append(Served())
        _kept.append(lib.Server(_kept[0].endpoint, 60.0))
        _kept[1].register()
    if lib.devices() == ["CPU"]:
        pytest.exit("--device: this build has no device but the CPU", 4)
    defaults = LlamaModel.__init__.__kwdefaults__
    before = defaults["n_gpu_layers"]
    defaults["n_gpu_layers"] = 99
    yield
    defaults["n_gpu_layers"] = before


@pytest.fixture(scope="session")
def binding() -> ModuleType:
    """The package, or a skip where its compiled layer was not built."""
    reason = "the compiled layer is missing"
    pytest.importorskip("pykvcache._native.lib", reason=reason, exc_type=ImportError)
    return importlib.import_module("pykvcache")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the generated models of this session lie, for all workers."""
    return shared_folder(tmp_path_factory)


@pytest.fixture(scope="session")
def stories(binding: ModuleType) -> Iterator[LlamaModel]:
    """The model that ships with the package, loaded once per worker."""
    with binding.LlamaModel(binding.embedded_model_path()) as model:
        yield model


@pytest.fixture(scope="session")
def model(binding: ModuleType, model_folder: Path) -> Iterator[ModelFactory]:
    """``model(name, **sizes)``: a generated model, loaded once per worker."""
    loaded: dict[tuple[object, ...], LlamaModel] = {}

    def load(name: str, **sizes: int) -> LlamaModel:
        key = (name, *sorted(sizes.items()))
        if key not in loaded:
            loaded[key] = binding.LlamaModel(make_model(name, model_folder, **sizes))
        return loaded[key]

    yield load
    for one in loaded.values():
        one.close()


def open_context(
    binding: ModuleType, load: ModelFactory, which: str | LlamaModel, options: dict[str, Any]
) -> LlamaContext:
    """Return a small exact context; an encoder-decoder model has its input encoded for all."""
    defaults = {"n_ctx": 256, "n_seq_max": 4, "n_threads": 1, **EXACT}
    source = load(which) if isinstance(which, str) else which
    if isinstance(which, str):
        defaults |= {"embeddings": True} if MODELS[which].is_embedder else {}
        defaults |= {} if MODELS[which].can_unify else {"kv_unified": False}
    ctx: LlamaContext = binding.LlamaContext(source, **(defaults | options))
    if source.has_encoder and source.has_decoder:
        n = len(ENCODER_INPUT)
        # Cross attention sees only the sequences that the encoded tokens belong to.
        everyone = np.tile(np.arange(ctx.n_seq_max, dtype=np.int32), (n, 1))
        ctx.encode(binding.LlamaBatch.from_arrays(ENCODER_INPUT, np.arange(n), everyone))
    return ctx


@pytest.fixture
def make_context(binding: ModuleType, model: ModelFactory) -> Iterator[ContextFactory]:
    """``make_context(name_or_model, **options)``: a context, closed after the test.

    Without options: 256 cells, 4 sequences, one thread and `EXACT`.
    """
    opened: list[LlamaContext] = []

    def make(which: str | LlamaModel, **options: Any) -> LlamaContext:
        opened.append(open_context(binding, model, which, options))
        return opened[-1]

    yield make
    for ctx in opened:
        ctx.close()


@pytest.fixture(scope="session")
def fresh_logits(binding: ModuleType, model: ModelFactory) -> FreshLogits:
    """``fresh_logits(name_or_model, tokens, **options)``: of the last token, in a new context.

    Tokens are decoded at 0, 1, ... in one call in a context with one sequence and room for all
    of them. The answer is read-only, and remembered for the names of models without options.
    """
    known: dict[tuple[str, bytes], NDArray[np.float32]] = {}

    def run(which: str | LlamaModel, tokens: Any, **options: Any) -> NDArray[np.float32]:
        words = np.asarray(tokens, dtype=np.int32)
        key = (which, words.tobytes()) if isinstance(which, str) and not options else None
        if key is not None and key in known:
            return known[key]
        room = {"n_ctx": max(256, len(words)), "n_seq_max": 1}
        with open_context(binding, model, which, room | options) as ctx:
            ctx.decode(words)
            logits = ctx.logits()
        logits.flags.writeable = False
        if key is not None:
            known[key] = logits
        return logits

    return run
