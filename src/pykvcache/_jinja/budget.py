"""How much a template may do: steps, bytes at a time, and how deep it may be nested."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from operator import length_hint
from sys import getrefcount
from typing import NamedTuple

from jinja2.utils import Namespace

__all__ = ["MAX_DEPTH", "VIEWS", "Budget", "Exhausted", "Extent", "Items"]

MAX_DEPTH = 100
"""Of macros that call each other, and of lists in lists."""

MAX_BITS = 1 << 14
"""Of an integer: beyond what Python reads or writes in decimal (4300 digits)."""

_LARGE = 1024  # bytes of a value from which on it is looked at whether it is still there
_FIRST_LOOK = 1 << 24

_EMPTY: dict[str, None] = {}
VIEWS = (type(_EMPTY.keys()), type(_EMPTY.values()), type(_EMPTY.items()))


class Exhausted(Exception):
    """The template exceeds a bound. Not a ValueError, because filters catch those."""

    def __init__(self, message: str, limit: int) -> None:
        super().__init__(message)
        self.limit = limit


class Extent(NamedTuple):
    """What a walk over a value has counted."""

    size: int
    """At least the bytes of the value's text."""
    nodes: int
    depth: int


class Items:
    """An iterator over a list, for filters that give generators: no length, true, read once.

    Generators over generators would be as deep as a loop makes them, and freed recursively. What
    ends the values early is raised where a generator would raise it: after those before it.
    """

    def __init__(self, values: object) -> None:
        self._values: list[object] = []
        self._failure: Exception | None = None
        try:
            self._values.extend(values)  # type: ignore[arg-type]
        except (Exhausted, MemoryError, RecursionError):
            raise
        except Exception as error:  # of a filter or a test
            self._failure = error.with_traceback(None)
        self._values.reverse()

    def __iter__(self) -> Items:
        return self

    def __next__(self) -> object:
        if self._values:
            return self._values.pop()
        failure, self._failure = self._failure, None
        raise failure or StopIteration

    def __length_hint__(self) -> int:
        return len(self._values)

    def __sizeof__(self) -> int:
        return 64 + self._values.__sizeof__()

    def rest(self) -> list[object]:
        """Return what was not read yet, last first."""
        return self._values


def inside(value: object) -> Iterator[object] | None:
    """Return what a value shows of others when it is written, compared or hashed."""
    if isinstance(value, (list, tuple, set, frozenset, *VIEWS)):
        return iter(value)
    if isinstance(value, dict):
        return chain.from_iterable(value.items())
    if isinstance(value, Items):
        return iter(value.rest())
    if isinstance(value, Namespace):
        attributes: dict[str, object] = Namespace.__getattribute__(value, "_Namespace__attrs")
        return iter(attributes.values())
    return None


