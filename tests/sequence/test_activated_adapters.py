"""Activated adapters (aLoRA): cells of the base before the invocation tokens, then their own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pykvcache import (
    LLM,
    BatchGenerator,
    LlamaContext,
    LlamaModel,
    LlamaSequence,
    LoraAdapter,
    PrefixCache,
    Sampler,
)
from pykvcache.errors import ArgumentError, DecodeAborted, StateLayoutMismatch
from pykvcache.sequence.logprobs import prompt_logprobs
from support.adapters import write_adapter
from support.models import EXACT, RIGHT, WRONG, make_model

pytestmark = pytest.mark.not_on_a_device(reason="layers on servers take no adapters")

NAMES = ["llama", "step35", "mamba2", "jamba", "lfm2_swa"]
INVOCATION = [5, 6, 7]
BEFORE = np.arange(20, 60, dtype=np.int32).tolist()
PROMPT = [*BEFORE, *INVOCATION, *range(70, 80)]
Logits = NDArray[np.float32]


class Made:
    """A model, an activated adapter and a plain one, and logits of runs by hand."""

    def __init__(self, folder: Path, name: str, invocation: list[int] = INVOCATION) -> None:
        self.path = make_model(name, folder)
        self.model = LlamaModel(self.path)
        self.folder, self.name = folder, name
        self.alora = self.adapter(1, invocation)
        self.plain = self.adapter(2, [])
        self.invocation = invocation
        self.hand = self.context()

    def adapter(self, seed: int, invocation: list[int]) -> LoraAdapter:
        path = self.folder / f"{self.name}-{seed}-{'-'.join(map(str, invocation))}.gguf"
        if not path.exists():
            write_adapter(path, self.name, seed, invocation=invocation)
        return self.model.load_adapter(path)

    def context(self, adapters: Any = (), **options: Any) -> LlamaContext:
        options = {"n_ctx": 512, "n_seq_max": 4, **EXACT, **options}
        return LlamaContext(self.model, adapters=adapters, **options)

    def place(self, tokens: list[int]) -> int | None:
        """Return where the last occurrence of the invocation tokens begins."""
        n = len(self.invocation)
        found = [i for i in range(len(tokens) - n + 1) if tokens[i : i + n] == self.invocation]
        return found[-1] if found else None

    def by_hand(self, tokens: list[int], at: int | None, base: Any = ()) -> Logits:
        """Evaluate tokens without the adapter up to a place, and with it from there on."""
        ctx = self.hand
        at = len(tokens) if at is None else at
        ctx.set_adapters(base)
        ctx.clear_kv_cache()
        if at:
            ctx.decode(tokens[:at])
        if at < len(tokens):
            state = ctx.get_state(0) if at else None
            ctx.set_adapters([*base, self.alora])
            if state is not None:
                ctx.set_state(state, 0)
            ctx.decode(tokens[at:])
        return ctx.logits()

    def right(self, tokens: Any) -> Logits:
        """Return the logits after tokens, activated where the invocation tokens are."""
        given = np.asarray(tokens).tolist()
        return self.by_hand(given, self.place(given))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("activated")


@pytest.fixture(params=NAMES)
def made(request: pytest.FixtureRequest, folder: Path) -> Any:
    made = Made(folder, str(request.param))
    yield made
    made.model.close()


@pytest.fixture
def llama(folder: Path) -> Iterator[Made]:
    made = Made(folder, "llama")
    yield made
    made.model.close()


def differ(a: Logits, b: Logits) -> float:
    return float(np.abs(a - b).max())


# Sequences ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("swa_full", [True, False])
def test_an_adapter_applies_from_the_invocation_tokens_on(made: Made, swa_full: bool) -> None:
    after = list(range(70, 80))
    with made.context([made.alora], swa_full=swa_full) as ctx:
        for tokens, at in [
            (PROMPT, len(BEFORE)),
            ([*INVOCATION, *PROMPT], 3 + len(BEFORE)),  # the last occurrence counts
            ([*INVOCATION, *after], 0),
            ([*BEFORE, *INVOCATION], len(BEFORE)),
            ([*BEFORE, *INVOCATION[:2]], None),
            ([*BEFORE, *after], None),
            ([*BEFORE, 5, 5, 6, 7, 7], len(BEFORE) + 1),
        ]:
            with LlamaSequence(ctx, tokens) as sequence:
                assert differ(sequence.logits(), made.by_hand(tokens, at)) < RIGHT
        assert differ(made.by_hand(PROMPT, len(BEFORE)), made.by_hand(PROMPT, None)) > WRONG
        assert differ(made.by_hand(PROMPT, len(BEFORE)), made.by_hand(PROMPT, 0)) > WRONG
        # A context's own decode uses it for all tokens.
        ctx.decode(PROMPT)
        assert differ(ctx.logits(), made.by_hand(PROMPT, 0)) < RIGHT


def test_log_probabilities_of_a_prompt_are_those_of_its_adapters(made: Made) -> None:
    with made.context([made.alora]) as ctx, LlamaSequence(ctx, PROMPT) as sequence:
        found = prompt_logprobs(sequence, 1)
    for i in range(len(BEFORE) - 2, len(PROMPT)):
        row = made.by_hand(PROMPT[:i], len(BEFORE)).astype(np.float64)
        wanted = row[PROMPT[i]] - np.logaddexp.reduce(row)
        assert found[i - 1][PROMPT[i]] == pytest.approx(wanted, abs=RIGHT)


def test_a_plain_adapter_applies_before_it_and_after_it(made: Made) -> None:
    with made.context([made.plain, made.alora]) as ctx, LlamaSequence(ctx, PROMPT) as sequence:
        wanted = made.by_hand(PROMPT, len(BEFORE), [made.plain])
        assert differ(sequence.logits(), wanted) < RIGHT
        assert differ(wanted, made.right(PROMPT)) > WRONG


def test_truncated_tokens_are_reused_if_they_return(made: Made) -> None:
    with made.context([made.alora]) as ctx:
        sequence = LlamaSequence(ctx, PROMPT)
        sequence.evaluate()
        sequence.truncate(len(BEFORE))
        assert sequence.n_evaluated == len(BEFORE)
        sequence.append(PROMPT[len(BEFORE) :])
        assert sequence.n_evaluated == len(PROMPT)
        assert differ(sequence.logits(), made.right(PROMPT)) < RIGHT
        sequence.sync([*BEFORE, 9])
        assert differ(sequence.logits(), made.right([*BEFORE, 9])) < RIGHT


def test_generated_tokens_activate_nothing(folder: Path) -> None:
    made = Made(folder, "llama", [5])
    only_5 = Sampler(temperature=0, logit_bias={5: 1000.0})
    with made.context([made.alora]) as ctx:
        sequence = LlamaSequence(ctx, [8, 9, 10])
        assert list(sequence.generate(3, only_5)) == [5, 5, 5]
        assert differ(sequence.logits(), made.by_hand([8, 9, 10, 5, 5, 5], None)) < RIGHT
        fork = sequence.fork()
        assert differ(fork.logits(), made.by_hand([8, 9, 10, 5, 5, 5], None)) < RIGHT
        handle = BatchGenerator(ctx).submit(fork, 2, only_5)
        assert list(handle) == [5, 5]
        assert differ(fork.logits(), made.by_hand([8, 9, 10, 5, 5, 5, 5, 5], None)) < RIGHT
        sequence.append([11])
        assert differ(sequence.logits(), made.by_hand([8, 9, 10, 5, 5, 5, 11], 5)) < RIGHT


def test_a_shift_moves_the_activation(llama: Made) -> None:
    with llama.context([llama.alora]) as ctx:
        sequence = LlamaSequence(ctx, [*PROMPT, 80])
        sequence.evaluate()
        sequence.discard(4, 10)
        assert sequence.n_evaluated == len(PROMPT) - 5
        llama.right(PROMPT)
        llama.hand.remove(0, 4, 10)
        llama.hand.decode([80])
        assert differ(sequence.logits(), llama.hand.logits()) < RIGHT
        at = len(BEFORE) - 6
        sequence.discard(at, at + 1)  # without its first token nothing invokes the adapter
        assert sequence.n_evaluated == at


@pytest.mark.parametrize("swa_full", [True, False])
def test_random_edits(made: Made, swa_full: bool) -> None:
    rng = np.random.default_rng(NAMES.index(made.name))
    held: list[tuple[LlamaSequence, list[int]]] = []

    def words(most: int) -> list[int]:
        found: list[int] = []
        while len(found) < most * rng.random():
            part = INVOCATION[: int(rng.integers(1, 4))]
            found += part if rng.random() < 0.3 else rng.integers(5, 12, 3).tolist()
        return found

    with made.context([made.alora], n_seq_max=2, swa_full=swa_full) as ctx:
        for _ in range(120):
            if len(held) < 4:
                first = words(30)
                held.append((LlamaSequence(ctx, first), first))
            i = int(rng.integers(len(held)))
            sequence, tokens = held[i]
            n = int(rng.integers(len(tokens) + 1))
            match rng.choice(["append", "truncate", "back", "sync", "fork", "park", "save"]):
                case "append" if len(tokens) < 60:
                    more = words(9)
                    sequence.append(more)
                    tokens += more
                case "truncate":
                    sequence.truncate(n)
                    del tokens[n:]
                case "back":
                    sequence.truncate(n)
                    sequence.append(tokens[n:])
                case "sync":
                    tokens[n:] = words(9)
                    sequence.sync(tokens)
                case "fork":
                    held[(i + 1) % 4] = sequence.fork(n), tokens[:n]
                case "park":
                    sequence.park()
                case "save" if tokens:
                    sequence.save(made.folder / "one.kv", sync=False)
                    held[i] = LlamaSequence.load(ctx, made.folder / "one.kv"), tokens
            assert held[i][0].tokens.tolist() == tokens
            sequence, tokens = held[int(rng.integers(len(held)))]
            if tokens:
                assert differ(sequence.logits(), made.right(tokens)) < RIGHT


# Files --------------------------------------------------------------------------------------------


def test_files_of_activated_sequences_need_the_adapter(made: Made, tmp_path: Path) -> None:
    before, after, raw = tmp_path / "before.kv", tmp_path / "after.kv", tmp_path / "raw.kv"
    with made.context([made.alora]) as ctx:
        sequence = LlamaSequence(ctx, PROMPT)
        sequence.evaluate()
        sequence.save(after)
        other = LlamaSequence(ctx, BEFORE)
        other.evaluate()
        other.save(before)
        sequence.close()
        ctx.decode(PROMPT, seq_id=0)
        ctx.save_sequence(raw, 0, PROMPT)
    for adapters, refused in (([made.alora], []), ([], [after, raw]), ([made.plain], [])):
        with made.context(adapters) as ctx:
            for path in (before, after, raw):
                if path in refused or adapters == [made.plain]:
                    with pytest.raises(StateLayoutMismatch, match="adapters"):
                        LlamaSequence.load(ctx, path)
                    continue
                loaded = LlamaSequence.load(ctx, path)
                known = {before: len(BEFORE), after: len(PROMPT), raw: 0}[path]
                assert loaded.n_evaluated == known
                loaded.append([9])
                tokens = loaded.tokens.tolist()
                at = made.place(tokens) if adapters else None
                assert differ(loaded.logits(), made.by_hand(tokens, at)) < RIGHT
                loaded.close()


def test_a_file_that_a_context_saved_is_not_trusted(llama: Made, tmp_path: Path) -> None:
    with llama.context([llama.alora]) as ctx:
        sequence = LlamaSequence(ctx, INVOCATION[:2])
        # The base evaluates generated tokens, although they invoke the adapter.
        only = Sampler(temperature=0, logit_bias={INVOCATION[2]: 1000.0})
        assert list(sequence.generate(1, only)) == INVOCATION[2:]
        sequence.evaluate()
        assert sequence.seq_id is not None
        ctx.save_sequence(tmp_path / "raw.kv", sequence.seq_id, sequence.tokens)
        loaded = LlamaSequence.load(ctx, tmp_path / "raw.kv")
        loaded.append([30])
        tokens = [*INVOCATION, 30]
        assert differ(loaded.logits(), llama.by_hand(tokens, 0)) < RIGHT


# The prefix cache ---------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_logits", [False, True])
def test_a_prefix_cache_shares_blocks_of_the_base_model(made: Made, keep_logits: bool) -> None:
    base = [*BEFORE, *range(90, 100)]
    with made.context() as ctx:
        cache = PrefixCache(ctx, block_size=8, keep_logits=keep_logits)

        def run(tokens: list[int], adapters: list[LoraAdapter], at: int | None) -> int:
            ctx.set_adapters(adapters)
            with cache.sequence(tokens) as sequence:
                assert differ(sequence.logits(), made.by_hand(tokens, at)) < RIGHT
                return len(tokens) - sequence.reuse.evaluated

        assert run(base, [], None) == 0
        assert run(PROMPT, [made.alora], len(BEFORE)) == len(BEFORE)  # the base's blocks
        assert run(PROMPT, [made.alora], len(BEFORE)) == len(BEFORE)  # and no others
        assert run(PROMPT, [], None) == len(BEFORE)
        assert run(PROMPT, [made.alora], len(BEFORE)) == len(BEFORE)
        assert run(PROMPT, [], None) > len(BEFORE)
        cache.clear("")
        assert run(PROMPT, [made.alora], len(BEFORE)) == 0
        assert run(base, [], None) == len(BEFORE)  # the other way round
        cache.close()


def test_live_sequences_share_the_tokens_before_the_activation(made: Made) -> None:
    with made.context([made.alora]) as ctx:
        cache = PrefixCache(ctx, block_size=8, ram_bytes=0)
        first, others = cache.sequence(PROMPT), []
        first.logits()
        for tokens in (PROMPT, [*BEFORE, 9, 10], [*PROMPT, 9]):
            others.append(sequence := cache.sequence(tokens))
            assert sequence.reuse.live == len(BEFORE)
            assert ("activated" in sequence.reuse.reason) == (made.place(tokens) is not None)
            assert differ(sequence.logits(), made.right(tokens)) < RIGHT
        first.append([11])
        assert differ(first.logits(), made.right([*PROMPT, 11])) < RIGHT
        cache.close()


def test_tiers_store_the_blocks_before_the_activation(made: Made, tmp_path: Path) -> None:
    for adapters in ([made.alora], [], [made.alora]):
        with made.context(adapters) as ctx:
            cache = PrefixCache(ctx, block_size=8, tiers=[tmp_path / "blocks"], tier_seconds=10)
            with cache.sequence(PROMPT) as sequence:
                at = len(BEFORE) if adapters else None
                assert differ(sequence.logits(), made.by_hand(PROMPT, at)) < RIGHT
            cache.close()
    assert sequence.reuse.disk == len(BEFORE)


# Batches ------------------------------------------------------------------------------------------

BATCH = [
    PROMPT,
    [*BEFORE, 9, 10],
    [*PROMPT, *BEFORE[:9], *INVOCATION],
    [*INVOCATION, 30],
    [*BEFORE[:21], *INVOCATION, 31],
    PROMPT[::-1],
]


@pytest.mark.parametrize("seed", range(6))
def test_random_batches(made: Made, seed: int) -> None:
    rng = np.random.default_rng([NAMES.index(made.name), seed])

    def words(least: int) -> list[int]:
        found: list[int] = []
        while len(found) < least:
            part = INVOCATION[: int(rng.integers(1, 4))]
            found += part if rng.random() < 0.35 else rng.integers(5, 9, 4).tolist()
        return found

    stems = [words(int(rng.integers(60))) for _ in range(4)]
    options = {"n_seq_max": int(rng.integers(2, 5)), "swa_full": seed % 2 == 0, "n_ubatch": 32}
    running: list[tuple[Any, list[int], bool]] = []
    is_set = True
    # The cells are too few for all requests: some are parked.
    with made.context([made.alora], n_ctx=256, **options) as ctx:
        cache = PrefixCache(ctx, block_size=8, ram_bytes=[0, 1 << 16, 1 << 26][seed % 3])
        generator = BatchGenerator(cache if seed else ctx, n_chunk=[3, 16, 512][seed % 3])
        for i in range(40):
            if rng.random() < 0.5:
                prompt = [*stems[int(rng.integers(4))], *words(int(rng.integers(1, 14)))]
                samples = generator.submit(prompt, int(rng.integers(1, 8)), n=2 + i % 2)
                running += [(one, prompt, is_set) for one in samples]
            if rng.random() < 0.05:
                generator.run()
                is_set = not is_set
                ctx.set_adapters([made.alora] if is_set else [])
            generator.step()
        generator.run()
        for handle, prompt, was_set in running:
            tokens = handle.tokens.tolist()
            assert handle.finish_reason in ("length", "stop"), handle.error
            for n in {0, len(tokens) - 1} if tokens else ():
                at = made.place(prompt) if was_set else None
                row = made.by_hand([*prompt, *tokens[:n]], at)
                assert row.max() - row[tokens[n]] < RIGHT
        cache.close()


def test_an_abort_between_the_decodes_of_a_step_loses_no_token(llama: Made) -> None:
    with llama.context([llama.alora]) as ctx:
        generator = BatchGenerator(ctx)
        handles = [generator.submit(tokens, 6) for tokens in (BEFORE, PROMPT)]
        returned: dict[Any, list[int]] = {handle: [] for handle in handles}
        decode, n_decodes = generator._stepper._decode, 0

        def aborted(*given: Any) -> Any:
            nonlocal n_decodes
            n_decodes += 1
            if n_decodes % 4 == 2:
                raise DecodeAborted("aborted", 0)
            return decode(*given)

        generator._stepper._decode = aborted  # type: ignore[method-assign]
        while not all(handle.finish_reason for handle in handles):
            with contextlib.suppress(DecodeAborted):
                for handle, token in generator.step():
                    returned[handle].append(token)
        assert n_decodes > 8
        assert [returned[handle] for handle in handles] == [h.tokens.tolist() for h in handles]


def test_a_step_sees_the_edit_of_a_running_sequence(folder: Path) -> None:
    made = Made(folder, "llama", [5])
    with made.context([made.alora]) as ctx:
        sequence = LlamaSequence(ctx, [8, 9, 10])
        generator = BatchGenerator(ctx)
        handle = generator.submit(sequence, 8)
        for _ in range(3):
            generator.step()
        sequence.truncate(len(sequence) - 1)
        sequence.append([5])
        tokens = sequence.tokens.tolist()
        generator.step()
        assert handle.tokens[-1] == made.by_hand(tokens, len(tokens) - 1).argmax()


def test_an_llm_activates_adapters_whose_tokens_are_not_said_to_be_cached(llama: Made) -> None:
    with LLM(llama.path, n_ctx=512, adapters=[llama.alora.path], **EXACT) as llm:
        for cached in (0, len(BEFORE)):
            found = llm.generate([PROMPT], max_tokens=1)[0]
            assert found.tokens[0] == llama.right(PROMPT).argmax()
            written = {"cached_tokens": cached, "cache_write_tokens": len(BEFORE) - cached}
            assert found.usage["prompt_tokens_details"] == written
        found = llm.generate([[*BEFORE, 9]], max_tokens=1)[0]
        assert found.tokens[0] == llama.right([*BEFORE, 9]).argmax()


# Refusals -----------------------------------------------------------------------------------------


def test_only_one_adapter_can_be_activated(llama: Made) -> None:
    second = llama.adapter(3, [9])
    with llama.context([llama.alora]) as ctx:
        with pytest.raises(ArgumentError, match=f"{llama.alora.digest[:16]}.*{second.digest[:16]}"):
            ctx.set_adapters([llama.alora, second])
        assert ctx.adapters == ((llama.alora, 1.0),)
        ctx.set_adapters([llama.alora, (second, 0.0)])
        assert ctx.adapters == ((llama.alora, 1.0),)
