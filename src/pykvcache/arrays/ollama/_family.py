"""What the caches of the Ollama family share beside their protocol."""

from __future__ import annotations

from typing import SupportsIndex

from numpy.typing import DTypeLike

from pykvcache.arrays.ollama._batch import Batch
from pykvcache.arrays.ollama.protocol import CacheConfig
from pykvcache.errors import CacheOrderError, ClosedError, KvCacheError

__all__ = ["FamilyCache"]


class FamilyCache:
    """A cache that is configured at most once, then set up, used and closed.

    The ``_check_*`` methods raise what the method of that name would raise and change nothing:
    `WrapperCache` asks all of its caches before it lets any of them act. What they let pass must
    succeed, but for a `shift_fn` that raises.
    """

    def __init__(self) -> None:
        self._config: CacheConfig | None = None
        self._closed = False

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

    def _check_set_config(self, config: CacheConfig) -> None:
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
