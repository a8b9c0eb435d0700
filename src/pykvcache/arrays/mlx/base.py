"""The interface of mlx-lm's caches, the base of those with a history, and parsing of states."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays._checks import as_int, check_size
from pykvcache.arrays.mlx.masks import Mask, create_causal_mask
from pykvcache.arrays.mlx.rows import LARGEST, LARGEST_SIZE
from pykvcache.arrays.mlx.token_pair import TokenPair
from pykvcache.errors import CacheDTypeError, CacheValueError, NotSupported, shown

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "Arrays",
    "BaseCache",
    "PairCache",
    "as_caches",
    "create_attention_mask",
    "meta_ints",
    "restored_on_error",
    "state_pair",
]

_SIZES = ("max_size", "keep", "chunk_size", "group_size")

#: Keys and values.
Arrays: TypeAlias = tuple[NDArray[Any], NDArray[Any]]


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


class PairCache(BaseCache):
    """A cache whose keys and values are one `TokenPair`; a base class."""

    def __init__(self) -> None:
        self._pair = TokenPair()

    @property
    def offset(self) -> int:
        """Number of stored tokens, which is the position of the next one."""
        return self._pair.count

    @property
    def nbytes(self) -> int:
        """Bytes of both buffers, used or not."""
        return self._pair.nbytes

    @property
    def state(self) -> tuple[Any, ...]:
        """``(keys, values)`` as views of exactly the stored tokens; ``()`` when empty."""
        return self._pair.view() if self._pair.count else ()

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        self._pair = state_pair(state)

    def update(self, keys: NDArray[Any], values: NDArray[Any]) -> Arrays:
        """Store new tokens; return views of all keys and values.

        Raises
        ------
        CacheValueError
            A shape does not fit the stored tokens, or has no token.
        CacheDTypeError
            The arguments are not NumPy arrays of numbers, or differ in dtype from stored tokens.
        """
        return self._pair.append(keys, values)

    def is_trimmable(self) -> bool:
        """Return True."""
        return True

    def trim(self, n: SupportsIndex) -> int:
        """Drop the newest `n` tokens, or all if fewer; return the number."""
        dropped = min(as_int("n", n, minimum=0), self._pair.count)
        if not self.is_trimmable():
            return 0
        self._pair.length -= dropped
        return dropped

    def make_mask(
        self, n: SupportsIndex, window_size: SupportsIndex | None = None, return_array: bool = False
    ) -> Mask:
        """Return the mask for `n` new tokens over the stored ones and themselves.

        With a window it is always an array, `(n, stored + n)`; without one a single token needs
        no mask.
        """
        n = as_int("n", n, minimum=1)
        if window_size is not None:
            return create_causal_mask(n, self._pair.count, window_size)
        if n == 1:
            return None
        return create_causal_mask(n, self._pair.count) if return_array else "causal"

    def size(self) -> int:
        """Return the number of stored tokens that the next one can see."""
        return self._pair.count

    def is_empty(self) -> bool:
        """Return whether the cache has no tokens."""
        return self._pair.count == 0

    def _copied(self, n: int = 0) -> Self | None:
        if n and not (self.is_trimmable() and n <= self._pair.count):
            return None
        pair = self._pair.first(self._pair.count - n, self.max_size)
        return deepcopy(self, {id(self._pair): pair})


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
            leaf.__dict__.update(attributes)
        raise


def state_pair(state: Sequence[Any], limit: int | None = None) -> TokenPair:
    """Copy a ``(keys, values)`` state, or ``()``, into a new `TokenPair`.

    `limit` bounds its capacity.
    """
    empty = TokenPair()
    if len(state) == 0:
        return empty
    check_size("arrays of a state, keys and values", len(state), 2)
    keys, values = state
    # mlx-lm saves zero tokens after a full trim.
    if all(isinstance(a, np.ndarray) and a.ndim == 4 and a.shape[2] == 0 for a in (keys, values)):
        return empty
    given = TokenPair(*empty.check(keys, values))
    return given.first(given.count, limit)


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
        if not (isinstance(text, str) and text.isascii() and text.isdigit() and len(text) < 20):
            raise CacheValueError(f"{what} is {shown(text)}; expected a number as text", what, text)
        if int(text) > limit:
            message = f"{what} is {text}; it must be at most {limit}"
            raise CacheValueError(message, what, int(text), limit)
        numbers.append(int(text))
    return numbers


def as_caches(name: str, caches: Sequence[BaseCache]) -> list[BaseCache]:
    """Return the caches of all layers as a list; raise `TypeError` if one is not a cache."""
    layers = list(caches)
    for i, layer in enumerate(layers):
        if not isinstance(layer, BaseCache):
            raise TypeError(f"{name}[{i}] must be a cache, not {type(layer).__name__}")
    return layers


def create_attention_mask(
    h: NDArray[Any],
    cache: BaseCache | None = None,
    window_size: SupportsIndex | None = None,
    return_array: bool = False,
) -> Mask:
    """Return the mask for hidden states `h`, `(batch, n_tokens, ...)`.

    With a cache, the cache's mask. Otherwise None for a single token, an array if `return_array`
    is set or the window is shorter than `h`, else ``"causal"``.
    """
    try:
        shape = np.shape(h)
    except ValueError as error:  # rows of unequal length
        raise CacheDTypeError(f"h is not an array: {error}", "h", type(h).__name__) from None
    if len(shape) < 2:
        message = f"h has shape {shape}; expected (batch, n_tokens, ...)"
        raise CacheValueError(message, "h", shape, 2)
    n = shape[1]
    if cache is not None:
        as_caches("cache", [cache])
        return cache.make_mask(n, window_size=window_size, return_array=return_array)
    if n == 1:
        return None
    if return_array or (window_size is not None and n > as_int("window_size", window_size)):
        return create_causal_mask(n, window_size=window_size)
    return "causal"
