"""How a cache of one sequence finds the class that keeps several of its kind side by side."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar, SupportsIndex

from pykvcache.arrays.mlx._base import PairCache
from pykvcache.arrays.mlx._rows import Counts, Rows

__all__ = ["BatchCache", "SingleCache"]


class SingleCache(PairCache):
    """A cache of one sequence that can become a row of a batch."""

    _batch_class: ClassVar[type[BatchCache]]

    @classmethod
    def merge(cls, caches: Iterable[Any]) -> BatchCache:
        """Return a batch with one row for each of `caches`, padded on the left.

        A `KVCache` gives a `BatchKVCache`, a `RotatingKVCache` a `BatchRotatingKVCache`.
        """
        return cls._batch_class.merge(caches)


class BatchCache(PairCache):
    """One row per sequence. The class names the cache that `extract` gives: ``row_class``."""

    def __init_subclass__(cls, row_class: type[SingleCache] | None = None, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if row_class is not None:
            row_class._batch_class = cls

    @property
    @abstractmethod
    def left_padding(self) -> Rows:
        """Leading columns of each row without a token, as a copy."""

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Number of rows."""

    @abstractmethod
    def prepare(
        self,
        *,
        left_padding: Counts | None = None,
        lengths: Counts | None = None,
        right_padding: Counts | None = None,
    ) -> None:
        """Announce padding of the columns to come."""

    @abstractmethod
    def finalize(self) -> None:
        """Move right padding to the left, so that all rows end in the same column."""

    @abstractmethod
    def filter(self, batch_indices: Counts) -> None:
        """Keep the given rows, in that order."""

    @abstractmethod
    def extend(self, other: Any) -> None:
        """Add the rows of another batch of this class below."""

    @abstractmethod
    def extract(self, index: SupportsIndex) -> SingleCache:
        """Return row `index` as a cache of its own."""

    @classmethod
    @abstractmethod
    def merge(cls, caches: Iterable[Any]) -> BatchCache:
        """Return a batch with one row for each of `caches`."""
