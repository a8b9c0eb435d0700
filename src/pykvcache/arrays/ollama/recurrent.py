"""RecurrentCache: a causal cache with recurrent states and checkpoints."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pykvcache.arrays._checks import MOST, as_float_dtype, as_int, as_storable, check_shape
from pykvcache.arrays.ollama.cache import Batch, as_position, as_range, as_sequence
from pykvcache.arrays.ollama.causal import CausalCache
from pykvcache.arrays.ollama.cells import Cut
from pykvcache.arrays.ollama.layers import ShiftFn
from pykvcache.errors import CacheValueError, NotSupported, shown

__all__ = ["CheckpointRing", "RecurrentCache"]

# Maximum number of checkpoints of a sequence.
_MOST_CHECKPOINTS = 2**16


class CheckpointRing:
    """A fixed number of checkpoints; a new one replaces the oldest.

    A checkpoint is a position and named arrays. Modelled on the checkpoint store of Ollama's
    recurrent cache.

    Parameters
    ----------
    count : int
        Number of checkpoints, at most 65,536.
    """

    def __init__(self, count: SupportsIndex) -> None:
        n = as_int("count", count, minimum=0, maximum=_MOST_CHECKPOINTS)
        # -1 marks an unused slot.
        self._pos = np.full(n, -1, np.int64)
        # Never changed in place, because copies of the ring share them.
        self._arrays: list[dict[Hashable, NDArray[Any]]] = [{}] * n
        self._next = 0
        self._last_pos = -1

    def copy(self) -> CheckpointRing:
        """Return an independent ring with the same checkpoints, without copying arrays."""
        other = CheckpointRing(0)
        other._pos, other._arrays = self._pos.copy(), self._arrays.copy()
        other._next, other._last_pos = self._next, self._last_pos
        return other

    # The default shallow copy would share the positions.
    __copy__ = copy

    @property
    def size(self) -> int:
        """Number of checkpoints."""
        return int((self._pos >= 0).sum())

    @property
    def last_pos(self) -> int:
        """Position of the last recorded or restored checkpoint; -1 for none."""
        return self._last_pos

    @property
    def positions(self) -> list[int]:
        """Positions of the checkpoints, ascending."""
        return sorted(self._pos[self._pos >= 0].tolist())

    def record(self, pos: SupportsIndex) -> int:
        """Begin a checkpoint without arrays; return its slot, -1 if the ring has size 0."""
        position = as_int("pos", pos, minimum=0, maximum=MOST)
        if not self._pos.size:
            return -1
        place = self._next
        self._next = (place + 1) % self._pos.size
        self._pos[place] = self._last_pos = position
        self._arrays[place] = {}
        return place

    def store(self, place: int, name: Hashable, array: NDArray[Any]) -> None:
        """Copy an array into the checkpoint of a slot."""
        place = as_int("place", place, minimum=0, maximum=self._pos.size - 1)
        self._hold(place, name, as_storable("array", array).copy())

    def _hold(self, place: int, name: Hashable, array: NDArray[Any]) -> None:
        """Store an array that never changes in a checkpoint."""
        self._arrays[place] = {**self._arrays[place], name: array}

    def best(self, target: SupportsIndex) -> int | None:
        """Return the slot of the highest checkpoint below `target`, if any."""
        below = np.where(self._pos < as_int("target", target), self._pos, -1)
        if not below.size or below.max() < 0:
            return None
        return int(below.argmax())

    def at(self, place: int) -> tuple[int, Mapping[Hashable, NDArray[Any]]]:
        """Return position and arrays, read-only, of the checkpoint of a slot."""
        place = as_int("place", place, minimum=0, maximum=self._pos.size - 1)
        held = {name: array.view() for name, array in self._arrays[place].items()}
        for array in held.values():
            array.flags.writeable = False
        return int(self._pos[place]), held

    def prune_after(self, pos: SupportsIndex) -> None:
        """Drop the checkpoints above `pos`, after a restore to it."""
        position = as_int("pos", pos)
        self._pos[self._pos > position] = -1
        self._renumber(position)

    def shift_range(self, begin: SupportsIndex, end: SupportsIndex) -> None:
        """Drop the checkpoints in ``[begin, end)`` and shift those after it down."""
        _, first, last = as_range(0, begin, end)
        self._pos[(self._pos >= first) & (self._pos < last)] = -1
        self._pos[self._pos >= last] -= last - first
        self._renumber(int(self._pos.max(initial=-1)))

    def _renumber(self, last_pos: int) -> None:
        used = self._pos >= 0
        self._last_pos = last_pos if used.any() else -1
        if not used.any():
            self._next = 0
        else:
            # The first unused slot, or that of the oldest checkpoint.
            self._next = int(self._pos.argmin() if used.all() else used.argmin())


class _State:
    """State of a sequence's recurrent layers after the tokens below `pos`."""

    def __init__(self, count: int) -> None:
        self.pos = 0
        # Never changed in place, because copies of the state share them.
        self.arrays: dict[Hashable, NDArray[Any]] = {}
        self.ring = CheckpointRing(count)
        # Slots in the ring: of the current batch's checkpoint, -1 for none, and of a prepared
        # restore.
        self.place = -1
        self.prepared: int | None = None

    def copy(self) -> _State:
        other = _State(0)
        other.pos, other.arrays, other.ring = self.pos, self.arrays.copy(), self.ring.copy()
        return other

    def can_go_back(self, pos: int) -> bool:
        """Return whether the prepared checkpoint is complete and leads to `pos`."""
        if self.prepared is None:
            return False
        last, arrays = self.ring.at(self.prepared)
        return last + 1 == pos and self.arrays.keys() <= arrays.keys()

    def go_back(self) -> None:
        """Restore the prepared checkpoint, and drop later ones."""
        assert self.prepared is not None
        pos, arrays = self.ring.at(self.prepared)
        self.arrays = {key: arrays[key] for key in self.arrays}
        self.pos = pos + 1
        self.ring.prune_after(pos)


