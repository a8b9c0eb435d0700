"""The causal cache of the Ollama family: K and V in cells that sequences share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pykvcache.arrays._checks import as_ints, as_storable
from pykvcache.arrays.ollama._batch import (
    UNLIMITED,
    Batch,
    as_copy,
    as_layer,
    as_position,
    as_range,
    as_sequence,
)
from pykvcache.arrays.ollama._cell_mask import batch_mask
from pykvcache.arrays.ollama._cells import Cut, Write, commit
from pykvcache.arrays.ollama._family import FamilyCache
from pykvcache.arrays.ollama._forward import Start
from pykvcache.arrays.ollama._layers import Layer
from pykvcache.arrays.ollama._placement import check_shift, find_room
from pykvcache.arrays.ollama._setup import Pass, Setup
from pykvcache.arrays.ollama.protocol import CacheConfig, ShiftFn
from pykvcache.errors import CacheOrderError

__all__ = ["CausalCache"]


class CausalCache(FamilyCache):
    """Every token attends to the tokens of its sequence up to its own position.

    K and V of all sequences lie in one array of cells per layer; a cell may belong to several
    sequences at once, which is how ``copy_prefix`` shares a prompt without copying it. See
    `Cache` for the methods' arguments and the order of calls. Arrays: key and value
    ``(n_tokens, n_kv_heads, head_dim)`` (key and value head sizes may differ), mask
    ``(rows, history)`` with 0 where a row sees a cell and -inf elsewhere.

    It follows Ollama's ``kvcache.Causal`` in everything that can be observed, but for this:

    - Bad arguments and bad order of calls raise, where Ollama panics or does not look.
    - `KvCacheFull`, a refused ``remove`` and a raising `shift_fn` leave the cache exactly as it
      was; Ollama has slid its window, moved cells or changed positions by then.
    - Defragmenting keeps positions with their data (Ollama swaps the positions of two cells that
      move as neighbours), and moves runs of any length as one.
    - ``copy_prefix(s, s, n)`` keeps the first `n` positions; Ollama wipes the sequence.

    ``copy.copy`` and ``copy.deepcopy`` make an independent cache of the same contents; the copy
    of the former has the same `shift_fn`.

    A position stored twice in a sequence is two tokens, both visible, as in Ollama.

    Parameters
    ----------
    shift_fn : callable, optional
        ``shift_fn(layer, key, shift) -> key``: keys ``(n_tokens, n_kv_heads, head_dim)``, its own
        copy, rotated by `shift` positions each, an int32 array ``(n_tokens,)`` that is 0 for
        tokens to leave alone. Without it, ``remove`` from the middle raises `NotSupported`.
        It must not use the cache: `ReentryError`.

    Raises
    ------
    TypeError
        `shift_fn` is not callable.
    """

    # Subclasses set these, in tokens: UNLIMITED and 0 stand for "no such limit".
    _window = UNLIMITED
    _window_memory = UNLIMITED
    _chunk = 0

    def __init__(self, shift_fn: ShiftFn | None = None) -> None:
        super().__init__()
        if shift_fn is not None and not callable(shift_fn):
            raise TypeError(f"shift_fn must be callable, not {type(shift_fn).__name__}")
        self._shift_fn = shift_fn
        self._setup: Setup | None = None
        self._pass: Pass | None = None
        # What the short way through put needs, next to where it is: the arrays of the active
        # layer (None while there are none) and the cells of the batch, those of _pass.
        self._active: Layer | None = None
        self._slot = slice(0)

    # Life cycle -------------------------------------------------------------------------

    def init(
        self,
        dtype: DTypeLike,
        max_sequences: SupportsIndex,
        capacity: SupportsIndex,
        max_batch: SupportsIndex,
    ) -> None:
        """Set the cache up, empty; see `Cache.init`.

        There are ``max_sequences * capacity`` cells, or with a sliding window
        ``max_sequences * memory + max_batch``, rounded up to the padding. `max_sequences` sizes
        the cache and limits nothing: more sequences, of any ids, may share the cells.

        Raises
        ------
        CacheDTypeError
            `dtype` is not float16, float32 or float64.
        CacheValueError
            A number is below 1, or the memory of a sliding window is below the window.
        """
        setup = self._sized(dtype, max_sequences, capacity, max_batch)
        self._check_idle()
        self._setup, self._config = setup, setup.config
        self._pass, self._active, self._closed = None, None, False

    def _sized(self, *sizes: Any) -> Setup:
        return Setup.sized(self._config or CacheConfig(), self._window, self._window_memory, *sizes)

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """What K and V are stored as; None while the cache is not set up."""
        return None if self._setup is None else self._setup.store.dtype

    def close(self) -> None:
        """Free the arrays; see `Cache.close`."""
        self._check_idle()
        self._setup = self._pass = self._active = None
        self._closed = True

    def _ready(self) -> Setup:
        self._check_idle()
        if self._setup is None:
            raise self._not_ready()
        return self._setup

    # A forward pass ---------------------------------------------------------------------

    def set_layer(self, layer: SupportsIndex) -> None:
        """Choose the layer for ``put`` and ``get``.

        Raises
        ------
        CacheLayerError
            `layer` is negative.
        """
        index = as_layer(layer)
        active = self._ready().store.select(index)
        self._expect(active)
        self._active = active

    def _expect(self, layer: Layer | None) -> None:
        """Let put take the short way to a layer, if the pass has one."""
        now = self._pass
        if layer is not None:
            layer.expect(None if now is None or now.reserve else len(now.batch))

    def start_forward(
        self,
        positions: Iterable[SupportsIndex],
        sequences: Iterable[SupportsIndex],
        reserve: bool = False,
        multimodal: Iterable[SupportsIndex] = (),
    ) -> None:
        """Slide the window, find cells for the batch and build its mask; see `Cache`.

        The batch gets the first block of free cells that holds it; where there is none although
        enough cells are free, the cells are defragmented first. `multimodal` has no effect.

        Raises
        ------
        KvCacheFull
            Too few cells are free even so.
        CacheValueError
            The batch is empty or larger than `max_batch`, `positions` and `sequences` differ in
            length, a sequence id is negative or an index of `multimodal` outside the batch.
        PositionError
            A position is negative or does not fit int32.
        """
        batch = Batch(positions, sequences, multimodal, lambda: self._ready().max_batch)
        self._begin(batch, bool(reserve))
        self._expect(self._active)

    def _begin(self, batch: Batch, reserve: bool) -> Callable[[], None]:
        setup, before = self._ready(), (self._setup, self._slot, self._pass)
        start = Start(setup)

        def undo() -> None:
            start.undo()
            self._setup, self._slot, self._pass = before

        try:
            now = start.run(batch, reserve, self._window, self._chunk)
            # No short way through put while the shapes are those of another pass.
            if self._active is not None:
                self._active.expect(None)
            self._setup, self._slot, self._pass = now[0], now[1].slot, now[1]
        except BaseException:
            undo()
            raise
        return undo

    def set_causal(self, except_: Iterable[SupportsIndex] = ()) -> None:
        """Let some rows of the batch look ahead; see `Cache.set_causal`.

        The mask is built anew only if `except_` differs from the rows before.

        Raises
        ------
        CacheValueError
            A row is outside the batch.
        CacheOrderError
            No batch was started.
        """
        rows = as_ints("except_", except_)
        setup, now = self._ready(), self._started()
        ahead = frozenset(now.batch.rows("except_", rows).tolist())
        if ahead != now.ahead:
            how = ahead, self._window, self._chunk, setup.config
            mask = batch_mask(setup.cells, now.batch, now.history, *how)
            self._pass = now._replace(ahead=ahead, mask=mask)

    def put(self, key: NDArray[Any], value: NDArray[Any]) -> None:
        """Store K and V of the batch in the active layer.

        The first ``put`` of a layer allocates its arrays. In a reserve pass that is all.

        Parameters
        ----------
        key, value : ndarray, shape (n_tokens, n_kv_heads, head_dim)
            The head sizes may differ. Numbers of another dtype are converted.

        Raises
        ------
        CacheOrderError
            No batch was started.
        CacheValueError
            A shape is wrong, is for another number of tokens than the batch has, or is not that
            of the layer's first ``put``.
        CacheDTypeError
            `key` or `value` holds something else than real numbers.
        """
        layer = self._active
        # Taken by every put like the one before; anything else is looked at more closely. Arrays
        # that own their memory share none with the keys, which are written first.
        if (
            layer is not None
            and type(key) is type(value) is np.ndarray
            and key.shape == layer.key_shape
            and value.shape == layer.value_shape
            and key.dtype is layer.dtype
            and value.dtype is layer.dtype
            and (value.base is None or not np.may_share_memory(value, layer.keys))
        ):
            slot = self._slot
            layer.keys[slot] = key
            layer.values[slot] = value
            return
        self._ready(), self._started()
        key, value = as_storable("key", key), as_storable("value", value)
        # Objects that are converted may have used the cache meanwhile.
        setup, now = self._ready(), self._started()
        self._active = setup.store.put(key, value, len(now.batch), now.slot, now.reserve)

    def _started(self) -> Pass:
        if self._pass is None:
            raise CacheOrderError("no batch was started; call start_forward first", "start_forward")
        return self._pass

    def get(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return what the batch attends to in the active layer.

        Returns
        -------
        key, value : ndarray, shape (history, n_kv_heads, head_dim)
            Read-only views of the cells that the batch needs, which the next ``start_forward``
            may overwrite; `value` is ``(n_kv_heads, head_dim, history)`` with ``permuted_v``.
        mask : ndarray, shape (rows, history)
            Read-only; 0 and -inf, to be added to the attention scores.

        Raises
        ------
        CacheOrderError
            No batch was started, or nothing was ever put in this layer.
        """
        setup, now, layer = self._ready(), self._started(), self._active
        if layer is None:
            raise CacheOrderError("nothing was put in this layer yet", "put")
        if setup.config.permuted_v:
            return layer.keys_out[now.history], layer.values_out[..., now.history], now.mask
        return layer.keys_out[now.history], layer.values_out[now.history], now.mask

    # Sequences --------------------------------------------------------------------------

    def copy_prefix(self, src_seq: SupportsIndex, dst_seq: SupportsIndex, n: SupportsIndex) -> None:
        """Let `dst_seq` share the tokens of `src_seq` below position `n`.

        What `dst_seq` held before is removed. No K or V is copied.

        Raises
        ------
        CacheValueError
            A sequence id or `n` is negative.
        """
        src, dst, count = as_copy(src_seq, dst_seq, n)
        cells = self._ready().cells
        if src == dst:
            self.remove(src, count)
        else:
            commit(cells.shared(src, dst, count))
            cells.forget(dst)

    def can_resume(self, seq: SupportsIndex, pos: SupportsIndex) -> bool:
        """Tell whether everything that a token at `pos` attends to is still there.

        Always true without a sliding window, for unknown sequences too.
        """
        ident, position = as_sequence("seq", seq), as_position("pos", pos)
        setup = self._ready()
        row = setup.cells.row(ident)
        if setup.memory == UNLIMITED:
            return True
        first, last = int(setup.cells.first[row]), int(setup.cells.last[row])
        return last >= 0 and max(0, position - self._window) >= first and position <= last + 1

    def remove(
        self, seq: SupportsIndex, begin: SupportsIndex, end: SupportsIndex | None = None
    ) -> None:
        """Remove tokens of a sequence; see `Cache.remove`.

        Tokens after `end` get positions lower by ``end - begin``, and `shift_fn` rotates their
        keys to match, over at most `max_batch` cells at once. None is stored before all are
        computed, which takes memory for as many keys as are shifted.

        Raises
        ------
        SharedCellsError
            Another sequence shares a token after `end`.
        NotSupported
            There are tokens after `end` and no `shift_fn`, or the sliding window would come to
            lie over tokens that it has given up (Ollama does not look).
        CacheValueError
            `seq` is negative.
        PositionError
            `begin` or `end` is negative, or `begin` over `end`.
        """
        ident, (first, last) = as_sequence("seq", seq), as_range(begin, end)
        setup = self._ready()
        cells, cut = setup.cells, self._check_cut(setup, ident, first, last)
        if cut is not None:
            writes = cells.taken(cut)
            if self._shift_fn is not None and cut.later.any():
                writes += self._shifted(setup, self._shift_fn, cut)
            commit(writes)
        cells.forget(ident)

    def _shifted(self, setup: Setup, shift_fn: ShiftFn, cut: Cut) -> list[Write]:
        # The short way through put asks nobody.
        if self._active is not None:
            self._active.expect(None)
        self._busy = True
        try:
            return setup.store.shifted(shift_fn, cut, setup.max_batch)
        finally:
            self._busy = False

    def _check_cut(self, setup: Setup, seq: int, begin: int, end: int) -> Cut | None:
        cut = setup.cells.cut(seq, begin, end)
        if cut is not None and cut.later.any():
            check_shift(setup.cells, cut, self._window, self._shift_fn is not None)
        return cut

    # What WrapperCache asks beforehand ---------------------------------------------------

    def _check_init(
        self,
        dtype: DTypeLike,
        max_sequences: SupportsIndex,
        capacity: SupportsIndex,
        max_batch: SupportsIndex,
    ) -> None:
        self._check_idle()
        self._sized(dtype, max_sequences, capacity, max_batch)

    def _check_forward(self, batch: Batch, reserve: bool) -> None:
        setup = self._ready()
        if not reserve:
            find_room(setup.cells, batch, setup.memory)

    def _check_remove(
        self, seq: SupportsIndex, begin: SupportsIndex, end: SupportsIndex | None
    ) -> None:
        ident, (first, last) = as_sequence("seq", seq), as_range(begin, end)
        self._check_cut(self._ready(), ident, first, last)

    def _check_copy_prefix(
        self, src_seq: SupportsIndex, dst_seq: SupportsIndex, n: SupportsIndex
    ) -> None:
        as_copy(src_seq, dst_seq, n)
        self._ready()
