"""The interface of Ollama's caches, their configuration and batch, and the base class of all."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, SupportsIndex, runtime_checkable

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pykvcache.arrays._checks import MOST, as_float_dtype, as_int, as_ints
from pykvcache.errors import (
    CacheLayerError,
    CacheOrderError,
    CacheValueError,
    ClosedError,
    PositionError,
    ReentryError,
    shown,
)

__all__ = [
    "UNLIMITED",
    "Batch",
    "Cache",
    "CacheConfig",
    "OllamaCache",
    "as_position",
    "as_range",
    "as_sequence",
]

#: Largest position: one below int32's maximum, so that the next position fits too.
MAX_POSITION = 2**31 - 2
#: A window, memory or end of range without a limit.
UNLIMITED = 2**31 - 1


@dataclass(frozen=True)
class CacheConfig:
    """Layout of the arrays that ``get`` returns, for an attention kernel; plain by default.

    Parameters
    ----------
    cache_padding : int
        Start and length of the history that ``get`` returns are multiples of this; 0 counts
        as 1.
    mask_batch_padding : int
        The number of mask rows is a multiple of this; added rows are -inf. 0 counts as 1.
    mask_dtype : dtype
        float16, float32 or float64; None counts as float32.
    permuted_v : bool
        ``get`` returns V as ``(n_kv_heads, head_dim, history)``; ``put`` takes the usual order.

    Raises
    ------
    CacheValueError, CacheDTypeError
        A padding is negative or above 2**31 - 1, or `mask_dtype` is not one of the three.
    """

    cache_padding: int = 1
    mask_batch_padding: int = 1
    mask_dtype: DTypeLike = np.float32
    permuted_v: bool = False

    def __post_init__(self) -> None:
        for name in ("cache_padding", "mask_batch_padding"):
            padding = as_int(name, getattr(self, name), minimum=0, maximum=MOST)
            object.__setattr__(self, name, padding or 1)
        mask_dtype = np.float32 if self.mask_dtype is None else self.mask_dtype
        object.__setattr__(self, "mask_dtype", as_float_dtype(mask_dtype))
        if not isinstance(self.permuted_v, (bool, np.bool_)):
            raise TypeError(f"permuted_v must be a bool, not {type(self.permuted_v).__name__}")
        object.__setattr__(self, "permuted_v", bool(self.permuted_v))


@runtime_checkable
class Cache(Protocol):
    """A cache that a model's forward pass writes to and reads from.

    The order of calls is that of Ollama's ``kvcache.Cache``: ``set_config`` if needed, ``init``,
    then for every batch ``start_forward`` and, per layer, ``set_layer``, ``put``, ``get``.
    A refused call changes nothing; an interrupted call leaves the cache undefined. Not
    thread-safe.
    """

    def init(
        self,
        dtype: DTypeLike,
        max_sequences: SupportsIndex,
        capacity: SupportsIndex,
        max_batch: SupportsIndex,
    ) -> None:
        """Set the cache up, empty.

        Parameters
        ----------
        dtype : dtype
            Dtype of the stored K and V: float16, float32 or float64.
        max_sequences : int
            Number of sequences to reserve room for, over all batches; at least 1.
        capacity : int
            Number of tokens to reserve room for, per sequence; at least 1.
        max_batch : int
            Largest number of tokens in one batch; at least 1.

        Raises
        ------
        CacheDTypeError, CacheValueError
            `dtype` is not one of the three, or a number is out of range.
        """
        ...

    def set_config(self, config: CacheConfig) -> None:
        """Set the layout, once and before ``init``, else raise `CacheOrderError`."""
        ...

    def close(self) -> None:
        """Free the arrays. Idempotent; ``init`` makes the cache usable again."""
        ...

    def set_layer(self, layer: SupportsIndex) -> None:
        """Choose the layer for ``put`` and ``get``, 0 at first; `CacheLayerError` if negative."""
        ...

    def start_forward(
        self,
        positions: Iterable[SupportsIndex],
        sequences: Iterable[SupportsIndex],
        reserve: bool = False,
        multimodal: Iterable[SupportsIndex] = (),
    ) -> None:
        """Begin a forward pass.

        Parameters
        ----------
        positions, sequences : ints, shape (n_tokens,)
            Position and sequence id of every token of the batch, not negative.
        reserve : bool
            Reserve the largest possible pass: ``put`` allocates and stores nothing.
        multimodal : ints
            Batch indices of the multimodal items.

        Raises
        ------
        CacheValueError
            The batch is empty or larger than `max_batch`, `positions` and `sequences` differ in
            length, a sequence id is negative, or an index of `multimodal` is outside the batch.
        PositionError
            A position is negative or does not fit int32.
        KvCacheFull
            Too few cells are free.
        """
        ...

    def put(self, key: NDArray[Any], value: NDArray[Any]) -> None:
        """Store the batch's K and V in the active layer."""
        ...

    def get(self) -> tuple[NDArray[Any] | None, NDArray[Any] | None, NDArray[Any] | None]:
        """Return K, V and mask of the active layer, as read-only views."""
        ...

    def set_causal(self, except_: Iterable[SupportsIndex] = ()) -> None:
        """Let the batch rows in `except_` see later positions, until the next ``start_forward``."""
        ...

    def copy_prefix(self, src_seq: SupportsIndex, dst_seq: SupportsIndex, n: SupportsIndex) -> None:
        """Replace `dst_seq` by the tokens of `src_seq` at positions below `n`."""
        ...

    def can_resume(self, seq: SupportsIndex, pos: SupportsIndex) -> bool:
        """Return whether `seq` can continue with a token at `pos`.

        The caller has verified the cached tokens below `pos`.
        """
        ...

    def remove(
        self, seq: SupportsIndex, begin: SupportsIndex, end: SupportsIndex | None = None
    ) -> None:
        """Remove the tokens of `seq` at positions ``[begin, end)`` and close the gap.

        `end` None removes to the end, which never fails. After an exception the caller can
        always call ``remove(seq, 0)`` and evaluate the sequence again.

        Raises
        ------
        CacheValueError
            `seq` is negative.
        PositionError
            `begin` or `end` is negative, or `begin` is above `end`.
        SharedCellsError
            Another sequence shares a token after `end`.
        NotSupported
            Tokens follow `end` and cannot be moved.
        """
        ...


