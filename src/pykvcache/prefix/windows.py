"""Which window cells of a tree are of use: those of complete windows."""

from __future__ import annotations

import math

from pykvcache.prefix.node import MemoryShape, Node

__all__ = ["incomplete", "is_resumable"]


def is_resumable(shape: MemoryShape, node: Node) -> bool:
    """Return whether a prompt can go on from the end of a node."""
    return _goes_on(shape, node, _reach(shape, node))


def incomplete(shape: MemoryShape, top: Node) -> list[Node]:
    """Return the nodes, from one on, whose window cells are in no complete window; last first.

    A node whose window is not complete may still hold the beginning of one that follows.
    """
    before = math.inf if top.parent is None or top.parent.is_root else _reach(shape, top.parent)
    waiting, found, connected = [(top, before)], list[Node](), set[Node]()
    while waiting:
        node, reach = waiting.pop()
        one = node.window
        n = 0 if one is None else one.n_tokens
        is_full = one is not None and n == node.n_tokens
        reach = reach + n if is_full else n
        if _goes_on(shape, node, reach):
            # So can whatever follows it.
            connected |= {node} if is_full else set()
            continue
        found.append(node)
        followers = (child for child in node.children.values() if child.window is not None)
        waiting.extend((child, reach) for child in followers)
    useless = list[Node]()
    for node in reversed(found):
        if connected.isdisjoint(node.children.values()):
            useless.append(node)
        elif node.window is not None and node.window.n_tokens == node.n_tokens:
            connected.add(node)
    return useless


def _goes_on(shape: MemoryShape, node: Node, reach: float) -> bool:
    """Return whether a prompt can go on from a node before whose end so many window cells are."""
    if shape.needs_state and (node.state is None or not node.state.chunks[0].has_state):
        return False
    return shape.window_start is None or node.end - shape.window_start(node.end) <= reach


def _reach(shape: MemoryShape, node: Node) -> float:
    """Return how many tokens up to the end of a node have window cells without a gap."""
    start, end, n = shape.window_start, node.end, 0
    for each in node.path():
        one = each.window
        if one is None or start is None:
            return n
        n += one.n_tokens
        if one.n_tokens < each.n_tokens or n > end - start(end):
            return n
    return math.inf
