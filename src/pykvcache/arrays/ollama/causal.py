"""The causal caches of Ollama: K and V in cells that sequences share."""

from __future__ import annotations

from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays._checks import MOST, as_int, check_shape
from pykvcache.arrays.ollama.cache import UNLIMITED, Batch, CacheConfig, OllamaCache
from pykvcache.arrays.ollama.cells import CellTable, Cut, batch_mask
from pykvcache.arrays.ollama.layers import Layer, LayerStore, ShiftFn
from pykvcache.errors import CacheOrderError, CacheValueError

__all__ = ["CausalCache", "ChunkedAttentionCache", "SWACache", "SWAMemCache"]


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

    Modelled on Ollama's ``kvcache.Causal``; docs/array-caches.md lists the differences.
    ``copy_prefix(s, s, n)`` keeps the first `n` positions. A position stored twice in a sequence
    is two visible tokens. ``copy.copy`` and ``copy.deepcopy`` make an independent cache with the
    same `shift_fn`.

    Parameters
    ----------
    shift_fn : callable, optional
        ``shift_fn(layer, key, shift) -> key`` rotates keys ``(n_tokens, n_kv_heads, head_dim)``, a
        copy, by `shift` positions, an int32 array ``(n_tokens,)`` that is 0 for tokens to skip.
        Without it, ``remove`` from the middle raises `NotSupported`. It must not use the cache
        (`ReentryError`).

    Notes
    -----
    ``init`` reserves ``max_sequences * capacity`` cells, or with a sliding window ``max_sequences *
    memory + max_batch``, rounded up to the padding. More sequences, with any ids, may share them.

    ``start_forward`` gives the batch the first sufficient run of free cells. If no run is long
    enough but enough cells are free, it defragments them first. `multimodal` has no effect.

    ``can_resume`` returns whether everything that the token attends to is still stored: always
    without a sliding window, even for unknown sequences.

    ``remove`` from the middle decreases later positions and rotates their keys to match, at most
    `max_batch` cells at once. It refuses if the next token would attend to tokens that the sliding
    window has dropped. All keys are computed before any is stored, which needs memory for them.
    """

    # Set by subclasses, in tokens; UNLIMITED and 0 mean no limit.
    _window = UNLIMITED
    _window_memory = UNLIMITED
    _chunk = 0

    def __init__(self, shift_fn: ShiftFn | None = None) -> None:
        super().__init__()
        if shift_fn is not None and not callable(shift_fn):
            raise TypeError(f"shift_fn must be callable, not {type(shift_fn).__name__}")
        self._shift_fn = _SharedFunction(shift_fn)
        self._free()

    # Life cycle -------------------------------------------------------------------------

    def _free(self) -> None:
        self._set_up(0, np.dtype(np.float32), UNLIMITED)

    def _set_up(self, n_cells: int, dtype: np.dtype[Any], memory: int) -> None:
        """Forget everything; layers get arrays with their first ``put``."""
        config = self._config or CacheConfig()
        self._cells, self._memory = CellTable(n_cells), memory
        self._store = LayerStore(n_cells, dtype, config.permuted_v)
        self._active: Layer | None = None  # None before the active layer has arrays
        # Cells of the batch and of its history, rows that see later positions, and the mask.
        self._slot = self._history = slice(0)
        self._ahead: list[int] = []
        self._mask = np.empty((0, 0), np.float32)

    def _check_init(
        self, dtype: np.dtype[Any], sequences: int, tokens: int, batch: int
    ) -> tuple[int, int]:
        """Return the number of cells, and how many tokens the window keeps."""
        config = self._config or CacheConfig()
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
        return n_cells, memory

    def _init(self, dtype: np.dtype[Any], sequences: int, tokens: int, batch: int) -> None:
        n_cells, memory = self._check_init(dtype, sequences, tokens, batch)
        self._config = self._config or CacheConfig()
        self._set_up(n_cells, dtype, memory)

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """Dtype of the stored K and V; None while the cache is not set up."""
        return self._store.dtype if self._max_batch else None

    # A forward pass ---------------------------------------------------------------------

    def _set_layer(self, layer: int) -> None:
        self._active = active = self._store.layers.get(layer)
        if active is not None:
            batch = self._batch
            active.expect(None if batch is None or self._reserve else len(batch))

    def _check_forward(self, batch: Batch, reserve: bool) -> None:
        self._ready()
        if not reserve:
            self._cells.find_room(batch, self._memory)

    def _begin(self, batch: Batch, reserve: bool) -> None:
        cells, start, low, high = self._cells, 0, 0, self._cells.size - 1
        if not reserve:
            room = cells.find_room(batch, self._memory)
            cells.expire(room)
            if room.start is None:
                self._store.move(*cells.compact())
                start = cells.in_use  # the free cells follow those in use
            else:
                start = room.start
            low, high = cells.needed(batch, self._window, self._memory)
            cells.claim(start, batch)
            low, high = min(low, start), max(high, start + len(batch) - 1)
        padding = (self._config or CacheConfig()).cache_padding
        self._history = slice(low // padding * padding, _round_up(high + 1, padding))
        self._slot = slice(start, start + len(batch))
        self._build_mask(batch, [])
        if self._active is not None:
            self._active.expect(None if reserve else len(batch))

    def _build_mask(self, batch: Batch, ahead: list[int]) -> None:
        config = self._config or CacheConfig()
        sight = ahead, self._window, self._chunk
        self._mask = batch_mask(self._cells, batch, self._history, *sight, config)
        self._ahead = ahead

    def _set_causal(self, ahead: list[int]) -> None:
        ahead = sorted({*ahead}) if ahead else ahead
        if ahead != self._ahead and self._batch is not None:
            self._build_mask(self._batch, ahead)

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
        CacheValueError, CacheDTypeError
            A shape is wrong, has another number of tokens than the batch, or differs from the
            layer's first ``put``; or not real numbers.
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
        batch = self._started()
        place = None if self._reserve else self._slot
        self._active = self._store.put(self._layer, key, value, len(batch), place)

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
        self._started()
        layer, history = self._active, self._history
        if layer is None:
            raise CacheOrderError("nothing was put in this layer yet", "put")
        if layer.permuted:
            return layer.keys_out[history], layer.values_out[..., history], self._mask
        return layer.keys_out[history], layer.values_out[history], self._mask

    # Sequences --------------------------------------------------------------------------

    def _check_copy(self, src: int, dst: int, n: int) -> None:
        self._ready()
        if src == dst:
            self._check_remove(src, n, UNLIMITED)

    def _copy(self, src: int, dst: int, n: int) -> None:
        if src == dst:
            self._remove(src, n, UNLIMITED)
        else:
            self._ready()
            self._cells.share(src, dst, n)

    def _can_resume(self, seq: int, pos: int) -> bool:
        if self._memory == UNLIMITED:
            return True
        row = self._cells.row(seq)
        first, last = int(self._cells.first[row]), int(self._cells.last[row])
        return last >= 0 and max(0, pos - self._window) >= first and pos <= last + 1

    def _check_remove(self, seq: int, begin: int, end: int) -> Cut | None:
        """Return the cells to remove; None if there are none."""
        self._ready()
        cut = self._cells.cut(seq, begin, end)
        if cut is not None:
            self._cells.check_shift(cut, self._window, self._shift_fn.function is not None)
        return cut

    def _remove(self, seq: int, begin: int, end: int) -> None:
        cut, shift_fn = self._check_remove(seq, begin, end), self._shift_fn.function
        if cut is None:
            return
        if shift_fn is not None and cut.later.any():
            if self._active is not None:
                self._active.expect(None)  # the fast path of `put` would not see `_busy`
            self._busy = True
            try:
                self._store.shift(shift_fn, cut, self._max_batch)
            finally:
                self._busy = False
        self._cells.take(seq, cut)


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
        A size is negative; by ``init``: the memory is smaller than the window.
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
