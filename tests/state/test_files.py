"""The file for other tools: safetensors, checksums, descriptions, metadata, read-only arrays."""

from __future__ import annotations

import ast
import copy
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import pykvcache.state
from pykvcache import SequenceState, describe_state
from pykvcache.errors import StateDamaged, StateError, StateFileError, StateVersionError
from pykvcache.state import ContextState, StateInfo
from state.kit import WORDS, Tensors, Text, forged

if TYPE_CHECKING:
    from conftest import ContextFactory

safetensors = pytest.importorskip("safetensors")
xxhash = pytest.importorskip("xxhash")


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2vl", "mamba", "jamba", "lfm2_swa"])
def test_others_can_read_it(name: str, make_context: ContextFactory, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    ctx = make_context(name, flash_attn="enabled")
    ctx.decode(WORDS[:20], seq_id=1)
    ctx.save_sequence(tmp_path / "a", 1, tokens=WORDS[:20])
    ctx.save_context(tmp_path / "all")
    tensors = load_file(tmp_path / "a")
    assert np.array_equal(tensors["tokens"], WORDS[:20])
    kv = ctx.kv(1)
    for part, layers in (("attention", kv.layers), ("window", kv.window and kv.window.layers)):
        for layer in layers or ():
            place = f"{part}.layers.{layer.layer}"
            assert np.array_equal(tensors[f"{place}.k"], layer.keys)
            assert np.array_equal(tensors[f"{place}.v"], layer.values)
    if kv.layers:
        assert np.array_equal(tensors["attention.positions"], kv.positions)
    whole = load_file(tmp_path / "all")
    for key, tensor in tensors.items():
        part, _, rest = key.partition(".")
        if rest:
            assert np.array_equal(whole[f"{part}.0.{rest}"], tensor)
    with safetensors.safe_open(tmp_path / "a", "np") as file:
        text = file.metadata()
        assert set(file.keys()) == set(tensors)
    assert text["format"] == "pykvcache.state"
    assert text["kind"] == "sequence"


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0"])
def test_types_that_others_have_and_have_not(
    kind: str, make_context: ContextFactory, tmp_path: Path
) -> None:
    ctx = make_context("llama_h64", type_k=kind, type_v=kind, flash_attn="enabled")
    ctx.decode(WORDS[:20])
    ctx.save_sequence(tmp_path / "a", 0)
    with safetensors.safe_open(tmp_path / "a", "np") as file:
        view = file.get_slice("attention.layers.0.k")
        assert view.get_dtype() == {"f16": "F16", "bf16": "BF16", "q8_0": "U8"}[kind]
        assert view.get_shape() == ([20, 2, 64] if kind != "q8_0" else [20, 128 // 32 * 34])
        if kind == "f16":
            keys = file.get_tensor("attention.layers.0.k")
            assert np.array_equal(keys.astype(np.float32), ctx.kv(0).layers[0].keys)


def test_a_description_reads_the_header_alone(make_context: ContextFactory, tmp_path: Path) -> None:
    ctx = make_context("llama", type_k="f16")
    ctx.decode(WORDS[:20], seq_id=1)
    ctx.decode(WORDS[:5], seq_id=2)
    size = ctx.save_sequence(tmp_path / "a", 1, WORDS[:20], {"a": [1]})
    fingerprint = ctx.sequence_state(1).fingerprint
    assert fingerprint.model == ctx.model.fingerprint
    assert len({fingerprint, ctx.sequence_state(2).fingerprint}) == 1
    want = StateInfo(
        "sequence", 20, True, fingerprint, {"k": "f16", "v": "f32"}, {"a": [1]}, "xxh3-128", size
    )
    assert describe_state(tmp_path / "a") == want
    ctx.save_context(tmp_path / "all")
    info = describe_state(str(tmp_path / "all"))
    assert (info.kind, info.n_tokens, info.has_tokens) == ("context", 25, False)
    # Everything after the table of checksums may be damaged.
    data = bytearray((tmp_path / "a").read_bytes())
    start = 8 + int.from_bytes(data[:8], "little") + 16 * 7
    data[start:] = bytes(len(data) - start)
    (tmp_path / "a").write_bytes(data)
    assert describe_state(tmp_path / "a") == want
    with pytest.raises(StateDamaged):
        SequenceState.load(tmp_path / "a")


@pytest.mark.parametrize("checksum", ["xxh3-128", "sha256"])
@pytest.mark.parametrize("mapped", [True, False])
def test_both_checksums_mapped_or_not(
    checksum: str, mapped: bool, make_context: ContextFactory, tmp_path: Path
) -> None:
    ctx = make_context("llama")
    ctx.decode(WORDS[:20])
    state = ctx.sequence_state(0)
    state.save(tmp_path / "a", checksum=checksum)
    assert (tmp_path / "a").read_bytes() == state.to_bytes(checksum=checksum)
    assert describe_state(tmp_path / "a").checksum == checksum
    loaded = SequenceState.load(tmp_path / "a", mapped=mapped)
    assert loaded.to_bytes() == state.to_bytes()
    for bad in ("md5", "SHA256", "xxh3"):
        with pytest.raises(ValueError, match="checksums of type"):
            state.to_bytes(checksum=bad)


WITHOUT = """
import sys
sys.modules["xxhash"] = None
from pykvcache import SequenceState, describe_state
from pykvcache.errors import StateVersionError
state = SequenceState.load(sys.argv[1])
assert describe_state(sys.argv[1]).checksum == "sha256"
state.save(sys.argv[3])
assert describe_state(sys.argv[3]).checksum == "sha256"
for call in (
    lambda: SequenceState.load(sys.argv[2]),
    lambda: describe_state(sys.argv[2]),
    lambda: state.to_bytes(checksum="xxh3-128"),
):
    try:
        call()
    except StateVersionError as error:
        assert "pip install" in str(error), error
    else:
        raise AssertionError("read without its checksums")
"""


def test_without_xxhash(make_context: ContextFactory, tmp_path: Path) -> None:
    ctx = make_context("llama")
    ctx.decode(WORDS[:20])
    state = ctx.sequence_state(0)
    sha, xxh, new = (tmp_path / name for name in ("sha", "xxh", "new"))
    state.save(sha, checksum="sha256")
    state.save(xxh, checksum="xxh3-128")
    subprocess.run([sys.executable, "-c", WITHOUT, sha, xxh, new], check=True)
    assert new.read_bytes() == sha.read_bytes()
    assert SequenceState.load(new).to_bytes() == xxh.read_bytes()


META: dict[str, Any] = {
    "text": 'snow \N{SNOWMAN} "quoted" \0 \ud800',
    "numbers": [0, -1, 2**70, 1.5, 1e-300],
    "nothing": None,
    "truth": [True, False],
    "deep": {"a": {"b": [{"c": []}]}},
    "": "",
    "format": "mine",
}


def test_metadata_comes_back(make_context: ContextFactory, tmp_path: Path) -> None:
    ctx = make_context("llama")
    ctx.decode(WORDS[:5])
    ctx.save_sequence(tmp_path / "a", 0, metadata=META)
    ctx.save_context(tmp_path / "all", metadata=META)
    for state in (SequenceState.load(tmp_path / "a"), ContextState.load(tmp_path / "all")):
        assert state.metadata == META
        state.metadata["text"] = "changed"
        state.metadata["deep"]["a"].clear()
        assert state.metadata == META
    mine = copy.deepcopy(META)
    state = ctx.sequence_state(0, metadata=mine)
    mine["deep"]["a"].clear()
    assert state.metadata == META


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({1: 2}, TypeError),
        ({"a": {1: 2}}, TypeError),
        ({"a": [{None: 2}]}, TypeError),
        ({"a": b"bytes"}, TypeError),
        ({"a": {1, 2}}, TypeError),
        ({"a": np.float32(1)}, TypeError),
        ({"a": float("nan")}, ValueError),
        ({"a": float("inf")}, ValueError),
        ([("a", 1)], TypeError),
        ("text", TypeError),
        (5, TypeError),
    ],
    ids=repr,
)
def test_metadata_that_no_file_can_hold(
    bad: Any, error: type[Exception], make_context: ContextFactory, tmp_path: Path
) -> None:
    ctx = make_context("llama")
    ctx.decode(WORDS[:5])
    with pytest.raises(error, match="metadata"):
        ctx.save_sequence(tmp_path / "a", 0, metadata=bad)
    with pytest.raises(error, match="metadata"):
        ctx.save_context(tmp_path / "a", metadata=bad)
    round_: Any = []
    round_.append(round_)
    with pytest.raises(ValueError, match="metadata"):
        ctx.sequence_state(0, metadata={"a": round_})
    assert list(tmp_path.iterdir()) == []


def test_metadata_is_read_wherever_the_stack_stands(make_context: ContextFactory) -> None:
    """The JSON module goes as deep as the recursion limit leaves room for."""

    def nested(depth: int) -> dict[str, Any]:
        return {"a": nested(depth - 1)} if depth else {}

    def below(depth: int, call: Callable[[], Any]) -> Any:
        return below(depth - 1, call) if depth else call()

    ctx = make_context("llama")
    ctx.decode(WORDS[:5])
    data = ctx.sequence_state(0, metadata=nested(100)).to_bytes()
    assert below(500, lambda: SequenceState.from_bytes(data).metadata) == nested(100)
    for depth in (101, 400):
        with pytest.raises(ValueError, match="deeper than 100"):
            ctx.sequence_state(0, metadata=nested(depth))


def test_metadata_that_could_not_be_read_again_is_not_written(
    make_context: ContextFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = make_context("llama")
    ctx.decode(WORDS[:5])
    monkeypatch.setattr("pykvcache.state.container._MAX_HEADER", 5000)
    assert SequenceState.from_bytes(ctx.sequence_state(0, metadata={"a": "x" * 2000}).to_bytes())
    with pytest.raises(ValueError, match="limit of 5000"):
        ctx.sequence_state(0, metadata={"a": "x" * 5000}).to_bytes()


@pytest.mark.parametrize("n", [0, 1, 19, 21, 400])
def test_tokens_are_as_many_as_positions(
    n: int, make_context: ContextFactory, tmp_path: Path
) -> None:
    for name in ("llama", "gemma3", "mamba", "jamba"):
        ctx = make_context(name)
        ctx.decode(WORDS[:20], seq_id=1)
        with pytest.raises(ValueError, match=f"{n} tokens given"):
            ctx.save_sequence(tmp_path / "a", 1, tokens=WORDS[:n])
        with pytest.raises(ValueError, match=f"{n} tokens given"):
            ctx.save_context(tmp_path / "a", tokens={1: WORDS[:n]})
    for bad in ("text", [1.5] * 20, b"x" * 20, 5):
        with pytest.raises(TypeError):
            ctx.save_sequence(tmp_path / "a", 1, tokens=bad)  # type: ignore[arg-type]
    for key in ("1", 1.0, None, True):
        with pytest.raises(TypeError):
            ctx.context_state(tokens={key: WORDS[:20]})  # type: ignore[dict-item]
    assert list(tmp_path.iterdir()) == []


def test_nothing_of_a_state_can_be_changed(make_context: ContextFactory, tmp_path: Path) -> None:
    ctx = make_context("jamba")
    tokens = WORDS[:20].copy()
    ctx.decode(tokens)
    state = ctx.sequence_state(0, tokens)
    before = state.to_bytes()
    tokens[:] = 0
    state.save(tmp_path / "a")
    for one in (
        state,
        SequenceState.load(tmp_path / "a"),
        SequenceState.load(tmp_path / "a", mapped=False),
        SequenceState.from_bytes(before),
        ctx.context_state().sequence(0),
        copy.deepcopy(state),
        pickle.loads(pickle.dumps(state)),
    ):
        for part in one.parts:
            for array in (one.positions, part.positions, *part.tensors):
                with pytest.raises(ValueError, match="read-only"):
                    array[...] = 0
        if one.tokens is not None:
            with pytest.raises(ValueError, match="read-only"):
                one.tokens[...] = 0
        for name in ("positions", "tokens", "parts", "metadata", "fingerprint", "n_tokens"):
            with pytest.raises(AttributeError):
                setattr(one, name, None)
    assert state.to_bytes() == before
    assert SequenceState.load(tmp_path / "a").to_bytes() == before
    whole = ctx.context_state({0: WORDS[:20]})
    again = pickle.loads(pickle.dumps(whole))
    assert again.to_bytes() == whole.to_bytes()
    with pytest.raises(ValueError, match="read-only"):
        again.tokens[0][...] = 0
    damaged = bytearray(pickle.dumps(state))
    damaged[len(damaged) // 2] ^= 1
    with pytest.raises(StateError):
        pickle.loads(damaged)


@pytest.mark.parametrize("kind", [bytearray, lambda data: memoryview(bytearray(data))])
def test_a_buffer_that_changes_later_changes_no_state(
    kind: Any, make_context: ContextFactory
) -> None:
    ctx = make_context("llama")
    ctx.decode(WORDS[:20])
    data = ctx.sequence_state(0).to_bytes()
    buffer = kind(data)
    state = SequenceState.from_bytes(buffer)
    buffer[-1000:] = bytes(1000)
    assert state.to_bytes() == data
    for bad in ("text", 5, None, [1, 2]):
        with pytest.raises(TypeError):
            SequenceState.from_bytes(bad)


def test_the_order_of_tensors_and_keys_does_not_matter(make_context: ContextFactory) -> None:
    """Another writer may put both in another order."""
    ctx = make_context("jamba")
    ctx.decode(WORDS[:20])
    data = ctx.sequence_state(0, WORDS[:20], {"a": 1}).to_bytes(checksum="sha256")

    def turn(text: Text, tensors: Tensors) -> None:
        for each in (text, tensors):
            pairs = list(each.items())[::-1]
            each.clear()
            each.update(pairs)  # type: ignore[arg-type]
        text["fingerprint"] = json.dumps(dict(reversed(json.loads(text["fingerprint"]).items())))

    turned = forged(data, turn)
    assert turned != data
    ctx.decode(WORDS[:9], seq_id=1)
    tokens = {0: WORDS[:20], 1: WORDS[:9]}
    whole = ctx.context_state(tokens).to_bytes()
    assert ctx.context_state(dict(reversed(tokens.items()))).to_bytes() == whole
    assert SequenceState.from_bytes(turned).to_bytes(checksum="sha256") == data
    ctx.restore_sequence(SequenceState.from_bytes(turned), 1)
    assert ctx.sequence_state(1, WORDS[:20], {"a": 1}).to_bytes(checksum="sha256") == data


def test_nothing_is_pickled() -> None:
    for path in Path(pykvcache.state.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            names = [alias.name for alias in node.names]
            names.append(getattr(node, "module", None) or "")
            assert not {"pickle", "marshal", "shelve", "dill"} & {n.split(".")[0] for n in names}


def test_checksums_that_are_not_installed_have_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pykvcache.state.container._xxh3", lambda: None)
    from pykvcache.state.container import best_checksum, find_checksum

    assert best_checksum() == "sha256"
    with pytest.raises(StateVersionError, match="pykvcache\\[state\\]"):
        find_checksum("xxh3-128")


def test_a_long_name_is_shortened_in_the_text_and_whole_in_the_facts() -> None:
    name = "x" * 100_000
    with pytest.raises(StateFileError, match=r"File name too long|[Ii]nvalid") as info:
        SequenceState.load(name)
    assert len(str(info.value)) < 300
    assert info.value.filename == name
