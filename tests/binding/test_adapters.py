"""Adapters change logits as merged weights do, and nothing computed without them is used."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from binding.kit import differ
from pykvcache import (
    LLM,
    BatchGenerator,
    ControlVector,
    LlamaContext,
    LlamaModel,
    LlamaSequence,
    LoraAdapter,
    PrefixCache,
)
from pykvcache.errors import (
    ArgumentError,
    ClosedError,
    KvCacheError,
    ModelLoadError,
    StateLayoutMismatch,
    UnsupportedOperation,
)
from support.adapters import write_adapter, write_control, write_merged
from support.models import EXACT, RIGHT, WRONG, make_model

pytestmark = pytest.mark.not_on_a_device(reason="layers on servers take no adapters")

NAMES = ["llama", "gemma3", "mamba2", "jamba", "lfm2_swa"]
PROMPT = np.arange(20, 84, dtype=np.int32)
Logits = NDArray[np.float32]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def load(folder: Path, name: str) -> tuple[LlamaModel, LoraAdapter, LoraAdapter]:
    model = LlamaModel(make_model(name, folder))
    found = []
    for seed in (1, 2):
        path = folder / f"{name}-{seed}.lora.gguf"
        if not path.exists():
            write_adapter(path, name, seed)
        found.append(model.load_adapter(path))
    return model, found[0], found[1]


def fresh(path: Path, tokens: NDArray[np.int32] = PROMPT, **options: Any) -> Logits:
    with LlamaModel(path) as model, LlamaContext(model, n_ctx=256, **EXACT, **options) as ctx:
        ctx.decode(tokens)
        return ctx.logits()


def with_adapters(model: LlamaModel, adapters: Any, tokens: NDArray[np.int32] = PROMPT) -> Logits:
    with LlamaContext(model, n_ctx=256, adapters=adapters, **EXACT) as ctx:
        ctx.decode(tokens)
        return ctx.logits()


def test_an_adapter_does_what_merged_weights_do(folder: Path, name: str) -> None:
    model, one, two = load(folder, name)
    base = fresh(make_model(name, folder))
    for k, (given, merged) in enumerate(
        [([one], [(1, 1.0)]), ([(one, -0.25), (two, 1.5)], [(1, -0.25), (2, 1.5)])]
    ):
        right = fresh(write_merged(folder / f"{name}-merged{k}.gguf", name, merged))
        assert differ(base, right) > WRONG
        assert differ(with_adapters(model, given), right) < RIGHT


def test_paths_are_loaded(folder: Path) -> None:
    model, one, two = load(folder, "llama")
    paths = [folder / "llama-1.lora.gguf", (str(folder / "llama-2.lora.gguf"), 0.5)]
    assert np.array_equal(with_adapters(model, paths), with_adapters(model, [one, (two, 0.5)]))
    with pytest.raises(ArgumentError, match="given twice"):
        with_adapters(model, [one, paths[0]])
    with pytest.raises(TypeError, match="must be a list"):
        with_adapters(model, str(paths[0]))
    with LlamaContext(model, n_ctx=256, adapters=[(one, 0.0)]) as ctx:
        assert ctx.adapters == ()
    with LLM(model.path, n_ctx=256, adapters=paths) as llm:
        assert [(a.digest, scale) for a, scale in llm.context.adapters] == [
            (one.digest, 1.0),
            (two.digest, 0.5),
        ]


def test_a_control_vector_is_added_to_what_a_layer_puts_out(folder: Path) -> None:
    model, _, _ = load(folder, "llama3l")
    values = np.zeros((3, 64), np.float32)
    values[1:] = np.random.default_rng(1).standard_normal((2, 64)) * 0.3
    loaded = model.load_control_vector(write_control(folder / "control.gguf", values))
    assert np.array_equal(loaded.values, values)
    assert loaded.digest == ControlVector(values).digest
    base = with_adapters(model, [])
    one = with_adapters(model, [ControlVector(values)])
    assert differ(base, one) > WRONG
    assert np.array_equal(with_adapters(model, [(loaded, 1.0)]), one)
    assert np.array_equal(
        with_adapters(model, [ControlVector(values * 2)]), with_adapters(model, [(loaded, 2)])
    )
    both = with_adapters(model, [ControlVector(values), ControlVector(-values)])
    assert differ(both, base) < RIGHT


def test_no_direction_stays_when_another_vector_is_set(folder: Path) -> None:
    model, _, _ = load(folder, "llama3l")
    first, second = np.zeros((2, 3, 64), np.float32)
    first[1], second[2] = 0.5, 0.25
    right = with_adapters(model, [ControlVector(second)])
    with LlamaContext(model, n_ctx=256, adapters=[ControlVector(first)], **EXACT) as ctx:
        ctx.set_adapters([ControlVector(second)])
        ctx.decode(PROMPT)
        assert np.array_equal(ctx.logits(), right)


def test_a_switch_empties_the_memory_and_forgets_logits(folder: Path, name: str) -> None:
    model, one, two = load(folder, name)
    right = with_adapters(model, [two])
    with LlamaContext(model, n_ctx=256, **EXACT) as ctx:
        ctx.decode(PROMPT)
        ctx.set_adapters([one])
        assert ctx.sequences() == {}
        with pytest.raises(KvCacheError, match="adapters"):
            ctx.logits()
        ctx.decode(PROMPT)
        ctx.set_adapters([one])  # the same: nothing happens
        ctx.set_adapters([(one, 1)])
        assert ctx.kv_cache_seq_pos_max(0) == len(PROMPT) - 1
        ctx.set_adapters([two])
        ctx.decode(PROMPT)
        assert differ(ctx.logits(), right) < RIGHT


def test_sequences_evaluate_again_after_a_switch(folder: Path, name: str) -> None:
    model, one, two = load(folder, name)
    right = [with_adapters(model, given) for given in ([], [one], [two])]
    with LlamaContext(model, n_ctx=256, n_seq_max=2, **EXACT) as ctx:
        live, fork = (sequence := LlamaSequence(ctx, PROMPT[:-1])), None
        sequence.logits()
        fork = sequence.fork()
        others = [LlamaSequence(ctx, PROMPT[:20]) for _ in range(2)]
        for other in others:
            other.logits()  # parks what was there
        for given, wanted in ((1, right[1]), (2, right[2]), (0, right[0]), (1, right[1])):
            ctx.set_adapters([[], [one], [two]][given])
            for one_of in (live, fork, others[0]):
                copy = one_of.fork()
                copy.sync(PROMPT)
                assert differ(copy.logits(), wanted) < RIGHT
                copy.close()


@pytest.mark.parametrize("keep_logits", [False, True])
def test_a_prefix_cache_never_mixes_adapters(folder: Path, name: str, keep_logits: bool) -> None:
    model, one, two = load(folder, name)
    sets: list[Any] = [[], [one], [(one, 0.5)], [two], [one, two]]
    right = [with_adapters(model, given) for given in sets]
    with LlamaContext(model, n_ctx=512, n_seq_max=3, **EXACT) as ctx:
        cache = PrefixCache(ctx, block_size=8, keep_logits=keep_logits)
        rng = np.random.default_rng(1)
        seen = set[int]()
        held = cache.sequence(PROMPT)
        held.logits()
        for i in [0, 1, 2, 3, 4, *rng.integers(0, 5, 10).tolist()]:
            ctx.set_adapters(sets[i])
            with cache.sequence(PROMPT) as sequence:
                assert differ(sequence.logits(), right[i]) < RIGHT
                assert (sequence.reuse.evaluated < len(PROMPT)) == (
                    i in seen or (i == 0 and not seen)
                )
            seen.add(i)
        assert differ(held.logits(), right[i]) < RIGHT
        held.close()
        cache.clear("")
        for given in sets:
            ctx.set_adapters(given)
            with cache.sequence(PROMPT) as sequence:
                assert sequence.reuse.evaluated == len(PROMPT)
        cache.close()


def test_tiers_keep_adapters_apart(folder: Path, tmp_path: Path, name: str) -> None:
    model, one, _ = load(folder, name)
    right = with_adapters(model, [one])
    for given, known in (([], False), ([one], False), ([one], True), ([], True)):
        with LlamaContext(model, n_ctx=512, adapters=given, **EXACT) as ctx:
            cache = PrefixCache(ctx, block_size=8, tiers=[tmp_path / "blocks"], tier_seconds=10)
            with cache.sequence(PROMPT) as sequence:
                assert (sequence.reuse.evaluated < len(PROMPT)) == known
                assert (differ(sequence.logits(), right) < RIGHT) == bool(given)
            cache.close()


def test_states_of_other_adapters_are_refused(folder: Path, tmp_path: Path, name: str) -> None:
    model, one, two = load(folder, name)
    with LlamaContext(model, n_ctx=256, adapters=[one], **EXACT) as ctx:
        ctx.decode(PROMPT)
        state = ctx.sequence_state(0)
        ctx.save_sequence(tmp_path / "one.kv", 0)
        for given in ([], [two], [(one, 0.5)], [one, two]):
            ctx.set_adapters(given)
            with pytest.raises(StateLayoutMismatch, match="adapters"):
                ctx.restore_sequence(state, 1)
            with pytest.raises(StateLayoutMismatch, match="adapters"):
                ctx.load_sequence(tmp_path / "one.kv", 1)
        ctx.set_adapters([one])
        ctx.load_sequence(tmp_path / "one.kv", 1)
        ctx.decode([7], seq_id=1)
        found = ctx.logits()
    assert differ(found, with_adapters(model, [one], np.append(PROMPT, np.int32(7)))) < RIGHT


def test_requests_continue_with_new_adapters(folder: Path, name: str) -> None:
    model, one, _ = load(folder, name)
    with LlamaContext(model, n_ctx=512, n_seq_max=3, **EXACT) as ctx:
        generator = BatchGenerator(PrefixCache(ctx, block_size=8))
        handles = [generator.submit(PROMPT + i, 12) for i in range(5)]
        for _ in range(4):
            generator.step()
        ctx.set_adapters([one])
        before = [(handle.tokens, handle.finish_reason) for handle in handles]
        generator.run()
        for i, (handle, (known, ended)) in enumerate(zip(handles, before, strict=True)):
            tokens = np.concatenate([PROMPT + i, known])
            if ended is None:
                alone = LlamaSequence(ctx, tokens)
                wanted = list(alone.generate(12 - len(known)))
                assert handle.tokens[len(known) :].tolist() == wanted, handle.finish_reason
                alone.close()


def test_an_adapter_lives_as_long_as_a_context_uses_it(folder: Path) -> None:
    model, one, _ = load(folder, "llama")
    right = with_adapters(model, [one])
    ctx = LlamaContext(model, n_ctx=256, adapters=[one], **EXACT)
    del one
    model.close()
    gc.collect()
    ctx.decode(PROMPT)
    assert np.array_equal(ctx.logits(), right)
    ctx.close()


def test_digests_name_contents(folder: Path, tmp_path: Path) -> None:
    model, one, two = load(folder, "llama")
    copy = tmp_path / "copy.gguf"
    copy.write_bytes((folder / "llama-1.lora.gguf").read_bytes())
    assert model.load_adapter(copy).digest == one.digest != two.digest
    assert one.metadata["general.type"] == "adapter"
    assert one.invocation_tokens == ()
    invoked = write_adapter(tmp_path / "alora.gguf", "llama", 3, invocation=[5, 6, 7])
    assert model.load_adapter(invoked).invocation_tokens == (5, 6, 7)


def test_files_that_are_not_adapters_are_refused(folder: Path, tmp_path: Path) -> None:
    model, _, _ = load(folder, "llama")
    good = (folder / "llama-1.lora.gguf").read_bytes()
    bad: list[tuple[bytes, str | None]] = [
        (b"", None),
        (b"GGUF", None),
        (good[: len(good) // 2], None),
        (good.replace(b"lora_b", b"lora_c"), "suffix"),
        (good.replace(b"adapter.type", b"adapter.typo"), "lora"),
        (make_model("llama", folder).read_bytes(), "adapter"),
        (write_adapter(tmp_path / "x.gguf", "llama", arch="gemma3").read_bytes(), "arch"),
        (write_adapter(tmp_path / "y.gguf", "llama", alpha=float("nan")).read_bytes(), "alpha"),
    ]
    for content, why in bad:
        path = tmp_path / "bad.gguf"
        path.write_bytes(content)
        with pytest.raises(ModelLoadError, match=why):
            model.load_adapter(path)
        with pytest.raises(ModelLoadError):
            model.load_control_vector(path)
    for call in (model.load_adapter, model.load_control_vector):
        for path in (tmp_path / "missing.gguf", tmp_path):
            with pytest.raises(ModelLoadError):
                call(path)


def test_damaged_adapters_never_end_the_process(folder: Path, tmp_path: Path) -> None:
    model, _, _ = load(folder, "llama")
    good = (folder / "llama-1.lora.gguf").read_bytes()
    rng = np.random.default_rng(1)
    path = tmp_path / "damaged.gguf"
    for _ in range(150):
        data = bytearray(good)
        for at in rng.integers(0, 4000, rng.integers(1, 4)):
            data[at] = rng.integers(0, 256)
        path.write_bytes(data)
        try:
            adapter = model.load_adapter(path)
            with LlamaContext(model, n_ctx=256, adapters=[adapter]) as ctx:
                ctx.decode(PROMPT)
                ctx.logits()
        except KvCacheError:
            pass


def test_wrong_adapters_are_refused_with_nothing_changed(folder: Path) -> None:
    model, one, _ = load(folder, "llama")
    _, foreign, _ = load(folder, "llama")
    with LlamaContext(model, n_ctx=256, adapters=[one], **EXACT) as ctx:
        ctx.decode(PROMPT)
        right = ctx.logits()
        for bad, error in [
            ([foreign], ArgumentError),
            ([one, one], ArgumentError),
            ([(one, float("nan"))], ValueError),
            ([(one, 1e9)], ValueError),
            ([(one, "x")], TypeError),
            ([(one, 1, 2)], TypeError),
            (["adapter.gguf"], ModelLoadError),
            (one, TypeError),
            (3, TypeError),
            ([ControlVector(np.zeros((2, 32), np.float32))], ArgumentError),
        ]:
            with pytest.raises(error):
                ctx.set_adapters(bad)  # type: ignore[arg-type]
        assert np.array_equal(ctx.logits(), right)
        assert ctx.adapters == ((one, 1.0),)
    with pytest.raises(ClosedError):
        ctx.set_adapters([])
    for values in (np.zeros(3), np.full((2, 4), np.nan), np.ones((2, 4)), np.zeros((1, 4))):
        with pytest.raises(ArgumentError):
            ControlVector(values)


def test_a_model_without_weights_has_no_adapters(folder: Path) -> None:
    load(folder, "llama")
    model = LlamaModel(make_model("llama", folder), vocab_only=True)
    with model, pytest.raises(UnsupportedOperation):
        model.load_adapter(folder / "llama-1.lora.gguf")
