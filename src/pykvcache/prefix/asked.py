"""A policy that is asked: until it has answered nobody changes what it is asked about."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from pykvcache.errors import ReentryError

__all__ = ["Asked"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Asked:
    """Call methods of a policy, which may be a user's."""

    __slots__ = ("is_busy",)

    def __init__(self) -> None:
        self.is_busy = False

    def check(self) -> None:
        """Raise where a policy calls the cache that asks it: nothing has changed."""
        if self.is_busy:
            raise ReentryError("a policy called the cache in the middle of a call that asks it")

    def __call__(self, method: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Ask, or tell of something."""
        self.is_busy = True
        try:
            return method(*args, **kwargs)
        finally:
            self.is_busy = False
