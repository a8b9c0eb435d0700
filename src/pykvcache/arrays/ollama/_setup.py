"""The state of a causal cache: what ``init`` and ``start_forward`` fix."""

from __future__ import annotations

from typing import Any, NamedTuple, SupportsIndex

from numpy.typing import DTypeLike, NDArray

from pykvcache.arrays._checks import MOST, as_float_dtype, as_int
from pykvcache.arrays.ollama._batch import UNLIMITED, Batch
from pykvcache.arrays.ollama._cells import CellTable
from pykvcache.arrays.ollama._layers import LayerStore
from pykvcache.arrays.ollama._placement import effective_memory
from pykvcache.arrays.ollama.protocol import CacheConfig
from pykvcache.errors import CacheValueError

__all__ = ["Pass", "Setup"]


class Setup(NamedTuple):
    """What ``init`` fixes, and the contents.

    Attributes
    ----------
    memory : int
        How many tokens the sliding window keeps, `UNLIMITED` if it never slides.
    """

    cells: CellTable
    store: LayerStore
    config: CacheConfig
    memory: int
    max_batch: int

    @classmethod
    def sized(
        cls,
        config: CacheConfig,
        window: int,
        window_memory: int,
        dtype: DTypeLike,
        max_sequences: SupportsIndex,
        capacity: SupportsIndex,
        max_batch: SupportsIndex,
    ) -> Setup:
        """Make an empty cache; cheap, as layers get their arrays with their first ``put``."""
        found = as_float_dtype(dtype)
        sequences = as_int("max_sequences", max_sequences, minimum=1, maximum=MOST)
        tokens = as_int("capacity", capacity, minimum=1, maximum=MOST)
        batch = as_int("max_batch", max_batch, minimum=1, maximum=MOST)
        memory = effective_memory(window, window_memory, sequences, tokens)
        n_cells = sequences * tokens if memory == UNLIMITED else sequences * memory + batch
        n_cells = -(-n_cells // config.cache_padding) * config.cache_padding
        if n_cells > MOST:
            raise CacheValueError(
                f"max_sequences, capacity, max_batch and cache_padding need {n_cells} cells; "
                f"a cache has at most {MOST}",
                "cells",
                n_cells,
                MOST,
            )
        cells = CellTable(n_cells)
        store = LayerStore(cells.size, found, config.permuted_v)
        return cls(cells, store, config, memory, batch)


class Pass(NamedTuple):
    """What ``start_forward`` fixes.

    Attributes
    ----------
    slot : slice
        The cells that the batch has.
    history : slice
        The cells to which the batch attends.
    ahead : set of int
        Batch rows to which later positions are visible.
    """

    batch: Batch
    reserve: bool
    slot: slice
    history: slice
    ahead: frozenset[int]
    mask: NDArray[Any]
