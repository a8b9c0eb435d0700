"""The interface of mlx-lm's caches, and checks of their states and counts."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays._checks import as_int, as_ints
from pykvcache.errors import CacheDTypeError, CacheValueError, NotSupported, shown

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "LARGEST",
    "LARGEST_SIZE",
    "Arrays",
    "BaseCache",
    "Counts",
    "Mask",
    "Rows",
    "announced",
    "as_caches",
    "check_alike",
    "meta_ints",
    "parse_int",
    "parse_padding",
    "restored_on_error",
    "row_counts",
    "row_indices",
    "summed",
]

#: Limit of positions and counts in arguments and files, so that sums fit int64.
LARGEST = 2**60
#: Limit of ring and chunk sizes; ``sys.maxsize`` means "no limit".
LARGEST_SIZE = 2**63 - 1
#: One number per row, from a caller.
Counts: TypeAlias = Sequence[int] | NDArray[Any]
#: One number per row, inside a cache; never changed in place.
Rows: TypeAlias = NDArray[np.int64]
_SIZES = ("max_size", "keep", "chunk_size", "group_size")

#: Keys and values.
Arrays: TypeAlias = tuple[NDArray[Any], NDArray[Any]]
#: None: all visible; ``"causal"``; or a boolean array (True = visible).
Mask: TypeAlias = NDArray[np.bool_] | Literal["causal"] | None


class BaseCache(ABC):
    """The cache of one layer: takes new keys and values, returns those of the history.

    Modelled on mlx-lm's ``_BaseCache`` and the ``KvCache`` trait of its Rust port. Arrays
    are `(batch, n_kv_heads, n_tokens, head_dim)`. Arguments are copied; returned arrays may
    be read-only views of the cache's buffers, valid until the next call that changes the cache.
    A refused call changes nothing; an interrupted call leaves the cache undefined.

    Not thread-safe.
    """

    def __repr__(self) -> str:
        return f"{type(self).__name__}(offset={self.offset}, nbytes={self.nbytes})"

    @property
    @abstractmethod
    def offset(self) -> int:
        """Position of the next token."""

    @property
    def rope_offset(self) -> int | NDArray[np.int64]:
        """Rotary position of the next token: ``offset``, or one number per row of a batch."""
        return self.offset

    @property
    def max_size(self) -> int | None:
        """Maximum number of tokens of a ring; None without a limit."""
        return None

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of all buffers, used or not."""

    @property
    @abstractmethod
    def state(self) -> tuple[Any, ...]:
        """The stored arrays, nested as in mlx-lm, ``()`` when empty; copied when set."""

    @state.setter
    @abstractmethod
    def state(self, state: Sequence[Any]) -> None: ...

    @property
    def meta_state(self) -> tuple[Any, ...]:
        """Sizes and counts of the state as strings; ``()`` for none."""
        return ()

    @meta_state.setter
    def meta_state(self, meta: Sequence[Any]) -> None:
        if len(meta):
            message = f"a {type(self).__name__} has no meta state; got {len(meta)} values"
            raise CacheValueError(message, "meta_state", len(meta), 0)

    def from_serialized(self, state: Sequence[Any], meta: Sequence[Any]) -> None:
        """Set state and meta state, or raise and change nothing."""
        with restored_on_error([self]):
            self.state = state
            self.meta_state = meta

    @abstractmethod
    def update(self, keys: NDArray[Any], values: NDArray[Any]) -> Arrays:
        """Store keys and values of new tokens; return all that they attend to."""

    def is_trimmable(self) -> bool:
        """Return whether ``trim`` can drop the newest tokens."""
        return False

    def trim(self, n: SupportsIndex) -> int:
        """Drop the newest `n` tokens, or all if fewer; return the number.

        Returns 0 and changes nothing if the cache cannot be trimmed. A negative `n` raises
        ``CacheValueError``.
        """
        as_int("n", n, minimum=0)
        return 0

    @abstractmethod
    def make_mask(
        self, n: SupportsIndex, window_size: SupportsIndex | None = None, return_array: bool = False
    ) -> Mask:
        """Return the mask for the `n` tokens of the next ``update``.

        None if every stored token is visible, ``"causal"`` if a causal mask is enough, or a
        boolean array over the tokens that ``update`` will return. `window_size` is the number of
        visible tokens including the new one; `return_array` requests an array instead of
        ``"causal"``.
        """

    @abstractmethod
    def size(self) -> int:
        """Return the number of stored tokens that the next one can see."""

    @abstractmethod
    def is_empty(self) -> bool:
        """Return whether nothing is stored."""

    def copy(self) -> Self:
        """Return an independent copy without spare room."""
        copied = self._copied()
        assert copied is not None, "nothing is trimmed"
        return copied

    # A shallow copy would share buffers but not token counts.
    __copy__ = copy

    def _copied(self, n: int = 0) -> Self | None:
        """Return a copy without the newest `n` tokens; None if that is not possible."""
        copied = deepcopy(self)
        return copied if copied.trim(n) == n else None

    def to_quantized(self, group_size: SupportsIndex = 64, bits: SupportsIndex = 4) -> BaseCache:
        """Return a ``QuantizedKVCache`` with this content; most classes raise ``NotSupported``."""
        name = type(self).__name__
        raise NotSupported(f"a {name} cannot be quantized", "to_quantized", name)

    def _rows(self) -> int | None:
        """Return the rows of a batch; None for one sequence, or if not known yet."""
        return None

    def _leaves(self) -> Iterator[BaseCache]:
        """Yield this cache, or the members of a list."""
        yield self


