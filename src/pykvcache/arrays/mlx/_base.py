"""What every cache of the mlx-style family has in common."""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays._checks import as_int, check_size
from pykvcache.arrays.mlx._growth import TokenPair
from pykvcache.arrays.mlx._limits import LARGEST, LARGEST_SIZE
from pykvcache.errors import CacheValueError, NotSupported
from pykvcache.errors._shown import shown

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "Arrays",
    "BaseCache",
    "Mask",
    "PairCache",
    "adopt_all",
    "as_caches",
    "meta_ints",
    "state_pair",
]

_SIZES = ("max_size", "keep", "chunk_size", "group_size")

#: Keys and values.
Arrays: TypeAlias = tuple[NDArray[Any], NDArray[Any]]
#: Nothing to hide, causal without an array, or a boolean array (True = visible).
Mask: TypeAlias = NDArray[np.bool_] | Literal["causal"] | None


class BaseCache(ABC):
    """The cache of one layer: keys and values in, keys and values of the history out.

    It follows mlx-lm's ``_BaseCache`` and the ``KvCache`` trait of its Rust port. Arrays
    are `(batch, n_kv_heads, n_tokens, head_dim)`. What a method returns may be a view of
    the cache's buffers, read-only and good until the next call that changes the cache; what
    it is given is copied. A call that raises leaves the cache as it was.

    No cache may be used by two threads at once.
    """

    def __repr__(self) -> str:
        return f"{type(self).__name__}(offset={self.offset}, nbytes={self.nbytes})"

    @property
    @abstractmethod
    def offset(self) -> int:
        """Position of the next token."""

    @property
    def rope_offset(self) -> int | NDArray[np.int64]:
        """Where rotary positions go on: ``offset``, or one number per row of a batch."""
        return self.offset

    @property
    def max_size(self) -> int | None:
        """Tokens that a ring keeps; None where there is no such limit."""
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
        """What ``state`` does not tell, as strings; ``()`` if there is nothing."""
        return ()

    @meta_state.setter
    def meta_state(self, meta: Sequence[Any]) -> None:
        if len(meta):
            raise CacheValueError(
                f"a {type(self).__name__} has no meta state; expected 0 values, got {len(meta)}",
                "meta_state",
                len(meta),
                0,
            )

    def from_serialized(self, state: Sequence[Any], meta: Sequence[Any]) -> None:
        """Take over a state and its meta state, or raise and keep everything as it was.

        Both are prepared beside the cache first, so that nothing has to be undone.
        """
        beside = self._shadow()
        beside.state = state
        beside.meta_state = meta
        self._adopt(beside)

    @abstractmethod
    def update(self, keys: NDArray[Any], values: NDArray[Any]) -> Arrays:
        """Store the keys and values of new tokens; return those to attend to."""

    def is_trimmable(self) -> bool:
        """Tell whether ``trim`` can drop the newest tokens."""
        return False

    def trim(self, n: SupportsIndex) -> int:
        """Drop the newest `n` tokens, or as many as there are; return how many.

        0, and no change, if the cache cannot be trimmed. A negative `n` raises
        ``CacheValueError``.
        """
        as_int("n", n, minimum=0)
        return 0

    @abstractmethod
    def make_mask(
        self,
        n: SupportsIndex,
        window_size: SupportsIndex | None = None,
        return_array: bool = False,
    ) -> Mask:
        """Return the mask for the `n` tokens of the next ``update``.

        None if every stored token is visible, ``"causal"`` if the causal rule is enough, or
        a boolean array over what ``update`` will return. `window_size` counts the visible
        tokens, the new one included; `return_array` asks for an array where several new
        tokens would get ``"causal"``.
        """

    @abstractmethod
    def size(self) -> int:
        """Return how many stored tokens are in reach of the next one; 0 if none are."""

    @abstractmethod
    def is_empty(self) -> bool:
        """Tell whether nothing is stored."""

    def copy(self) -> Self:
        """Return an independent cache with the same content; no spare room is copied."""
        return self._duplicate()

    def __copy__(self) -> Self:
        # A shallow copy would share the buffers, but not the counts of what is in them.
        # Not by `copy`, which a subclass may build on `copy.copy`.
        return self._duplicate()

    def _duplicate(self) -> Self:
        return copy.deepcopy(self)

    def to_quantized(self, group_size: SupportsIndex = 64, bits: SupportsIndex = 4) -> BaseCache:
        """Return a ``QuantizedKVCache`` with this content; most kinds cannot."""
        raise NotSupported(
            f"a {type(self).__name__} cannot be quantized", "to_quantized", type(self).__name__
        )

    def _rows(self) -> int | None:
        """Return the rows of a batch; None for one sequence, or where it is not known yet."""
        return None

    def _copy_trimmed(self, n: int) -> Self | None:
        """Return a copy without the newest `n` tokens; None if it cannot go back so far."""
        shorter = self.copy()
        return shorter if shorter.trim(n) == n else None

    def _shadow(self) -> Self:
        """Return a cache that shares the arrays; changing it leaves this one alone."""
        return self._twin()

    def _twin(self) -> Self:
        """Return a cache of the same attributes, those in the slots of a subclass included."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        for kind in type(self).__mro__:
            if vars(kind).get("__slots__"):
                for slot in vars(kind).values():
                    if isinstance(slot, MemberDescriptorType):
                        with contextlib.suppress(AttributeError):  # it may be unset
                            slot.__set__(twin, slot.__get__(self))
        return twin

    def _leaves(self) -> Iterator[BaseCache]:
        """Yield the caches that hold something: those within a list, else this one."""
        yield self

    def _adopt(self, other: Self) -> None:
        """Become what a shadow has become; an interrupt finds all of it done, or nothing."""
        self.__dict__.update(other.__dict__)


class PairCache(BaseCache):
    """A cache that keeps its keys and values in one `TokenPair`."""

    def __init__(self) -> None:
        self._pair = TokenPair()

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

    def size(self) -> int:
        """Return how many stored tokens are in reach of the next one."""
        return self._pair.count

    def is_empty(self) -> bool:
        """Tell whether no token is stored."""
        return self._pair.count == 0

    def _duplicate(self) -> Self:
        return self._copy_first(self._pair.count)

    def _copy_first(self, count: int) -> Self:
        twin = self._twin()
        keys, values = self._pair.view()
        twin._pair = TokenPair.copied(keys[:, :, :count], values[:, :, :count], self.max_size)
        return twin

    def _shadow(self) -> Self:
        twin = self._twin()
        twin._pair = copy.copy(self._pair)
        return twin


def state_pair(state: Sequence[Any], limit: int | None = None) -> TokenPair:
    """Copy a ``(keys, values)`` state, or ``()``, into a new `TokenPair`.

    With `limit` there is spare room up to so many tokens at most.
    """
    if len(state) == 0:
        return TokenPair()
    check_size("arrays of a state, keys and values", len(state), 2)
    keys, values = state
    empty = TokenPair()
    # Zero tokens are what mlx-lm saves after a full trim.
    if all(isinstance(a, np.ndarray) and a.ndim == 4 and a.shape[2] == 0 for a in (keys, values)):
        return empty
    return TokenPair.copied(*empty.check(keys, values), limit)


def meta_ints(owner: str, names: Sequence[str], meta: Sequence[Any]) -> list[int]:
    """Return the numbers of a meta state, one for each of `names`, none negative."""
    if len(meta) != len(names):
        raise CacheValueError(
            f"the meta state of a {owner} is {len(names)} values ({', '.join(names)}); "
            f"got {len(meta)}",
            f"meta_state of a {owner}",
            len(meta),
            names,
        )
    numbers = []
    for name, text in zip(names, meta, strict=True):
        limit = LARGEST_SIZE if name in _SIZES else LARGEST
        if not (isinstance(text, str) and text.isascii() and text.isdigit() and len(text) < 20):
            raise CacheValueError(
                f"{name} of a {owner} is {shown(text)}; expected a number as text",
                f"{name} of a {owner}",
                text,
            )
        if int(text) > limit:
            raise CacheValueError(
                f"{name} of a {owner} is {text}; it must be at most {limit}",
                f"{name} of a {owner}",
                int(text),
                limit,
            )
        numbers.append(int(text))
    return numbers


def as_caches(name: str, caches: Sequence[BaseCache]) -> list[BaseCache]:
    """Return a list of what must be caches of layers, or raise a `TypeError`."""
    layers = list(caches)
    for i, layer in enumerate(layers):
        if not isinstance(layer, BaseCache):
            raise TypeError(f"{name}[{i}] must be a cache, not {type(layer).__name__}")
    return layers


def adopt_all(pairs: Iterable[tuple[BaseCache, BaseCache]]) -> None:
    """Let several caches become what their shadows have become, all of them or none."""
    leaves = [
        (old.__dict__, new.__dict__)
        for cache, shadow in pairs
        for old, new in zip(cache._leaves(), shadow._leaves(), strict=True)
    ]
    # One call of compiled code, which no interrupt divides.
    deque(map(dict.update, [old for old, _ in leaves], [new for _, new in leaves]), maxlen=0)
