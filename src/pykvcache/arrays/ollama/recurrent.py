"""A causal cache with recurrent states that can be taken back to checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pykvcache.arrays._checks import as_float_dtype, as_int, as_storable
from pykvcache.arrays.ollama._batch import Batch, as_position, as_range, as_sequence
from pykvcache.arrays.ollama.causal import CausalCache
from pykvcache.arrays.ollama.checkpoints import CheckpointRing
from pykvcache.arrays.ollama.protocol import ShiftFn
from pykvcache.errors import CacheValueError, NotSupported

__all__ = ["RecurrentCache"]


class _State:
    """What a sequence's recurrent layers hold after its tokens below `pos`."""

    def __init__(self, count: int) -> None:
        self.pos = 0
        self.arrays: dict[tuple[int, str], NDArray[Any]] = {}
        self.ring = CheckpointRing(count)


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

    Parameters
    ----------
    shift_fn : callable, optional
        See `CausalCache`.
    checkpoint_count : int
        Checkpoints per sequence.
    checkpoint_min_pos : int
        No checkpoints below this position.
    checkpoint_interval : int
        Least distance between two checkpoints.

    Raises
    ------
    CacheValueError
        A number is negative.
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
        self._count = as_int("checkpoint_count", checkpoint_count, minimum=0)
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
        super().set_layer(layer)
        self._state_layer = as_int("layer", layer)

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

    def start_forward(
        self,
        positions: Iterable[SupportsIndex],
        sequences: Iterable[SupportsIndex],
        reserve: bool = False,
        multimodal: Iterable[SupportsIndex] = (),
    ) -> None:
        """Begin a forward pass; see `CausalCache.start_forward`.

        Raises
        ------
        NotSupported
            The positions of a sequence are not those that follow its state.
        """
        batch = Batch(positions, sequences, multimodal, self._ready().max_batch)
        self._check_forward(batch, bool(reserve))
        super().start_forward(batch.positions, batch.sequences, reserve, batch.multimodal)
        self._places = {}
        if reserve:
            return
        for i, seq in enumerate(batch.ids):
            state = self._own(seq)
            self._pending.pop(seq, None)
            newest = int(batch.positions[batch.which == i].max())
            state.pos, last = newest + 1, state.ring.last_pos
            if newest >= self._min_pos and (last < 0 or newest - last >= self._interval):
                self._places[seq] = state.ring.record(newest)

    def _check_forward(self, batch: Batch, reserve: bool) -> None:
        super()._check_forward(batch, reserve)
        for i, seq in enumerate(() if reserve else batch.ids):
            pos = self._states[seq].pos if seq in self._states else 0
            found = np.sort(batch.positions[batch.which == i])
            if not np.array_equal(found, np.arange(pos, pos + found.size)):
                raise NotSupported(
                    f"the recurrent state of sequence {seq} goes on at {pos}, not with "
                    f"positions {found[0]} to {found[-1]}",
                    f"positions of sequence {seq}",
                    (int(found[0]), int(found[-1])),
                    pos,
                )

    def get_state(
        self, name: str, shape: tuple[int, ...], dtype: DTypeLike = np.float32
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
            A sequence's state has another shape.
        """
        key, ids = (self._state_layer, name), self.batch_sequences
        out = np.zeros((len(ids), *shape), as_float_dtype(dtype))
        for row, seq in zip(out, ids, strict=True):
            kept = self._states[seq].arrays.get(key) if seq in self._states else None
            if kept is not None:
                if kept.shape != row.shape:
                    raise CacheValueError(
                        f"state {name!r} has shape {kept.shape}, not {shape}",
                        f"state {name!r}",
                        kept.shape,
                        shape,
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
        key, ids = (self._state_layer, name), self.batch_sequences
        rows = as_storable("value", value)
        if rows.ndim < 1 or len(rows) != len(ids):
            raise CacheValueError(
                f"state {name!r} has shape {rows.shape}; {len(ids)} rows are needed",
                f"state {name!r}",
                rows.shape,
                len(ids),
            )
        if self._started().reserve:
            return
        for row, seq in zip(rows, ids, strict=True):
            state = self._own(seq)
            state.arrays[key] = np.array(row)
            place = self._places.get(seq, -1)
            if place >= 0:
                state.ring.store(place, key, state.arrays[key])

    def _own(self, seq: int) -> _State:
        """Return a state that no other sequence has."""
        state = self._states.get(seq)
        if state is None:
            state = self._states[seq] = _State(self._count)
        elif any(other is state for key, other in self._states.items() if key != seq):
            state = self._states[seq] = copy.deepcopy(state)
        return state

    def prepare_restore(self, seq: SupportsIndex, pos: SupportsIndex) -> int | None:
        """Choose where to go back to, for ``remove`` to do it.

        Returns
        -------
        int or None
            The position from which the sequence can go on, at most `pos`: `pos` itself if the
            state is there, else one after the highest checkpoint below `pos`.
        """
        self._ready()
        ident, target = as_sequence("seq", seq), as_position("pos", pos)
        state = self._states.get(ident)
        self._pending.pop(ident, None)
        if state is None or target == 0:
            return None
        if state.pos == target:
            return target
        place = state.ring.best(target)
        if place is None:
            return None
        self._pending[ident] = place
        return state.ring.at(place)[0] + 1

    def can_resume(self, seq: SupportsIndex, pos: SupportsIndex) -> bool:
        """Tell whether the state is at `pos`, or there is a checkpoint right before it."""
        position = as_position("pos", pos)
        if not super().can_resume(seq, position):
            return False
        state = self._states.get(as_sequence("seq", seq))
        if position == 0 or state is None:
            return position == 0
        return state.pos == position or position - 1 in state.ring.positions

    def copy_prefix(self, src_seq: SupportsIndex, dst_seq: SupportsIndex, n: SupportsIndex) -> None:
        """Share a prefix, and the state and checkpoints of all of `src_seq`.

        Unless the prefix is all of it, `dst_seq` must be taken back to a checkpoint first.
        """
        super().copy_prefix(src_seq, dst_seq, n)
        src, dst = as_sequence("src_seq", src_seq), as_sequence("dst_seq", dst_seq)
        if src != dst and as_int("n", n) > 0 and src in self._states:
            self._states[dst] = self._states[src]

    def remove(
        self, seq: SupportsIndex, begin: SupportsIndex, end: SupportsIndex | None = None
    ) -> None:
        """Remove tokens, and take the state back where ``prepare_restore`` said.

        Raises
        ------
        NotSupported
            What is left would end before the state, at no prepared and complete checkpoint.
        """
        self._check_remove(seq, begin, end)
        ident, (first, last) = as_sequence("seq", seq), as_range(begin, end)
        super().remove(ident, first, last)
        state = self._states.get(ident)
        if state is None or first == last or first >= state.pos:
            return
        place = self._pending.pop(ident, -1)
        if last < state.pos:
            state = self._own(ident)
            state.ring.shift_range(first, last)
            state.pos -= last - first
        elif first == 0:
            del self._states[ident]
        else:
            state = self._own(ident)
            pos, arrays = state.ring.at(place)
            state.arrays = {key: arrays[key].copy() for key in state.arrays}
            state.pos = pos + 1
            state.ring.prune_after(pos)

    def _check_remove(
        self, seq: SupportsIndex, begin: SupportsIndex, end: SupportsIndex | None
    ) -> None:
        super()._check_remove(seq, begin, end)
        ident, (first, last) = as_sequence("seq", seq), as_range(begin, end)
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
