"""CacheList: several caches of one layer, used as one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

from numpy.typing import NDArray

from pykvcache.arrays._checks import as_int, as_kind, check_size
from pykvcache.arrays.mlx.arrays_cache import ArraysCache
from pykvcache.arrays.mlx.base import Arrays, BaseCache, restored_on_error
from pykvcache.arrays.mlx.rows import Counts
from pykvcache.errors import CacheValueError, NotSupported, shown

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CacheList", "check_depth"]

# Maximum nesting of lists; files hold 7 levels.
_MAX_DEPTH = 64


class CacheList(BaseCache):
    """The caches of a layer with more than one, for example attention and recurrence.

    Modelled on mlx-lm's ``CacheList``: trimmable if all members are, `size` of the longest,
    empty if the first one is. If a member refuses a call, no member changes.

    Parameters
    ----------
    *caches : cache
        The members; they are not copied.
    """

    _depth: int

    def __init__(self, *caches: BaseCache) -> None:
        for cache in caches:
            as_kind("cache", cache, BaseCache)  # type: ignore[type-abstract]
        depth = 1 + max((c._depth for c in caches if isinstance(c, CacheList)), default=0)
        check_depth(depth)
        self._caches, self._depth = caches, depth

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

    def _copied(self) -> Self:
        return self._with(tuple(cache.copy() for cache in self._caches))

    def _copy_trimmed(self, n: int) -> Self | None:
        shorter = [cache._copy_trimmed(n) for cache in self._caches]
        whole = tuple(cache for cache in shorter if cache is not None)
        return self._with(whole) if len(whole) == len(shorter) else None

    def prepare(
        self,
        *,
        left_padding: Counts | None = None,
        lengths: Counts | None = None,
        right_padding: Counts | None = None,
    ) -> None:
        """Announce padding to all members, as in `BatchKVCache.prepare`."""
        self._all(
            lambda cache: _method(cache, "prepare")(
                left_padding=left_padding, lengths=lengths, right_padding=right_padding
            )
        )

    def finalize(self) -> None:
        """Finalize all members."""
        self._all(lambda cache: _method(cache, "finalize")())

    def advance(self, n: SupportsIndex) -> None:
        """Advance all members."""
        self._all(lambda cache: _method(cache, "advance")(n))

    def filter(self, batch_indices: Counts) -> None:
        """Keep the given rows of all members."""
        self._all(lambda cache: _method(cache, "filter")(batch_indices))

    def extend(self, other: CacheList) -> None:
        """Extend each member by the corresponding member of `other`."""
        self._extend(other, 1, 1)

    def _extend(self, other: BaseCache, mine: int, others: int) -> None:
        """Extend; a member without rows counts as many as the list has."""
        other = as_kind("other", other, CacheList)
        check_size("caches of other", len(other), len(self))
        known = self._rows(), other._rows()
        mine = mine if known[0] is None else known[0]
        others = others if known[1] is None else known[1]
        below = iter(other.caches)

        def extend(cache: BaseCache) -> None:
            member = next(below)
            if isinstance(cache, (ArraysCache, CacheList)):
                cache._extend(member, mine, others)
            else:
                _method(cache, "extend")(member)

        self._all(extend)

    def _rows(self) -> int | None:
        known = (cache._rows() for cache in self._caches)
        return next((rows for rows in known if rows is not None), None)

    def extract(self, index: SupportsIndex) -> CacheList:
        """Return a list of row `index` of each member."""
        return CacheList(*(_method(cache, "extract")(index) for cache in self._caches))

    @classmethod
    def merge(cls, caches: Iterable[CacheList]) -> CacheList:
        """Merge corresponding members; return a list of batches."""
        caches = list(caches)
        for cache in caches:
            as_kind("caches", cache, CacheList)
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
            message = f"the meta state of a CacheList is names and metas; got {shown(meta)}"
            raise CacheValueError(message, "meta_state", meta, 2)
        names, found = tuple(type(cache).__name__ for cache in self._caches), tuple(meta[0])
        if found != names:
            message = f"the caches are {shown(names)}; the meta state is of {shown(found)}"
            raise CacheValueError(message, "meta_state", found, names)
        return self._per_member("meta state", meta[1])

    def _all(self, change: Callable[[BaseCache], object]) -> None:
        """Change all members, or none if one refuses."""
        with restored_on_error(self._caches):
            for cache in self._caches:
                change(cache)

    def _with(self, caches: tuple[BaseCache, ...]) -> Self:
        return copy.deepcopy(self, {id(self._caches): caches})

    def _leaves(self) -> Iterator[BaseCache]:
        for cache in self._caches:
            yield from cache._leaves()


def check_depth(depth: int) -> None:
    """Raise `CacheValueError` for lists that are nested too deeply."""
    if depth > _MAX_DEPTH:
        message = f"a CacheList of {depth} levels; it may have {_MAX_DEPTH}"
        raise CacheValueError(message, "levels of a CacheList", depth, _MAX_DEPTH)


def _method(cache: BaseCache, name: str) -> Callable[..., Any]:
    method = getattr(cache, name, None)
    if method is None:
        kind = type(cache).__name__
        raise NotSupported(f"a {kind} cannot {name}: it is not a batch", name, kind)
    found: Callable[..., Any] = method
    return found
