"""The index of blocks: a radix tree over tokens that keeps to a budget in bytes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

from pykvcache.errors import ArgumentError
from pykvcache.errors._shown import shown
from pykvcache.prefix.asked import PolicyMethods
from pykvcache.prefix.match import Match, common_blocks
from pykvcache.prefix.policies import Policy
from pykvcache.prefix.roots import Roots
from pykvcache.prefix.runs import Run, below, new_root, salt_of

__all__ = ["BlockTree", "Match"]

_TOKEN_BYTES = 4


class BlockTree(PolicyMethods):
    """Which blocks are known, found by their tokens; at most ``max_bytes`` of them.

    Blocks leave from the ends of the tree only, and never while they are held. Nothing here is
    safe for several threads: the cache that owns the tree has the lock.

    Parameters
    ----------
    block_size
        Tokens per block.
    policy
        What goes first: a name of `pykvcache.prefix.policies`, or an object.
    max_bytes
        Budget for all blocks and checkpoints.
    root
        Gives the root's name of a namespace (`root_name`); else names mean nothing elsewhere.
    run_bytes
        What a run, or a root, costs beside its blocks. It counts towards the budget, and so does
        what the policy keeps for itself; 0 where blocks alone are counted.
    on_remove
        Called before blocks leave: with their run, and the index of the first that does.
    other_bytes
        Returns what else the budget has to pay for.
    release
        Called with the bytes above the budget (below it: negative); whether it gave any back.
    last
        Called where the budget is exceeded and no block may leave; whether it gave any back.
    expect
        Called with the number of blocks that are new, 0 for a checkpoint, before others leave.
    """

    def __init__(
        self,
        block_size: int,
        policy: str | Policy = "lru",
        *,
        max_bytes: int,
        root: Callable[[str], bytes] | None = None,
        run_bytes: int = 0,
        on_remove: Callable[[Run, int], None] | None = None,
        other_bytes: Callable[[], int] = lambda: 0,
        release: Callable[[int], bool] = lambda _: False,
        last: Callable[[], bool] = lambda: False,
        expect: Callable[[int], object] = lambda _: None,
    ) -> None:
        if block_size < 1:
            raise ArgumentError(
                f"block_size is {block_size}: it must be at least 1", "block_size", block_size, 1
            )
        self.block_size = block_size
        self.step = block_size * _TOKEN_BYTES
        self._set_policy(policy)
        self.clock = 0
        self.n_bytes = 0
        self.n_blocks = 0
        self.n_runs = 0
        self._root_name = root
        self.run_bytes = run_bytes
        self.on_remove = on_remove
        self._other_bytes = other_bytes
        self._release, self._last, self._expect = release, last, expect
        self._roots = Roots()
        self.max_bytes = max_bytes

    @property
    def max_bytes(self) -> int:
        """The budget. Lowering it evicts at once; what is held stays, even above it."""
        return self._max_bytes

    @max_bytes.setter
    def max_bytes(self, value: int) -> None:
        if value < 0:
            text = f"max_bytes is {shown(value)}: it must be at least 0"
            raise ArgumentError(text, "max_bytes", value, 0)
        self._max_bytes = value
        self._resize_policy()
        self.fit()

    @property
    def used_bytes(self) -> int:
        """What counts towards the budget: blocks, runs, the policy's notes, and the rest."""
        used = self.n_bytes + self._other_bytes()
        if self.run_bytes:
            roots = self.run_bytes * len(self._roots) + self._roots.name_bytes
            used += self._policy_bytes() + roots
        return used

    def match(self, tokens: bytes, namespace: str = "") -> Match:
        """Return the longest known beginning; changes nothing.

        Parameters
        ----------
        tokens
            As `token_bytes` gives them.
        namespace
            Whose blocks to look among.
        """
        run = self.root(namespace)
        step, at = self.step, 0
        deepest = None
        while (child := run.children.get(tokens[at : at + step])) is not None:
            text = child.text
            if not tokens.startswith(text, at):
                n = common_blocks(text, tokens, at, step)
                return Match(child, n, at // step + n, deepest)
            run = child
            at += len(text)
            if run.checkpoint is not None:
                deepest = run.checkpoint
        return Match(run, run.n_blocks, at // step, deepest)

    def lookup(self, tokens: bytes, namespace: str = "") -> Match:
        """Match the tokens of a prompt, and count it as a use; the match ends with its run."""
        match = self.match(tokens, namespace)
        self.ask(tokens, namespace)
        self.use(match)
        return match

    def ask(self, tokens: bytes, namespace: str = "") -> None:
        """Let the policy know of a prompt, before what is known of it is used."""
        self.asked(self.policy.asked, tokens, self.step, zlib.crc32(salt_of(namespace)))

    def end_of(self, match: Match) -> Run:
        """Return the run that a match of just now ends with; no use is counted.

        A run of which only the first blocks belong to it is cut in two.
        """
        if not match.run.is_root and match.offset < match.run.n_blocks:
            match.run = self._cut(match.run, match.offset)
            self.fit(match.run)
        return match.run

    def use(self, match: Match, begun: bytes = b"") -> Run:
        """Count a use of what was matched just now, and return the run that it ends with.

        ``begun``: the tokens of a block after it, of which the beginning is used. No use of that
        one is counted; it stays, and is a run of its own from then on.
        """
        self.clock += 1
        if not match.run.is_root and match.offset < match.run.n_blocks:
            match.run = self._cut(match.run, match.offset)
        kept = match.run
        if begun and (kept := match.run.children[begun]).n_blocks > 1:
            kept = self._cut(kept, 1)
        points = [] if match.checkpoint is None else [match.checkpoint]
        for run in [*points, *match.run.path()]:
            self._count_use(run)
        self.fit(kept, *points)
        return match.run

    def _count_use(self, run: Run) -> None:
        run.uses += 1
        run.last_use = self.clock
        self.asked(self.policy.used, run)

    def insert(self, tokens: bytes, block_bytes: int, namespace: str = "") -> Run | None:
        """Add the full blocks of some tokens that are not known yet, as far as the budget allows.

        Returns
        -------
        Run or None
            The new blocks, whose ``payloads`` are None and for the caller to fill; None if there is
            nothing new, or nothing of it is kept.
        """
        found = self.match(tokens, namespace)
        if len(tokens) // self.step == found.n_blocks:
            return None
        if not (run := found.run).is_root and found.offset < run.n_blocks:
            run = self._cut(run, found.offset)
        return self.extend(run, tokens[found.n_blocks * self.step :], block_bytes)

    def extend(self, run: Run, tokens: bytes, block_bytes: int) -> Run | None:
        """Add full blocks after a run; the first must not be known there. Returns as `insert`."""
        size = len(tokens) // self.step * self.step
        if size == 0:
            return None
        first = tokens[: self.step]
        if first in run.children:
            raise ArgumentError(
                "the block is known already: insert() finds out where new ones begin", "run"
            )
        self._roots.keep(run)
        new = Run(
            run,
            tokens[:size],
            self.step,
            start=run.end,
            start_key=run.end_key,
            block_bytes=block_bytes,
            tokens_saved=self.block_size,
            now=self.clock,
        )
        run.children[first] = new
        return self._add(new)

    def add_checkpoint(self, run: Run, n_bytes: int, tokens_saved: int) -> Run | None:
        """Put a checkpoint at the end of a run; None if there is one, or the budget has no room.

        Parameters
        ----------
        run
            Whose end: `use` cuts a run where a match ends.
        n_bytes
            Its size.
        tokens_saved
            Tokens that would be evaluated without it: from the checkpoint before it on.
        """
        if run.is_root or run.is_checkpoint or run.checkpoint is not None:
            return None
        new = Run(
            run,
            b"",
            self.step,
            start=run.end,
            start_key=~run.end_key & 0xFFFFFFFF,
            block_bytes=n_bytes,
            tokens_saved=tokens_saved,
            now=self.clock,
            is_checkpoint=True,
        )
        run.checkpoint = new
        return self._add(new)

    def _add(self, new: Run) -> Run | None:
        self.n_bytes += new.n_bytes + self.run_bytes
        self.n_blocks += 0 if new.is_checkpoint else new.n_blocks
        self.n_runs += 1
        self._expect(0 if new.is_checkpoint else new.n_blocks)
        self.asked(self.policy.added, new)
        fits = self.policy.declines
        if not fits:
            # The others go first, whatever the policy thinks of something that was never used.
            new.held += 1
            fits = self.fit(is_new=True)
            new.held -= 1
        self.asked(self.policy.evictable, new)
        if self.policy.declines or not fits:
            self.fit()
        return new if new.n_blocks else None

    def hold(self, run: Run) -> None:
        """Keep a run, and with it all before it, until it is released as often as it was held."""
        run.held += 1
        self._roots.keep(run)

    def release(self, run: Run, *, is_use: bool = True) -> None:
        """Release a run; now counts as the last use of it and of all before it, or does not."""
        if run.held < 1:
            raise ArgumentError("the run is not held", "run")
        run.held -= 1
        if run.parent is None:  # a root, or cleared meanwhile
            self._roots.leave(run)
            return
        if is_use:
            self.clock += 1
            for each in run.path():
                each.last_use = self.clock
        if run.is_evictable:
            self.asked(self.policy.evictable, run)
        self.fit()

    def fit(self, *kept: Run, is_new: bool = False) -> bool:
        """Evict until the budget is kept, or all that is left is held: False then.

        Nothing up to the ends of the runs that are given leaves: somebody is about to hold them.
        With ``is_new`` what needs the room is new, and can do without: `last` is not called for it.
        """
        if (excess := self.used_bytes - self._max_bytes) <= 0:
            self._release(excess)
            return True
        runs = [run for run in kept if not run.is_root]
        for run in runs:
            run.held += 1
        fits = self.shrink(self._max_bytes, is_new=is_new)
        for run in runs:
            run.held -= 1
            if run.is_evictable:
                self.asked(self.policy.evictable, run)
        return fits

    def shrink(self, max_bytes: int, *, is_new: bool = False) -> bool:
        """Evict until at most so many bytes are used, or all that is left is held: False then."""
        while (excess := self.used_bytes - max_bytes) > 0:
            if self._release(excess):
                continue
            run = self.asked(self.policy.victim)
            if run is None:
                if is_new or not self._last():
                    return False
                continue
            self._check_own(run)
            if self.policy.whole or not run.block_bytes:
                n = run.n_blocks
            else:
                n = min(run.n_blocks, -(-excess // run.block_bytes), self._most_blocks())
            self.remove(run, n)
        return True

    def remove(self, run: Run, n_blocks: int | None = None) -> None:
        """Remove the last blocks of a run, all by default; nothing may follow or hold it."""
        if not run.is_evictable:
            text = f"{run} is held, followed by others, or no longer in the tree"
            raise ArgumentError(text, "run", repr(run))
        n = run.n_blocks if n_blocks is None else n_blocks
        if not 1 <= n <= run.n_blocks:
            text = f"{n} blocks cannot be removed from {run}"
            raise ArgumentError(text, "n_blocks", n, run.n_blocks)
        self._drop(run, n)
        parent = run.parent
        if run.n_blocks == 0 and parent is not None:
            self._unlink(run)
            if parent.is_evictable:
                self.asked(self.policy.evictable, parent)

    def _drop(self, run: Run, n: int) -> None:
        if self.on_remove is not None:
            self.on_remove(run, run.n_blocks - n)
        self.asked(self.policy.removing, run, n)
        self._forget(run, n)

    def _forget(self, run: Run, n: int) -> None:
        self.n_bytes -= n * run.block_bytes
        self.n_blocks -= 0 if run.is_checkpoint else n
        key = run.tokens[: run.step]
        run.drop(n)
        if run.n_blocks == 0:
            run.tokens = key  # what its parent knows it by

    def _unlink(self, run: Run) -> None:
        parent = run.parent
        assert parent is not None
        if run.is_checkpoint:
            parent.checkpoint = None
        else:
            del parent.children[run.tokens]
            if parent.is_root:
                self._roots.leave(parent)
        run.parent = None
        self.n_bytes -= self.run_bytes
        self.n_runs -= 1

    def clear(self, namespace: str | None = None) -> None:
        """Remove all blocks of a namespace, or of all; held ones too: holds keep nothing then."""
        for root in self.roots(namespace):
            for run in reversed(list(below(root))):
                self._drop(run, run.n_blocks)
                self._unlink(run)
            self._roots.forget(str(root.namespace))

    def runs(self, namespace: str | None = None) -> Iterator[Run]:
        """Yield every run and checkpoint, those before others first."""
        for root in self.roots(namespace):
            yield from below(root)

    def _cut(self, run: Run, n_blocks: int) -> Run:
        head = run.cut(n_blocks)
        self.n_bytes += self.run_bytes
        self.n_runs += 1
        self.asked(self.policy.split, head, run)
        return head

    def root(self, namespace: str) -> Run:
        """Return the root of a namespace; it is kept as long as something follows or holds it."""
        if (root := self._roots.get(namespace)) is not None:
            return root
        named = self._root_name or salt_of
        return new_root(namespace, self.step, named(namespace))

    def roots(self, namespace: str | None = None) -> list[Run]:
        """Return the root of a namespace, or of all, where it keeps anything."""
        names = list(self._roots) if namespace is None else [namespace]
        return [self._roots[name] for name in names if name in self._roots]
