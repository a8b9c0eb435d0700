"""A causal cache with recurrent states that can be taken back to checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pykvcache.arrays._checks import as_float_dtype, as_int, as_storable, check_shape
from pykvcache.arrays.ollama._batch import (
    Batch,
    as_copy,
    as_layer,
    as_position,
    as_range,
    as_sequence,
)
from pykvcache.arrays.ollama.causal import CausalCache
from pykvcache.arrays.ollama.checkpoints import MOST_CHECKPOINTS, CheckpointRing
from pykvcache.arrays.ollama.protocol import ShiftFn
from pykvcache.errors import CacheValueError, NotSupported
from pykvcache.errors._shown import shown

__all__ = ["RecurrentCache"]


class _State:
    """What a sequence's recurrent layers hold after its tokens below `pos`."""

    def __init__(self, ring: CheckpointRing) -> None:
        self.pos = 0
        # Never changed in place, but replaced: copies of the state share them.
        self.arrays: dict[Hashable, NDArray[Any]] = {}
        self.ring = ring

    def copy(self) -> _State:
        other = _State(self.ring.copy())
        other.pos, other.arrays = self.pos, self.arrays.copy()
        return other


class RecurrentCache(CausalCache):
    """K and V for a model's attention layers, and a state per sequence for its recurrent ones.

    A recurrent state cannot be cut: it is taken back to a checkpoint, one of the copies made
    every so often while the sequence grew. ``prepare_restore(seq, pos)`` says from where the
    sequence can go on, at most `pos`; ``remove(seq, that)`` then goes there. `InputCache` does
    both. Any other ``remove`` of the end of a sequence but for all of it raises `NotSupported`.

    It follows the recurrent cache of newer Ollama, but that a sequence whose state is already at
    the position asked for needs no checkpoint, that a batch which does not begin where the state
    is raises, and that any number of sequences have states. As there, ``remove`` from the middle
    leaves in the state what the removed tokens did to it.

    A sequence goes on only where its state and its K and V end: ``start_forward`` raises
    `NotSupported` for other positions, and where the two do not end at the same one.

    Parameters
    ----------
    shift_fn : callable, optional
        See `CausalCache`.
    checkpoint_count : int
        Checkpoints per sequence, at most 65,536.
    checkpoint_min_pos : int
        No checkpoints below this position.
    checkpoint_interval : int
        Least distance between two checkpoints.

    Raises
    ------
    CacheValueError
        A number is negative, or `checkpoint_count` too large.
    """

    def __init__(
        self,
        shift_fn: ShiftFn | None = None,
        *,
        checkpoint_count: SupportsIndex = 24,
        checkpoint_min_pos: SupportsIndex = 16,
        checkpoint_interval: SupportsIndex = 1664,
    ) -> None:
        super().__init__(shift_fn)
        self._count = as_int(
            "checkpoint_count", checkpoint_count, minimum=0, maximum=MOST_CHECKPOINTS
        )
        self._min_pos = as_int("checkpoint_min_pos", checkpoint_min_pos, minimum=0)
        self._interval = as_int("checkpoint_interval", checkpoint_interval, minimum=0)
        self._forget_states()

    def _forget_states(self) -> None:
        # copy_prefix lets two sequences have one state, until one of them writes to it.
        self._states: dict[int, _State] = {}
        self._pending: dict[int, int] = {}
        self._places: dict[int, int] = {}
        self._state_layer = 0

    def init(
        self,
        dtype: DTypeLike,
        max_sequences: SupportsIndex,
        capacity: SupportsIndex,
        max_batch: SupportsIndex,
    ) -> None:
        """Set the cache up, empty; see `CausalCache.init`."""
        super().init(dtype, max_sequences, capacity, max_batch)
        self._forget_states()

    def close(self) -> None:
        """Free the arrays; see `Cache.close`."""
        super().close()
        self._forget_states()

    def set_layer(self, layer: SupportsIndex) -> None:
        """Choose the layer, for states too; see `CausalCache.set_layer`."""
        index = as_layer(layer)
        super().set_layer(index)
        self._state_layer = index

    @property
    def batch_sequences(self) -> list[int]:
        """The sequences of the batch, ascending: the rows of ``get_state`` and ``put_state``.

        Raises
        ------
        CacheOrderError
            No batch was started.
        """
        self._ready()
        return list(self._started().batch.ids)

    def _begin(self, batch: Batch, reserve: bool) -> Callable[[], None]:
        self._check_forward(batch, reserve)
        if reserve:
            return super()._begin(batch, reserve)
        before = self._states, self._pending, self._places
        states, places = self._states.copy(), {}
        for i, seq in enumerate(batch.ids):
            old = states.get(seq)
            state = states[seq] = _State(CheckpointRing(self._count)) if old is None else old.copy()
            newest = int(batch.positions[batch.which == i].max())
            state.pos, last = newest + 1, state.ring.last_pos
            if newest >= self._min_pos and (last < 0 or newest - last >= self._interval):
                places[seq] = state.ring.record(newest)
        pending = {seq: place for seq, place in self._pending.items() if seq not in batch.ids}
        undo_cells = super()._begin(batch, reserve)
        # Nothing else is left to do, and a Ctrl-C cannot come in between.
        self._states, self._pending, self._places = states, pending, places

        def undo() -> None:
            undo_cells()
            self._states, self._pending, self._places = before

        return undo

    def _length(self, seq: int) -> int:
        """Return the position after the last whose K and V a sequence has."""
        cells = self._ready().cells
        return int(cells.last[cells.row(seq)]) + 1

    def _check_forward(self, batch: Batch, reserve: bool) -> None:
        super()._check_forward(batch, reserve)
        for i, seq in enumerate(() if reserve else batch.ids):
            pos = self._states[seq].pos if seq in self._states else 0
            found, length = np.sort(batch.positions[batch.which == i]), self._length(seq)
            if not np.array_equal(found, np.arange(pos, pos + found.size)):
                raise NotSupported(
                    f"the recurrent state of sequence {seq} goes on at {pos}, not with "
                    f"positions {found[0]} to {found[-1]}",
                    f"positions of sequence {seq}",
                    (int(found[0]), int(found[-1])),
                    pos,
                )
            if pos != length:
                raise NotSupported(
                    f"the recurrent state of sequence {seq} is at {pos}, but its K and V end at "
                    f"{length}; take it back to a checkpoint (see prepare_restore), or remove all",
                    f"state of sequence {seq}",
                    pos,
                    length,
                )

    def get_state(
        self, name: str, shape: tuple[SupportsIndex, ...], dtype: DTypeLike = np.float32
    ) -> NDArray[Any]:
        """Return a state of the batch's sequences in the active layer.

        Returns
        -------
        ndarray, shape (n_sequences, *shape)
            A copy; zeros for a sequence that has none yet.

        Raises
        ------
        CacheOrderError
            No batch was started.
        CacheValueError
            A sequence's state has another shape, or no array can have it.
        """
        one = tuple(as_int(f"shape[{i}]", n, minimum=0) for i, n in enumerate(shape))
        kind, ids = as_float_dtype(dtype), self.batch_sequences
        key = self._state_layer, name
        out = np.zeros(check_shape(f"state {shown(name)}", (len(ids), *one), kind), kind)
        for row, seq in zip(out, ids, strict=True):
            kept = self._states[seq].arrays.get(key) if seq in self._states else None
            if kept is not None:
                if kept.shape != row.shape:
                    raise CacheValueError(
                        f"state {shown(name)} has shape {kept.shape}, not {one}",
                        f"state {shown(name)}",
                        kept.shape,
                        one,
                    )
                row[...] = kept
        return out

    def put_state(self, name: str, value: NDArray[Any]) -> None:
        """Store a state of the batch's sequences in the active layer; nothing if reserving.

        Parameters
        ----------
        value : ndarray, shape (n_sequences, *shape)
            The states after the batch.

        Raises
        ------
        CacheOrderError
            No batch was started.
        CacheValueError
            There is not one row per sequence of the batch.
        CacheDTypeError
            `value` holds something else than real numbers.
        """
        rows = as_storable("value", value)
        key, ids = (self._state_layer, name), self.batch_sequences
        if rows.ndim < 1 or len(rows) != len(ids):
            raise CacheValueError(
                f"state {shown(name)} has shape {rows.shape}; {len(ids)} rows are needed",
                f"state {shown(name)}",
                rows.shape,
                len(ids),
            )
        if self._started().reserve:
            return
        for array, seq in zip([np.array(row) for row in rows], ids, strict=True):
            state, place = self._own(seq), self._places.get(seq, -1)
            state.arrays[key] = array
            if place >= 0:
                state.ring._hold(place, key, array)

    def _own(self, seq: int) -> _State:
        """Return a state that no other sequence has."""
        state = self._states.get(seq)
        if state is None:
            state = self._states[seq] = _State(CheckpointRing(self._count))
        elif any(other is state for key, other in self._states.items() if key != seq):
            state = self._states[seq] = state.copy()
        return state

    def prepare_restore(self, seq: SupportsIndex, pos: SupportsIndex) -> int | None:
        """Choose where to go back to, for ``remove`` to do it.

        Returns
        -------
        int or None
            The position from which the sequence can go on, at most `pos`: `pos` itself if the
            state is there, else one after the highest checkpoint below `pos`.
        """
        ident, target = as_sequence("seq", seq), as_position("pos", pos)
        length, state = self._length(ident), self._states.get(ident)
        self._pending.pop(ident, None)
        if state is None or target == 0:
            return None
        if state.pos == target == length:
            return target
        # The state of a prefix may have gone on where its K and V end.
        place = state.ring.best(min(target, length))
        if place is None:
            return None
        self._pending[ident] = place
        return state.ring.at(place)[0] + 1

    def can_resume(self, seq: SupportsIndex, pos: SupportsIndex) -> bool:
        """Tell whether the state is at `pos`, or there is a checkpoint right before it."""
        ident, position = as_sequence("seq", seq), as_position("pos", pos)
        if not super().can_resume(ident, position):
            return False
        length, state = self._length(ident), self._states.get(ident)
        if position == 0 or state is None or position > length:
            return position == 0
        return state.pos == position == length or position - 1 in state.ring.positions

    def copy_prefix(self, src_seq: SupportsIndex, dst_seq: SupportsIndex, n: SupportsIndex) -> None:
        """Share a prefix, and the state and checkpoints of all of `src_seq`.

        Unless the prefix is all of it, `dst_seq` must be taken back to a checkpoint first.
        """
        src, dst, count = as_copy(src_seq, dst_seq, n)
        if src == dst:
            super().copy_prefix(src, dst, count)
            return
        self._ready()
        # In between it has none: a sequence without a state does not go on by mistake.
        before = self._states.pop(dst, None)
        try:
            super().copy_prefix(src, dst, count)
        except Exception:
            self._put_back(dst, before)
            raise
        self._pending.pop(dst, None)
        self._put_back(dst, self._states.get(src) if count else None)

    def _put_back(self, seq: int, state: _State | None) -> None:
        if state is not None:
            self._states[seq] = state

    def remove(
        self, seq: SupportsIndex, begin: SupportsIndex, end: SupportsIndex | None = None
    ) -> None:
        """Remove tokens, and take the state back where ``prepare_restore`` said.

        Raises
        ------
        NotSupported
            What is left would end before the state, at no prepared and complete checkpoint.
        """
        ident, (first, last) = as_sequence("seq", seq), as_range(begin, end)
        self._check_remove(ident, first, last)
        before, after = self._states.get(ident), self._after(ident, first, last)
        length = self._length(ident)
        # In between it has none: a sequence without a state does not go on by mistake.
        self._states.pop(ident, None)
        try:
            super().remove(ident, first, last)
        except BaseException:
            # A Ctrl-C may come when all is done.
            self._put_back(ident, before if self._length(ident) == length else after)
            raise
        self._put_back(ident, after)
        if after is not before:
            self._pending.pop(ident, None)

    def _after(self, seq: int, first: int, last: int) -> _State | None:
        """Return what a sequence's state is once ``[first, last)`` is removed."""
        state, end = self._states.get(seq), min(last, self._length(seq))
        if state is None or first == last or first >= state.pos:
            return state
        if last < state.pos:
            if first < end:
                state = state.copy()
                state.ring.shift_range(first, end)
                state.pos -= end - first
            return state
        if first == 0:
            return None
        pos, arrays = state.ring.at(self._pending[seq])
        keys, state = state.arrays.keys(), state.copy()
        state.arrays = {key: arrays[key] for key in keys}
        state.pos = pos + 1
        state.ring.prune_after(pos)
        return state

    def _check_remove(
        self, seq: SupportsIndex, begin: SupportsIndex, end: SupportsIndex | None
    ) -> None:
        ident, (first, last) = as_sequence("seq", seq), as_range(begin, end)
        super()._check_remove(ident, first, last)
        state = self._states.get(ident)
        if state is None or not 0 < first < state.pos <= last:
            return
        place = self._pending.get(ident)
        pos, arrays = (-1, {}) if place is None else state.ring.at(place)
        if pos + 1 != first or not state.arrays.keys() <= arrays.keys():
            raise NotSupported(
                f"the recurrent state of sequence {ident} is at {state.pos} and cannot go back "
                f"to {first} without a complete checkpoint there; see prepare_restore",
                f"position of sequence {ident}",
                first,
                state.pos,
            )