@contextlib.contextmanager
def restored_on_error(caches: Iterable[BaseCache]) -> Iterator[None]:
    """Restore the attributes of several caches if the body raises.

    For methods that replace attributes; ``update`` and ``trim`` change them in place.
    """
    before = [(leaf, leaf.__dict__.copy()) for cache in caches for leaf in cache._leaves()]
    try:
        yield
    except Exception:
        for leaf, attributes in before:
            leaf.__dict__ = attributes
        raise


def meta_ints(owner: str, names: Sequence[str], meta: Sequence[Any]) -> list[int]:
    """Parse a meta state of non-negative numbers, one for each of `names`."""
    if len(meta) != len(names):
        message = (
            f"the meta state of a {owner} is {len(names)} values ({', '.join(names)}); "
            f"got {len(meta)}"
        )
        raise CacheValueError(message, f"meta_state of a {owner}", len(meta), names)
    numbers = []
    for name, text in zip(names, meta, strict=True):
        limit, what = LARGEST_SIZE if name in _SIZES else LARGEST, f"{name} of a {owner}"
        numbers.append(as_int(what, parse_int(what, text), minimum=0, maximum=limit))
    return numbers


def parse_int(what: str, text: str) -> int:
    """Parse a number of a meta state."""
    digits = text.removeprefix("-") if isinstance(text, str) and len(text) < 20 else ""
    if not (digits.isascii() and digits.isdigit()):
        raise CacheValueError(f"{what} is {shown(text)}; expected a number as text", what, text)
    return int(text)


def parse_padding(meta: Sequence[Any]) -> Rows:
    """Parse the padding from the meta state of an empty batch."""
    return row_counts("left_padding", meta_ints("batch", ["left_padding"] * len(meta), meta))


def as_caches(name: str, caches: Sequence[BaseCache]) -> list[BaseCache]:
    """Return the caches of all layers as a list; raise `TypeError` if one is not a cache."""
    layers = list(caches)
    for i, layer in enumerate(layers):
        if not isinstance(layer, BaseCache):
            raise TypeError(f"{name}[{i}] must be a cache, not {type(layer).__name__}")
    return layers


def check_alike(noun: str, arrays: Sequence[NDArray[Any]], axes: slice) -> NDArray[Any]:
    """Return the first array; raise if another one differs in dtype or along `axes`."""
    first = arrays[0]
    for other in arrays:
        if other.shape[axes] != first.shape[axes]:
            message = f"{noun} of shapes {first.shape} and {other.shape} differ"
            raise CacheValueError(message, "shape", other.shape, first.shape)
        if other.dtype != first.dtype:
            message = f"{noun} of dtypes {first.dtype} and {other.dtype} differ"
            raise CacheDTypeError(message, "dtype", str(other.dtype), str(first.dtype))
    return first


# Counts per row of a batch --------------------------------------------------------------------


def _numbers(name: str, given: Counts) -> Rows:
    """Return the integers of a sequence or array; refuse iterators, which can be read only once."""
    if not isinstance(given, Sequence | np.ndarray) or isinstance(given, bytes):
        kind = type(given).__name__
        raise CacheDTypeError(f"{name} is {kind}; integers in a list are needed", name, kind)
    return as_ints(name, given)


def row_counts(
    name: str, counts: Counts, batch: int | None = None, *, signed: bool = False
) -> Rows:
    """Return `counts` as a new int64 array, one per row, not negative unless `signed`.

    Refuses numbers above `LARGEST`, so that sums do not wrap around.
    """
    array = _numbers(name, counts)
    if array.size and max(abs(int(array.min())), abs(int(array.max()))) > LARGEST:
        message = f"{name} is {shown(array.tolist())}; no number may be beyond {LARGEST}"
        raise CacheValueError(message, name, array.tolist(), LARGEST)
    if batch is not None and array.size != batch:
        message = f"{name} has {array.size} numbers for {batch} rows"
        raise CacheValueError(message, name, array.size, batch)
    if not signed and array.size and array.min() < 0:
        message = f"{name} is {shown(array.tolist())}; no number may be negative"
        raise CacheValueError(message, name, array.tolist(), 0)
    return array


def summed(name: str, counts: Rows, more: Rows) -> Rows:
    """Return a sum of counts; raise if it exceeds `LARGEST`."""
    return row_counts(name, counts + more, signed=True)


def announced(
    cache: BaseCache,
    batch: int | None,
    left: Counts | None,
    lengths: Counts | None,
    right: Counts | None,
) -> tuple[Rows | None, Rows | None, Rows | None]:
    """Return the checked arguments of a cache's `prepare`."""
    given = (("left_padding", left), ("lengths", lengths), ("right_padding", right))
    checked = [None if c is None else row_counts(name, c, batch) for name, c in given]
    if left is not None and not cache.is_empty():
        message = f"left padding can only be added to an empty {type(cache).__name__}"
        raise CacheValueError(message, "left_padding")
    return checked[0], checked[1], checked[2]


def row_indices(indices: Counts, batch: int | None) -> Rows:
    """Return `indices` as an array of rows of a batch; rows may repeat.

    `batch` is None if the number of rows is not known yet.
    """
    array = _numbers("batch_indices", indices)
    if array.size and not (array.min() >= 0 and (batch is None or array.max() < batch)):
        limit = "any number of rows" if batch is None else batch
        message = f"batch_indices {shown(array.tolist())} are not all in [0, {limit})"
        raise CacheValueError(message, "batch_indices", array.tolist(), limit)
    return array
