"""PinBoard: prefixes that clients keep in memory, bounded over all tenants."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from pykvcache.llm import LLM
from pykvcache.prefix.block_cache import Pin

__all__ = ["PinBoard"]


class PinBoard:
    """The pins of all tenants on one cache. A second pin of a prefix renews the first.

    Pins may take half of the cache's memory. Beyond that, the tenant with the most pinned tokens
    loses its oldest pins first.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._lock = threading.Lock()
        self._pins: dict[tuple[str, bytes], Pin] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def pin(self, tokens: npt.NDArray[np.int32], ttl: float, tenant: str) -> int:
        """Pin a prefix for `ttl` seconds; return how many of its tokens are pinned."""
        key = tenant, tokens.tobytes()
        with self._lock:
            new = self._llm.cache.pin(tokens, ttl=ttl, namespace=tenant)
            old = self._pins.pop(key, None)
            if old is not None:
                old.release()
            self._pins[key] = new
            self._make_room()
            return new.n_tokens

    def clear(self, tenant: str, tokens: bytes = b"") -> None:
        """Release the pins of a tenant that begin with `tokens`."""
        with self._lock:
            for key in [key for key in self._pins if key[0] == tenant]:
                if key[1].startswith(tokens):
                    self._pins.pop(key).release()

    def _make_room(self) -> None:
        """Drop pins that have expired or exceed the bounds, such as 256 pins per tenant."""
        sizes = {key: pin.n_tokens for key, pin in self._pins.items()}
        for key in [key for key, n in sizes.items() if not n]:
            del self._pins[key], sizes[key]
        info = self._llm.context.memory_info
        most = self._llm.cache.stats().max_ram_bytes // 2 // max(info.bytes_per_token, 1)
        shares: dict[str, int] = {}
        counts: dict[str, int] = {}
        for (tenant, _), n in sizes.items():
            shares[tenant] = shares.get(tenant, 0) + n
            counts[tenant] = counts.get(tenant, 0) + 1
        while sizes and (sum(shares.values()) > most or max(counts.values()) > 256):
            loser = max(shares, key=lambda one: (counts[one] > 256, shares[one]))
            key = next(key for key in sizes if key[0] == loser)
            shares[loser] -= sizes.pop(key)
            counts[loser] -= 1
            self._pins.pop(key).release()