def as_sequence(name: str, seq: SupportsIndex) -> int:
    """Return a sequence id in ``[0, 2**63)``."""
    return as_int(name, seq, minimum=0, maximum=2**63 - 1)


def as_position(name: str, pos: SupportsIndex) -> int:
    """Return a position in ``[0, 2**31)``."""
    number = as_int(name, pos)
    if not 0 <= number <= UNLIMITED:
        message = f"{name} is {shown(number)}; it must be in [0, 2**31)"
        raise PositionError(message, p0=number, value=number, limit=UNLIMITED, what=name)
    return number


def as_range(
    seq: SupportsIndex, begin: SupportsIndex, end: SupportsIndex | None
) -> tuple[int, int, int]:
    """Return the arguments of ``remove``; an open end is `UNLIMITED`."""
    ident, first = as_sequence("seq", seq), as_position("begin", begin)
    last = UNLIMITED if end is None else as_position("end", end)
    if first > last:
        raise PositionError(f"begin is {first}, above end, which is {last}", p0=first, p1=last)
    return ident, first, last


class Batch:
    """Positions and sequences of a batch, and which of its tokens belong together.

    `ids` are its sequences, ascending, `lowest` the lowest position of each, and `which` the index
    into `ids` of every token.
    """

    def __init__(
        self,
        positions: Iterable[SupportsIndex],
        sequences: Iterable[SupportsIndex],
        multimodal: Iterable[SupportsIndex] = (),
    ) -> None:
        pos, seq = as_ints("positions", positions), as_ints("sequences", sequences)
        if pos.size != seq.size:
            message = f"{pos.size} positions, but {seq.size} sequences"
            raise CacheValueError(message, "sequences", seq.size, pos.size)
        self.positions = pos.astype(np.int32)
        self.multimodal = self.rows("multimodal", as_ints("multimodal", multimodal))
        low, high = int(pos.min(initial=0)), int(pos.max(initial=0))
        if low < 0 or high > MAX_POSITION:
            wrong = low if low < 0 else high
            message = f"position {wrong} is outside [0, {MAX_POSITION}]"
            raise PositionError(message, p0=wrong, value=wrong, limit=MAX_POSITION)
        if (first := int(seq.min(initial=0))) < 0:
            raise CacheValueError(f"sequence id {first} is negative", "sequences", first, 0)
        if pos.size and (seq == seq[0]).all():
            self.ids, self.which = [int(seq[0])], np.zeros(pos.size, np.intp)
            self.lowest = np.array([pos.min()], np.int64)
        else:
            ids, which = np.unique(seq, return_inverse=True)
            self.ids, self.which = ids.tolist(), which.reshape(-1)
            self.lowest = np.full(len(self.ids), UNLIMITED, np.int64)
            np.minimum.at(self.lowest, self.which, pos)

    @property
    def sequences(self) -> NDArray[np.int64]:
        """Sequence id of every token."""
        return np.array(self.ids, np.int64)[self.which]

    def __len__(self) -> int:
        return len(self.positions)

    def check_size(self, most: int) -> Batch:
        """Return the batch; raise `CacheValueError` unless it has 1 to `most` tokens."""
        if not 0 < len(self) <= most:
            message = f"the batch has {len(self)} tokens; it must have 1 to {most}"
            raise CacheValueError(message, "tokens", len(self), most)
        return self

    def rows(self, name: str, found: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return batch indices; raise `CacheValueError` for one outside the batch."""
        if found.size and not (found.min() >= 0 and found.max() < len(self)):
            message = (
                f"{name} holds {shown(found.tolist())}; the batch has rows 0 to {len(self) - 1}"
            )
            raise CacheValueError(message, name, found.tolist(), len(self) - 1)
        return found


class OllamaCache(ABC):
    """Base class of the caches here: checks arguments and the order of calls.

    Subclasses implement the underscored methods, which get checked arguments. A ``_check_*``
    method raises what the method of that name would raise, and changes nothing: `WrapperCache`
    asks all its caches before it changes any.
    """

    def __init__(self) -> None:
        self._config: CacheConfig | None = None
        self._closed = False
        self._busy = False  # whether a callback is running within a call
        self._max_batch = 0  # 0 unless set up
        self._layer = 0
        self._batch: Batch | None = None  # that of the current pass
        self._reserve = False

    @property
    def config(self) -> CacheConfig | None:
        """The layout; None until ``set_config`` or ``init`` sets one."""
        return self._config

    def __copy__(self) -> Any:
        # A shallow copy would share arrays but not cell metadata.
        return copy.deepcopy(self)

    def __getstate__(self) -> dict[str, Any]:
        self._check_idle()  # a copy would stay busy forever
        return self.__dict__

    # Life cycle -------------------------------------------------------------------------

    def set_config(self, config: CacheConfig) -> None:
        """Choose the layout; see `Cache.set_config`."""
        self._check_set_config(config)
        self._config = config

    def _check_set_config(self, config: CacheConfig) -> None:
        self._check_idle()
        if not isinstance(config, CacheConfig):
            raise TypeError(f"config must be a CacheConfig, not {type(config).__name__}")
        if self._config is not None:
            message = "config cannot be changed after being previously set"
            raise CacheOrderError(message, "config", config, self._config)

    def init(
        self,
        dtype: DTypeLike,
        max_sequences: SupportsIndex,
        capacity: SupportsIndex,
        max_batch: SupportsIndex,
    ) -> None:
        """Set the cache up, empty; see `Cache.init`."""
        kind = as_float_dtype(dtype)
        sequences = as_int("max_sequences", max_sequences, minimum=1, maximum=MOST)
        tokens = as_int("capacity", capacity, minimum=1, maximum=MOST)
        batch = as_int("max_batch", max_batch, minimum=1, maximum=MOST)
        self._check_idle()
        self._init(kind, sequences, tokens, batch)
        self._layer, self._batch, self._reserve = 0, None, False
        self._max_batch, self._closed = batch, False

    @abstractmethod
    def _check_init(self, dtype: np.dtype[Any], sequences: int, tokens: int, batch: int) -> Any: ...

    @abstractmethod
    def _init(self, dtype: np.dtype[Any], sequences: int, tokens: int, batch: int) -> None: ...

    def close(self) -> None:
        """Free the arrays; see `Cache.close`."""
        self._check_idle()
        self._free()
        self._max_batch, self._closed = 0, True

    @abstractmethod
    def _free(self) -> None: ...

    def _check_idle(self) -> None:
        """Raise `ReentryError` if a callback uses the cache within a call."""
        if self._busy:
            name = type(self).__name__
            raise ReentryError(f"the {name} was called from within one of its own calls")

    def _ready(self) -> None:
        """Raise unless the cache is set up and idle."""
        if self._max_batch and not self._busy:
            return
        self._check_idle()
        name = type(self).__name__
        if self._closed:
            raise ClosedError(f"the {name} was closed", name)
        raise CacheOrderError(f"the {name} was not set up; call init first", "init", name)

    def _started(self) -> Batch:
        """Return the batch of the current pass."""
        self._ready()
        if self._batch is None:
            raise CacheOrderError("no batch was started; call start_forward first", "start_forward")
        return self._batch

    # A forward pass ---------------------------------------------------------------------

    def set_layer(self, layer: SupportsIndex) -> None:
        """Set the layer for ``put`` and ``get``; see `Cache.set_layer`."""
        index = as_int("layer", layer)
        if index < 0:
            message = f"layer is {shown(index)}; it must be at least 0"
            raise CacheLayerError(message, "layer", index, 0)
        self._ready()
        self._layer = index
        self._set_layer(index)

    @abstractmethod
    def _set_layer(self, layer: int) -> None: ...

    def start_forward(
        self,
        positions: Iterable[SupportsIndex],
        sequences: Iterable[SupportsIndex],
        reserve: bool = False,
        multimodal: Iterable[SupportsIndex] = (),
    ) -> None:
        """Begin a forward pass; see `Cache.start_forward`."""
        batch, reserve = Batch(positions, sequences, multimodal), bool(reserve)
        self._ready()
        self._begin(batch.check_size(self._max_batch), reserve)
        self._batch, self._reserve = batch, reserve

    def _check_forward(self, batch: Batch, reserve: bool) -> None:
        self._ready()

    @abstractmethod
    def _begin(self, batch: Batch, reserve: bool) -> None: ...

    def set_causal(self, except_: Iterable[SupportsIndex] = ()) -> None:
        """Let some rows of the batch see later positions; see `Cache.set_causal`."""
        rows = as_ints("except_", except_)
        self._set_causal(self._started().rows("except_", rows).tolist())

    @abstractmethod
    def _set_causal(self, ahead: list[int]) -> None: ...

    # Sequences --------------------------------------------------------------------------

    def copy_prefix(self, src_seq: SupportsIndex, dst_seq: SupportsIndex, n: SupportsIndex) -> None:
        """Replace `dst_seq` by a prefix of `src_seq`; see `Cache.copy_prefix`."""
        src, dst = as_sequence("src_seq", src_seq), as_sequence("dst_seq", dst_seq)
        self._copy(src, dst, min(as_int("n", n, minimum=0), UNLIMITED))

    def _check_copy(self, src: int, dst: int, n: int) -> None:
        self._ready()

    @abstractmethod
    def _copy(self, src: int, dst: int, n: int) -> None: ...

    def can_resume(self, seq: SupportsIndex, pos: SupportsIndex) -> bool:
        """Return whether `seq` can continue at `pos`; see `Cache.can_resume`."""
        ident, position = as_sequence("seq", seq), as_position("pos", pos)
        self._ready()
        return self._can_resume(ident, position)

    @abstractmethod
    def _can_resume(self, seq: int, pos: int) -> bool: ...

    def remove(
        self, seq: SupportsIndex, begin: SupportsIndex, end: SupportsIndex | None = None
    ) -> None:
        """Remove tokens of a sequence and close the gap; see `Cache.remove`."""
        ident, first, last = as_range(seq, begin, end)
        self._remove(ident, first, last)

    def _check_remove(self, seq: int, begin: int, end: int) -> Any:
        self._ready()

    @abstractmethod
    def _remove(self, seq: int, begin: int, end: int) -> None: ...