class RecurrentCache(CausalCache):
    """K and V for attention layers, and a state per sequence for recurrent layers.

    A recurrent state cannot be truncated, only restored from a checkpoint, a copy made at
    intervals. ``prepare_restore(seq, pos)`` returns the position, at most `pos`, from which the
    sequence can continue; ``remove(seq, that)`` then restores it. `InputCache` does both. Any
    other removal at the end of a sequence, except of all of it, raises `NotSupported`.

    Modelled on the recurrent cache of newer Ollama versions. After ``remove`` from the middle the
    state still contains the effect of the removed tokens.

    A sequence continues only where its state and its K and V end: ``start_forward`` raises
    `NotSupported` for other positions, and if the two ends differ. ``copy_prefix`` shares the whole
    state and all checkpoints, so that after a copy of less than all, `dst_seq` must restore one.

    Parameters
    ----------
    shift_fn : callable, optional
        See `CausalCache`.
    checkpoint_count : int
        Checkpoints per sequence, at most 65,536.
    checkpoint_min_pos : int
        Lowest position of a checkpoint.
    checkpoint_interval : int
        Minimum distance between two checkpoints.
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
            "checkpoint_count", checkpoint_count, minimum=0, maximum=_MOST_CHECKPOINTS
        )
        self._min_pos = as_int("checkpoint_min_pos", checkpoint_min_pos, minimum=0)
        self._interval = as_int("checkpoint_interval", checkpoint_interval, minimum=0)

    def _set_up(self, n_cells: int, dtype: np.dtype[Any], memory: int) -> None:
        super()._set_up(n_cells, dtype, memory)
        self._states: dict[int, _State] = {}

    @property
    def batch_sequences(self) -> list[int]:
        """Sequences of the batch, ascending: the rows of ``get_state`` and ``put_state``."""
        return list(self._started().ids)

    def _begin(self, batch: Batch, reserve: bool) -> None:
        self._check_forward(batch, reserve)
        super()._begin(batch, reserve)
        if reserve:
            return
        for i, seq in enumerate(batch.ids):
            state, newest = self._own_state(seq), int(batch.positions[batch.which == i].max())
            state.pos, last = newest + 1, state.ring.last_pos
            state.place, state.prepared = -1, None
            if newest >= self._min_pos and (last < 0 or newest - last >= self._interval):
                state.place = state.ring.record(newest)

    def _own_state(self, seq: int) -> _State:
        """Return the state of a sequence, creating one if needed."""
        if seq not in self._states:
            self._states[seq] = _State(self._count)
        return self._states[seq]

    def _length(self, seq: int) -> int:
        """Return the position after a sequence's last K and V."""
        return int(self._cells.last[self._cells.row(seq)]) + 1

    def get_state(
        self, name: str, shape: tuple[SupportsIndex, ...], dtype: DTypeLike = np.float32
    ) -> NDArray[Any]:
        """Return a state of the active layer for the batch's sequences.

        Returns
        -------
        ndarray, shape (n_sequences, *shape)
            A copy; zeros for a sequence without a state.

        Raises
        ------
        CacheOrderError
            No batch was started.
        CacheValueError
            A sequence's state has another shape, or the shape is too large.
        """
        one = tuple(as_int(f"shape[{i}]", n, minimum=0) for i, n in enumerate(shape))
        kind, ids = as_float_dtype(dtype), self.batch_sequences
        key, what = (self._layer, name), f"state {shown(name)}"
        out = np.zeros(check_shape(what, (len(ids), *one), kind), kind)
        for row, seq in zip(out, ids, strict=True):
            stored = self._states[seq].arrays.get(key) if seq in self._states else None
            if stored is not None:
                if stored.shape != row.shape:
                    message = f"{what} has shape {stored.shape}, not {one}"
                    raise CacheValueError(message, what, stored.shape, one)
                row[...] = stored
        return out

    def put_state(self, name: str, value: NDArray[Any]) -> None:
        """Store a state of the active layer for the batch's sequences; a reserve pass does nothing.

        Parameters
        ----------
        value : ndarray, shape (n_sequences, *shape)
            The states after the batch.

        Raises
        ------
        CacheOrderError
            No batch was started.
        CacheValueError, CacheDTypeError
            `value` has another number of rows than the batch has sequences, or not real numbers.
        """
        rows = as_storable("value", value)
        key, ids = (self._layer, name), self.batch_sequences
        if rows.ndim < 1 or len(rows) != len(ids):
            what = f"state {shown(name)}"
            message = f"{what} has shape {rows.shape}; {len(ids)} rows are needed"
            raise CacheValueError(message, what, rows.shape, len(ids))
        if self._reserve:
            return
        for row, seq in zip(rows, ids, strict=True):
            state, array = self._own_state(seq), np.array(row)
            state.arrays[key] = array
            if state.place >= 0:
                state.ring._hold(state.place, key, array)

    def prepare_restore(self, seq: SupportsIndex, pos: SupportsIndex) -> int | None:
        """Choose the checkpoint that ``remove`` will restore.

        Returns
        -------
        int or None
            The position from which the sequence can continue: `pos` if the state is there, else
            the one after the highest checkpoint below `pos`.
        """
        ident, target = as_sequence("seq", seq), as_position("pos", pos)
        self._ready()
        length, state = self._length(ident), self._states.get(ident)
        if state is None:
            return None
        state.prepared = None
        if target == 0:
            return None
        if state.pos == target == length:
            return target
        # The state of a copied prefix may be ahead of its K and V.
        state.prepared = place = state.ring.best(min(target, length))
        return None if place is None else state.ring.at(place)[0] + 1

    def _can_resume(self, seq: int, pos: int) -> bool:
        if not super()._can_resume(seq, pos):
            return False
        length, state = self._length(seq), self._states.get(seq)
        if pos == 0 or state is None or pos > length:
            return pos == 0
        return state.pos == pos == length or pos - 1 in state.ring.positions

    def _copy(self, src: int, dst: int, n: int) -> None:
        super()._copy(src, dst, n)
        if src != dst:
            self._states.pop(dst, None)
            if n and src in self._states:
                self._states[dst] = self._states[src].copy()

    def _remove(self, seq: int, begin: int, end: int) -> None:
        stop = min(end, self._length(seq))
        super()._remove(seq, begin, end)
        state = self._states.get(seq)
        if state is None or begin == end or begin >= state.pos:
            return
        if end >= state.pos and begin:
            state.go_back()
        elif end >= state.pos:
            del self._states[seq]
        elif begin < stop:
            state.prepared = None
            state.ring.shift_range(begin, stop)
            state.pos -= stop - begin

    def _check_forward(self, batch: Batch, reserve: bool) -> None:
        super()._check_forward(batch, reserve)
        for i, seq in enumerate(() if reserve else batch.ids):
            pos = self._states[seq].pos if seq in self._states else 0
            found, length = np.sort(batch.positions[batch.which == i]), self._length(seq)
            first, last = int(found[0]), int(found[-1])
            if not np.array_equal(found, np.arange(pos, pos + found.size)):
                message = (
                    f"the recurrent state of sequence {seq} continues at {pos}, not at "
                    f"positions {first} to {last}"
                )
                raise NotSupported(message, f"positions of sequence {seq}", (first, last), pos)
            if pos != length:
                message = (
                    f"the recurrent state of sequence {seq} is at {pos}, but its K and V end at "
                    f"{length}; restore a checkpoint (see prepare_restore), or remove the whole "
                    "sequence"
                )
                raise NotSupported(message, f"state of sequence {seq}", pos, length)

    def _check_remove(self, seq: int, begin: int, end: int) -> Cut | None:
        cut, state = super()._check_remove(seq, begin, end), self._states.get(seq)
        if state is not None and 0 < begin < state.pos <= end and not state.can_go_back(begin):
            message = (
                f"the recurrent state of sequence {seq} is at {state.pos} and cannot go back "
                f"to {begin} without a complete checkpoint there; see prepare_restore"
            )
            raise NotSupported(message, f"position of sequence {seq}", begin, state.pos)
        return cut
