"""States and a context that is in use: threads, aborted decodes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memory.kit import Fresh, Make, apart
from pykvcache import SequenceState
from pykvcache.errors import DecodeAborted, UnsupportedOperation
from state.kit import WORDS, next_logits
from support.models import RIGHT


def test_a_state_taken_during_decodes_is_consistent(make_context: Make, tmp_path: Path) -> None:
    """Tokens are decoded one by one: each saved state is a prefix of the final one."""
    ctx = make_context("llama")
    states: list[SequenceState] = []
    wholes: list[Any] = []
    done = threading.Event()

    def decode() -> None:
        for token in WORDS[:120]:
            ctx.decode([int(token)], seq_id=1)
        done.set()

    thread = threading.Thread(target=decode)
    thread.start()
    while not done.is_set():
        states.append(ctx.sequence_state(1))
        ctx.save_sequence(tmp_path / "a", 1, sync=False)
        states.append(SequenceState.load(tmp_path / "a"))
        wholes.append(ctx.context_state())
    thread.join()
    final = ctx.sequence_state(1)
    assert len(final) == 120
    for state in states:
        assert state.to_bytes() == final[: len(state)].to_bytes()
    for whole in wholes:
        if whole.sequence_ids:
            one = whole.sequence(1)
            assert one.to_bytes() == final[: len(one)].to_bytes()


@pytest.mark.not_on_a_device(reason="a decode is stopped between its parts alone")
def test_the_rest_of_an_aborted_decode_is_not_saved_but_replaced(
    make_context: Make, fresh_logits: Fresh, tmp_path: Path
) -> None:
    ctx = make_context("mamba")
    ctx.decode(WORDS[:20], seq_id=1)
    ctx.native.abort_at(30)
    with pytest.raises(DecodeAborted):
        ctx.decode(WORDS)
    calls: tuple[Callable[[], object], ...] = (
        lambda: ctx.sequence_state(0),
        lambda: ctx.save_sequence(tmp_path / "a", 0),
        ctx.context_state,
        lambda: ctx.save_context(tmp_path / "a"),
    )
    for call in calls:
        with pytest.raises(UnsupportedOperation, match="aborted"):
            call()
    assert list(tmp_path.iterdir()) == []
    other = make_context("mamba")
    other.decode(WORDS[:20])
    ctx.sequence_state(1)  # the other one is intact
    ctx.restore_sequence(other.sequence_state(0), 0)
    want = fresh_logits("mamba", [*WORDS[:20], 9])
    assert apart(next_logits(ctx, 0), want) < RIGHT
    ctx.context_state()
