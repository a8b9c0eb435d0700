"""A policy that is asked: until it has answered nobody changes what it is asked about."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from pykvcache.prefix.policies import Policy, make_policy
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
    _max_bytes: int

    def _set_policy(self, policy: str | Policy) -> None:
        self._made_by = policy
        self.policy = self._make_policy()
        #: Asks the policy: nothing may change until it has answered.
        self.asked = Asked()

    def _make_policy(self) -> Policy:
        policy = make_policy(self._made_by)
        policy.make_tree = type(self)
        return policy

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
        """Return what the policy takes."""
        return self.policy.n_bytes
