"""From a template's text to code that counts its steps and asks before it computes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.parser import Parser

from pykvcache._jinja.budget import MAX_DEPTH, Exhausted

__all__ = ["MAX_SOURCE", "ChatGenerator", "ChatParser", "count_steps"]

MAX_SOURCE = 1 << 17
"""Characters of a template; the largest that comes with llama.cpp has 17,000."""

MAX_NODES = 30_000
"""Expressions and statements of a template; the largest that comes with llama.cpp has 1,300."""

_PARSE_DEPTH = 3 * MAX_DEPTH  # of calls of the methods below: three for a pair of parentheses
_TREE_DEPTH = 2 * MAX_DEPTH

# What a statement runs under a count of its own.
_BODIES: dict[type[nodes.Node], tuple[str, ...]] = {
    nodes.Block: ("body",),
    nodes.CallBlock: ("body",),
    nodes.For: ("body", "else_"),
    nodes.If: ("body", "else_"),
    nodes.Macro: ("body",),
}

# Bytes that a node leaves in memory when it runs, at most; those of a list's items come on top.
_SIZES: dict[type[nodes.Node], int] = {
    nodes.CallBlock: 1500,
    nodes.Dict: 240,
    nodes.For: 500,
    nodes.Getattr: 64,
    nodes.List: 64,
    nodes.Macro: 1500,
    nodes.Pair: 160,
    nodes.Tuple: 64,
}


class ChatParser(Parser):
    """Jinja's parser, which ends where expressions or blocks are nested too deep."""

    _nested = 0

    def _enter(self) -> None:
        self._nested += 1
        if self._nested > _PARSE_DEPTH:
            raise Exhausted(f"its text is nested deeper than {MAX_DEPTH}", MAX_DEPTH)

    def parse_statement(self) -> nodes.Node | list[nodes.Node]:
        """Parse a block, with those in it."""
        self._enter()
        try:
            return super().parse_statement()
        finally:
            self._nested -= 1

    def parse_condexpr(self) -> nodes.Expr:
        """Parse an expression, with those in parentheses in it."""
        self._enter()
        try:
            return super().parse_condexpr()
        finally:
            self._nested -= 1

    def parse_not(self) -> nodes.Expr:
        """Parse ``not``, any number of them."""
        self._enter()
        try:
            return super().parse_not()
        finally:
            self._nested -= 1

    def parse_unary(self, with_filter: bool = True) -> nodes.Expr:
        """Parse signs, any number of them."""
        self._enter()
        try:
            return super().parse_unary(with_filter)
        finally:
            self._nested -= 1


def check_tree(tree: nodes.Template) -> None:
    """Refuse a tree that is too large, or too deep for compilers that recurse."""
    n = 0
    found: list[tuple[nodes.Node, int]] = [(tree, 1)]
    while found:
        node, depth = found.pop()
        n += 1
        if n > MAX_NODES:
            raise Exhausted(f"its text has more than {MAX_NODES} parts", MAX_NODES)
        if depth > _TREE_DEPTH:
            raise Exhausted(f"its text is nested deeper than {_TREE_DEPTH}", _TREE_DEPTH)
        # For Python each elif is inside the one before.
        chain = node.elif_ if isinstance(node, nodes.If) else []
        found += [(one, depth + 1 + k) for k, one in enumerate(chain)]
        found += [(one, depth + 1) for one in node.iter_child_nodes(exclude=("elif_",))]


def _cost(found: Iterable[nodes.Node]) -> tuple[int, int]:
    """Return steps and bytes of nodes, without the bodies that count for themselves."""
    steps = size = 0
    for node in found:
        steps += 1
        size += _SIZES.get(type(node), 0)
        if isinstance(node, (nodes.List, nodes.Tuple)):
            size += 64 * len(node.items)
        elif isinstance(node, nodes.Output):
            size += 16 * len(node.nodes)
        below = _cost(node.iter_child_nodes(exclude=_BODIES.get(type(node), ())))
        steps, size = steps + below[0], size + below[1]
    return steps, size


def _step(steps: int, size: int, line: int) -> nodes.Expr:
    """Return ``environment.step(steps, size)``."""
    numbers: list[nodes.Expr] = [nodes.Const(steps), nodes.Const(size)]
    function = nodes.EnvironmentAttribute("step", lineno=line)
    return nodes.Call(function, numbers, [], None, None, lineno=line)


def count_steps(tree: nodes.Template) -> None:
    """Put a count of what it takes in front of everything that runs more or less than once."""
    check_tree(tree)
    for kind, bodies in _BODIES.items():
        for node in list(tree.find_all(kind)):
            for name in bodies:
                _count_body(getattr(node, name), node.lineno, is_run=name == "body")
            if isinstance(node, nodes.For) and node.test is not None:
                count = nodes.Not(_step(*_cost([node.test]), node.lineno), lineno=node.lineno)
                node.test = nodes.And(count, node.test, lineno=node.lineno)
    _count_body(tree.body, 1, is_run=True)


def _count_body(body: list[nodes.Node], line: int, *, is_run: bool) -> None:
    """Count a body, an empty one too, but not an ``else`` that is missing."""
    if body or is_run:
        steps, size = _cost(body)
        body.insert(0, nodes.ExprStmt(_step(1 + steps, size, line), lineno=line))


class ChatGenerator(CodeGenerator):
    """Jinja's code generator; what works on values goes through `ChatEnvironment`.

    Operators and calls go there already, since it is a sandbox.
    """

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible  # it would be computed here, without a budget
        return super()._output_child_to_const(node, frame, finalize)

    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:
        """Write a call; that of a count without a detour."""
        if isinstance(node.node, nodes.EnvironmentAttribute):
            steps, size = (arg.as_const() for arg in node.args)
            self.write(f"environment.{node.node.name}({steps}, {size})")
        else:
            super().visit_Call(node, frame, forward_caller=forward_caller)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """Write ``a ~ b``."""
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        """Write a comparison, or a chain of them."""
        one = len(node.ops) == 1
        self.write("environment.compare(" if one else "environment.compare_chain(")
        self.visit(node.expr, frame)
        for operand in node.ops:
            self.write(f", {operand.op!r}, " if one else f", ({operand.op!r}, lambda: ")
            self.visit(operand.expr, frame)
            self.write("" if one else ")")
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        """Write a mapping, with its keys charged before they are hashed."""
        self.write("{")
        for pair in node.items:
            self.write("environment.hashed(")
            self.visit(pair.key, frame)
            self.write("): ")
            self.visit(pair.value, frame)
            self.write(", ")
        self.write("}")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        """Write ``a[b]``; a part of a text or a list is charged."""
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.sliced(")
        self.visit(node.node, frame)
        for bound in (node.arg.start, node.arg.stop, node.arg.step):
            self.write(", ")
            if bound is None:
                self.write("None")
            else:
                self.visit(bound, frame)
        self.write(")")