class Budget:
    """Counts what a template does; every charge is made before the work that it stands for.

    What was made is held here until a look finds that nothing else holds it: templates that write a
    long text anew with every message make much, and keep little.

    Parameters
    ----------
    steps
        Evaluations of a node of the template, and other work of about 0.1 to 1 microseconds.
    size
        Bytes at a time.
    """

    def __init__(self, steps: int, size: int) -> None:
        self.max_steps, self.max_size = steps, size
        self.scale = 1  # of what is made from text that is marked as safe: it may be escaped
        self._steps = steps
        self._held = self._depth = 0
        self._next_look = _FIRST_LOOK
        self._large: dict[int, tuple[object, int]] = {}

    def step(self, steps: int, size: int = 0) -> None:
        """Charge steps, and bytes of small things that may be kept."""
        self._steps -= steps
        if self._steps < 0:
            raise Exhausted(f"it takes more than {self.max_steps} steps", self.max_steps)
        if size:
            self._hold(size)

    def _hold(self, size: int) -> None:
        self._held += size
        if self._held > self._next_look:
            self._look()
            self._check(0)

    def _check(self, size: int) -> None:
        if self._held + size > self.max_size:
            raise Exhausted(f"it needs more than {self.max_size} bytes", self.max_size)

    def _look(self) -> None:
        """Release what nothing else refers to, newest first: lists before their items."""
        large, self._large = self._large, {}
        self.step(len(large) >> 2)
        kept = []
        while large:
            key, (value, size) = large.popitem()
            if getrefcount(value) > 2:
                kept.append((key, (value, size)))
            else:
                self._held -= size
        self._large = dict(reversed(kept))
        self._next_look = self._held + max(self._held, _FIRST_LOOK)

    def make(self, size: int) -> None:
        """Charge the writing of so many bytes at most, and see that there is room."""
        size *= self.scale
        self.step(size >> 10)
        if self._held + size > self.max_size:
            self._look()
            self._check(size)

    def made(self, value: object, extra: int = 0) -> object:
        """Hold what an operation gave, with what is new in it, and return it."""
        if isinstance(value, (str, list, tuple, dict, Items)):
            size = value.__sizeof__() + extra
            if size < _LARGE:
                self._hold(size)
            elif id(value) not in self._large:
                self._large[id(value)] = value, size
                self._hold(size)
        elif isinstance(value, int):
            self.integer(value.bit_length())
            self._hold(32)
        else:
            self._hold(64)
        return value

    def read(self, text: str, needle: str = "") -> None:
        """Charge a pass over a text, which looks for another."""
        self.step(1 + (len(text) * (16 + min(len(needle), 128)) >> 14))

    def scan(self, text: str) -> None:
        """Charge a look at each character by itself: ten times as long as the pass of `read`."""
        self.step(1 + (len(text) >> 7))

    def close(self) -> None:
        """Release everything, also inside reference cycles that are collected later."""
        self._large.clear()

    def enter(self) -> None:
        """Count a call that may lead to another; `leave` ends it."""
        if self._depth >= MAX_DEPTH:
            raise Exhausted(f"its calls are nested deeper than {MAX_DEPTH}", MAX_DEPTH)
        self._depth += 1

    def leave(self) -> None:
        """End what `enter` began."""
        self._depth -= 1

    def integer(self, bits: int) -> None:
        """Refuse an integer of so many bits."""
        if bits > MAX_BITS:
            raise Exhausted(f"it makes an integer of more than {MAX_BITS} bits", MAX_BITS)

    def walk(self, value: object) -> Extent:
        """Charge a step for everything that a value holds, as often as it holds it.

        A list that holds a list twice, and so on, is as large as its text, not as its memory; and
        Python compares and hashes deep values without a look at the stack.
        """
        if value is None or type(value) is bool or type(value) is float:
            return Extent(32, 1, 0)
        size = nodes = paid = deepest = 0
        stack: list[Iterator[object]] = [iter((value,))]
        while stack:
            for item in stack[-1]:
                nodes += 1
                if nodes - paid > 256:
                    self.step(nodes - paid)
                    paid = nodes
                if isinstance(item, str):
                    size += 10 * len(item) + 6  # every character as \U0001f600
                    continue
                if isinstance(item, int):
                    bits = item.bit_length()
                    self.integer(bits)
                    self.step(bits * bits >> 17)  # what writing it takes
                size += 32 if not isinstance(item, int) else 6 + item.bit_length()
                below = inside(item)
                if below is not None:
                    if len(stack) > MAX_DEPTH:
                        raise Exhausted(f"its values are nested deeper than {MAX_DEPTH}", MAX_DEPTH)
                    stack.append(below)
                    deepest = max(deepest, len(stack))
                    break
            else:
                stack.pop()
        self.step(nodes - paid + (size >> 10))
        return Extent(size, nodes, deepest)

    def key(self, value: object) -> None:
        """Charge the hash of a value."""
        if type(value) is not str:
            self.walk(value)

    def text(self, value: object) -> str:
        """Return a value as text."""
        if type(value) is str:
            return value
        self.make(value.__sizeof__() if isinstance(value, str) else self.walk(value).size)
        text = str(value)
        self.made(text)
        return text

    def joined(self, pieces: Sequence[str], between: str = "") -> str:
        """Return texts as one."""
        size = sum(map(len, pieces)) + len(between) * len(pieces)
        is_narrow = between.isascii() and all(map(str.isascii, pieces))
        self.step(1 + (len(pieces) >> 3))
        self.make(64 + size * (1 if is_narrow else 4))
        text = between.join(pieces)
        self.made(text)
        return text

    def listed(self, value: object, steps: int = 1) -> list[object]:
        """Charge and return what an iteration over a value gives."""
        new = self._iterate(value, steps)
        found: list[object] = list(value)  # type: ignore[call-overload]
        self.made(found, new)
        return found

    def begun(self, value: object, steps: int) -> Items:
        """Charge what an iteration over a value gives, and return it up to where it fails."""
        new = self._iterate(value, steps)
        found = Items(value)
        self.made(found, new)
        return found

    def _iterate(self, value: object, steps: int) -> int:
        """Charge an iteration, and return how many bytes of it are new."""
        length = length_hint(value)
        each = 64 if isinstance(value, (str, range)) else 0
        self.step(1 + steps * length)
        self.make(64 + (8 + each) * length)
        return each * length
