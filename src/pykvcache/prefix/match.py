"""What the tree finds of a prompt, and what it is offered: Match, Resume, Hold, Offer, Plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pykvcache._ranges import Range
from pykvcache.prefix.block_hash import TOKEN_SIZE
from pykvcache.prefix.node import NO_STATE, Component, EndState, Kind, Node

__all__ = ["Chunk", "Hold", "Match", "Offer", "Plan", "Resume"]

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
                if child.attention.last_use > latest:
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

    def end_at(self, n: int) -> EndState:
        """Return the state and logits after n tokens, where they are known."""
        for node in self.node.path():
            if node.end == n <= self.n and node.state is not None:
                end: EndState = node.state.chunks[0]
                return end
        return NO_STATE

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


@dataclass(slots=True)
class Hold:
    """What a sequence or a pin keeps in the tree, until it is released.

    Attributes
    ----------
    node
        The node that it ends in: its attention cells, and so all those before them, are kept.
    window_first
        First token whose window cells are kept; the end of the node where none are.
    """

    node: Node
    window_first: int
    state: Component | None


@dataclass
class Offer:
    """What a closing sequence can give for its first n tokens, whose attention cells can be read.

    Attributes
    ----------
    windows
        Tokens whose window cells can be read.
    states
        States by the number of tokens that they are after.
    ends
        Numbers of tokens that prompts are likely to go on from, before the last: the prompt's end,
        boundaries of messages. Their windows and states are kept before spare ones.
    priority
        Of the sequence: lower ones leave first.
    """

    n: int
    windows: list[Range] = field(default_factory=list)
    states: dict[int, EndState] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)
    priority: int = 0


@dataclass
class Plan(Offer):
    """What of an offer is to be inserted: the windows and states that are missing and can fit.

    ``slack`` tokens before its windows are kept with them. Other prompts go on differently after
    ``parting`` tokens; 0 where that is not known.
    """

    slack: int = 0
    parting: int = 0
