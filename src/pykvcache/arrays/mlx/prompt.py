"""The caches of a whole prompt: one for each layer of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsIndex

from pykvcache.arrays._checks import as_int
from pykvcache.arrays.mlx._base import BaseCache, adopt_all, as_caches
from pykvcache.arrays.mlx.rotating import RotatingKVCache
from pykvcache.arrays.mlx.standard import KVCache

__all__ = [
    "ROTATING_DEFAULT_KEEP",
    "PromptCacheConfig",
    "can_trim_prompt_cache",
    "make_prompt_cache",
    "trim_prompt_cache",
]

#: First tokens that the rings of `make_prompt_cache` keep.
ROTATING_DEFAULT_KEEP = 4

_MAX_LAYERS = 65_536


@dataclass(frozen=True)
class PromptCacheConfig:
    """What `make_prompt_cache` has to know of a model.

    Attributes
    ----------
    num_hidden_layers : int
        Caches to make.
    sliding_window : int, optional
        Size of the rings; None for plain caches, below 0 counts as 0.
    """

    num_hidden_layers: int
    sliding_window: int | None = None


def make_prompt_cache(config: PromptCacheConfig) -> list[BaseCache]:
    """Return an empty cache for each layer.

    `RotatingKVCache` of the sliding window, keeping `ROTATING_DEFAULT_KEEP` tokens, if there
    is a window; else `KVCache`.
    """
    if not isinstance(config, PromptCacheConfig):
        raise TypeError(f"config must be a PromptCacheConfig, not {type(config).__name__}")
    layers = as_int("num_hidden_layers", config.num_hidden_layers, minimum=0, maximum=_MAX_LAYERS)
    if config.sliding_window is None:
        return [KVCache() for _ in range(layers)]
    size = max(as_int("sliding_window", config.sliding_window), 0)
    return [RotatingKVCache(size, ROTATING_DEFAULT_KEEP) for _ in range(layers)]


def can_trim_prompt_cache(cache: Sequence[BaseCache]) -> bool:
    """Tell whether the caches of all layers can be trimmed."""
    return _can_trim(as_caches("cache", cache))


def _can_trim(layers: list[BaseCache]) -> bool:
    return all(layer.is_trimmable() for layer in layers)


def trim_prompt_cache(cache: Sequence[BaseCache], num_tokens: SupportsIndex) -> int:
    """Drop the newest tokens of all layers; return how many the first one dropped.

    0, and no layer is changed, if one cannot be trimmed or there are none.
    """
    n = as_int("num_tokens", num_tokens, minimum=0)
    layers = as_caches("cache", cache)
    if not layers or not _can_trim(layers):
        return 0
    shadows = [layer._shadow() for layer in layers]
    dropped = [shadow.trim(n) for shadow in shadows]
    adopt_all(zip(layers, shadows, strict=True))
    return dropped[0]
