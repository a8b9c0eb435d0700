"""Causal caches whose tokens attend to a part of their past."""

from __future__ import annotations

from typing import SupportsIndex

from pykvcache.arrays._checks import as_int
from pykvcache.arrays.ollama._batch import UNLIMITED
from pykvcache.arrays.ollama.causal import CausalCache
from pykvcache.arrays.ollama.protocol import ShiftFn

__all__ = ["ChunkedAttentionCache", "SWACache", "SWAMemCache"]


class SWAMemCache(CausalCache):
    """A sliding window that remembers more than it attends to.

    A token at position p sees positions ``p - window_size`` to p: **window_size + 1 keys**, as
    in Ollama. llama.cpp's ``n_swa`` and mlx-lm's ``window_size`` count the token itself, so that
    their W is a `window_size` of W - 1 here.

    At the start of a batch, each sequence drops what lies more than `memory_size` below its
    lowest position in the batch, or, if it is not in the batch, below its next position. What is
    kept beyond the window lets a sequence be resumed further back (``can_resume``). A cache
    whose `capacity` is not larger than the memory drops nothing at all. With several sequences
    the memory is at least ``window_size + 1``.

    Parameters
    ----------
    window_size : int
        0 for an unlimited window.
    memory_size : int
        Number of tokens to keep; 0 for as many as the window.
    shift_fn : callable, optional
        See `CausalCache`.

    Raises
    ------
    CacheValueError
        A size is negative. ``init`` raises it for a memory below the window.
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
    """A sliding window that remembers what it attends to.

    See `SWAMemCache`, of which it is the case of a memory as large as the window.

    Parameters
    ----------
    window_size : int
        A token sees ``window_size + 1`` keys, its own included; 0 for an unlimited window.
    shift_fn : callable, optional
        See `CausalCache`.
    """

    def __init__(self, window_size: SupportsIndex, shift_fn: ShiftFn | None = None) -> None:
        super().__init__(window_size, 0, shift_fn)


class ChunkedAttentionCache(CausalCache):
    """Every token attends to the tokens of its own chunk of positions, up to itself.

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
