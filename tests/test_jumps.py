"""Ctrl-C at the end of a round of a loop leaves no lock taken (`support.jumps` says where)."""

from __future__ import annotations

import contextlib
import sys
import threading
from pathlib import Path
from textwrap import dedent, indent

import pytest

from support.interrupts import CtrlCAnywhere
from support.jumps import uncovered_jumps

PACKAGE = Path(__file__).parents[1] / "src" / "pykvcache"

# Each is the body of a function. CPython 3.13 loses a lock there, or what puts the flag down.
LOST = {
    "an if at the end": """
        with lock:
            for i in numbers:
                if i > 5:
                    call()
        """,
    "an else at the end": """
        with lock:
            for i in numbers:
                if i > 5:
                    call()
                elif i > 6:
                    call()
        """,
    "a condition": """
        with lock:
            while len(numbers):
                numbers.pop()
        """,
    "a condition, then a try": """
        with lock:
            while numbers:
                try:
                    numbers.pop()
                except IndexError:
                    call()
        """,
    "a comprehension": """
        with lock:
            return [i for i in numbers if i > 5]
        """,
    "two blocks": """
        with lock, contextlib.suppress(IndexError):
            for i in numbers:
                if i > 5:
                    call()
        """,
    "a block in a block": """
        with lock:
            try:
                for i in numbers:
                    if i > 5:
                        call()
            except ValueError:
                call()
        """,
    "finally": """
        flag[0] = 1
        try:
            for i in numbers:
                if i > 5:
                    call()
        finally:
            flag[0] = 0
        """,
    "what puts it right": """
        flag[0] = 1
        try:
            while numbers:
                numbers.pop()
            flag[0] = 0
        except BaseException:
            flag[0] = 0
            raise
        """,
    "a handler with a finally": """
        flag[0] = 1
        try:
            numbers.index(-1)
        except ValueError:
            while numbers:
                numbers.pop()
        finally:
            flag[0] = 0
        """,
    "yield": """
        def each():
            with lock:
                for i in numbers:
                    if i > 5:
                        yield i
        for i in each():
            call()
        """,
}
# And CPython 3.11 and 3.12.
LOST_BEFORE = {
    "continue, first in a try": """
        flag[0] = 1
        try:
            while numbers:
                numbers.pop()
                continue
        finally:
            flag[0] = 0
        """,
}
RIGHT = {
    "while True": """
        with lock:
            while True:
                if not numbers:
                    break
                if numbers.pop() > 5:
                    call()
        """,
    "a call": """
        def each():
            for i in numbers:
                if i > 5:
                    call()
        with lock:
            each()
        """,
    "a generator": """
        with lock:
            return list(i for i in numbers if i > 5)
        """,
    "a plain end": """
        with lock:
            for i in numbers:
                call()
        """,
    "a block in a loop": """
        for i in numbers:
            with lock:
                call()
            if i > 5:
                call()
        """,
    "a try in a loop": """
        for i in numbers:
            flag[0] = 1
            try:
                call()
            finally:
                flag[0] = 0
        """,
    "a handler that nothing needs": """
        try:
            for i in numbers:
                if i > 5:
                    call()
        except ValueError:
            call()
        """,
    "a function in a block": """
        with lock:
            def each():
                for i in numbers:
                    if i > 5:
                        call()
        each()
        """,
}


def program(body: str) -> str:
    return "def run(lock, numbers, flag, call):\n" + indent(dedent(body), "    ")


def found(body: str) -> list[str]:
    """Return the functions with such an end."""
    return [jump.function for jump in uncovered_jumps(program(body), "example.py")]


def lost(body: str) -> bool:
    """Press Ctrl-C at each place; return whether a lock stays taken, or a flag stays up."""
    names = {"contextlib": contextlib}
    exec(compile(program(body), "pykvcache/example.py", "exec"), names)

    def attempt(place: int) -> tuple[int, bool]:
        lock, flag = threading.Lock(), [0]
        interrupt = CtrlCAnywhere(place, ("/example.py",))
        interrupt.run(lambda: names["run"](lock, [1, 7, 2], flag, lambda: None))
        return interrupt.seen, lock.locked() or bool(flag[0])

    return any(attempt(place)[1] for place in range(1, attempt(0)[0] + 1))


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.relative_to(PACKAGE).as_posix()
)
def test_no_loop_ends_outside_of_the_block_around_it(path: Path) -> None:
    jumps = list(uncovered_jumps(path.read_text(encoding="utf-8"), str(path)))
    assert not jumps, "make it a function, which the block calls"


IS_313 = sys.version_info[:2] == (3, 13)
IS_BEFORE = (3, 11) <= sys.version_info[:2] <= (3, 12)


@pytest.mark.skipif(not IS_313, reason="CPython 3.13 compiles loops so")
@pytest.mark.parametrize("name", LOST)
def test_loops_that_end_outside_are_found(name: str) -> None:
    assert found(LOST[name])


@pytest.mark.skipif(not IS_BEFORE, reason="CPython 3.11 and 3.12 jump so")
@pytest.mark.parametrize("name", LOST_BEFORE)
def test_jumps_to_the_beginning_of_a_try_are_found(name: str) -> None:
    assert found(LOST_BEFORE[name])


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_not_found(name: str) -> None:
    assert not found(RIGHT[name])


# From 3.14 on a lock is taken by a call, after which Python looks for signals (its issue 148874).
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="every `with` can lose a lock in 3.14")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", LOST | LOST_BEFORE | RIGHT)
def test_what_is_found_is_what_a_signal_loses(name: str) -> None:
    body = (LOST | LOST_BEFORE | RIGHT)[name]
    assert lost(body) == bool(found(body))
