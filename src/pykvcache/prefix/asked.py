"""A policy that is asked: until it has answered nobody changes what it is asked about."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from pykvcache._integers import as_int
from pykvcache.errors import ArgumentError
from pykvcache.prefix.policies import Policy, make_policy
from pykvcache.prefix.roots import Roots
from pykvcache.prefix.runs import Run

__all__ = ["Asked", "PolicyMethods"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Asked:
    """Call methods of a policy, which may be a user's."""

    __slots__ = ("is_busy",)

    def __init__(self) -> None:
        self.is_busy = False

    def __call__(self, method: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Ask, or tell of something."""
        self.is_busy = True
        try:
            return method(*args, **kwargs)
        finally:
            self.is_busy = False


class PolicyMethods:
    """The policy of a tree, which a user may have written; part of `BlockTree`."""

    policy: Policy
    asked: Asked
    run_bytes: int
    _made_by: str | Policy
    _is_ours: bool
    _max_bytes: int
    _notes: int
    _roots: Roots

    def _set_policy(self, policy: str | Policy) -> None:
        self._made_by, self._is_ours = policy, isinstance(policy, str)
        self.policy = self._make_policy()
        #: Asks the policy: nothing may change until it has answered.
        self.asked = Asked()
        self._notes = 0

    def give_up_policy(self) -> None:
        """Go on with a plain one: that of the user has failed, and all is to be dropped."""
        self._made_by, self._is_ours = "lru", True

    def _make_policy(self) -> Policy:
        return make_policy(self._made_by)

    def _resize_policy(self) -> None:
        self.policy.max_notes = self._max_bytes // 16 if self.run_bytes else None
        self.asked(self.policy.resize, self._max_bytes)

    def renew_policy(self, runs: list[Run]) -> None:
        """Let the policy know these runs, and no others, after a call that was cut short.

        One that was named begins anew. What an object of the user's raises is not raised again.
        """
        self.policy = self._make_policy()
        for run in runs:
            run.state, run.stamp = None, -1
        with contextlib.suppress(Exception):
            self._resize_policy()
        with contextlib.suppress(Exception):
            self.asked(self.policy.adopt, sorted(runs, key=lambda run: (run.last_use, -run.end)))
        for run in runs:
            with contextlib.suppress(Exception):
                if run.is_evictable:
                    self.asked(self.policy.evictable, run)

    def _policy_bytes(self) -> int:
        """Return what the policy takes; while it is asked, what it said last."""
        if self._is_ours:
            return self.policy.n_bytes
        if not self.asked.is_busy:
            n_bytes = self.asked(getattr, self.policy, "n_bytes")
            self._notes = as_int(n_bytes, "n_bytes of the policy", 0)
        return self._notes

    def _most_blocks(self) -> int:
        """Return how many blocks of a victim may leave before the policy is asked again."""
        if self._is_ours:
            return self.policy.most_blocks
        most = self.asked(getattr, self.policy, "most_blocks")
        return as_int(most, "most_blocks of the policy", 1)

    def _check_own(self, run: Run) -> None:
        """Raise where a user's policy has chosen something else than a run of this tree."""
        if self._is_ours:
            return
        if not isinstance(run, Run):
            raise TypeError(f"victim of the policy must be a Run or None, not {type(run).__name__}")
        root = run.root
        is_here = root.namespace is not None and self._roots.get(root.namespace) is root
        if not is_here or not all(one.is_linked for one in run.path()):
            text = f"victim of the policy is {run}, which is not here"
            raise ArgumentError(text, "victim", repr(run))
