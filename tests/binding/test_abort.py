"""abort() stops a running decode, and the sequences report correctly what is left."""

from __future__ import annotations

from typing import Any

import pytest

from binding.conftest import Child, assert_quiet, needs_timers
from binding.kit import differ, lengths, words
from pykvcache import LlamaBatch
from pykvcache.errors import DecodeAborted, DecodeError
from support.models import RIGHT
from support.stopping import stop_soon

LONG = 3000


def aborted(make_context: Any, name: str, *, inside: bool = False, **options: Any) -> Any:
    """A context whose decode of `LONG` tokens was stopped, and whose sequence 1 holds 20.

    `inside` of a part: where it stopped between two, nothing is unfinished, and it is tried again.
    """
    for delay in (0.02, 0.01, 0.005, 0.0, 0.0, 0.0):
        ctx = make_context(name, n_ctx=4096, **options)
        ctx.decode(words(20, 1), seq_id=1)
        thread = stop_soon(ctx, delay)
        try:
            ctx.decode(words(LONG))
        except DecodeAborted as error:
            if error.needs_removal or not inside:
                return ctx, error
            between = lengths(ctx)
            assert between == {0: error.n_decoded, 1: 20}  # noqa: PT017
        finally:
            thread.join()
    raise AssertionError("the decode was never stopped")


@pytest.mark.hazard("T5")
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("n_batch", [4096, 256])
def test_attention_keeps_computed_tokens_and_continues(
    make_context: Any, fresh_logits: Any, name: str, n_batch: int
) -> None:
    ctx, error = aborted(make_context, name, n_batch=n_batch, n_ubatch=64)
    assert error.code == 2
    assert isinstance(error, DecodeError)
    with pytest.raises(IndexError):
        ctx.logits()
    held = lengths(ctx)
    assert held.pop(1) == 20
    done = held.get(0, 0)
    assert 0 <= done < LONG
    tokens = words(LONG)[: done + 40]
    ctx.decode(tokens[done:])
    assert lengths(ctx) == {0: done + 40, 1: 20}
    assert differ(ctx.logits(), fresh_logits(name, tokens)) < RIGHT
    ctx.decode([7], seq_id=1)
    assert differ(ctx.logits(), fresh_logits(name, [*words(20, 1), 7])) < RIGHT


@pytest.mark.hazard("D22")
@pytest.mark.not_on_a_device(reason="a decode is stopped between its parts alone")
@pytest.mark.parametrize("name", ["mamba", "lfm2_swa"])
def test_a_recurrent_sequence_refuses_use_until_it_is_removed(
    make_context: Any, fresh_logits: Any, name: str
) -> None:
    ctx, error = aborted(make_context, name, inside=True, n_batch=4096, n_ubatch=64)
    assert "remove" in str(error)
    assert 0 in error.needs_removal
    batch = LlamaBatch()
    batch.add(5, ctx.kv_cache_seq_pos_max(0) + 1, 0, True)
    for use in (
        lambda: ctx.decode([5]),
        lambda: ctx.decode(batch),
        lambda: next(ctx.generate([5], 1)),
    ):
        with pytest.raises(DecodeError, match="remove") as refused:
            use()
        assert refused.value.needs_removal == (0,)
    if 0 in lengths(ctx):
        with pytest.raises((ValueError, RuntimeError)):
            ctx.copy_kv_cache_seq(0, 2)
    else:
        ctx.copy_kv_cache_seq(0, 2)  # stopped before the first step: there is nothing to copy
    assert 2 not in lengths(ctx)
    # Another sequence is unchanged, or reports damage too: llama.cpp moves states.
    try:
        ctx.decode([7], seq_id=1)
    except DecodeError as refusal:
        assert "remove" in str(refusal)  # noqa: PT017
        assert ctx.clear_kv_cache_seq(1)
        ctx.decode([*words(20, 1), 7], seq_id=1)
    assert differ(ctx.logits(), fresh_logits(name, [*words(20, 1), 7])) < RIGHT
    assert ctx.clear_kv_cache_seq(0)
    assert lengths(ctx) == {1: 21}
    ctx.decode(words(30))
    assert differ(ctx.logits(), fresh_logits(name, words(30))) < RIGHT


@pytest.mark.hazard("N243")
@pytest.mark.not_on_a_device(reason="a decode is stopped between its parts alone")
@pytest.mark.parametrize("name", ["mamba", "mamba2", "jamba"])
def test_a_new_sequence_after_an_abort_starts_from_zeros(
    make_context: Any, fresh_logits: Any, name: str
) -> None:
    """For every last step of a graph: cells may be marked as zeroed without being written."""
    ctx = make_context(name, n_ctx=1024, n_seq_max=3)
    batch = LlamaBatch()
    for seq in (0, 1):
        batch.add(5, 12, seq, True)
    for step in range(1, 200):
        ctx.clear_kv_cache()
        for seq in (0, 2, 1):
            ctx.decode(words(12, seq), seq_id=seq)
        ctx.clear_kv_cache_seq(2)  # its cell lies between those of the others
        ctx.native.abort_at(step)
        try:
            ctx.decode(batch)
        except DecodeAborted as error:
            assert 2 not in error.needs_removal  # noqa: PT017
        else:
            break
        ctx.decode(words(20, 9), seq_id=2)
        assert differ(ctx.logits(), fresh_logits(name, words(20, 9))) < RIGHT, step
    assert 20 < step < 199
    assert ctx.native.abort_at(0)


@pytest.mark.hazard("D22")
@pytest.mark.parametrize("cure", ["clear_kv_cache", "kv_cache_seq_keep", "copy_kv_cache_seq"])
def test_any_removal_makes_an_aborted_recurrent_sequence_usable(
    make_context: Any, fresh_logits: Any, cure: str
) -> None:
    ctx, _ = aborted(make_context, "mamba", inside=True, n_batch=4096, n_ubatch=64)
    assert ctx.clear_kv_cache_seq(1)
    ctx.decode(words(20, 1), seq_id=1)
    arguments = {"clear_kv_cache": (), "kv_cache_seq_keep": (1,), "copy_kv_cache_seq": (1, 0)}
    getattr(ctx, cure)(*arguments[cure])
    before = words(20, 1) if cure == "copy_kv_cache_seq" else words(0)
    ctx.decode(words(10))
    assert differ(ctx.logits(), fresh_logits("mamba", [*before, *words(10)])) < RIGHT


@pytest.mark.hazard("N12")
@needs_timers
def test_a_signal_handler_stops_a_decode_between_its_parts(forked: Child, model: Any) -> None:
    code = """
import signal, sys
import numpy as np
from pykvcache import LlamaBatch, LlamaContext, LlamaModel
from pykvcache.errors import DecodeAborted
ctx = LlamaContext(LlamaModel(sys.argv[1]), n_ctx=8192, n_batch=64, n_threads=1)
said = []
signal.signal(signal.SIGALRM, lambda *_: said.append(ctx.abort()))
batch = LlamaBatch.from_arrays(np.full(8000, 5), np.arange(8000), 0, False)
for what in (np.full(8000, 5), batch):
    ctx.clear_kv_cache()
    said.clear()
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    try: ctx.decode(what)
    except DecodeAborted: pass
    else: sys.exit("it was not stopped")
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert True in said
    assert ctx.kv_cache_seq_pos_max(0) % 64 == 63
"""
    done = forked(code, model("llama").path)
    assert_quiet(done)
