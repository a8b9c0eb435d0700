"""PrefixCache: evaluate what is new, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, SupportsIndex

from pykvcache._arguments import TokenInput, as_bool, as_int
from pykvcache._closing import Closing
from pykvcache.context import LlamaContext
from pykvcache.prefix.arguments import (
    as_namespace,
    as_priority,
    as_queue_bytes,
    as_seconds,
    as_tiers,
    as_tokens,
    as_wait,
)
from pykvcache.prefix.core import CacheCore
from pykvcache.prefix.events import EventLog
from pykvcache.prefix.pins import Pin
from pykvcache.prefix.policies import DEFAULT, Policy
from pykvcache.prefix.prefetch import Prefetch
from pykvcache.prefix.report import CacheStats
from pykvcache.prefix.sequence import CachedSequence
from pykvcache.prefix.tiers.stack import TierInput
from pykvcache.prefix.tree_view import CacheTree, plot_tree, view_tree
from pykvcache.sequence.sequence import LlamaSequence

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PrefixCache", "core_of"]


class PrefixCache(Closing):
    """Sequences of one context that begin with the longest prefix that is known.

    `sequence` takes a prompt. What a sequence in use has of it is forked, token by token; what
    earlier ones evaluated is restored from memory, where every token is stored once however many
    sequences share it. Closing a sequence gives the cache what it evaluated.

    Parameters
    ----------
    context
        Where it is evaluated; a context has one cache at most.
    block_size
        Tokens per block: what is named, evicted and written to tiers as one.
    ram_bytes
        Upper bound on the bytes that are kept outside the context: cells and states, the cache's
        own accounts, events that wait, and buffers for the next blocks. What sequences in use and
        pins hold stays, even above.
    policy
        What leaves first when they are used up: a name of `pykvcache.prefix.policies`, or an
        object.
    namespace
        The default of `sequence`. Namespaces never share anything.
    keep_logits
        Keep the logits after each prompt, too: an exact repeat then needs no decode.
    checkpoint_bytes
        Upper bound on the bytes of the checkpoints of sequences in use.
    tiers
        Where blocks go besides memory, and come from where memory does not have them, the nearest
        first: folders, addresses such as ``"redis://host"``, or stores of
        `pykvcache.prefix.stores`.
    secret
        At least 16 bytes that only trusted writers and readers know: blocks in tiers are then
        encrypted, and only those are taken. Needs ``pykvcache[crypto]``.
    tier_seconds
        For how long a request waits for the tiers at most. Default: a tenth of what evaluating is
        thought to take, and only where loading is thought to take no longer than that.
    queue_bytes
        Upper bound on the bytes that wait to be written, per tier; default: half of ``ram_bytes``,
        and at least 64 MiB. What is over is not written, and counted.

    Raises
    ------
    ValueError
        The context has a cache already, or a value is out of range.
    UnsupportedOperation
        Nothing can be taken out of this memory, or tiers cannot keep what comes out of it.

    Examples
    --------
    >>> from pykvcache import LlamaContext, LlamaModel, PrefixCache, embedded_model_path
    >>> with LlamaModel(embedded_model_path()) as model, LlamaContext(model, n_ctx=512) as ctx:
    ...     cache = PrefixCache(ctx, block_size=16)
    ...     with cache.sequence("Once upon a time there was a little village by the sea.") as one:
    ...         text = "".join(one.stream(20))
    ...     two = cache.sequence("Once upon a time there was a little village in the hills.")
    ...     two.reuse.ram > two.reuse.evaluated
    True
    """

    def __init__(
        self,
        context: LlamaContext,
        *,
        block_size: SupportsIndex = 64,
        ram_bytes: SupportsIndex = 1 << 30,
        policy: str | Policy = DEFAULT,
        namespace: str = "",
        keep_logits: bool = False,
        checkpoint_bytes: SupportsIndex = 256 << 20,
        tiers: Sequence[TierInput] = (),
        secret: bytes | str | None = None,
        tier_seconds: float | None = None,
        queue_bytes: SupportsIndex | None = None,
    ) -> None:
        LlamaSequence(context).close()  # raises what a sequence of this context would
        size = as_int(block_size, "block_size", 1, 2**20)
        most = as_int(ram_bytes, "ram_bytes", 0, 2**62)
        self._core = CacheCore(
            context,
            size,
            most,
            policy=policy,
            namespace=as_namespace(namespace),
            keep_logits=as_bool(keep_logits, "keep_logits"),
            checkpoint_bytes=as_int(checkpoint_bytes, "checkpoint_bytes", 0, 2**62),
            stores=as_tiers(tiers, can_check=context.native.has_layout),
            secret=secret,
            tier_seconds=as_wait(tier_seconds, "tier_seconds", 3600),
            queue_bytes=as_queue_bytes(queue_bytes, most),
        )

    @property
    def context(self) -> LlamaContext:
        """The context it belongs to."""
        return self._core.context

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._core.block_size

    @property
    def events(self) -> EventLog:
        """What was stored and removed: iterate over it, or subscribe to it."""
        return self._core.events

    # Sequences ----------------------------------------------------------------------------------

    def sequence(
        self,
        prompt: str | TokenInput | None = None,
        *,
        namespace: str | None = None,
        boundaries: Iterable[SupportsIndex] = (),
        priority: SupportsIndex = 0,
    ) -> CachedSequence:
        """Return a sequence that begins with the longest known prefix of a prompt.

        Evaluates nothing: what is not known is evaluated when its logits are needed. `reuse`
        of the sequence says where its tokens came from.

        Parameters
        ----------
        prompt
            Text (with the model's special tokens), token ids, or None.
        namespace
            Whose prefixes to share; default: the cache's.
        boundaries
            Numbers of tokens after which messages end: recurrent memories keep states there, since
            other prompts are likely to part there.
        priority
            Of what the sequence gives to the cache: components of lower priority leave first.

        Raises
        ------
        TypeError, ValueError
            An argument is wrong; a boundary is beyond the prompt.
        """
        is_plain = type(priority) is int and abs(priority) < 2**31
        rank = int(priority) if is_plain else as_priority(priority)
        core = self._core
        with self._core.pool:
            sequence = core.open(prompt, namespace, boundaries=boundaries, priority=rank)
            if core.has_tiers:
                core.seek(sequence._request)
        search = sequence._request.search
        if search is not None:
            search.done.wait(search.left)
            with self._core.pool:
                core.settle(sequence._request)
        return sequence

    def prefetch(self, tokens: str | TokenInput, *, namespace: str | None = None) -> Prefetch:
        """Bring what the tiers have of a prompt to memory, in a thread of its own.

        A hint, for a prompt that is expected: nothing depends on it. What comes is checked as
        ever, counts towards ``ram_bytes``, and stays as long as the policy lets it; no more is
        read than fits there. What goes wrong in a tier is a counter.

        Parameters
        ----------
        tokens
            The prompt: text (with the model's special tokens) or token ids.
        namespace
            Whose; default: the cache's.

        Raises
        ------
        ClosedError
            The cache is closed.
        TypeError, ValueError
            The tokens are none of this model.
        """
        with self._core.pool:
            space = self._core.space(namespace)
            ids = as_tokens(self.context, tokens)[: self.context.n_ctx_seq]
            one = Prefetch(ids.tobytes(), self._core.current_space(space))
            self._core.prefetch(one)
        return one

    # Care -----------------------------------------------------------------------------------------

    def pin(
        self, tokens: str | TokenInput, *, ttl: float | None = None, namespace: str | None = None
    ) -> Pin:
        """Keep the known part of a prefix, whatever the policy would evict.

        Parameters
        ----------
        tokens
            The prefix; ``n_tokens`` of the pin tells how many of them are kept.
        ttl
            Seconds after which it may leave; None keeps it until `Pin.release`.
        namespace
            Whose; default: the cache's.

        Raises
        ------
        ValueError
            ``ttl`` is negative or not a number.
        """
        with self._core.pool:
            space = self._core.space(namespace)
            ids = as_tokens(self.context, tokens)
            until = None if ttl is None else time.monotonic() + as_seconds(ttl, "ttl")
            return self._core.pins.add(ids.tobytes(), self._core.current_space(space), until)

    def forget(self, tokens: str | TokenInput, *, namespace: str | None = None) -> None:
        """Drop some tokens, all that goes on from them, and all that only they need.

        In memory and in tiers. What sequences in use and pins hold stays. Tiers do not know which
        of their blocks prompts share: those that memory has not are removed, too, and other prompts
        evaluate them once more.

        Parameters
        ----------
        tokens
            The tokens, such as those of a conversation that was deleted.
        namespace
            Whose; default: the cache's.
        """
        with self._core.pool:
            space = self._core.space(namespace)
            self._core.forget(as_tokens(self.context, tokens).tobytes(), space)

    def clear(self, namespace: str | None = None) -> None:
        """Forget everything, or all of one namespace; sequences in use keep what they have.

        What those evaluated is not shared with later ones, either. Tiers lose what waits to be
        written; what they have stays there: ``pykvcache cache clear`` empties them. Events that
        wait lose its tokens.
        """
        with self._core.pool:
            self._core.check_open()
            self._core.clear(None if namespace is None else as_namespace(namespace))

    def tree(self, namespace: str | None = None) -> CacheTree:
        """Return what is kept in memory, as a tree: ``print(cache.tree())``.

        Parameters
        ----------
        namespace
            Whose, with the adapters that are in use; default: all of them.
        """
        wanted = None if namespace is None else as_namespace(namespace)
        with self._core.pool:
            self._core.check_open()
            space = None if wanted is None else self._core.current_space(wanted)
            return view_tree(self._core.blocks.tree, self.context.model, space)

    def plot(self, namespace: str | None = None) -> Figure:
        """Draw what is kept of a namespace, or of all: tokens from left to right, branches below.

        The darker, the more often used; framed is what sequences in use and pins hold; hatched is
        what comes after the last full block of a prompt. The figure is not registered with pyplot:
        ``figure.savefig("tree.svg")``; notebooks show it. Needs ``pykvcache[plot]``: raises
        ImportError without matplotlib.
        """
        blocks = self._core.blocks
        title = (
            f"{blocks.tree.n_blocks:,} blocks of {self.block_size} tokens, "
            f"{blocks.nbytes / 2**20:,.1f} of {blocks.max_bytes / 2**20:,.1f} MiB"
        )
        return plot_tree(self.tree(namespace), title)

    # Figures --------------------------------------------------------------------------------------

    def stats(self) -> CacheStats:
        """Return the figures since the cache was made."""
        with self._core.pool:
            core, blocks = self._core, self._core.blocks
            return CacheStats(
                requests=core.n_requests,
                **core.sums,
                ram_bytes=blocks.nbytes,
                ram_blocks=blocks.tree.n_blocks,
                ram_checkpoints=blocks.tree.n_states,
                max_ram_bytes=blocks.max_bytes,
                stored=blocks.stored,
                removed=blocks.removed,
                tiers=self._core.link.tiers.stats(),
                hits=core.n_hits,
            )

    def flush(self, seconds: float | None = None) -> bool:
        """Wait until what is queued is written to the tiers; False if that takes longer.

        False at once, too, in a subscriber that the writing thread calls.

        Parameters
        ----------
        seconds
            For how long at most; None for as long as it takes.
        """
        self._core.check_open()  # without the lock: another thread may be evaluating for long
        return self._core.link.tiers.flush(as_wait(seconds, "seconds"))

    # Life -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Forget everything; its sequences go on as plain ones. Twice does nothing.

        Tiers get what the sequences in use have evaluated, and the queues are written, for 30
        seconds at most.
        """
        self._core.close()

    @property
    def is_closed(self) -> bool:
        """Whether it, or its context, was closed."""
        return self._core.is_closed

    def __repr__(self) -> str:
        if self.is_closed:
            return "<PrefixCache (closed)>"
        blocks = self._core.blocks
        return (
            f"<PrefixCache: {blocks.tree.n_blocks} blocks of {self.block_size} tokens, "
            f"{blocks.nbytes:,} of {blocks.max_bytes:,} bytes>"
        )


def core_of(cache: PrefixCache) -> CacheCore:
    """Return what the package's own code calls of a cache."""
    return cache._core
