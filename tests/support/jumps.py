"""Loops that Ctrl-C leaves without the `finally`, or the end of the `with`, around them.

Python looks for signals as a loop jumps back. It finds out by the number of an instruction which
`with` and `try` are around it: in CPython 3.13 by that of the jump, which the compiler leaves
outside of all where it made two instructions of a condition (`while` with a condition, an `if` that
ends a round; CPython's issue 130279). CPython 3.11 and 3.12 have jumped already, and take that of
the instruction before the place where they are. 3.10 keeps account while it runs, and is right.
"""

from __future__ import annotations

import ast
import dis
import sys
from collections.abc import Iterator
from types import CodeType
from typing import NamedTuple

__all__ = ["Jump", "uncovered_jumps"]

_HAS_JUMPED = sys.version_info < (3, 13)


class Jump(NamedTuple):
    """The end of a round: in which function, and where it jumps to."""

    function: str
    line: int


class _Guarded(NamedTuple):
    """The body of a `with`, or of a `try` that does something whatever ends it."""

    statement: int  # its line
    begin: tuple[int, int]
    end: tuple[int, int]


def uncovered_jumps(source: str, name: str) -> Iterator[Jump]:
    """Yield where a signal leaves a block without what ends it, on the Python that runs this."""
    if sys.version_info < (3, 11):
        return
    guarded = list(_guarded(ast.parse(source)))
    waiting = [compile(source, name, "exec")]
    while waiting:
        code = waiting.pop()
        waiting += [one for one in code.co_consts if isinstance(one, CodeType)]
        # A block around the whole function began before it.
        blocks = [block for block in guarded if block.statement > code.co_firstlineno]
        yield from _jumps(code, blocks)


def _jumps(code: CodeType, blocks: list[_Guarded]) -> Iterator[Jump]:
    entries = dis._parse_exception_table(code)  # type: ignore[attr-defined]
    instructions = {one.offset: one for one in dis.get_instructions(code)}

    def is_covered(offset: int) -> bool:
        return any(entry.start <= offset < entry.end for entry in entries)

    for at, jump in instructions.items():
        if "JUMP_BACKWARD" not in jump.opname or jump.opname.endswith("_NO_INTERRUPT"):
            continue
        head = instructions[jump.argval]
        line, column = head.positions.lineno, head.positions.col_offset  # type: ignore[attr-defined]
        if line is None or is_covered(head.offset - 2 if _HAS_JUMPED else at):
            continue
        if is_covered(at) or any(block.begin <= (line, column) < block.end for block in blocks):
            yield Jump(code.co_name, line)


def _guarded(tree: ast.AST) -> Iterator[_Guarded]:
    for node in ast.walk(tree):
        if isinstance(node, ast.With | ast.AsyncWith):
            bodies = [node.body]
        elif isinstance(node, ast.Try) and node.finalbody:
            bodies = [node.body, *(handler.body for handler in node.handlers), node.orelse]
        elif isinstance(node, ast.Try) and any(map(_takes_all, node.handlers)):
            bodies = [node.body]
        else:
            continue
        for body in filter(None, bodies):
            end = body[-1].end_lineno or 0, body[-1].end_col_offset or 0
            yield _Guarded(node.lineno, (body[0].lineno, body[0].col_offset), end)


def _takes_all(handler: ast.ExceptHandler) -> bool:
    names = ast.unparse(handler.type) if handler.type else "BaseException"
    return "BaseException" in names or "KeyboardInterrupt" in names
