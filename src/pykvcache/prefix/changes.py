"""Changes of what a cache keeps: each is made whole, or what is left of it is put right."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar, cast

from pykvcache.errors import ReentryError

__all__ = ["Changing", "change"]


class Changing:
    """What is changed in calls that may end anywhere: by Ctrl-C, or by what a policy raises.

    The next call finds out, and lets `_repair` put right what is left. What others are to hear of
    a change waits until it is whole, and is said again where saying it was cut short.
    """

    def __init__(self) -> None:
        self._is_whole = True
        self._is_changing = self._is_telling = False
        self._untold: deque[Callable[[], object]] = deque()

    @property
    def is_busy(self) -> bool:
        """Whether somebody is in the middle of a change."""
        return self._is_changing

    def need_quiet(self) -> None:
        """Raise where a policy calls the cache that asks it."""
        if self.is_busy:
            raise ReentryError("a policy called the cache in the middle of a call that asks it")

    def check(self) -> None:
        """Raise where a policy calls the cache that asks it; put right what was cut short."""
        self.need_quiet()
        if not self._is_whole:
            self._is_changing = True
            try:
                self._repair()
            finally:
                self._is_changing = False
            self._is_whole = True
        self._tell()

    def _repair(self) -> None:
        raise NotImplementedError

    def _told(self) -> None:
        """Go on after everything was said: perhaps with another change."""

    def _tell(self) -> None:
        """Say what was changed. Who hears of it may call the cache: nothing is being changed."""
        if self._is_telling or not self._untold:
            return
        self._is_telling = True
        try:
            # A call: Ctrl-C at the end of a loop may pass its `try` by (tests/support/jumps.py).
            self._tell_all()
        finally:
            self._is_telling = False

    def _tell_all(self) -> None:
        while self._untold:
            self._untold[0]()
            self._untold.popleft()
            if not self._untold:
                self._told()


_Method = TypeVar("_Method", bound=Callable[..., Any])


def change(method: _Method) -> _Method:
    """Make a method of `Changing` one change; it calls no other."""

    @functools.wraps(method)
    def changed(self: Changing, *args: Any, **kwargs: Any) -> Any:
        if self.is_busy or self._untold or not self._is_whole:
            self.check()
        self._is_whole, self._is_changing = False, True
        try:
            result = method(self, *args, **kwargs)
        finally:
            self._is_changing = False
        self._is_whole = True
        if self._untold:
            self._tell()
        return result

    return cast("_Method", changed)
