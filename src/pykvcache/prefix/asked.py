"""A policy that is asked: until it has answered nobody changes what it is asked about."""

from __future__ import annotations

from pykvcache.errors import ReentryError
from pykvcache.prefix.policies import Policy
from pykvcache.prefix.runs import Run

__all__ = ["Asked"]


class Asked:
    """Call a policy's methods, which may be a user's; see `Policy` for each."""

    __slots__ = ("_policy", "is_busy")

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.is_busy = False

    def check(self) -> None:
        """Raise where a policy calls the cache that asks it: nothing has changed."""
        if self.is_busy:
            raise ReentryError("a policy called the cache in the middle of a call that asks it")

    def asked(self, tokens: bytes, step: int, start_key: int) -> None:
        """Tell of a prompt."""
        self.is_busy = True
        try:
            self._policy.asked(tokens, step, start_key)
        finally:
            self.is_busy = False

    def added(self, run: Run) -> None:
        """Tell of a new run."""
        self.is_busy = True
        try:
            self._policy.added(run)
        finally:
            self.is_busy = False

    def used(self, run: Run) -> None:
        """Tell of a use."""
        self.is_busy = True
        try:
            self._policy.used(run)
        finally:
            self.is_busy = False

    def split(self, head: Run, tail: Run) -> None:
        """Tell of a run that was cut."""
        self.is_busy = True
        try:
            self._policy.split(head, tail)
        finally:
            self.is_busy = False

    def removing(self, run: Run, n_blocks: int) -> None:
        """Tell of blocks that leave."""
        self.is_busy = True
        try:
            self._policy.removing(run, n_blocks)
        finally:
            self.is_busy = False

    def evictable(self, run: Run) -> None:
        """Tell of a run that may go."""
        self.is_busy = True
        try:
            self._policy.evictable(run)
        finally:
            self.is_busy = False

    def victim(self) -> Run | None:
        """Ask who goes first."""
        self.is_busy = True
        try:
            return self._policy.victim()
        finally:
            self.is_busy = False
