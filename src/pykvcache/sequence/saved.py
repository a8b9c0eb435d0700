"""A LlamaSequence in a file: the state of the evaluated tokens, and all tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pykvcache._arguments import as_path
from pykvcache.errors import StateDamaged
from pykvcache.state import SequenceState
from pykvcache.state.container import naming
from pykvcache.state.saved import Path, check_metadata

if TYPE_CHECKING:
    from pykvcache.sequence.cells import SequenceCells

__all__ = ["load_sequence", "save_sequence"]

#: Keys in the state's metadata: pending tokens, the user's metadata, and the index of the first
#: token that was shifted, or evaluated with an activated adapter.
PENDING, METADATA, SHIFTED, ACTIVATED = "pending", "metadata", "shifted_at", "activated_at"


def save_sequence(
    cells: SequenceCells, path: Path, metadata: Mapping[str, Any] | None, *, sync: bool
) -> int:
    """Write a sequence; trim surplus cells first."""
    ledger = cells.ledger
    given = check_metadata(metadata)
    seq_id = cells.attach()
    cells.rewind(ledger.n_evaluated)
    note: dict[str, Any] = {PENDING: ledger.pending.tolist()}
    if metadata is not None:
        note[METADATA] = given
    if ledger.shifted_at is not None:
        note[SHIFTED] = ledger.shifted_at
    if ledger.activated_at >= 0:
        note[ACTIVATED] = ledger.activated_at
    evaluated = ledger.part(0, ledger.n_evaluated)
    state = cells.pool.ctx.sequence_state(seq_id, evaluated, note)
    if ledger.activated_at < 0:
        state = _computed_with(state, cells.pool.native.base_names)
    return state.save(path, sync=sync)


def _computed_with(state: SequenceState, adapters: tuple[str, ...]) -> SequenceState:
    """Return a state with other adapters in its fingerprint."""
    if state.fingerprint.adapters == adapters:
        return state
    return SequenceState(
        state.parts,
        replace(state.fingerprint, adapters=adapters),
        first=state.first,
        tokens=state.tokens,
        metadata=state.metadata,
    )


def load_sequence(cells: SequenceCells, path: Path, *, convert: bool) -> Any:
    """Fill a new sequence from a file; return the user's metadata."""
    name = as_path(path)
    state = SequenceState.load(name, mapped=False)
    with naming(name):
        _fill(cells, state, convert=convert)
    return (state.metadata or {}).get(METADATA)


def _fill(cells: SequenceCells, state: SequenceState, *, convert: bool) -> None:
    ctx, ledger, native = cells.pool.ctx, cells.ledger, cells.pool.native
    is_base = state.fingerprint.adapters == native.base_names
    if is_base:
        state = _computed_with(state, native.adapter_names)
    state.fingerprint.check(ctx.fingerprint)  # first: tokens of another model look damaged
    tokens = state.tokens
    if tokens is None:
        raise StateDamaged(
            "the file holds no tokens: load it with LlamaContext.load_sequence", what="tokens"
        )
    pending = _pending(state, ctx.model.n_vocab)
    shifted_at, activated_at = _place(state, SHIFTED), _place(state, ACTIVATED)
    wrong = tokens[(tokens < 0) | (tokens >= ctx.model.n_vocab)]
    if len(wrong):
        raise StateDamaged(
            f"the file holds the token {wrong[0]}, outside [0, {ctx.model.n_vocab})",
            what="tokens",
            value=int(wrong[0]),
            limit=ctx.model.n_vocab - 1,
        )
    if state.first:
        raise StateDamaged(
            f"the state begins at position {state.first}, not at 0",
            what="first position",
            value=state.first,
            limit=0,
        )
    if activated_at is None and not is_base:
        # `LlamaContext` saved it: which adapters computed which tokens is unknown, so none count.
        ledger.append(tokens)
        ledger.append(pending)
        return
    seq_id = cells.attach()
    cells.with_room(lambda: ctx.restore_sequence(state, seq_id, convert=convert))
    ledger.append(tokens)
    ledger.append(pending)
    ledger.holds(len(tokens))
    ledger.shifted_at = shifted_at
    ledger.activated_at = -1 if is_base or activated_at is None else activated_at
    ledger.settle()
    cells.note()
    cells.checkpoint()


def _pending(state: SequenceState, n_vocab: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    note = state.metadata or {}
    pending = note.get(PENDING, [])
    if not isinstance(pending, list) or not all(
        type(token) is int and 0 <= token < n_vocab for token in pending
    ):
        raise StateDamaged(
            f"the pending tokens of the file are not all in [0, {n_vocab})",
            what="pending tokens",
            value=pending,
            limit=n_vocab - 1,
        )
    return np.array(pending, np.int32)


def _place(state: SequenceState, key: str) -> int | None:
    at = (state.metadata or {}).get(key)
    if at is not None and (type(at) is not int or not 0 <= at <= len(state)):
        raise StateDamaged(
            f"the file has {key} {at!r}, which is not a place in {len(state)} tokens",
            what=key,
            value=at,
            limit=len(state),
        )
    return at
