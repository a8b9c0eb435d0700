"""PrefixCache: evaluate only what no earlier prompt has evaluated."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, SupportsIndex

import numpy as np

from pykvcache._arguments import IntArray, TokenInput, as_bool, as_int, as_list
from pykvcache._closing import Closing
from pykvcache._drawing import draw_tree
from pykvcache.context import LlamaContext
from pykvcache.errors import UnsupportedOperation
from pykvcache.prefix.block_cache import Pin
from pykvcache.prefix.core import CacheCore, as_namespace
from pykvcache.prefix.events import EventLog
from pykvcache.prefix.policies import DEFAULT, Policy
from pykvcache.prefix.prefetch import Prefetch, as_seconds
from pykvcache.prefix.report import CacheStats
from pykvcache.prefix.sequence import CachedSequence
from pykvcache.prefix.stores import BlockStore, TierInput
from pykvcache.prefix.tree_view import CacheTree, view_tree
from pykvcache.sequence.sequence import LlamaSequence

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PrefixCache", "core_of"]


class PrefixCache(Closing):
    """A cache of evaluated prompts: its sequences start with the longest cached prefix.

    The prefix is forked from a live sequence, or restored from RAM, where shared tokens are stored
    once, or from tiers. When a sequence is closed, the cache stores the keys and values of its new
    tokens. ``docs/prefix-cache.md`` explains the tree.

    Parameters
    ----------
    context
        The context that evaluates the prompts. A context has at most one cache.
    block_size
        Tokens per block. Tiers and events handle whole blocks.
    ram_bytes
        Upper bound on the bytes kept outside the context, bookkeeping, queued events and free
        buffers included. Components used by live sequences or pins are kept even beyond it.
    policy
        Eviction policy: a name in `pykvcache.prefix.policies`, or an object.
    namespace
        Default namespace of `sequence`. Namespaces share nothing.
    keep_logits
        Also keep the logits that were read after a prompt, so that an exact repeat needs no decode.
    checkpoint_bytes
        Upper bound on the bytes of checkpoints of live sequences.
    tiers
        Stores to search after RAM, fastest first: folders, addresses such as ``"redis://host"``, or
        stores of `pykvcache.prefix.stores`.
    secret
        At least 16 bytes, with which records in tiers are encrypted; no others are accepted. Needs
        the extra ``crypto``.
    tier_seconds
        Longest time that a request waits for the tiers, in seconds. Default: a tenth of the
        estimated evaluation time, and no read if loading is estimated to take longer than that.
    queue_bytes
        Upper bound on the bytes queued for writing, per tier; records beyond it are dropped.
        Default: half of ``ram_bytes``, at least 64 MiB.

    Raises
    ------
    ValueError
        The context has a cache already, or a value is out of range.
    UnsupportedOperation
        The cells of this kind of memory cannot be copied, or cannot be written to tiers.

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
        LlamaSequence(context).close()  # raises if this context cannot have sequences
        size = as_int(block_size, "block_size", 1, 2**20)
        most = as_int(ram_bytes, "ram_bytes", 0, 2**62)
        if tier_seconds is not None:
            tier_seconds = as_seconds(tier_seconds, "tier_seconds", 3600)
        if queue_bytes is None:
            queue_bytes = max(most // 2, 64 << 20)
        self._core = CacheCore(
            context,
            size,
            most,
            policy=policy,
            namespace=as_namespace(namespace),
            keep_logits=as_bool(keep_logits, "keep_logits"),
            checkpoint_bytes=as_int(checkpoint_bytes, "checkpoint_bytes", 0, 2**62),
            stores=_as_tiers(tiers, can_check=context.native.has_layout),
            secret=secret,
            tier_seconds=tier_seconds,
            queue_bytes=as_int(queue_bytes, "queue_bytes", 0, 2**62),
        )

    @property
    def context(self) -> LlamaContext:
        """The context of this cache."""
        return self._core.context

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._core.block_size

    @property
    def events(self) -> EventLog:
        """Events of stored and removed blocks: iterate over them, or subscribe a callback."""
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
        """Return a sequence that starts with the longest cached prefix of a prompt.

        The remaining tokens are evaluated when their logits are needed.

        Parameters
        ----------
        prompt
            Text (with the model's special tokens), token ids, or None.
        namespace
            Namespace of the prefixes to share; default: the cache's.
        boundaries
            Numbers of tokens after which messages end, where other prompts are likely to diverge:
            recurrent states are saved there.
        priority
            Priority of the sequence's tokens in the cache: lower ones are evicted first.
        """
        if type(priority) is not int or abs(priority) >= 2**31:
            priority = as_int(priority, "priority", -(2**31), 2**31 - 1)
        core = self._core
        with self._core.pool:
            sequence = core.open(prompt, namespace, boundaries=boundaries, priority=priority)
            if core.has_tiers:
                core.seek(sequence._request)
        search = sequence._request.search
        if search is not None:
            search.done.wait(search.left)
            with self._core.pool:
                core.settle(sequence._request)
        return sequence

    def prefetch(self, tokens: str | TokenInput, *, namespace: str | None = None) -> Prefetch:
        """Load a prompt's cached prefix from the tiers into RAM, in a background thread.

        Loaded records count towards ``ram_bytes`` and may be evicted; no more is read than fits.
        Failures of a tier are counted, not raised.

        Parameters
        ----------
        tokens
            The prompt: text (with the model's special tokens) or token ids.
        namespace
            Namespace of the prompt; default: the cache's.
        """
        with self._core.pool:
            namespace = self._core.namespace(namespace)
            ids = _as_tokens(self.context, tokens)[: self.context.n_ctx_seq]
            one = Prefetch(ids.tobytes(), self._core.current_space(namespace))
            self._core.prefetch(one)
        return one

    # Maintenance ----------------------------------------------------------------------------------

    def pin(
        self, tokens: str | TokenInput, *, ttl: float | None = None, namespace: str | None = None
    ) -> Pin:
        """Protect the part of a prefix that is in RAM from eviction; evaluates and loads nothing.

        Parameters
        ----------
        tokens
            The prefix; ``n_tokens`` of the pin says how many of its tokens are protected.
        ttl
            Seconds until the pin expires; None: until `Pin.release`.
        namespace
            Namespace of the prefix; default: the cache's.
        """
        with self._core.pool:
            namespace = self._core.namespace(namespace)
            ids = _as_tokens(self.context, tokens)
            until = math.inf if ttl is None else time.monotonic() + as_seconds(ttl, "ttl")
            return self._core.blocks.pin(ids.tobytes(), self._core.current_space(namespace), until)

    def forget(self, tokens: str | TokenInput, *, namespace: str | None = None) -> None:
        """Remove tokens and all that is cached after them.

        They are removed from RAM and from tiers. Tokens shared with a prompt that diverges within
        them stay. Components used by live sequences or pins stay.
        Blocks that are not in RAM are removed from tiers even if other prompts use them, because
        tiers do not record that.

        Parameters
        ----------
        tokens
            The tokens, such as those of a conversation that was deleted.
        namespace
            Namespace of the tokens; default: the cache's.
        """
        with self._core.pool:
            namespace = self._core.namespace(namespace)
            self._core.forget(_as_tokens(self.context, tokens).tobytes(), namespace)

    def clear(self, namespace: str | None = None) -> None:
        """Empty the RAM cache, or remove one namespace from it; live sequences keep their cells.

        Later sequences do not reuse what live sequences have evaluated so far. Records queued for
        tiers and unread ``BlockStored`` events of removed tokens are dropped; written records stay
        (``pykvcache cache clear`` removes them).
        """
        with self._core.pool:
            self._core.check_open()
            self._core.clear(None if namespace is None else as_namespace(namespace))

    def tree(self, namespace: str | None = None) -> CacheTree:
        """Return the tree of a namespace, under the adapters in use, or of all, to print."""
        wanted = None if namespace is None else as_namespace(namespace)
        with self._core.pool:
            self._core.check_open()
            space = None if wanted is None else self._core.current_space(wanted)
            return view_tree(self._core.blocks.tree, self.context.model, space)

    def plot(self, namespace: str | None = None) -> Figure:
        """Draw the tree of a namespace, or of all: tokens from left to right, branches below.

        Darker nodes were used more often; framed ones are used by live sequences or pins; hatched
        tokens come after the last full block of a prompt. The figure is not registered with
        pyplot. Needs the extra ``plot``.
        """
        blocks = self._core.blocks
        title = (
            f"{blocks.tree.n_blocks:,} blocks of {self.block_size} tokens, "
            f"{blocks.nbytes / 2**20:,.1f} of {blocks.max_bytes / 2**20:,.1f} MiB"
        )
        return draw_tree(self.tree(namespace).nodes, title)

    # Statistics -----------------------------------------------------------------------------------

    def stats(self) -> CacheStats:
        """Return totals since the cache was created."""
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
                tiers=self._core.link.stats(),
                hits=core.n_hits,
            )

    def flush(self, seconds: float | None = None) -> bool:
        """Wait until all queued records are written to the tiers; False after a timeout.

        Returns False at once in an event callback that the writing thread calls.
        """
        self._core.check_open()  # without the lock: another thread may be evaluating for long
        limit = math.inf if seconds is None else as_seconds(seconds, "seconds")
        return self._core.link.flush(limit)

    # Lifetime -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Empty the cache; its sequences continue as plain ones. A second call does nothing.

        Tokens that live sequences have evaluated are queued for the tiers. Then the queues are
        written, for at most 30 seconds.
        """
        self._core.close()

    @property
    def is_closed(self) -> bool:
        """Whether the cache or its context is closed."""
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
    """Return the internals of a cache, for the package's own code."""
    return cache._core


def _as_tokens(context: LlamaContext, tokens: str | TokenInput) -> IntArray:
    """Return the tokens of a prompt; raise TypeError for None, otherwise as `LlamaSequence`."""
    if tokens is None:
        raise TypeError("tokens must be text or token ids, not None")
    return LlamaSequence(context, tokens).tokens


def _as_tiers(tiers: Sequence[TierInput], *, can_check: bool) -> list[TierInput]:
    """Return the tiers as a list; raise TypeError if they are not in a list.

    Raises `UnsupportedOperation` for any tier if records cannot be checked (``can_check``).
    """
    if isinstance(tiers, str | os.PathLike | BlockStore | np.ndarray):
        raise TypeError(f"tiers must be a list of stores, not a {type(tiers).__name__}")
    stores = as_list(tiers, "tiers", "stores")
    if stores and not can_check:
        raise UnsupportedOperation(
            "PrefixCache",
            "it has no tiers for this model: the layout of its states is unknown, so records from "
            "a tier could not be checked. Leave out tiers=",
            "memory",
        )
    return stores
