"""The default policy: several vote, those more that would have found more lately."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from pykvcache._native.shadows import Shadow, block_keys
from pykvcache.prefix.policies.base import Policy
from pykvcache.prefix.policies.votes import Votes
from pykvcache.prefix.runs import Run

__all__ = ["Adaptive"]

#: What a shadow costs at least, and a block of it with its run: `Shadow.memory`.
_SHADOW_BYTES, _BLOCK_BYTES = 200_000, 300

#: What parts of the budget the experts are tried with before it is full.
_TRIALS = (2, 4)


class Adaptive(Policy):
    """Keep what those of several policies would keep that would have found most lately.

    Each of them, an expert, has a shadow: a small tree without keys and values, that is sent the
    same prompts and evicts as that expert would in the whole budget. What the
    shadows find is counted, old prompts less than new ones. Each shadow votes for the blocks that
    it holds, and the block with the fewest votes leaves first. A vote weighs less the less its
    shadow has found: where one is far ahead the tree becomes what that shadow is, and where
    several are close it keeps what most of them agree about, so that little is lost when another
    one comes to the front.

    Checkpoints are in no shadow. Once there was one, the expert that found most decides alone, and
    the next one takes over when it has found a little more.

    Shadows begin when the first block has to leave; until then there is nothing to decide. They
    get a 16th of the budget at most: where that is too little, experts that found least are given
    up, one after the other.

    Parameters
    ----------
    experts
        What makes each, by a name that `Shadow` knows; the first decides while nothing is known.
    half_life
        After how many prompts a hit counts half.
    margin
        By what share more another one must have found to take over where one decides alone.
    spread
        By what share less a shadow has found whose vote weighs 1/e of that of the best.
    """

    def __init__(
        self,
        experts: Mapping[str, Callable[[], Policy]],
        *,
        half_life: float = 1000.0,
        margin: float = 0.005,
        spread: float = 0.02,
    ) -> None:
        self._experts = dict(experts)
        self._margin, self._spread = margin, spread
        self._fade = 0.5 ** (1 / half_life)
        self._max_bytes = 0
        self._forget_all()

    def _forget_all(self) -> None:
        self._leader = next(iter(self._experts))
        self._policy = self._experts[self._leader]()
        self.whole, self.declines = self._policy.whole, self._policy.declines
        self.most_blocks = Policy.most_blocks
        self._shadows: dict[str, Shadow] = {}
        self._shadow_bytes = 0
        # None until there are shadows, and where one decides alone.
        self._votes: Votes | None = None
        self._had_checkpoints = False
        self._hits: dict[str, float] = {}
        self._runs: dict[Run, None] = {}
        # Prompts before the first eviction: what the shadows begin with.
        self._log: deque[bytes] = deque(maxlen=1000)
        self._log_bytes = self._bytes = 0
        self._block_bytes = 1
        self._is_full = self._has_begun = False

    @property
    def leader(self) -> str:
        """The name of the policy whose vote weighs most, or that decides alone."""
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
        self._weigh()

    def _note(self, keys: bytes) -> None:
        if len(self._log) == self._log.maxlen:
            self._log_bytes -= _size(self._log.popleft())
        self._log.append(keys)
        self._log_bytes += _size(keys)
        while self._log and self.n_bytes > self._most_notes:
            self._log_bytes -= _size(self._log.popleft())

    def _look_up(self, keys: bytes) -> None:
        if self._votes is not None:
            self._votes.sent(keys)
        for i, name in enumerate(self._experts):
            if (shadow := self._shadows.get(name)) is not None:
                found = shadow.send(keys, self._block_bytes)
                self._hits[name] = self._hits[name] * self._fade + found
                self._hear(i, shadow)
        self._count_shadows()

    def _hear(self, i: int, shadow: Shadow) -> None:
        """Let the votes know what a shadow let go in the last call."""
        if self._votes is not None:
            self._votes.hear(1 << i, shadow)

    def _count_shadows(self) -> None:
        """Note what the shadows take: it is asked for far more often than it changes."""
        self._shadow_bytes = sum([shadow.memory for shadow in self._shadows.values()])

    def _begin(self) -> None:
        """Make the shadows, with the prompts up to now."""
        self._has_begun = True
        if len(self._experts) < 2:
            return
        self._try_experts()
        votes = Votes(len(self._experts), self._runs)
        for name in self._experts:
            self._shadows[name] = Shadow(name, self._max_bytes)
        self._count_shadows()
        self._give_up()
        if len(self._shadows) > 1 and not self._had_checkpoints:
            self._begin_votes(votes)
        while self._log:
            keys = self._log.popleft()
            self._log_bytes -= _size(keys)
            self._look_up(keys)
            self._give_up()
        self._weigh()
        if self._votes is not None:
            for run in self._runs:
                votes.evictable(run)

    def _try_experts(self) -> None:
        """Let the expert lead that would have found most in smaller trees: nothing left yet."""
        # Each may take what notes may, at most a run for each block.
        room = (self._most_notes - _SHADOW_BYTES) / _BLOCK_BYTES * self._block_bytes
        for name in self._experts:
            found = 0
            for part in _TRIALS:
                shadow = Shadow(name, int(max(0, min(self._max_bytes // part, room))))
                found += sum(shadow.send(keys, self._block_bytes) for keys in self._log)
            self._hits[name] = found / len(_TRIALS)
        best = max(self._hits, key=self._hits.__getitem__)
        if self._hits[best] > (1 + self._margin) * self._hits[self._leader]:
            self._change(best)

    def _begin_votes(self, votes: Votes) -> None:
        """Let the shadows vote from now on."""
        self._votes, self._policy = votes, Policy()
        self.whole, self.declines = False, True
        # What no prompt had.
        rest = {}
        for run in sorted(self._runs, key=lambda run: (run.last_use, run.start)):
            votes.added(run)
            rest[run.state[-4:]] = run
        for keys in self._log:
            for at in range(0, len(keys), 4):
                rest.pop(keys[at : at + 4], None)
        for run in rest.values():
            self._show(run)
            self._give_up()

    def _show(self, run: Run) -> None:
        """Put what no prompt had into the shadows: an answer, say."""
        keys = run.path_keys
        if self._votes is not None:
            self._votes.sent(keys)
        for i, name in enumerate(self._experts):
            if (shadow := self._shadows.get(name)) is not None:
                shadow.insert(keys, self._block_bytes)
                self._hear(i, shadow)
        self._count_shadows()

    def _resize_shadows(self) -> None:
        """Give them what the real blocks have now, beside tails, checkpoints and accounts."""
        if self._is_full:
            for i, name in enumerate(self._experts):
                shadow = self._shadows.get(name)
                if shadow and abs(shadow.max_bytes - self._bytes) >= self._block_bytes:
                    shadow.max_bytes = self._bytes
                    self._hear(i, shadow)
            self._count_shadows()
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
            self._count_shadows()
            if self._votes is not None:
                self._votes.drop(1 << [*self._experts].index(last))
            if len(self._shadows) == 1:
                self._end_votes()

    @property
    def n_bytes(self) -> int:  # type: ignore[override]
        """What the shadows take, and what the expert that decides remembers."""
        own = self._policy.n_bytes if self._votes is None else self._votes.n_bytes
        return own + self._log_bytes + self._shadow_bytes

    # Who decides ----------------------------------------------------------------------------

    def _elect(self) -> None:
        hits = self._hits
        if not hits:
            return
        best = max(hits, key=hits.__getitem__)
        least = (1 + self._margin) * hits.get(self._leader, 0.0)
        if best != self._leader and hits[best] > least + 1:
            self._change(best)

    def _weigh(self) -> None:
        """Give each shadow's votes a weight by what it found."""
        if self._votes is None:
            return
        most = max(self._hits.values())
        scale = self._spread * most + 1
        self._votes.weigh(
            [
                math.exp((self._hits[name] - most) / scale) if name in self._hits else 0.0
                for name in self._experts
            ]
        )

    def _end_votes(self) -> None:
        """Let the leader decide alone from now on."""
        if self._votes is not None:
            self._votes, self.most_blocks = None, Policy.most_blocks
            self._change(self._leader)

    def _change(self, name: str) -> None:
        """Let another policy lead; where it decides alone it hears of all runs in the tree."""
        self._leader = name
        if self._votes is not None:
            return
        policy = self._policy = self._experts[name]()
        self.whole, self.declines = policy.whole, policy.declines
        policy.max_notes = self.max_notes
        policy.resize(self._max_bytes)
        if name in self._shadows:
            policy.learn_from(self._shadows[name])
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
        self._note_run(run)
        if self._votes is not None:
            if run.is_checkpoint:
                self._end_votes()
                return
            self._votes.added(run)
            if not self._votes.knows(run):
                self._show(run)
            return
        self._policy.added(run)
        if not run.is_checkpoint and (uses := self._known_uses(run)) > run.uses:
            run.uses = uses
            self._policy.remembered(run)

    def adopt(self, runs: Sequence[Run]) -> None:
        """Begin anew: of what was noted before nothing may be true any more."""
        self._forget_all()
        self.resize(self._max_bytes)
        for run in runs:
            self._note_run(run)
        self._policy.adopt(runs)

    def _note_run(self, run: Run) -> None:
        self._runs[run] = None
        if run.is_checkpoint:
            self._had_checkpoints = True
        else:
            self._block_bytes = max(run.block_bytes, 1)
            self._bytes += run.n_bytes

    @property
    def _decides(self) -> Votes | Policy:
        return self._policy if self._votes is None else self._votes

    def _known_uses(self, run: Run) -> int:
        """Return how often the leader's shadow saw a run used that comes back to the real tree.

        Without it what is new here would never get in where others were used often.
        """
        shadow = self._shadows.get(self._leader)
        return 0 if shadow is None else shadow.uses_at(run.path_keys, run.start)

    def used(self, run: Run) -> None:
        """Pass it on."""
        self._decides.used(run)

    def split(self, head: Run, tail: Run) -> None:
        """Pass it on."""
        self._runs[head] = None
        self._decides.split(head, tail)

    def removing(self, run: Run, n_blocks: int) -> None:
        """Pass it on."""
        if n_blocks == run.n_blocks:
            del self._runs[run]
        if not run.is_checkpoint:
            self._bytes -= n_blocks * run.block_bytes
        self._decides.removing(run, n_blocks)

    def evictable(self, run: Run) -> None:
        """Pass it on."""
        self._decides.evictable(run)

    def victim(self) -> Run | None:
        """Return what has the fewest votes, or what the policy chooses that decides alone."""
        self._is_full = True
        if not self._has_begun:
            self._begin()
        if self._votes is None:
            return self._policy.victim()
        run, self.most_blocks = self._votes.least()
        return run


def _size(keys: bytes) -> int:
    return 48 + len(keys)
