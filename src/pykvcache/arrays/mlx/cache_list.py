"""Several caches of one layer that are driven as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

from numpy.typing import NDArray

from pykvcache.arrays._checks import as_int, as_kind, check_size
from pykvcache.arrays.mlx._base import Arrays, BaseCache, adopt_all
from pykvcache.arrays.mlx._rows import Counts
from pykvcache.arrays.mlx.arrays_cache import ArraysCache
from pykvcache.errors import CacheValueError, NotSupported
from pykvcache.errors._shown import shown

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CacheList", "check_depth"]

# Lists within lists; files hold 7 levels at most.
_MAX_DEPTH = 64


class CacheList(BaseCache):
    """The caches of a layer that has more than one, for instance attention and recurrence.

    It follows mlx-lm's ``CacheList``: trimmable if all members are, `size` of the longest,
    empty if the first one is. What changes all members does so for all or for none: a
    member that refuses leaves the others as they were (mlx-lm stops half-way; its `trim`
    shortens the members that can be trimmed even if one cannot).

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
        """That of the first member; 0 if there is none."""
        return self._caches[0].offset if self._caches else 0

    @property
    def rope_offset(self) -> Any:
        """That of the first member; 0 if there is none."""
        return self._caches[0].rope_offset if self._caches else 0

    @property
    def nbytes(self) -> int:
        """Bytes of all members."""
        return sum(cache.nbytes for cache in self._caches)

    def size(self) -> int:
        """Return the size of the longest member."""
        return max((cache.size() for cache in self._caches), default=0)

    def is_empty(self) -> bool:
        """Tell whether the first member is empty."""
        return not self._caches or self._caches[0].is_empty()

    def update(self, keys: NDArray[Any], values: NDArray[Any]) -> Arrays:
        """Raise ``NotSupported``: update the member that is meant."""
        raise NotSupported("a CacheList has several caches: update cache[i]", "update")

    def make_mask(
        self,
        n: SupportsIndex,
        window_size: SupportsIndex | None = None,
        return_array: bool = False,
    ) -> Any:
        """Raise ``NotSupported``: ask the member that is meant."""
        raise NotSupported("a CacheList has several caches: make the mask of cache[i]", "make_mask")

    def is_trimmable(self) -> bool:
        """Tell whether all members can be trimmed."""
        return all(cache.is_trimmable() for cache in self._caches)

    def trim(self, n: SupportsIndex) -> int:
        """Trim all members; return what the last one dropped, 0 if one cannot be trimmed."""
        n = as_int("n", n, minimum=0)
        if not self.is_trimmable():
            return 0
        dropped: list[int] = self._all(lambda cache: cache.trim(n))
        return dropped[-1] if dropped else 0

    def _duplicate(self) -> Self:
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
        """Extend each member by that of `other` in the same place."""
        self._extend(other, 1, 1)

    def _extend(self, other: BaseCache, mine: int, others: int) -> None:
        """Extend; members that do not know their rows have as many as the list."""
        other = as_kind("other", other, CacheList)
        check_size("caches of other", len(other), len(self))
        known = self._rows(), other._rows()
        mine = mine if known[0] is None else known[0]
        others = others if known[1] is None else known[1]
        below = iter(other.caches)

        def put(cache: BaseCache) -> None:
            member = next(below)
            if isinstance(cache, (ArraysCache, CacheList)):
                cache._extend(member, mine, others)
            else:
                _method(cache, "extend")(member)

        self._all(put)

    def _rows(self) -> int | None:
        known = (cache._rows() for cache in self._caches)
        return next((rows for rows in known if rows is not None), None)

    def extract(self, index: SupportsIndex) -> CacheList:
        """Return a list of row `index` of each member."""
        return CacheList(*(_method(cache, "extract")(index) for cache in self._caches))

    @classmethod
    def merge(cls, caches: Iterable[CacheList]) -> CacheList:
        """Return a list of batches: the members in each place, merged."""
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
        states = iter(self._per_member("state", state))

        def put(cache: BaseCache) -> None:
            cache.state = next(states)

        self._all(put)

    @property
    def meta_state(self) -> tuple[Any, ...]:
        """``(names, metas)``: class name and meta state of each member."""
        return (
            tuple(type(cache).__name__ for cache in self._caches),
            tuple(cache.meta_state for cache in self._caches),
        )

    @meta_state.setter
    def meta_state(self, meta: Sequence[Any]) -> None:
        metas = iter(self._metas(meta))

        def put(cache: BaseCache) -> None:
            cache.meta_state = next(metas)

        self._all(put)

    def from_serialized(self, state: Sequence[Any], meta: Sequence[Any]) -> None:
        """Take over the states of all members, or raise and keep everything as it was."""
        pairs = zip(self._per_member("state", state), self._metas(meta), strict=True)
        self._all(lambda cache: cache.from_serialized(*next(pairs)))

    def _per_member(self, name: str, parts: Sequence[Any]) -> Sequence[Any]:
        if len(parts) == 0:
            return [()] * len(self._caches)
        check_size(f"parts of the {name}", len(parts), len(self._caches))
        return parts

    def _metas(self, meta: Sequence[Any]) -> Sequence[Any]:
        if len(meta) != 2:
            raise CacheValueError(
                f"the meta state of a CacheList is names and metas; got {shown(meta)}",
                "meta_state",
                meta,
                2,
            )
        names = tuple(type(cache).__name__ for cache in self._caches)
        if tuple(meta[0]) != names:
            raise CacheValueError(
                f"the caches are {shown(names)}; the meta state is of {shown(tuple(meta[0]))}",
                "meta_state",
                tuple(meta[0]),
                names,
            )
        return self._per_member("meta state", meta[1])

    def _all(self, change: Callable[[BaseCache], Any]) -> list[Any]:
        """Apply `change` to shadows of the members; take them over if none raises."""
        shadows = [cache._shadow() for cache in self._caches]
        results = [change(shadow) for shadow in shadows]
        adopt_all(zip(self._caches, shadows, strict=True))
        return results

    def _with(self, caches: tuple[BaseCache, ...]) -> Self:
        twin = self._twin()
        twin._caches = caches
        return twin

    def _shadow(self) -> Self:
        return self._with(tuple(cache._shadow() for cache in self._caches))

    def _leaves(self) -> Iterator[BaseCache]:
        for cache in self._caches:
            yield from cache._leaves()

    def _adopt(self, other: Self) -> None:
        adopt_all([(self, other)])


def check_depth(depth: int) -> None:
    """Raise `CacheValueError` for lists within lists that have too many levels."""
    if depth > _MAX_DEPTH:
        raise CacheValueError(
            f"a CacheList of {depth} levels; it may have {_MAX_DEPTH}",
            "levels of a CacheList",
            depth,
            _MAX_DEPTH,
        )


def _method(cache: BaseCache, name: str) -> Callable[..., Any]:
    method = getattr(cache, name, None)
    if method is None:
        raise NotSupported(
            f"a {type(cache).__name__} cannot {name}: it is not a batch", name, type(cache).__name__
        )
    found: Callable[..., Any] = method
    return found
