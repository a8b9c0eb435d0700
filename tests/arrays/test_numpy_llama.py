"""The bridge: one forward pass on three caches, against a reference and llama.cpp."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pykvcache.arrays import CausalCache
from support.models import MODELS, make_model
from support.numpy_llama import LedgerLlama

if TYPE_CHECKING:
    from pykvcache import LlamaContext

    ContextFactory = Callable[..., LlamaContext]

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "numpy_llama.py"
KINDS = ["kv", "causal", "flat"]
TOKENS = np.random.default_rng(5).integers(3, 300, 40).tolist()


@pytest.fixture(scope="module")
def example() -> Any:
    return SimpleNamespace(**runpy.run_path(str(EXAMPLE)))


@pytest.fixture(scope="module", params=["llama", "llama_h64"])
def path(request: pytest.FixtureRequest, model_folder: Path) -> Path:
    return make_model(request.param, model_folder)


@pytest.fixture(scope="module")
def tiny(model_folder: Path) -> Path:
    return make_model("llama", model_folder)


def run(example: Any, model: Any, exchange: Any, tokens: list[int], batches: list[int]) -> Any:
    """Logits of all tokens, decoded in `batches`."""
    assert sum(batches) == len(tokens)
    rows, start = [], 0
    for count in batches:
        positions = np.arange(start, start + count)
        rows.append(model.forward(tokens[start : start + count], positions, exchange))
        start += count
    return np.concatenate(rows)


@pytest.mark.parametrize("batches", [[40], [17, 1, 1, 20, 1]])
@pytest.mark.parametrize("kind", KINDS)
def test_every_cache_gives_the_reference_logits(
    example: Any, path: Path, kind: str, batches: list[int]
) -> None:
    model = example.Llama(str(path))
    logits = run(example, model, example.empty_cache(model, kind, 40), TOKENS, batches)
    expected = LedgerLlama(path).decode(0, TOKENS)
    np.testing.assert_allclose(logits, expected, atol=2e-4)
    # The logits differ between tokens far more than that, so the history matters.
    assert np.abs(np.diff(expected, axis=0)).max(axis=1).min() > 0.1


def test_a_causal_cache_holds_two_sequences_and_removes_from_the_middle(
    example: Any, tiny: Path
) -> None:
    model, ledger = example.Llama(str(tiny)), LedgerLlama(tiny)
    cache = CausalCache(lambda layer, key, shift: model.rope(key, shift))
    cache.init(np.float32, max_sequences=2, capacity=64, max_batch=16)
    first, second = (example.on_causal_cache(cache, sequence) for sequence in (0, 1))
    for start in (0, 10):
        for sequence, exchange in enumerate((first, second)):
            words = TOKENS[start + sequence : start + sequence + 10]
            logits = model.forward(words, np.arange(start, start + 10), exchange)
            np.testing.assert_allclose(logits, ledger.decode(sequence, words), atol=2e-4)
    cache.remove(0, 4, 9)
    ledger.remove(0, 4, 9)
    ledger.add(0, 9, 20, -5)
    logits = model.forward([7, 8], [15, 16], first)
    np.testing.assert_allclose(logits, ledger.decode(0, [7, 8]), atol=2e-4)
    cache.copy_prefix(1, 0, 12)
    ledger.copy(1, 0, 0, 12)
    logits = model.forward([9], [12], first)
    np.testing.assert_allclose(logits, ledger.decode(0, [9]), atol=2e-4)
    logits = model.forward([9], [20], second)
    np.testing.assert_allclose(logits, ledger.decode(1, [9]), atol=2e-4)


def test_models_that_the_example_cannot_run_are_refused(example: Any, model_folder: Path) -> None:
    for name in ("gemma3", "qwen2vl"):
        with pytest.raises(ValueError, match="architecture llama"):
            example.Llama(str(make_model(name, model_folder)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_script_generates(
    kind: str, tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [str(EXAMPLE), str(tiny), "5", "9", "-n", "6", "--cache", kind])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    # The greedy continuation by the reference.
    ledger, pieces = LedgerLlama(tiny), MODELS["llama"].vocab().tokens
    words, tokens = [], [5, 9]
    for _ in range(6):
        ledger.decode(0, tokens)
        tokens = [int(ledger.logits.argmax())]
        words.append(pieces[tokens[0]].decode())
    assert capsys.readouterr().out.split() == words


# Against llama.cpp ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_llama_cpp_gives_the_same_logits(
    example: Any, path: Path, kind: str, binding: ModuleType, make_context: ContextFactory
) -> None:
    model = example.Llama(str(path))
    exchange = example.empty_cache(model, kind, 40)
    with binding.LlamaModel(path) as native:
        context = make_context(native)
        for start, count in ((0, 37), (37, 1), (38, 1), (39, 1)):
            words = np.array(TOKENS[start : start + count], np.int32)
            logits = model.forward(words, np.arange(start, start + count), exchange)
            context.decode(words, seq_id=0)
            np.testing.assert_allclose(logits[-1], context.logits(-1), atol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_numpy_continues_where_llama_cpp_stopped(
    example: Any, tiny: Path, kind: str, make_context: ContextFactory
) -> None:
    context, model = make_context("llama"), example.Llama(str(tiny))
    context.decode(np.array(TOKENS[:30], np.int32), seq_id=0)
    taken = context.kv(0)
    assert taken.positions.tolist() == list(range(30))
    exchange = example.empty_cache(model, kind, 40)
    for layer, arrays in enumerate(taken.layers):
        exchange(layer, arrays.keys, arrays.values, taken.positions)
    for start, count in ((30, 7), (37, 1), (38, 1)):
        words = TOKENS[start : start + count]
        logits = model.forward(words, np.arange(start, start + count), exchange)
        context.decode(np.array(words, np.int32), seq_id=0)
        np.testing.assert_allclose(logits[-1], context.logits(-1), atol=1e-3)
