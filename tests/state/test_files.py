"""The file for other tools: safetensors, checksums, descriptions, metadata, read-only arrays."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memory.kit import Make
from pykvcache import SequenceState, describe_state
from pykvcache.errors import StateDamaged, StateError
from pykvcache.state import ContextState, StateInfo
from state.kit import WORDS

safetensors = pytest.importorskip("safetensors")
xxhash = pytest.importorskip("xxhash")


@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba"])
def test_safetensors_can_read_states(name: str, make_context: Make, tmp_path: Path) -> None:
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
def test_types_with_and_without_a_safetensors_equivalent(
    kind: str, make_context: Make, tmp_path: Path
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


def test_a_description_reads_the_header_alone(make_context: Make, tmp_path: Path) -> None:
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
    checksum: str, mapped: bool, make_context: Make, tmp_path: Path
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


def test_without_xxhash(make_context: Make, tmp_path: Path) -> None:
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


def test_metadata_survives_a_round_trip(make_context: Make, tmp_path: Path) -> None:
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


UNFIT: list[tuple[Any, type[Exception]]] = [
    ({1: 2}, TypeError),
    ({"a": [{None: 2}]}, TypeError),
    ({"a": b"bytes"}, TypeError),
    ({"a": np.float32(1)}, TypeError),
    ({"a": float("nan")}, ValueError),
    ({"a": float("inf")}, ValueError),
    ([("a", 1)], TypeError),
    ("text", TypeError),
]


def nested(depth: int) -> dict[str, Any]:
    return {"a": nested(depth - 1)} if depth else {}


def test_metadata_that_no_file_can_hold(
    make_context: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = make_context("llama")
    ctx.decode(WORDS[:5])
    for bad, error in UNFIT:
        with pytest.raises(error, match="metadata"):
            ctx.save_sequence(tmp_path / "a", 0, metadata=bad)
        with pytest.raises(error, match="metadata"):
            ctx.save_context(tmp_path / "a", metadata=bad)
    round_: Any = []
    round_.append(round_)
    with pytest.raises(ValueError, match="metadata"):
        ctx.sequence_state(0, metadata={"a": round_})
    data = ctx.sequence_state(0, metadata=nested(100)).to_bytes()
    assert SequenceState.from_bytes(data).metadata == nested(100)
    with pytest.raises(ValueError, match="deeper than 100"):
        ctx.sequence_state(0, metadata=nested(101))
    monkeypatch.setattr("pykvcache.state.container._MAX_HEADER", 5000)
    with pytest.raises(ValueError, match="limit of 5000"):
        ctx.sequence_state(0, metadata={"a": "x" * 5000}).to_bytes()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.hazard("S11", "S12")
def test_token_count_must_match_positions(make_context: Make, tmp_path: Path) -> None:
    for name in ("llama", "gemma3", "mamba", "jamba"):
        ctx = make_context(name)
        ctx.decode(WORDS[:20], seq_id=1)
        for n in (0, 19, 21):
            with pytest.raises(ValueError, match=f"{n} tokens given"):
                ctx.save_sequence(tmp_path / "a", 1, tokens=WORDS[:n])
            with pytest.raises(ValueError, match=f"{n} tokens given"):
                ctx.save_context(tmp_path / "a", tokens={1: WORDS[:n]})
            with pytest.raises(ValueError, match=f"{n} tokens given"):
                ctx.save_llama_file(tmp_path / "a", 1, WORDS[:n])
    for bad in ("text", [1.5] * 20, b"x" * 20, 5):
        for save in (ctx.save_sequence, ctx.save_llama_file):
            with pytest.raises(TypeError):
                save(tmp_path / "a", 1, tokens=bad)  # type: ignore[arg-type]
    for key in ("1", 1.0, None, True):
        with pytest.raises(TypeError):
            ctx.context_state(tokens={key: WORDS[:20]})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="must map sequence ids"):
        ctx.context_state(tokens=WORDS[:20])  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_states_are_immutable(make_context: Make, tmp_path: Path) -> None:
    ctx = make_context("jamba")
    tokens = WORDS[:20].copy()
    ctx.decode(tokens)
    state = ctx.sequence_state(0, tokens)
    before = state.to_bytes()
    buffer = bytearray(before)
    of_buffer = SequenceState.from_bytes(buffer)
    tokens[:] = 0
    buffer[-1000:] = bytes(1000)
    state.save(tmp_path / "a")
    for one in (
        state,
        of_buffer,
        SequenceState.load(tmp_path / "a"),
        SequenceState.load(tmp_path / "a", mapped=False),
        copy.deepcopy(state),
        pickle.loads(pickle.dumps(state)),
    ):
        assert one.to_bytes() == before
        assert one.tokens is not None
        arrays = [one.positions, one.tokens]
        for array in arrays + [a for part in one.parts for a in (part.positions, *part.tensors)]:
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0
        with pytest.raises(AttributeError):
            one.tokens = None  # type: ignore[misc]
    whole = ctx.context_state({0: WORDS[:20]})
    again = pickle.loads(pickle.dumps(whole))
    assert again.to_bytes() == whole.to_bytes()
    damaged = bytearray(pickle.dumps(state))
    damaged[len(damaged) // 2] ^= 1
    with pytest.raises(StateError):
        pickle.loads(damaged)
    for bad in ("text", 5, None, [1, 2]):
        with pytest.raises(TypeError):
            SequenceState.from_bytes(bad)  # type: ignore[arg-type]
