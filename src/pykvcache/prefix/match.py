"""What a lookup in the tree finds, and how much of it can be resumed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pykvcache._ranges import Range
from pykvcache.prefix.block_hash import TOKEN_SIZE
from pykvcache.prefix.node import Component, EndState, Kind, Node

__all__ = ["Chunk", "Match", "Resume"]

#: Cells, how many tokens they are of, and how many of these count.
Chunk = tuple[Any, int, int]


@dataclass(slots=True)
class Match:
    """The longest known beginning of some tokens: n tokens, and the node that they end in.

    The node is the root where nothing is known.
    """

    node: Node
    n: int

    @property
    def is_whole(self) -> bool:
        """Whether it ends where its node does."""
        return self.n == self.node.end

    def nodes(self) -> list[Node]:
        """Return the nodes on the way, the first first."""
        return self.node.path()[::-1]

    def next_token(self) -> int | None:
        """Return a token that follows it in the tree, the most recent one; None at an end."""
        node, at = self.node, (self.n - self.node.start) * TOKEN_SIZE
        if self.n == node.end:
            latest, at = -1, 0
            for child in self.node.children.values():
                if child.attention is not None and child.attention.last_use > latest:
                    latest, node = child.attention.last_use, child
            if latest < 0:
                return None
        return int.from_bytes(node.tokens[at : at + TOKEN_SIZE], "little")

    def windows(self) -> list[Range]:
        """Return the tokens whose window cells are there."""
        found: list[Range] = []
        for node in self.nodes():
            if node.window is not None and node.window.start < self.n:
                found.append((node.window.start, min(node.end, self.n)))
        return found

    def states(self) -> list[int]:
        """Return after how many tokens a state is there, the first first."""
        return [
            node.end
            for node in self.nodes()
            if node.state is not None and node.state.chunks[0].has_state and node.end <= self.n
        ]

    def end_at(self, n: int) -> EndState | None:
        """Return the state and logits after n tokens; None where there are none."""
        for node in self.node.path():
            if node.end == n <= self.n and node.state is not None:
                end: EndState = node.state.chunks[0]
                return end
        return None

    def chunks(self, kind: Kind, begin: int, end: int) -> tuple[int, list[Chunk]]:
        """Return where the first chunk begins, and the cells of the tokens of ``[begin, end)``.

        The chunks are as `set_blocks` takes them; the first begins at ``begin`` or before it.
        """
        first, found = end, list[Chunk]()
        for node in reversed(self.node.path()):
            one = node.attention if kind is Kind.ATTENTION else node.window
            if one is None or node.end <= begin or one.start >= end:
                continue
            at = one.start
            for cells, size in zip(one.chunks, one.sizes, strict=True):
                if at + size > begin and at < end:
                    first = min(first, at)
                    found.append((cells, size, min(size, end - at)))
                at += size
        return first, found


@dataclass(slots=True)
class Resume:
    """Where a prompt can go on from a match: after n tokens.

    Attributes
    ----------
    window_first
        First token whose window cells are used; ``n`` where the memory has no window.
    state
        The state that is used; None where none is needed.
    """

    n: int
    window_first: int
    state: Component | None = None
