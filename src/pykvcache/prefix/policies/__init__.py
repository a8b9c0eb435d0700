"""Policies of eviction, by name: the classes that the cache uses.

`_native/shadow` makes the same choices in C++, for the simulator and for what the default policy
tries out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from pykvcache.errors import ArgumentError
from pykvcache.errors._shown import shown
from pykvcache.prefix.policies.adaptive import Adaptive
from pykvcache.prefix.policies.base import ByPriority, Policy
from pykvcache.prefix.policies.density import HitDensity
from pykvcache.prefix.policies.peers import VLLM, LlamaServer, MlxLm
from pykvcache.prefix.policies.queues import S3FIFO, SLRU
from pykvcache.prefix.policies.simple import FIFO, LFU, LRU, CostAware

__all__ = ["DEFAULT", "POLICIES", "ByPriority", "Policy", "make_policy"]

_EXPERTS: Final[dict[str, Callable[[], Policy]]] = {
    "hit-density": HitDensity,
    "s3fifo": S3FIFO,
    "lru": LRU,
    "lfu": LFU,
    "slru": SLRU,
    "cost-aware": CostAware,
}

#: Every policy by its name.
POLICIES: Final[dict[str, Callable[[], Policy]]] = {
    "lru": LRU,
    "fifo": FIFO,
    "lfu": LFU,
    "slru": SLRU,
    "s3fifo": S3FIFO,
    "cost-aware": CostAware,
    "hit-density": HitDensity,
    "adaptive": partial(Adaptive, _EXPERTS),
    "llama-server": LlamaServer,
    "mlx-lm": MlxLm,
    "vllm": VLLM,
}

#: The policy that a cache has if none is named; docs/policies.md says why.
DEFAULT: Final = "adaptive"


def make_policy(policy: str | Policy) -> Policy:
    """Return a new policy of this name, or the object that was given.

    Raises
    ------
    ValueError
        If there is no policy of this name.
    """
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str):
        raise TypeError(f"policy must be a name or a Policy, not {type(policy).__name__}")
    if policy not in POLICIES:
        raise ArgumentError(
            f"there is no policy {shown(policy)}: known are {', '.join(POLICIES)}",
            "policy",
            policy,
            tuple(POLICIES),
        )
    return POLICIES[policy]()
