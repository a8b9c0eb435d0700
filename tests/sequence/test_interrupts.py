"""Ctrl-C in the middle of anything a sequence does: an edit is made or not, nothing is lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memory.kit import Logits, apart
from pykvcache import LlamaContext, LlamaSequence, Sampler
from support.interrupts import CtrlCAnywhere, InterruptAnywhere

Make = Callable[..., LlamaContext]
Fresh = Callable[..., Logits]
Edit = Callable[[LlamaSequence], object]

#: How many of the places where an interrupt can come are tried; 0 tries them all.
PLACES = int(os.environ.get("PYKVCACHE_FUZZ_PLACES", "8"))


def words(seed: int, n: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(5, 56, n).tolist()
    return found


def hot(ctx: LlamaContext) -> Sampler:
    """Return a sampler that never ends a text, and remembers what it chose."""
    ends = {t: -1e6 for t in range(ctx.model.n_vocab) if ctx.native.is_eog(t)}
    return Sampler(temperature=1, top_k=20, repeat_penalty=1.2, seed=3, logit_bias=ends)


def places(n: int) -> list[int]:
    """Return some places of n, or all."""
    if not PLACES:
        return list(range(1, n + 1))
    return np.random.default_rng(n).choice(np.arange(1, n + 1), min(n, PLACES), False).tolist()


@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba"])
@pytest.mark.parametrize("how", ["generate", "stream"])
def test_a_generation_goes_on_after_an_interrupt(how: str, name: str, make_context: Make) -> None:
    """The iterator gives every token, character and its end; beside others, in little room."""
    ctx = make_context(name, n_ctx=256, n_seq_max=1)
    other = LlamaSequence(ctx, words(2, 70))
    stop = ctx.model.detokenize([9]) + "x"

    def start() -> LlamaSequence:
        return LlamaSequence(ctx, words(1, 12))

    def generation(sequence: LlamaSequence) -> object:
        return getattr(sequence, how)(12, hot(ctx), stop=[stop, "never"], on_full="shift")

    def whole(interrupt: InterruptAnywhere | None) -> tuple[list[object], str, list[int]]:
        sequence = start()
        items = generation(sequence)
        found: list[object] = []

        def take() -> None:
            while True:
                # Nothing is called between the item and its place here.
                item = next(items, None)  # type: ignore[call-overload]
                if item is None:
                    return
                found.append(item)
                if len(found) == 3:
                    other.logits()  # which parks this one

        if interrupt is not None:
            interrupt.run(take)
        take()
        tokens = sequence.tokens[12:].tolist()
        sequence.close()
        return found, items.finish_reason, tokens  # type: ignore[attr-defined]

    wanted = whole(None)
    assert len(wanted[0]) > 3
    counting = InterruptAnywhere(0)
    assert whole(counting) == wanted
    assert counting.seen > 100
    for place in places(counting.seen):
        assert whole(InterruptAnywhere(place)) == wanted, place
    other.close()
    assert not ctx.sequences()
    LlamaSequence(ctx, [5]).evaluate()  # the id is free


# Python itself swallows what is raised in the finalizer of a dropped sequence.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba"])
def test_an_edit_was_made_or_not(
    name: str, make_context: Make, fresh_logits: Fresh, tmp_path: Path
) -> None:
    """Tokens are those of before or after, and the logits theirs; no id and no cell is lost."""
    ctx = make_context(name, n_ctx=256, n_seq_max=2)
    old, new = words(1, 30), words(2, 9)
    path = tmp_path / "sequence"
    edits: dict[str, tuple[Edit, list[int]]] = {
        "append": (lambda s: s.append(new), old + new),
        "truncate": (lambda s: s.truncate(20), old[:20]),
        "sync": (lambda s: s.sync(old[:7] + new), old[:7] + new),
        "back": (lambda s: (s.truncate(10), s.append(old[10:])), old),
        "discard": (lambda s: s.discard(4, 30, reevaluate=True), old[:4]),
        "park": (lambda s: s.park(), old),
        "fork": (lambda s: s.fork(12).logits(), old),
        "logits": (lambda s: s.logits(), old),
        "save": (lambda s: s.save(path, sync=False), old),
        "load": (lambda s: LlamaSequence.load(ctx, path), old),
        "close": (lambda s: s.fork(29).close(), old),
    }
    for what, (edit, after) in edits.items():
        allowed = [old, after] + ([old[:10]] if what == "back" else [])

        def attempt(place: int, what: str = what, edit: Edit = edit, allowed: Any = allowed) -> int:
            sequence: LlamaSequence | None = LlamaSequence(ctx, old)
            assert sequence is not None
            sequence.logits()
            interrupt = InterruptAnywhere(place)
            interrupt.run(partial(edit, sequence))
            tokens = sequence.tokens.tolist()
            assert tokens in allowed, (what, place)
            assert apart(sequence.logits(), fresh_logits(name, tokens)) < 1e-2, (what, place)
            sequence.close()
            sequence = None
            both = [LlamaSequence(ctx, [5]), LlamaSequence(ctx, [6])]
            for one in both:
                one.evaluate()
            assert all(one.seq_id is not None for one in both), (what, place)
            for one in both:
                one.close()
            assert not ctx.sequences(), (what, place)
            assert not ctx.n_cells_used, (what, place)
            return interrupt.seen

        for place in places(attempt(0)):
            attempt(place)


@pytest.mark.parametrize("name", ["llama", "jamba"])
def test_a_sequence_that_was_leaving_goes_on(
    name: str, make_context: Make, fresh_logits: Fresh
) -> None:
    """It has an id and the pool knows of it, or neither, wherever that is cut short."""
    ctx = make_context(name, n_ctx=256, n_seq_max=2)
    files = "/sequence/cells.py", "/sequence/pool.py", "/sequence/sequence.py"

    def attempt(how: str, place: int) -> int:
        sequence = LlamaSequence(ctx, words(1, 20))
        sequence.logits()
        interrupt = CtrlCAnywhere(place, files)
        interrupt.run(getattr(sequence, how))
        if not sequence.is_closed:
            got = sequence.logits()
            assert apart(got, fresh_logits(name, words(1, 20))) < 1e-2, (how, place)
        sequence.close()
        assert not ctx.n_cells_used
        return interrupt.seen

    for how in ("park", "close"):
        for place in range(1, attempt(how, 0) + 1):
            attempt(how, place)
