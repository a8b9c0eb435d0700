"""CacheList: several caches of one layer, used as one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

from numpy.typing import NDArray

from pykvcache.arrays._checks import as_int, as_kind, check_size
from pykvcache.arrays.mlx.arrays_cache import ArraysCache
from pykvcache.arrays.mlx.base import Arrays, BaseCache, Counts, restored_on_error
from pykvcache.errors import CacheValueError, NotSupported, shown

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CacheList"]


class CacheList(BaseCache):
    """The caches of a layer with more than one, for example attention and recurrence.

    Modelled on mlx-lm's ``CacheList``: it is trimmable if all members are, its `size` is that of
    the longest member, and it is empty if the first member is. If a member refuses a call, no
    member changes.

    Parameters
    ----------
    *caches : cache
        The members; they are not copied.
    """

    def __init__(self, *caches: BaseCache) -> None:
        for cache in caches:
            as_kind("cache", cache, BaseCache)  # type: ignore[type-abstract]
        self._caches = caches

    def __len__(self) -> int:
        return len(self._caches)

    def __getitem__(self, index: SupportsIndex) -> BaseCache:
        return self._caches[as_int("index", index, minimum=0, maximum=len(self._caches) - 1)]

    def __iter__(self) -> Iterator[BaseCache]:
        return iter(self._caches)

    @property
    def caches(self) -> tuple[BaseCache, ...]:
        """The members."""
        return self._caches

    @property
    def offset(self) -> int:
        """Offset of the first member; 0 without members."""
        return self._caches[0].offset if self._caches else 0

    @property
    def rope_offset(self) -> Any:
        """Rotary offset of the first member; 0 without members."""
        return self._caches[0].rope_offset if self._caches else 0

    @property
    def nbytes(self) -> int:
        """Bytes of all members."""
        return sum(cache.nbytes for cache in self._caches)

    def size(self) -> int:
        """Return the size of the longest member."""
        return max((cache.size() for cache in self._caches), default=0)

    def is_empty(self) -> bool:
        """Return whether the first member is empty."""
        return not self._caches or self._caches[0].is_empty()

    def update(self, keys: NDArray[Any], values: NDArray[Any]) -> Arrays:
        """Raise ``NotSupported``: update a member."""
        raise NotSupported("a CacheList has several caches: update cache[i]", "update")

    def make_mask(
        self, n: SupportsIndex, window_size: SupportsIndex | None = None, return_array: bool = False
    ) -> Any:
        """Raise ``NotSupported``: ask a member."""
        raise NotSupported("a CacheList has several caches: make the mask of cache[i]", "make_mask")

    def is_trimmable(self) -> bool:
        """Return whether all members can be trimmed."""
        return all(cache.is_trimmable() for cache in self._caches)

    def trim(self, n: SupportsIndex) -> int:
        """Trim all members; return the last one's count, or 0 if one cannot be trimmed."""
        n = as_int("n", n, minimum=0)
        if not self.is_trimmable():
            return 0
        dropped = [cache.trim(n) for cache in self._caches]
        return dropped[-1] if dropped else 0

    def _copied(self, n: int = 0) -> Self | None:
        copies = tuple(cache._copied(n) for cache in self._caches)
        return None if None in copies else copy.deepcopy(self, {id(self._caches): copies})

    def prepare(
        self,
        *,
        left_padding: Counts | None = None,
        lengths: Counts | None = None,
        right_padding: Counts | None = None,
    ) -> None:
        """Announce padding to all members, as in `BatchKVCache.prepare`."""
        self._all(
            "prepare", left_padding=left_padding, lengths=lengths, right_padding=right_padding
        )

    def finalize(self) -> None:
        """Finalize all members."""
        self._all("finalize")

    def advance(self, n: SupportsIndex) -> None:
        """Advance all members."""
        self._all("advance", n)

    def filter(self, batch_indices: Counts) -> None:
        """Keep the given rows of all members."""
        self._all("filter", batch_indices)

    def extend(self, other: CacheList) -> None:
        """Extend each member by the corresponding member of `other`."""
        self._extend(other, 1, 1)

    def _extend(self, other: BaseCache, mine: int, others: int) -> None:
        """Extend; a member without rows counts as having as many rows as the list."""
        other = as_kind("other", other, CacheList)
        check_size("caches of other", len(other), len(self))
        known = self._rows(), other._rows()
        mine = mine if known[0] is None else known[0]
        others = others if known[1] is None else known[1]
        with restored_on_error(self._caches):
            for cache, member in zip(self._caches, other.caches, strict=True):
                if isinstance(cache, (ArraysCache, CacheList)):
                    cache._extend(member, mine, others)
                else:
                    _method(cache, "extend")(member)

    def _rows(self) -> int | None:
        known = (cache._rows() for cache in self._caches)
        return next((rows for rows in known if rows is not None), None)

    def extract(self, index: SupportsIndex) -> CacheList:
        """Return a list of row `index` of each member."""
        return CacheList(*(_method(cache, "extract")(index) for cache in self._caches))

    @classmethod
    def merge(cls, caches: Iterable[CacheList]) -> CacheList:
        """Merge corresponding members; return a list of batches."""
        caches = [as_kind("caches", cache, CacheList) for cache in caches]
        for cache in caches:
            check_size("caches to merge", len(cache), len(caches[0]))
        columns = zip(*(cache.caches for cache in caches), strict=True)
        return CacheList(*(_method(column[0], "merge")(column) for column in columns))

    @property
    def state(self) -> tuple[Any, ...]:
        """The states of all members."""
        return tuple(cache.state for cache in self._caches)

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        with restored_on_error(self._caches):
            for cache, part in zip(self._caches, self._per_member("state", state), strict=True):
                cache.state = part

    @property
    def meta_state(self) -> tuple[Any, ...]:
        """``(names, metas)``: class name and meta state of each member."""
        return (
            tuple(type(cache).__name__ for cache in self._caches),
            tuple(cache.meta_state for cache in self._caches),
        )

    @meta_state.setter
    def meta_state(self, meta: Sequence[Any]) -> None:
        with restored_on_error(self._caches):
            for cache, part in zip(self._caches, self._metas(meta), strict=True):
                cache.meta_state = part

    def from_serialized(self, state: Sequence[Any], meta: Sequence[Any]) -> None:
        """Set the states of all members, or raise and change nothing."""
        states, metas = self._per_member("state", state), self._metas(meta)
        with restored_on_error(self._caches):
            for cache, *parts in zip(self._caches, states, metas, strict=True):
                cache.from_serialized(*parts)

    def _per_member(self, name: str, parts: Sequence[Any]) -> Sequence[Any]:
        if len(parts) == 0:
            return [()] * len(self._caches)
        check_size(f"parts of the {name}", len(parts), len(self._caches))
        return parts

    def _metas(self, meta: Sequence[Any]) -> Sequence[Any]:
        if len(meta) != 2:
            message = f"the meta state of a CacheList must be (names, metas); got {shown(meta)}"
            raise CacheValueError(message, "meta_state", meta, 2)
        names, found = tuple(type(cache).__name__ for cache in self._caches), tuple(meta[0])
        if found != names:
            message = f"the caches are {shown(names)}; the meta state is of {shown(found)}"
            raise CacheValueError(message, "meta_state", found, names)
        return self._per_member("meta state", meta[1])

    def _all(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of all members; change none if one refuses."""
        with restored_on_error(self._caches):
            for cache in self._caches:
                _method(cache, name)(*args, **kwargs)

    def _leaves(self) -> Iterator[BaseCache]:
        for cache in self._caches:
            yield from cache._leaves()


def _method(cache: BaseCache, name: str) -> Callable[..., Any]:
    method = getattr(cache, name, None)
    if method is None:
        kind = type(cache).__name__
        raise NotSupported(f"a {kind} cannot {name}: it is not a batch", name, kind)
    found: Callable[..., Any] = method
    return found
