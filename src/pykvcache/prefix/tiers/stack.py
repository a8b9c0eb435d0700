"""Tiers: all tiers of a cache, fastest first."""

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

#: A folder, an address, or a store.
TierInput = str | os.PathLike[str] | BlockStore

#: The key of a record, and a function that returns its content, or None if it is unavailable.
Record: TypeAlias = tuple[bytes, "Callable[[], Buffer | None]"]

#: Seconds that `close` waits until the queues are written.
CLOSE_SECONDS = 30.0


class Tiers:
    """The tiers of one cache: records are written to all, and read from the fastest.

    ``queue_bytes`` bounds the queue of each tier; ``sink`` receives their events; ``progress`` and
    ``urgent_bytes`` are those of `Writer`.
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
        """Return the estimated seconds to read n_bytes from the fastest tier."""
        return min(tier.speed.seconds(n_bytes) for tier in self.tiers)

    @property
    def is_measured(self) -> bool:
        """Whether reads of all tiers were timed."""
        return all(tier.speed.is_measured for tier in self.tiers)

    def write(self, prompt: NamedPrompt, records: Sequence[Record]) -> None:
        """Queue the records that a tier is not known to have, in the order of their importance.

        All of them count as used, in the order of `BlockStore.touch`.
        """
        keys = [key for key, _ in records]
        chains = [
            (writer, Chain(space=prompt.space, uses=keys, prompt=prompt), writer.tier.unknown(keys))
            for writer in self.writers
        ]
        for i, (key, content) in enumerate(records):
            takers = list[Chain]()
            for writer, chain, lacks in chains:
                if not lacks[i]:
                    continue
                if writer.n_bytes + chain.n_bytes > writer.max_bytes:
                    writer.dropped += 1  # do not copy cells out of memory only to drop them
                else:
                    takers.append(chain)
            data = content() if takers else None
            for chain in takers if data is not None else ():
                chain.add(key, cast("Any", data))
        for writer, chain, _ in chains:
            writer.offer(chain)

    def remove(self, keys: Sequence[bytes]) -> None:
        """Queue the removal of records."""
        for writer in self.writers:
            writer.offer(Chain(removes=list(keys)))

    def refuse(self, tier: Tier, keys: Sequence[bytes]) -> None:
        """Count records of a tier whose content the memory rejects, and queue their removal."""
        tier.refuse(keys)
        self.writers[self.tiers.index(tier)].offer(Chain(removes=list(keys)))

    def cancel(self, space: str | None) -> None:
        """Drop the queued records of a space, or of all."""
        for writer in self.writers:
            writer.cancel(space)

    def flush(self, seconds: float) -> bool:
        """Wait until everything is written; False if that takes longer than the timeout."""
        until = time.monotonic() + seconds
        return all([writer.flush(until - time.monotonic()) for writer in self.writers])

    def close(self) -> None:
        """Write the queues, for at most `CLOSE_SECONDS`, and close the cache's own stores."""
        until = time.monotonic() + CLOSE_SECONDS
        for writer in self.writers:
            writer.close(until - time.monotonic())
            writer.tier.close()

    def retire(self) -> None:
        """Accept no more records; the threads write the queues and then close."""
        for writer in self.writers:
            writer.retire()

    def forget_notices(self) -> None:
        """Forget which blocks were announced, so that they are announced again when used."""
        for tier in self.tiers:
            tier.notices.forget()

    def announce_again(self, withdrawn: Iterable[tuple[str, bytes]]) -> None:
        """Announce these blocks, by medium and hash, again at their next use."""
        keys = defaultdict[str, list[bytes]](list)
        for medium, key in withdrawn:
            keys[medium].append(key)
        for tier in self.tiers:
            tier.notices.announce_again(keys[tier.notices.medium])

    def stats(self) -> tuple[TierStats, ...]:
        """Return the counters of every tier."""
        return tuple(
            writer.tier.stats(writer.n_items, writer.n_bytes, writer.dropped)
            for writer in self.writers
        )
