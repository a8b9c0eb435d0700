"""Facts that are computed when they are first asked for, and kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

__all__ = ["once"]

T = TypeVar("T")


class once(Generic[T]):  # as `property`
    """As `functools.cached_property`, without its lock.

    Up to Python 3.11 that is one for all objects, held while a value is computed: a child that is
    forked meanwhile would wait for it for ever. Of two threads here the first one's value is kept.
    """

    def __init__(self, method: Callable[[Any], T]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, thing: None, owner: type) -> once[T]: ...

    @overload
    def __get__(self, thing: object, owner: type) -> T: ...

    def __get__(self, thing: object | None, owner: type) -> once[T] | T:
        if thing is None:
            return self
        value: T = vars(thing).setdefault(self._name, self._method(thing))
        return value
