"""Values of a wrong type that the survival fuzz found are refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from binding.kit import words
from pykvcache import LlamaModel, LlamaSequence, PrefixCache
from pykvcache.errors import ArgumentError, StateError
from pykvcache.kv import LayerKV, RecurrentState, SequenceKV, from_caches, to_caches
from pykvcache.prefix.stores import FolderStore

NONE = SequenceKV(np.empty(0, np.int32), [])


@pytest.mark.parametrize("given", [5, "tokens", [words(3)], -0.5])
def test_tokens_of_a_context_are_a_mapping(make_context: Any, tmp_path: Any, given: Any) -> None:
    ctx = make_context("llama")
    ctx.decode(words(3))
    with pytest.raises(TypeError, match="tokens"):
        ctx.context_state(tokens=given)
    with pytest.raises(TypeError, match="tokens"):
        ctx.save_context(tmp_path / "state", tokens=given)
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("given", [None, 5, [1], "fingerprint"])
def test_a_fingerprint_is_compared_with_another(make_context: Any, given: Any) -> None:
    ctx = make_context("llama")
    ctx.decode(words(3))
    with pytest.raises(TypeError, match="Fingerprint"):
        ctx.sequence_state(0).fingerprint.check(given)


def test_other_types_than_sequences_are_type_errors() -> None:
    for given in (5, [True], {5}, None):
        with pytest.raises(TypeError, match="SequenceKV"):
            to_caches(given)  # type: ignore[arg-type]
    window = SequenceKV(NONE.positions, [], window=NONE)
    for window_size in ("5", 1.5, slice(1)):
        with pytest.raises(TypeError):
            to_caches(window, window_size)  # type: ignore[arg-type]
    for n_tokens in ("5", 1.5, np.str_("a")):
        with pytest.raises(TypeError):
            from_caches([], n_tokens=n_tokens)  # type: ignore[arg-type]


def test_invalid_recurrent_states_are_refused(make_context: Any) -> None:
    given: Any = 6
    with pytest.raises(TypeError, match="RecurrentState"):
        make_context("mamba").write_kv(SequenceKV(NONE.positions, [], recurrent=given), 0)
    ctx = make_context("mamba")
    ctx.decode(words(3))
    held = ctx.kv(0)
    far = dataclasses.replace(held.recurrent, first=2**40)
    with pytest.raises(StateError):
        ctx.write_kv(dataclasses.replace(held, recurrent=far), 1)
    assert set(ctx.sequences()) == {0}
    state = RecurrentState(3, given)
    with pytest.raises((TypeError, ValueError)):
        make_context("mamba").write_kv(SequenceKV(NONE.positions, [], recurrent=state), 0)


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        (np.array([2**64 - 1], np.uint64), IndexError),
        ([4], IndexError),
        ([-5], IndexError),
        ([True, False], IndexError),
        (np.zeros(2, [("a", "i4")]), TypeError),
        ([1.0], TypeError),
        (2, ValueError),
    ],
)
def test_tokens_that_do_not_exist_are_not_selected(tokens: Any, error: type[Exception]) -> None:
    rows = np.arange(16, dtype=np.float32).reshape(4, 2, 2)
    held = SequenceKV(np.arange(4, dtype=np.int32), [LayerKV(rows, rows)])
    with pytest.raises(error):
        held.select(tokens)
    assert held.select([3, -4]).positions.tolist() == [3, 0]
    assert held.select([False, True, False, True]).positions.tolist() == [1, 3]
    assert len(held.select([])) == 0
    with pytest.raises(TypeError, match="LayerKV"):
        SequenceKV(held.positions, words(4)).select([0])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([{"role": "user", "content": "Hi"}], r"not dict \(at 0\): model.apply_chat_template"),
        ({"role": "user"}, "not a mapping: model.apply_chat_template"),
        ([5, "six"], r"tokens must be integers, not str \(at 1\)$"),
        ([5, 6.5], r"tokens must be integers, not float \(at 1\)$"),
        (5, "tokens must be a sequence of integers, not int"),
    ],
)
def test_wrong_tokens_are_named_once(make_context: Any, given: Any, says: str) -> None:
    ctx = make_context("llama")
    for call in (ctx.decode, lambda tokens: LlamaSequence(ctx, tokens), ctx.model.detokenize):
        with pytest.raises(TypeError, match=says) as error:
            call(given)
        assert str(error.value).count("tokens must be") == 1


def test_integers_without_a_text_are_typed_errors_everywhere(make_context: Any, model: Any) -> None:
    """Python writes no integer of more than 4,300 digits."""
    huge: Any = 10**5000
    path = model("llama").path
    for name in ("devices", "rpc"):
        with pytest.raises(TypeError, match=name):
            LlamaModel(path, **{name: [huge]})
    for wrong in (huge, [huge]):
        with pytest.raises((TypeError, ArgumentError)):
            make_context("llama").kv(0, dtype=wrong)
    with pytest.raises(TypeError, match="policy"):
        PrefixCache(make_context("llama"), policy=huge)
    with pytest.raises(TypeError, match="tiers"):
        PrefixCache(make_context("llama"), tiers=huge)


NO_INTEGERS: list[Any] = [np.array(1.5), np.array([1, 2]), np.array("1"), np.zeros((0,), np.int32)]


@pytest.mark.parametrize("given", NO_INTEGERS)
def test_arrays_of_other_types_are_named(make_context: Any, given: Any) -> None:
    """All arrays have ``__index__``."""
    ctx = make_context("llama")
    ctx.decode(words(3))
    calls = {
        "sequence id": lambda: ctx.kv_cache_seq_pos_max(given),
        "p0": lambda: ctx.remove(0, given, 2),
        "delta": lambda: ctx.kv_cache_seq_add(0, 0, 2, given),
        "n_threads": lambda: ctx.set_n_threads(given),
        "block_size": lambda: PrefixCache(ctx, block_size=given),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=f"{name} must be an integer, not ndarray"):
            call()
    assert ctx.kv_cache_seq_pos_max(0) == 2
    ctx.remove(0, np.array(2), None)  # one that is an integer
    assert ctx.kv_cache_seq_pos_max(0) == 1


@pytest.mark.parametrize("given", [[], {}, bytearray(9), np.zeros(2), 5, "tail", [[1]]])
def test_parts_of_any_type_are_named(make_context: Any, given: Any) -> None:
    ctx = make_context("llama")
    for call in (ctx.cells, ctx.plot):
        with pytest.raises(ArgumentError, match=r"part is .*: it must be one of attention"):
            call(given)


@pytest.mark.parametrize("given", ["x" * 100_000, object(), [(1, 2)], [5], {}, 5, "f2"])
def test_values_of_any_type_are_named(make_context: Any, given: Any) -> None:
    ctx = make_context("llama")
    ctx.decode(words(3))
    with pytest.raises((ArgumentError, TypeError), match=r"^dtype (is|must be)") as info:
        ctx.kv(0, dtype=given)
    assert len(str(info.value)) < 300


@pytest.mark.parametrize("name", [5, None, bytearray(b"x"), ["x"]])
def test_file_names_that_are_not_text_are_type_errors(name: Any) -> None:
    class Named:
        def __fspath__(self) -> Any:
            return name

    with pytest.raises(TypeError, match=f"path must be .*not Named, .* {type(name).__name__}"):
        LlamaModel(Named())
    with pytest.raises(TypeError, match=f"not Named, .* {type(name).__name__}"):
        FolderStore(Named())
