"""What the caches of the Ollama family share beside their protocol."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, SupportsIndex

from numpy.typing import DTypeLike

from pykvcache.arrays.ollama._batch import Batch
from pykvcache.arrays.ollama.protocol import CacheConfig
from pykvcache.errors import CacheOrderError, ClosedError, KvCacheError, ReentryError

__all__ = ["FamilyCache", "shared_functions"]


class FamilyCache:
    """A cache that is configured at most once, then set up, used and closed.

    The ``_check_*`` methods raise what the method of that name would raise and change nothing:
    `WrapperCache` asks all of its caches before it lets any of them act. What they let pass must
    succeed, but for a `shift_fn` that raises.
    """

    def __init__(self) -> None:
        self._config: CacheConfig | None = None
        self._closed = False
        # While code of the caller's runs in the middle of a call.
        self._busy = False

    @property
    def config(self) -> CacheConfig | None:
        """The layout, None while neither ``set_config`` nor ``init`` has set one."""
        return self._config

    def set_config(self, config: CacheConfig) -> None:
        """Choose the layout; see `Cache.set_config`.

        Raises
        ------
        CacheOrderError
            There is a configuration already, set by hand or by ``init``.
        """
        self._check_set_config(config)
        self._config = config

    def __copy__(self) -> Any:
        # The default would share the arrays, but not what says which tokens they hold.
        return copy.deepcopy(self, shared_functions(self))

    def _leaves(self) -> Iterator[Any]:
        """Yield the caches that hold something: those that are wrapped, else this one."""
        yield self

    def __getstate__(self) -> dict[str, Any]:
        self._check_idle()
        return self.__dict__

    def _check_idle(self) -> None:
        """Refuse what code of the caller's asks for in the middle of a call."""
        if self._busy:
            raise ReentryError(
                f"the {type(self).__name__} was called from within one of its own calls"
            )

    def _check_set_config(self, config: CacheConfig) -> None:
        self._check_idle()
        if not isinstance(config, CacheConfig):
            raise TypeError(f"config must be a CacheConfig, not {type(config).__name__}")
        if self._config is not None:
            raise CacheOrderError(
                "config cannot be changed after being previously set",
                "config",
                config,
                self._config,
            )

    def _check_init(
        self,
        dtype: DTypeLike,
        max_sequences: SupportsIndex,
        capacity: SupportsIndex,
        max_batch: SupportsIndex,
    ) -> None: ...

    def _check_forward(self, batch: Batch, reserve: bool) -> None: ...

    def _begin(self, batch: Batch, reserve: bool) -> Callable[[], None]:
        """Start a forward pass, or change nothing; return what takes it back."""
        raise NotImplementedError

    def _check_copy_prefix(
        self, src_seq: SupportsIndex, dst_seq: SupportsIndex, n: SupportsIndex
    ) -> None: ...

    def _check_remove(
        self, seq: SupportsIndex, begin: SupportsIndex, end: SupportsIndex | None
    ) -> None: ...

    def _not_ready(self) -> KvCacheError:
        """Return the error for use before ``init`` or after ``close``."""
        name = type(self).__name__
        if self._closed:
            return ClosedError(f"the {name} was closed", name)
        return CacheOrderError(f"the {name} was not set up; call init first", "init", name)


def shared_functions(cache: object) -> dict[int, Any]:
    """Return a memo for `copy.deepcopy` that shares the `shift_fn` of a cache and of those in it.

    A bound method would bring its model along.
    """
    leaves = cache._leaves() if isinstance(cache, FamilyCache) else [cache]
    found = [getattr(leaf, "_shift_fn", None) for leaf in leaves]
    return {id(function): function for function in found}
