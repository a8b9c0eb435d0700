"""Eviction policies by name. To add one: a class in a file here, and a line in `POLICIES`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pykvcache.errors import ArgumentError, shown
from pykvcache.prefix.policies.base import ByPriority, Policy
from pykvcache.prefix.policies.hit_density import HitDensity
from pykvcache.prefix.policies.simple import (
    FIFO,
    LFU,
    LRU,
    S3FIFO,
    SLRU,
    CostAware,
    WholePrompts,
)

__all__ = ["DEFAULT", "POLICIES", "ByPriority", "Policy", "make_policy"]

#: Every policy by its name.
POLICIES: Final[dict[str, Callable[[], Policy]]] = {
    "lru": LRU,
    "fifo": FIFO,
    "lfu": LFU,
    "slru": SLRU,
    "s3fifo": S3FIFO,
    "cost-aware": CostAware,
    "hit-density": HitDensity,
    "llama-server": WholePrompts,
    "mlx-lm": WholePrompts,
    "vllm": LRU,  # the last block of a prompt first, as all policies
}

#: The default policy of a cache; docs/policies.md says why.
DEFAULT: Final = "hit-density"


def make_policy(policy: str | Policy) -> Policy:
    """Return a new policy of this name, or the given object."""
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str):
        given = (
            f"the class {policy.__name__}" if isinstance(policy, type) else type(policy).__name__
        )
        raise TypeError(f"policy must be a name or a Policy object, not {given}")
    if policy not in POLICIES:
        raise ArgumentError(
            f"there is no policy {shown(policy)}: choose one of {', '.join(POLICIES)}",
            "policy",
            policy,
            tuple(POLICIES),
        )
    return POLICIES[policy]()
