"""The causal caches of Ollama: K and V in cells that sequences share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pykvcache.arrays._checks import MOST, as_float_dtype, as_int, as_ints, check_shape
from pykvcache.arrays.ollama.batch import UNLIMITED, Batch, as_copy, as_layer, as_place, as_range
from pykvcache.arrays.ollama.cache import CacheConfig, OllamaCache
from pykvcache.arrays.ollama.cells import CellTable
from pykvcache.arrays.ollama.layers import Layer, LayerStore, ShiftFn
from pykvcache.arrays.ollama.mask import batch_mask
from pykvcache.errors import CacheOrderError, CacheValueError

__all__ = ["CausalCache", "ChunkedAttentionCache", "SWACache", "SWAMemCache"]


class _Setup(NamedTuple):
    """The setup made by ``init``; `memory` is the number of tokens that the window keeps."""

    cells: CellTable
    store: LayerStore
    config: CacheConfig
    memory: int
    max_batch: int


class _Pass(NamedTuple):
    """A forward pass: its batch, its cells, its history and the mask.

    Rows in `ahead` also see later positions.
    """

    batch: Batch
    reserve: bool
    slot: slice
    history: slice
    ahead: frozenset[int]
    mask: NDArray[Any]


class _SharedFunction:
    """A function that is shared by copies: deep-copying a bound method would copy its model."""

    def __init__(self, function: ShiftFn | None) -> None:
        self.function = function

    def __deepcopy__(self, memo: Any) -> _SharedFunction:
        return self


class CausalCache(OllamaCache):
    """A causal cache: every token attends to its sequence up to its own position.

    K and V of all sequences are in one array of cells per layer. A cell may belong to several
    sequences, so ``copy_prefix`` shares a prompt without copying it. See `Cache` for the methods'
    arguments and the order of calls. Shapes: key and value ``(n_tokens, n_kv_heads, head_dim)``
    (their head sizes may differ); mask ``(rows, history)``, 0 where a row sees a cell and -inf
    elsewhere.

    Behaves like Ollama's ``kvcache.Causal``, except:

    - Invalid arguments and calls out of order raise; Ollama panics or does not check.
    - `KvCacheFull`, a refused ``remove`` and a raising `shift_fn` leave the cache unchanged; in
      Ollama the window has moved, cells were moved or positions changed.
    - Defragmenting keeps positions with their data (Ollama swaps the positions of two cells that
      move as neighbours), and moves runs of any length at once.
    - ``copy_prefix(s, s, n)`` keeps the first `n` positions; Ollama wipes the sequence.

    ``copy.copy`` and ``copy.deepcopy`` make an independent cache with the same `shift_fn`.
    As in Ollama, a position stored twice in a sequence is two visible tokens.

    Parameters
    ----------
    shift_fn : callable, optional
        ``shift_fn(layer, key, shift) -> key`` rotates keys ``(n_tokens, n_kv_heads, head_dim)``, a
        copy, by `shift` positions, an int32 array ``(n_tokens,)`` that is 0 for tokens to skip.
        Without it, ``remove`` from the middle raises `NotSupported`. It must not use the cache
        (`ReentryError`).

    Raises
    ------
    TypeError
        `shift_fn` is not callable.
    """

    # Set by subclasses, in tokens; UNLIMITED and 0 mean no limit.
    _window = UNLIMITED
    _window_memory = UNLIMITED
    _chunk = 0

    def __init__(self, shift_fn: ShiftFn | None = None) -> None:
        super().__init__()
        if shift_fn is not None and not callable(shift_fn):
            raise TypeError(f"shift_fn must be callable, not {type(shift_fn).__name__}")
        self._shared = _SharedFunction(shift_fn)
        self._slot = slice(0)  # the batch's cells
        self._reset()

    # Life cycle -------------------------------------------------------------------------

    def _reset(self) -> None:
        """Forget the arrays and the batch."""
        self._setup: _Setup | None = None
        self._pass: _Pass | None = None
        self._active: Layer | None = None  # for the fast path of `put`; None before it has arrays

    def init(
        self,
        dtype: DTypeLike,
        max_sequences: SupportsIndex,
        capacity: SupportsIndex,
        max_batch: SupportsIndex,
    ) -> None:
        """Set the cache up, empty; see `Cache.init`.

        The cache has ``max_sequences * capacity`` cells, or with a sliding window
        ``max_sequences * memory + max_batch``, rounded up to the padding. `max_sequences` only
        sizes the cache: more sequences, with any ids, may share the cells. A memory smaller than
        the window raises ``CacheValueError``.
        """
        setup = self._sized(dtype, max_sequences, capacity, max_batch)
        self._reset()
        self._setup, self._config, self._closed = setup, setup.config, False

    def _sized(
        self,
        dtype: DTypeLike,
        max_sequences: SupportsIndex,
        capacity: SupportsIndex,
        max_batch: SupportsIndex,
    ) -> _Setup:
        """Return an empty setup; cheap, because layers get arrays with their first ``put``."""
        config, kind = self._config or CacheConfig(), as_float_dtype(dtype)
        sequences = as_int("max_sequences", max_sequences, minimum=1, maximum=MOST)
        tokens = as_int("capacity", capacity, minimum=1, maximum=MOST)
        batch = as_int("max_batch", max_batch, minimum=1, maximum=MOST)
        self._check_idle()
        memory = _effective_memory(self._window, self._window_memory, sequences, tokens)
        n_cells = sequences * tokens if memory == UNLIMITED else sequences * memory + batch
        n_cells = _round_up(n_cells, config.cache_padding)
        if n_cells > MOST:
            message = (
                f"max_sequences, capacity, max_batch and cache_padding need {n_cells} cells; "
                f"a cache has at most {MOST}"
            )
            raise CacheValueError(message, "cells", n_cells, MOST)
        rows = _round_up(batch, config.mask_batch_padding)
        check_shape("the largest mask", (rows, n_cells), config.mask_dtype)
        store = LayerStore(n_cells, kind, config.permuted_v)
        return _Setup(CellTable(n_cells), store, config, memory, batch)

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """Dtype of the stored K and V; None while the cache is not set up."""
        return None if self._setup is None else self._setup.store.dtype

    def close(self) -> None:
        """Free the arrays; see `Cache.close`."""
        self._check_idle()
        self._reset()
        self._closed = True

    def _ready(self) -> _Setup:
        self._check_idle()
        if self._setup is None:
            raise self._not_ready()
        return self._setup

    # A forward pass ---------------------------------------------------------------------

    def set_layer(self, layer: SupportsIndex) -> None:
        """Set the layer for ``put`` and ``get``; see `Cache.set_layer`."""
        index = as_layer(layer)
        self._active = self._ready().store.select(index)
        self._expect_batch()

    def _expect_batch(self) -> None:
        """Enable the fast path of `put` for this pass."""
        if self._active is not None:
            now = self._pass
            self._active.expect(None if now is None or now.reserve else len(now.batch))

    def start_forward(
        self,
        positions: Iterable[SupportsIndex],
        sequences: Iterable[SupportsIndex],
        reserve: bool = False,
        multimodal: Iterable[SupportsIndex] = (),
    ) -> None:
        """Move the window, find cells for the batch and build its mask; see `Cache`.

        The batch gets the first sufficient run of free cells. If no run is long enough but
        enough cells are free, the cells are defragmented first. `multimodal` has no effect.

        Raises
        ------
        KvCacheFull
            Too few cells are free.
        CacheValueError, PositionError
            See `Cache.start_forward`.
        """
        batch = Batch(positions, sequences, multimodal)
        self._begin(batch.check_size(self._ready().max_batch), bool(reserve))

    def _begin(self, batch: Batch, reserve: bool) -> None:
        setup, n = self._ready(), len(batch)
        cells, start, low, high = setup.cells, 0, 0, setup.cells.size - 1
        if not reserve:
            room = cells.find_room(batch, setup.memory)
            cells.expire(room)
            if room.start is None:
                setup.store.move(*cells.compact())
                start = cells.in_use  # the free cells follow those in use
            else:
                start = room.start
            low, high = cells.needed(batch, self._window, setup.memory)
            cells.claim(start, batch)
            low, high = min(low, start), max(high, start + n - 1)
        padding = setup.config.cache_padding
        history = slice(low // padding * padding, _round_up(high + 1, padding))
        mask = self._mask(setup, batch, history, frozenset())
        self._slot = slice(start, start + n)
        self._pass = _Pass(batch, reserve, self._slot, history, frozenset(), mask)
        self._expect_batch()

    def _mask(
        self, setup: _Setup, batch: Batch, history: slice, ahead: frozenset[int]
    ) -> NDArray[Any]:
        how = history, ahead, self._window, self._chunk, setup.config
        return batch_mask(setup.cells, batch, *how)

    def set_causal(self, except_: Iterable[SupportsIndex] = ()) -> None:
        """Let some rows of the batch see later positions; see `Cache.set_causal`.

        The mask is rebuilt only if `except_` has changed.
        """
        rows = as_ints("except_", except_)
        setup, now = self._ready(), self._started()
        ahead = frozenset(now.batch.rows("except_", rows).tolist())
        if ahead != now.ahead:
            mask = self._mask(setup, now.batch, now.history, ahead)
            self._pass = now._replace(ahead=ahead, mask=mask)

    def put(self, key: NDArray[Any], value: NDArray[Any]) -> None:
        """Store K and V of the batch in the active layer.

        The first ``put`` of a layer allocates its arrays. A reserve pass does nothing else.

        Parameters
        ----------
        key, value : ndarray, shape (n_tokens, n_kv_heads, head_dim)
            The head sizes may differ. Numbers of another dtype are converted.

        Raises
        ------
        CacheOrderError
            No batch was started.
        CacheValueError
            A shape is wrong, has another number of tokens than the batch, or differs from the
            layer's first ``put``.
        CacheDTypeError
            `key` or `value` is not an array of real numbers.
        """
        layer = self._active
        # Fast path for a `put` like the last one. Keys are written first, so a value that is a
        # view of them must be copied; the slow path does that.
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
        setup, now = self._ready(), self._started()
        self._active = setup.store.put(key, value, len(now.batch), now.slot, now.reserve)

    def _started(self) -> _Pass:
        if self._pass is None:
            raise CacheOrderError("no batch was started; call start_forward first", "start_forward")
        return self._pass

    def get(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return the history of the batch in the active layer, and its mask.

        Returns
        -------
        key, value : ndarray, shape (history, n_kv_heads, head_dim)
            Read-only views of the cells that the batch needs, valid until the next
            ``start_forward``; `value` is ``(n_kv_heads, head_dim, history)`` with ``permuted_v``.
        mask : ndarray, shape (rows, history)
            Read-only; 0 and -inf, to be added to the attention scores.

        Raises
        ------
        CacheOrderError
            No batch was started, or this layer has no arrays yet.
        """
        self._ready()
        now, layer = self._started(), self._active
        if layer is None:
            raise CacheOrderError("nothing was put in this layer yet", "put")
        if layer.permuted:
            return layer.keys_out[now.history], layer.values_out[..., now.history], now.mask
        return layer.keys_out[now.history], layer.values_out[now.history], now.mask

    # Sequences --------------------------------------------------------------------------

    def copy_prefix(self, src_seq: SupportsIndex, dst_seq: SupportsIndex, n: SupportsIndex) -> None:
        """Share the tokens of `src_seq` below position `n` with `dst_seq`, without a copy."""
        src, dst, count = as_copy(src_seq, dst_seq, n)
        cells = self._ready().cells
        if src == dst:
            self.remove(src, count)
        else:
            cells.share(src, dst, count)

    def can_resume(self, seq: SupportsIndex, pos: SupportsIndex) -> bool:
        """Return whether everything that a token at `pos` attends to is still stored.

        Always true without a sliding window, even for unknown sequences.
        """
        ident, position = as_place(seq, pos)
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

        Positions after `end` decrease by ``end - begin``, and `shift_fn` rotates their keys to
        match, at most `max_batch` cells at once. All keys are computed before any is stored,
        which needs memory for all shifted keys.

        Raises
        ------
        SharedCellsError
            Another sequence shares a token after `end`.
        NotSupported
            Tokens follow `end` but `shift_fn` is missing, or the sliding window would cover
            tokens that it has dropped (Ollama does not check).
        CacheValueError, PositionError
            See `Cache.remove`.
        """
        ident, first, last = as_range(seq, begin, end)
        setup, shift_fn = self._ready(), self._shared.function
        cut = setup.cells.cut(ident, first, last)
        if cut is None:
            return
        setup.cells.check_shift(cut, self._window, shift_fn is not None)
        if shift_fn is not None and cut.later.any():
            if self._active is not None:
                self._active.expect(None)  # the fast path of `put` would not see `_busy`
            self._busy = True
            try:
                setup.store.shift(shift_fn, cut, setup.max_batch)
            finally:
                self._busy = False
        setup.cells.take(ident, cut)

    # Checks for WrapperCache -------------------------------------------------------------

    def _check_init(self, *sizes: Any) -> None:
        self._sized(*sizes)

    def _check_forward(self, batch: Batch, reserve: bool) -> None:
        setup = self._ready()
        if not reserve:
            setup.cells.find_room(batch, setup.memory)

    def _check_remove(self, seq: int, begin: int, end: int) -> None:
        cells = self._ready().cells
        cut = cells.cut(seq, begin, end)
        if cut is not None:
            cells.check_shift(cut, self._window, self._shared.function is not None)

    def _check_copy_prefix(self, src: int, dst: int, n: int) -> None:
        self._ready()
        if src == dst:
            self._check_remove(src, n, UNLIMITED)


class SWAMemCache(CausalCache):
    """A sliding window that stores more tokens than it attends to.

    A token at position p sees positions ``p - window_size`` to p: **window_size + 1 keys**, as
    in Ollama. llama.cpp's ``n_swa`` and mlx-lm's ``window_size`` count the token itself: their
    W is a `window_size` of W - 1 here.

    At the start of a batch, each sequence drops tokens more than `memory_size` below its lowest
    position in the batch, or below its next position if it is not in the batch. Tokens beyond
    the window allow resuming further back (``can_resume``). A cache whose `capacity` is at most
    the memory drops nothing. With several sequences the memory is at least ``window_size + 1``.

    Parameters
    ----------
    window_size : int
        0 for an unlimited window.
    memory_size : int
        Number of tokens to keep; 0 for the size of the window.
    shift_fn : callable, optional
        See `CausalCache`.

    Raises
    ------
    CacheValueError
        A size is negative. ``init`` also raises it for a memory smaller than the window.
    """

    def __init__(
        self,
        window_size: SupportsIndex,
        memory_size: SupportsIndex,
        shift_fn: ShiftFn | None = None,
    ) -> None:
        super().__init__(shift_fn)
        window = as_int("window_size", window_size, minimum=0) or UNLIMITED
        memory = as_int("memory_size", memory_size, minimum=0) or window
        self._window, self._window_memory = min(window, UNLIMITED), min(memory, UNLIMITED)


class SWACache(SWAMemCache):
    """A sliding window that stores the tokens it attends to.

    A `SWAMemCache` whose memory is as large as its window.

    Parameters
    ----------
    window_size : int
        A token sees ``window_size + 1`` keys, including its own; 0 for an unlimited window.
    shift_fn : callable, optional
        See `CausalCache`.
    """

    def __init__(self, window_size: SupportsIndex, shift_fn: ShiftFn | None = None) -> None:
        super().__init__(window_size, 0, shift_fn)


class ChunkedAttentionCache(CausalCache):
    """Chunked attention: a token attends to its own chunk of positions, up to itself.

    A token at position p sees positions ``p - p % chunk_size`` to p. Nothing is dropped.

    Parameters
    ----------
    chunk_size : int
        0 for no chunks.
    shift_fn : callable, optional
        See `CausalCache`.

    Raises
    ------
    CacheValueError
        `chunk_size` is negative.
    """

    def __init__(self, chunk_size: SupportsIndex, shift_fn: ShiftFn | None = None) -> None:
        super().__init__(shift_fn)
        self._chunk = min(as_int("chunk_size", chunk_size, minimum=0), UNLIMITED)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _effective_memory(window: int, memory: int, max_sequences: int, capacity: int) -> int:
    """Return how many tokens a sliding window keeps, `UNLIMITED` if it never slides."""
    # Room for the stop token, which the next turn rewinds. A single sequence has it in the
    # batch's part.
    if UNLIMITED not in (memory, window) and max_sequences > 1:
        memory = max(memory, window + 1)
    if memory >= capacity:
        return UNLIMITED
    if memory < window:
        message = (
            f"sliding window memory ({memory}) must be at least as large as "
            f"the window ({'unlimited' if window == UNLIMITED else window})"
        )
        raise CacheValueError(message, "sliding window memory", memory, window)
    return memory
