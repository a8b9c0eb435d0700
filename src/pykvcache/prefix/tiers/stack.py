"""All tiers of a cache, the nearest first."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from pykvcache.prefix.block_hash import NamedPrompt
from pykvcache.prefix.stores import BlockStore, Envelope, open_store
from pykvcache.prefix.tiers.tier import Sink, Tier, TierStats
from pykvcache.prefix.tiers.writer import Chain, Writer

if TYPE_CHECKING:
    from pykvcache.prefix.memory import Buffer

__all__ = ["Record", "TierInput", "Tiers"]

#: What names a tier: a folder, an address, or a store.
TierInput = str | os.PathLike[str] | BlockStore

#: The key of a record, and what makes its content: None where it is not available.
Record: TypeAlias = tuple[bytes, "Callable[[], Buffer | None]"]

#: For how long `close` waits for what is still to be written.
CLOSE_SECONDS = 30.0


class Tiers:
    """The stores below one cache: every record goes to all, and comes from the nearest.

    ``queue_bytes`` bounds the bytes that wait to be written to each; ``sink`` takes events of what
    they have; ``progress`` and ``urgent_bytes`` are as of a `Writer`.
    """

    def __init__(
        self,
        stores: Iterable[TierInput],
        envelope: Envelope,
        queue_bytes: int,
        sink: Sink = lambda event: None,
        progress: Callable[[], int] = lambda: 0,
        urgent_bytes: int | None = None,
    ) -> None:
        self.tiers: list[Tier] = []
        try:
            for store in stores:
                owned = not isinstance(store, BlockStore)
                self.tiers.append(Tier(open_store(store), envelope, owned=owned, sink=sink))
        except BaseException:
            for tier in self.tiers:
                tier.close()
            raise
        self.writers = [Writer(tier, queue_bytes, progress, urgent_bytes) for tier in self.tiers]

    def __len__(self) -> int:
        return len(self.tiers)

    def estimate(self, n_bytes: int) -> float:
        """Return how many seconds reading so much is thought to take: of the fastest tier."""
        return min(tier.speed.seconds(n_bytes) for tier in self.tiers)

    def write(self, prompt: NamedPrompt, records: Sequence[Record]) -> None:
        """Queue the records that a tier is not known to have, the most needed first.

        All of them count as used, in the order of `BlockStore.touch`.
        """
        keys = [key for key, _ in records]
        chains = [Chain(namespace=prompt.namespace, uses=keys, prompt=prompt) for _ in self.tiers]
        lacking = [tier.unknown(keys) for tier in self.tiers]
        for i, (key, content) in enumerate(records):
            takers = list[Chain]()
            for chain, writer, lacks in zip(chains, self.writers, lacking, strict=True):
                if not lacks[i]:
                    continue
                if writer.n_bytes + chain.n_bytes > writer.max_bytes:
                    writer.dropped += 1  # nothing more is taken out that would be dropped
                else:
                    takers.append(chain)
            data = content() if takers else None
            for chain in takers if data is not None else ():
                chain.add(key, cast("Any", data))
        for chain, writer in zip(chains, self.writers, strict=True):
            writer.offer(chain)

    def remove(self, keys: Sequence[bytes]) -> None:
        """Let the threads remove records, after what waits before them."""
        for writer in self.writers:
            writer.offer(Chain(removes=list(keys)))

    def refuse(self, tier: Tier, keys: Sequence[bytes]) -> None:
        """Let the thread of a tier remove records whose content the memory refuses."""
        tier.refuse(keys)
        self.writers[self.tiers.index(tier)].offer(Chain(removes=list(keys)))

    def cancel(self, namespace: str | None) -> None:
        """Forget what waits to be written of a namespace, or all."""
        for writer in self.writers:
            writer.cancel(namespace)

    def flush(self, seconds: float) -> bool:
        """Wait until everything is written; False if that takes longer than the timeout."""
        until = time.monotonic() + seconds
        return all([writer.flush(until - time.monotonic()) for writer in self.writers])

    def close(self) -> None:
        """Write what waits, for `CLOSE_SECONDS` at most, and close the cache's own stores."""
        until = time.monotonic() + CLOSE_SECONDS
        for tier, writer in zip(self.tiers, self.writers, strict=True):
            writer.close(until - time.monotonic())
            tier.close()

    def retire(self) -> None:
        """Let the threads write what waits, and then close: the cache was dropped."""
        for writer in self.writers:
            writer.retire()

    def forget_notices(self) -> None:
        """Forget which events were sent: what is used from now on is said again."""
        for tier in self.tiers:
            tier.notices.forget()

    def say_again(self, withdrawn: Iterable[tuple[str, bytes]]) -> None:
        """Say of blocks, by medium and name, that they are there when they are used again."""
        keys = defaultdict[str, list[bytes]](list)
        for medium, key in withdrawn:
            keys[medium].append(key)
        for tier in self.tiers:
            tier.notices.say_again(keys[tier.notices.medium])

    def stats(self) -> tuple[TierStats, ...]:
        """Return the figures of every tier."""
        return tuple(
            tier.stats(writer.n_items, writer.n_bytes, writer.dropped)
            for tier, writer in zip(self.tiers, self.writers, strict=True)
        )
