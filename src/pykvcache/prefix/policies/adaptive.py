"""The default policy: the one of several that would have found most lately."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pykvcache.prefix.policies.base import Policy
from pykvcache.prefix.runs import Run, block_keys

__all__ = ["Adaptive"]

#: What a run of a shadow costs, and a block: measured with tracemalloc.
_RUN_BYTES, _BLOCK_BYTES = 1_000, 12

#: What parts of the budget the experts are tried with before it is full.
_TRIALS = (2, 4)


class Adaptive(Policy):
    """Follow the policy, of several, that would have found most of the recent prompts.

    Each of them, an expert, has a shadow: a tree of 12 bytes per block without keys and values,
    that is sent the same prompts and evicts as that expert would in the whole budget. What the
    shadows find is counted, old prompts less than new ones. The expert that found most decides
    what leaves the real tree; the next one takes over when it has found a little more. So no way
    of sharing prompts that one expert serves well is served much worse for long.

    Shadows begin when the first block has to leave; until then there is nothing to decide. They
    get a 16th of the budget at most: where that is too little, experts that found least are given
    up, one after the other.

    Parameters
    ----------
    experts
        What makes each, by name; the first decides while nothing is known.
    half_life
        After how many prompts a hit counts half.
    margin
        By what share more another one must have found to take over.
    """

    def __init__(
        self,
        experts: Mapping[str, Callable[[], Policy]],
        *,
        half_life: float = 1000.0,
        margin: float = 0.005,
    ) -> None:
        self._experts = dict(experts)
        self._margin = margin
        self._fade = 0.5 ** (1 / half_life)
        self._leader = next(iter(experts))
        self._policy = self._experts[self._leader]()
        self._shadows: dict[str, Any] = {}
        self._hits: dict[str, float] = {}
        self._runs: dict[Run, None] = {}
        # Prompts before the first eviction: what the shadows begin with.
        self._log: deque[array[int]] = deque(maxlen=1000)
        self._log_bytes = 0
        self._max_bytes = self._bytes = 0
        self._block_bytes = 1
        self._is_full = self._has_begun = False
        self.whole, self.declines = self._policy.whole, self._policy.declines

    @property
    def leader(self) -> str:
        """The name of the policy that decides now."""
        return self._leader

    # What the shadows are sent --------------------------------------------------------------

    def asked(self, tokens: bytes, step: int, start_key: int) -> None:
        """Let all policies look the prompt up, and see which found most recently."""
        if len(self._experts) < 2:
            return
        keys = block_keys(tokens, step, start_key)
        if not self._has_begun:
            self._note(keys)
            return
        self._look_up(keys)
        self._resize_shadows()
        self._elect()

    def _note(self, keys: array[int]) -> None:
        if len(self._log) == self._log.maxlen:
            self._log_bytes -= _size(self._log.popleft())
        self._log.append(keys)
        self._log_bytes += _size(keys)
        while self._log and self.n_bytes > self._most_notes:
            self._log_bytes -= _size(self._log.popleft())

    def _look_up(self, keys: array[int]) -> None:
        data = keys.tobytes()
        for name, tree in self._shadows.items():
            found = self._sent(tree, data)
            self._hits[name] = self._hits[name] * self._fade + found

    def _sent(self, tree: Any, data: bytes) -> int:
        """Send a prompt to a shadow; return how many blocks it found."""
        match = tree.lookup(data)
        tree.extend(match.run, data[4 * match.n_blocks :], self._block_bytes)
        return int(match.n_blocks)

    def _begin(self) -> None:
        """Make the shadows, with the prompts up to now."""
        self._has_begun = True
        if len(self._experts) < 2 or self.make_tree is None:
            return
        for name, make in self._experts.items():
            # Nothing had to leave yet: smaller trees show who would have done well.
            self._hits[name] = 0.0
            for part in _TRIALS:
                tree = self.make_tree(1, make(), max_bytes=self._max_bytes // part)
                self._hits[name] += sum(self._sent(tree, keys.tobytes()) for keys in self._log)
        best = max(self._hits, key=self._hits.__getitem__)
        if self._hits[best] > (1 + self._margin) * self._hits[self._leader]:
            self._change(best)
        self._hits = dict.fromkeys(self._experts, 0.0)
        for name, make in self._experts.items():
            self._shadows[name] = self.make_tree(1, make(), max_bytes=self._max_bytes)
        while self._log:
            self._look_up(self._log.popleft())
        self._log_bytes = 0
        self._give_up()

    def _resize_shadows(self) -> None:
        """Give them what the real blocks have now, beside tails, checkpoints and accounts."""
        if self._is_full:
            for tree in self._shadows.values():
                if abs(tree.max_bytes - self._bytes) >= self._block_bytes:
                    tree.max_bytes = self._bytes
            self._is_full = False
        self._give_up()

    @property
    def _most_notes(self) -> float:
        return float("inf") if self.max_notes is None else self.max_notes

    def _give_up(self) -> None:
        while self._shadows and self.n_bytes > self._most_notes:
            last = min(
                (name for name in self._shadows if name != self._leader or len(self._shadows) < 2),
                key=self._hits.__getitem__,
            )
            del self._shadows[last], self._hits[last]

    @property
    def n_bytes(self) -> int:  # type: ignore[override]
        """What the shadows take, and what the expert that decides remembers."""
        shadows = (
            _RUN_BYTES * tree.n_runs + _BLOCK_BYTES * tree.n_blocks + tree.policy.n_bytes
            for tree in self._shadows.values()
        )
        taken: int = self._policy.n_bytes + self._log_bytes + sum(shadows)
        return taken

    # Who decides ----------------------------------------------------------------------------

    def _elect(self) -> None:
        hits = self._hits
        if not hits:
            return
        best = max(hits, key=hits.__getitem__)
        least = (1 + self._margin) * hits.get(self._leader, 0.0)
        if best != self._leader and hits[best] > least + 1:
            self._change(best)

    def _change(self, name: str) -> None:
        """Let another policy decide, which hears of all runs in the tree."""
        self._leader = name
        policy = self._policy = self._experts[name]()
        self.whole, self.declines = policy.whole, policy.declines
        policy.max_notes = self.max_notes
        policy.resize(self._max_bytes)
        if name in self._shadows:
            policy.learn_from(self._shadows[name].policy)
        runs = sorted(self._runs, key=lambda run: (run.last_use, -run.end))
        for run in runs:
            run.state, run.stamp = None, -1
        policy.adopt(runs)
        for run in runs:
            if run.is_evictable:
                policy.evictable(run)

    # What happens to runs -------------------------------------------------------------------

    def resize(self, max_bytes: int) -> None:
        """Learn the budget."""
        self._max_bytes = max_bytes
        self._policy.max_notes = self.max_notes
        self._policy.resize(max_bytes)

    def added(self, run: Run) -> None:
        """Pass it on."""
        self._runs[run] = None
        if not run.is_checkpoint:
            self._block_bytes = max(run.block_bytes, 1)
            self._bytes += run.n_bytes
        self._policy.added(run)
        if not run.is_checkpoint and (uses := self._known_uses(run)) > run.uses:
            run.uses = uses
            self._policy.remembered(run)

    def adopt(self, runs: Sequence[Run]) -> None:
        """Pass it on."""
        for run in runs:
            self._runs[run] = None
            if not run.is_checkpoint:
                self._block_bytes = max(run.block_bytes, 1)
                self._bytes += run.n_bytes
        self._policy.adopt(runs)

    def _known_uses(self, run: Run) -> int:
        """Return how often the leader's shadow saw a run used that comes back to the real tree.

        Without it what is new here would never get in where others were used often.
        """
        shadow = self._shadows.get(self._leader)
        if shadow is None:
            return 0
        for known, n_blocks in reversed(shadow.match(run.path_keys.tobytes()).parts()):
            if known.start <= run.start < known.start + n_blocks:
                return int(known.uses)
        return 0

    def used(self, run: Run) -> None:
        """Pass it on."""
        self._policy.used(run)

    def split(self, head: Run, tail: Run) -> None:
        """Pass it on."""
        self._runs[head] = None
        self._policy.split(head, tail)

    def removing(self, run: Run, n_blocks: int) -> None:
        """Pass it on."""
        if n_blocks == run.n_blocks:
            del self._runs[run]
        if not run.is_checkpoint:
            self._bytes -= n_blocks * run.block_bytes
        self._policy.removing(run, n_blocks)

    def evictable(self, run: Run) -> None:
        """Pass it on."""
        self._policy.evictable(run)

    def victim(self) -> Run | None:
        """Return what the policy chooses that decides now."""
        self._is_full = True
        if not self._has_begun:
            self._begin()
        return self._policy.victim()


def _size(keys: array[int]) -> int:
    return 96 + 4 * len(keys)
