"""Arguments and results of the tree: Match, Resume, Hold, Offer, Plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pykvcache._ranges import Range
from pykvcache.prefix.block_hash import TOKEN_SIZE
from pykvcache.prefix.node import NO_STATE, Component, EndState, Kind, Node

__all__ = ["Chunk", "Hold", "Match", "Offer", "Plan", "Resume"]

#: Cells of a chunk, its number of tokens, and how many of them are used.
Chunk = tuple[Any, int, int]


@dataclass(slots=True)
class Match:
    """The longest cached prefix: its number of tokens, and the node (or root) where it ends."""

    node: Node
    n: int

    def nodes(self) -> list[Node]:
        """Return the nodes of its path, from the root down."""
        return self.node.path()[::-1]

    def next_token(self) -> int | None:
        """Return the most recently used token after it in the tree; None at a leaf's end."""
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
        """Return the ranges of tokens whose window cells are cached."""
        found: list[Range] = []
        for node in self.nodes():
            if node.window is not None and node.window.start < self.n:
                found.append((node.window.start, min(node.end, self.n)))
        return found

    def states(self) -> list[int]:
        """Return the numbers of tokens after which a state is cached, ascending."""
        return [x.end for x in self.nodes() if x.end_state.has_state and x.end <= self.n]

    def end_at(self, n: int) -> EndState:
        """Return the state and logits after n tokens, if cached."""
        for node in self.node.path():
            if node.end == n <= self.n:
                return node.end_state
        return NO_STATE

    def chunks(self, kind: Kind, begin: int, end: int) -> tuple[int, list[Chunk]]:
        """Return the begin of the first chunk, and the chunks with the tokens of ``[begin, end)``.

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
    """A point where a prompt can resume: after n tokens."""

    n: int
    window_first: int  # first token whose window cells are used; n if the memory has no window
    state: Component | None = None  # the state that is used, if one is needed


@dataclass(slots=True)
class Hold:
    """The components that a sequence or a pin protects from eviction, until it is released."""

    node: Node  # its attention cells are held, and so those of all its ancestors
    window_first: int  # first token whose window cells are held; the node's end if none are
    state: Component | None


@dataclass
class Offer:
    """What a closing sequence can store for its first n tokens, whose attention cells it has.

    Prompts are likely to resume at ``ends``: the prompt's end and message boundaries. Windows and
    states there are not speculative.
    """

    n: int
    windows: list[Range] = field(default_factory=list)  # tokens whose window cells can be read
    states: dict[int, EndState] = field(default_factory=dict)  # by number of tokens
    ends: list[int] = field(default_factory=list)
    priority: int = 0


@dataclass
class Plan(Offer):
    """The part of an offer to insert: the windows and states that are missing and fit."""

    slack: int = 0  # tokens kept before each window
    divergence: int = 0  # after how many tokens other prompts diverge; 0 if unknown
