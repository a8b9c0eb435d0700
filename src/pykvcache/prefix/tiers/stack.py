"""All tiers of a cache, the nearest first."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from pykvcache.prefix.stores import BlockStore, Envelope, open_store
from pykvcache.prefix.tiers.fetch import Fetch, Wanted
from pykvcache.prefix.tiers.leases import Held, Lease, Leases
from pykvcache.prefix.tiers.notices import Place, Sink
from pykvcache.prefix.tiers.rule import Savings, is_hopeless
from pykvcache.prefix.tiers.tier import Tier, TierStats
from pykvcache.prefix.tiers.writing import Chain, WriteBehind

__all__ = ["TierInput", "Tiers"]

#: What names a tier: a folder, an address, or a store.
TierInput = str | os.PathLike[str] | BlockStore

#: For how long `close` waits for what is still to be written.
CLOSE_SECONDS = 30.0
# And, at least, for threads that are just asking a store for a lease.
_ASKING_SECONDS = 1.0

Item = tuple[bytes, Callable[[], object]]


class Tiers:
    """The stores below one cache: every block goes to all, and comes from the nearest.

    Parameters
    ----------
    stores
        The nearest first.
    envelope
        What is put around the blocks.
    queue_bytes
        Most bytes that may wait to be written, per tier.
    sink
        Takes events of what the tiers have.
    progress
        Returns a number that changes when tokens are evaluated: writing lets that go first.
    urgent_bytes
        Where more are waiting writing goes first, as it does from a quarter of the queue on.
    """

    def __init__(
        self,
        stores: Iterable[TierInput],
        envelope: Envelope,
        queue_bytes: int,
        sink: Sink = lambda event, namespace: None,
        progress: Callable[[], int] = lambda: 0,
        urgent_bytes: int | None = None,
    ) -> None:
        self.tiers: list[Tier] = []
        self.savings, self.leases = Savings(), Leases()
        try:
            for store in stores:
                owned = not isinstance(store, BlockStore)
                self.tiers.append(Tier(open_store(store), envelope, owned=owned, sink=sink))
        except BaseException:
            self.close(0)
            raise
        self.writers = [
            WriteBehind(tier, queue_bytes, progress, urgent_bytes) for tier in self.tiers
        ]

    def __len__(self) -> int:
        return len(self.tiers)

    def search(self, wanted: Wanted, evaluation: float) -> Fetch | None:
        """Return a search for one prompt, which has not begun; None where evaluating is faster.

        Parameters
        ----------
        wanted
            What could be used.
        evaluation
            How many seconds evaluating it is thought to take.
        """
        asked = [
            tier
            for tier in self.tiers
            if not is_hopeless(tier.estimate(0), evaluation) or not tier.skip()
        ]
        return Fetch(asked, wanted, leases=self.leases) if asked else None

    def give_up(self, fetch: Fetch) -> bool:
        """Whether what was found is left where it is; now and then it is loaded, to find out."""
        return all([tier.skip() for tier in fetch.to_load])

    def write(
        self,
        keys: Sequence[bytes],
        content: Callable[[int], object | None],
        namespace: str,
        block: Callable[[int], Place] | None = None,
    ) -> None:
        """Queue what a tier is not known to have.

        Parameters
        ----------
        keys
            Keys of a chain, the first one first.
        content
            Returns the bytes of key i, or None where they are not available.
        namespace
            Whose they are.
        block
            Gives the place of key i, where these are full blocks.
        """
        made: dict[int, object | None] = {}
        for tier, writer in zip(self.tiers, self.writers, strict=True):
            chain = Chain(namespace=namespace)
            size = 0
            for i, is_unknown in enumerate(tier.unknown(keys)):
                if not is_unknown:
                    continue
                if writer.n_bytes + size > writer.max_bytes:
                    writer.dropped += 1
                    continue  # nothing more is taken out that would be dropped
                if i not in made:
                    made[i] = content(i)
                if (data := made[i]) is not None:
                    size += memoryview(data).nbytes  # type: ignore[arg-type]
                    chain.items.append((keys[i], data))  # type: ignore[arg-type]
                    if block is not None:
                        chain.blocks[keys[i]] = block(i)
            writer.offer(chain)

    def release(self, lease: Lease) -> None:
        """Let the threads give a lease back, after what waits to be written."""
        self._give_back(lease.held)

    def _give_back(self, held: Held) -> None:
        writers = dict(zip(self.tiers, self.writers, strict=True))
        self.leases.give_back(
            held, lambda tier: writers[tier].offer(Chain(leases=[held.key], due=held.due))
        )

    def reap(self) -> None:
        """Give back leases of sequences that were dropped."""
        while (held := self.leases.lost()) is not None:
            self._give_back(held)

    def remove(self, keys: list[bytes]) -> None:
        """Let the threads remove blocks, after what waits before them."""
        for writer in self.writers:
            writer.offer(Chain(removes=keys))

    def cancel(self, namespace: str | None) -> None:
        """Forget what waits to be written of a namespace, or all."""
        for writer in self.writers:
            writer.cancel(namespace)

    def flush(self, seconds: float | None = None) -> bool:
        """Wait until everything is written; False if that takes longer than the timeout."""
        until = None if seconds is None else time.monotonic() + seconds
        left = (None if until is None else max(0.0, until - time.monotonic()) for _ in self.writers)
        return all([writer.flush(one) for writer, one in zip(self.writers, left, strict=True)])

    def close(self, seconds: float = CLOSE_SECONDS) -> bool:
        """Write what waits, for so long at most, and close the stores that are the cache's own."""
        until = time.monotonic() + seconds
        done = True
        writers = getattr(self, "writers", [])
        for writer in writers:
            done &= writer.close(max(0.0, until - time.monotonic()))
        self.leases.close(max(_ASKING_SECONDS, until - time.monotonic()))
        for i, tier in enumerate(self.tiers):
            if not (writers and writers[i].is_mine):  # it closes its tier itself, later
                tier.close()
        return done

    def retire(self) -> None:
        """Let the threads write what waits and end; nobody waits for them."""
        self.leases.retire(self._give_back)
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
