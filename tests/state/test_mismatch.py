"""States of another model, or computed under other settings, are refused by name."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind

from memory.kit import Load, Make
from pykvcache import LlamaContext, LlamaModel, SequenceState, describe_state
from pykvcache.errors import (
    NoKvCacheSlot,
    SequenceIdError,
    StateLayoutMismatch,
    StateModelMismatch,
    UnsupportedOperation,
)
from state.kit import WORDS, refused
from support.models import make_model, with_keys
from test_quantized_weights import quantized


@pytest.fixture
def wide(tmp_path: Path) -> Any:
    """``wide(kind)``: the model with matrices of that type, freshly loaded."""
    opened: list[LlamaModel] = []

    def load(kind: Kind) -> LlamaModel:
        opened.append(LlamaModel(quantized(tmp_path / f"{kind.name}.gguf", kind)))
        return opened[-1]

    yield load
    for one in opened:
        one.close()


def test_the_other_model_is_named(make_context: Make, model_folder: Path, tmp_path: Path) -> None:
    named = tmp_path / "named.gguf"
    with_keys(make_model("llama", model_folder), named, {"general.name": "Small " * 50})
    ctx, other = make_context("gemma3"), make_context("llama")
    with LlamaModel(named) as model, LlamaContext(model, n_ctx=256) as source:
        source.decode(WORDS[:12])
        source.save_sequence(tmp_path / "a", 0)
        assert describe_state(tmp_path / "a").fingerprint.model_name == ("Small " * 50)[:100]
        for wrong in (ctx, other):
            with refused(
                wrong, StateModelMismatch, match=r"another model, 'Small .* \(llama, 2 lay"
            ):
                wrong.load_sequence(tmp_path / "a", 0)
        ctx.decode(WORDS[:5])
        ctx.save_sequence(tmp_path / "b", 0)
        with refused(source, StateModelMismatch, match=r"this one is 'Small .*: load that model"):
            source.load_sequence(tmp_path / "b", 0)


def differ(a: LlamaContext, b: LlamaContext, error: type[Exception], match: str = "") -> None:
    """Check that states of either are refused in the other."""
    for one in (a, b):
        one.clear_kv_cache()
        one.decode(WORDS[:12])
    for source, target in ((a, b), (b, a)):
        with refused(target, error, match=match or None):
            target.restore_sequence(source.sequence_state(0), 0)
        with refused(target, error, match=match or None):
            target.restore_context(source.context_state())
        source.restore_sequence(source.sequence_state(0), 2)


@pytest.mark.hazard("S25")
@pytest.mark.parametrize("name", ["llama", "mamba", "gemma3"])
def test_another_model_of_the_same_shapes(name: str, model: Load, make_context: Make) -> None:
    ctx, other = make_context(name), make_context(model(name, seed=1))
    differ(ctx, other, StateModelMismatch, "another model")
    # llama.cpp itself sees no difference at all.
    other.set_state(ctx.get_state(0), 3)
    with refused(other, StateModelMismatch):
        other.restore_sequence(ctx.sequence_state(0), 0, convert=True)
    if name == "llama":
        with pytest.raises(StateModelMismatch):
            SequenceState.join([ctx.sequence_state(0), other.sequence_state(0)])


def test_another_quantisation_of_the_same_model(
    wide: Callable[[Kind], LlamaModel], make_context: Make
) -> None:
    contexts = [make_context(wide(kind)) for kind in (Kind.F16, Kind.Q8_0, Kind.Q4_0)]
    for a, b in combinations(contexts, 2):
        differ(a, b, StateModelMismatch)


OTHER: dict[str, dict[str, Any]] = {
    "base": {"rope_freq_base": 5000.0},
    "scale": {"rope_freq_scale": 0.5},
    "linear": {"rope_scaling_type": "linear", "rope_freq_scale": 0.25},
    "yarn": {"rope_scaling_type": "yarn", "rope_freq_scale": 0.25, "yarn_orig_ctx": 128},
    "yarn-ext": {"rope_scaling_type": "yarn", "yarn_ext_factor": 0.5},
    "non-causal": {"attention_type": "non_causal"},
    "type_k": {"type_k": "f16"},
    "type_v": {"type_v": "bf16"},
}


@pytest.mark.parametrize("what", OTHER)
def test_other_settings_of_the_context(what: str, make_context: Make) -> None:
    ctx, other = make_context("llama"), make_context("llama", **OTHER[what])
    differ(ctx, other, StateLayoutMismatch)
    with pytest.raises(StateLayoutMismatch):
        SequenceState.join([ctx.sequence_state(0)[:4], other.sequence_state(0)[4:]])


@pytest.mark.parametrize("name", ["gemma3", "granitehybrid", "lfm2"])
def test_other_rotations_of_some_layers(name: str, make_context: Make, tmp_path: Path) -> None:
    ctx, other = make_context(name), make_context(name, rope_freq_base=777.0)
    ctx.decode(WORDS[:12])
    ctx.save_sequence(tmp_path / "a", 0)
    # Only the difference is named. The first layer of gemma3 has another base.
    what = r"freq_base is \S+ in the state, but 777.0 here"
    if name == "gemma3":
        what = "another layer differ"
    with refused(other, StateLayoutMismatch, match=rf"rotates .*: .*{what}$"):
        other.load_sequence(tmp_path / "a", 0)


@pytest.mark.hazard("S26")
def test_another_architecture(make_context: Make) -> None:
    names = ("llama", "llama3l", "gemma3", "qwen2vl", "mamba", "jamba", "lfm2_swa")
    for a, b in combinations(map(make_context, names), 2):
        differ(a, b, StateModelMismatch)
        for source, target in ((a, b), (b, a)):
            for seq_id in (0, None):  # a raw state shows the shapes alone
                with refused(target):
                    target.set_state(source.get_state(seq_id), seq_id)


@pytest.mark.hazard("S5")
def test_streams_and_sequences_that_this_context_lacks(make_context: Make, tmp_path: Path) -> None:
    ctx = make_context("llama")
    ctx.decode(WORDS[:12], seq_id=3)
    ctx.save_context(tmp_path / "all")
    streams = make_context("llama", kv_unified=False, n_ctx=1024)
    with refused(streams, StateLayoutMismatch, match="1 streams, but this context has 4"):
        streams.load_context(tmp_path / "all")
    few = make_context("llama", n_seq_max=2)
    with refused(few, StateLayoutMismatch, match="sequence 3"):
        few.load_context(tmp_path / "all")
    for seq_id in (0, 1):
        ctx.copy_kv_cache_seq(3, seq_id)
    ctx.save_context(tmp_path / "shared")
    with refused(few, StateLayoutMismatch, match="belongs to 3 sequences, n_seq_max is 2"):
        few.load_context(tmp_path / "shared")
    with refused(few, StateLayoutMismatch):
        few.set_state(ctx.get_state())
    with pytest.raises(TypeError, match="context_state"):
        ctx.sequence_state(None)  # type: ignore[arg-type]
    ctx.clear_kv_cache_seq(1)
    with pytest.raises(SequenceIdError, match=r"no cells of sequence 1: it holds 0, 3$") as caught:
        ctx.context_state().sequence(1)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("unified", [True, False])
def test_a_state_of_more_cells_than_the_cache_has(unified: bool, make_context: Make) -> None:
    big = make_context("llama", n_ctx=1024, n_seq_max=1)
    big.decode(WORDS[:300])
    state = big.sequence_state(0)
    small = make_context("llama", n_ctx=256 if unified else 512, n_seq_max=2, kv_unified=unified)
    small.decode(WORDS[:100], seq_id=1)
    with refused(small, NoKvCacheSlot):
        small.restore_sequence(state, 0)
    one = make_context("llama", n_ctx=256, n_seq_max=1)
    one.decode(WORDS[:9])
    with refused(one, NoKvCacheSlot):
        one.restore_context(big.context_state())
    for seq_id in (0, None):
        with refused(one, NoKvCacheSlot, match="300 cells"):
            one.set_state(big.get_state(seq_id), seq_id)
    small.restore_sequence(state[:150], 0)


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_models_without_states(name: str, make_context: Make, tmp_path: Path) -> None:
    llama, ctx = make_context("llama"), make_context(name, n_seq_max=1)
    llama.decode(WORDS[:5])
    for call in (
        lambda: ctx.save_sequence(tmp_path / "a", 0),
        lambda: ctx.save_context(tmp_path / "a"),
        lambda: ctx.save_llama_file(tmp_path / "a"),
        ctx.state_size,
        ctx.get_state,
        lambda: ctx.set_state(b""),
    ):
        with pytest.raises(UnsupportedOperation):
            call()
    with pytest.raises(StateModelMismatch):
        ctx.restore_sequence(llama.sequence_state(0), 0)
    assert list(tmp_path.iterdir()) == []
