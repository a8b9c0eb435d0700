"""Nodes of the prefix tree, and what each of them can hold.

A node is a run of tokens that continues its parent's. It holds up to three components, each of
them counted, used and evicted by itself::

    attention   cells of layers without a window, for all tokens of the node
    window      cells of layers with a window, for the last tokens of the node
    state       the recurrent state and the logits after the node's last token

Cells lie in chunks. A chunk ends at a multiple of the block size or where its node ends, so that
whole blocks can be evicted, written to tiers and put back without being copied together.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

from pykvcache._ranges import Range, deepest
from pykvcache.prefix.block_hash import TOKEN_SIZE, block_names

__all__ = [
    "NO_STATE",
    "Component",
    "EndState",
    "Kind",
    "MemoryShape",
    "Node",
    "cut",
    "incomplete",
    "is_resumable",
    "new_root",
]


class Kind(IntEnum):
    """Which part of a memory a component holds."""

    ATTENTION = 0
    WINDOW = 1
    STATE = 2


#: Splits the cells of a chunk of n tokens at one of them: (kind, cells, n, at) -> two chunks.
Split = Callable[[Kind, Any, int, int], tuple[Any, Any]]


def _halves(kind: Kind, cells: Any, n: int, at: int) -> tuple[Any, Any]:
    """Split chunks without contents."""
    return None, None


@dataclass(frozen=True)
class MemoryShape:
    """What a tree needs to know of the memory whose cells it keeps.

    Attributes
    ----------
    attention_bytes, window_bytes
        Bytes of one token's cells in layers without and with a window; 0 where there are none.
    window_start
        Returns the first position whose window cells are needed to go on after n tokens. None
        where the memory has no window.
    slack
        Tokens before a window that are kept with it, so that a prompt may part a little earlier.
    needs_state
        Whether the memory can go on only where a state was taken.
    node_bytes, chunk_bytes
        Overhead of a node or component, and of a chunk; 0 where cells alone are counted.
    """

    block_size: int
    attention_bytes: int = 1
    window_bytes: int = 0
    window_start: Callable[[int], int] | None = None
    slack: int = 0
    needs_state: bool = False
    node_bytes: int = 0
    chunk_bytes: int = 0
    split: Split = _halves

    @cached_property
    def is_plain(self) -> bool:
        """Whether attention cells alone let a prompt go on, anywhere."""
        return self.window_start is None and not self.needs_state

    @cached_property
    def weight(self) -> float:
        """Tokens that a byte of cells saves, those of windows and of attention together."""
        each = self.attention_bytes + self.window_bytes
        return 1 / each if each else 1e300

    def deepest(self, limit: int, windows: Iterable[Range], states: Iterable[int]) -> int:
        """Return the most tokens, up to a limit, after which the memory can go on.

        ``limit`` tokens have their attention cells, ``windows`` are the tokens with window cells,
        and ``states`` tells after how many tokens a state is there.
        """
        return deepest(
            limit, windows, states, window_start=self.window_start, needs_state=self.needs_state
        )

    def window_begin(self, end: int, slack: int = 0) -> int:
        """Return the first token whose window cells are kept to go on after some tokens.

        Without a window that is their end: none are.
        """
        return end if self.window_start is None else max(0, self.window_start(end) - slack)

    def floor(self, position: int) -> int:
        """Return the start of the block that holds a position."""
        return position - position % self.block_size

    def cell_bytes(self, kind: Kind) -> int:
        """Return the bytes of one token's cells in a component."""
        return (self.attention_bytes, self.window_bytes, 0)[kind]


@dataclass(frozen=True, eq=False)
class EndState:
    """What a memory holds after the last token of a node in addition to cells, or None.

    Attributes
    ----------
    state
        The recurrent state.
    row
        The logits after the token.
    """

    state: Any = None
    row: Any = None

    @property
    def has_state(self) -> bool:
        """Whether a recurrent memory can go on from it."""
        return self.state is not None

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return sum(one.nbytes for one in (self.state, self.row) if one is not None)

    def adds_to(self, other: EndState) -> bool:
        """Return whether it has something that another one has not."""
        return (other.state is None and self.has_state) or (
            other.row is None and self.row is not None
        )

    def with_all_of(self, other: EndState) -> EndState:
        """Return what either has; of both that of the other one."""
        state = self.state if other.state is None else other.state
        return EndState(state, self.row if other.row is None else other.row)


#: Where neither is known.
NO_STATE = EndState()


def cut(begin: int, end: int, block_size: int) -> list[int]:
    """Return the sizes of the chunks that hold the tokens of ``[begin, end)``."""
    if begin >= end:
        return []
    first = min(end, begin - begin % block_size + block_size)
    n_full, last = divmod(end - first, block_size)
    return [first - begin, *[block_size] * n_full, *([last] if last else [])]


class Component:
    """One component of a node: what a policy ranks, and what leaves by itself.

    The tree makes and changes components; policies read them and keep what they need in `notes`
    and `stamp`.

    Attributes
    ----------
    chunks : list
        Cells of each chunk, or the one `EndState`; None where they are still to be read.
    sizes : list of int
        Tokens of each chunk; empty for a state.
    start : int
        Tokens of the path before its first one; of a state those before it.
    uses, created, last_use : int
        How often prompts used it; when it was made and last used, on the tree's clock.
    priority : int
        The highest that a sequence gave it: lower ones leave first.
    weight : float
        Tokens that a byte of it saves.
    held : int
        Number of sequences and pins that keep it.
    is_spare : bool
        Whether no prompt has used or ended with it yet: window cells in the middle of prompts,
        states that were taken just in case. Spare components leave first.
    """

    __slots__ = (
        "chunks",
        "created",
        "held",
        "is_spare",
        "kind",
        "last_use",
        "n_bytes",
        "n_tokens",
        "node",
        "notes",
        "priority",
        "sizes",
        "stamp",
        "start",
        "uses",
        "weight",
    )

    def __init__(self, node: Node, kind: Kind, now: int, weight: float, priority: int) -> None:
        self.node = node
        self.kind = kind
        self.chunks: list[Any] = []
        self.sizes: list[int] = []
        self.start, self.n_tokens, self.n_bytes = node.start, 0, 0
        self.uses = self.held = 0
        self.created = self.last_use = now
        self.priority = priority
        self.weight = weight
        self.is_spare = False
        self.notes: Any = None
        self.stamp = -1

    def __repr__(self) -> str:
        name = self.kind.name.lower()
        return f"<Component: {name} of tokens {self.start} to {self.end}, {self.uses} uses>"

    @property
    def end(self) -> int:
        """Tokens of the path up to its end."""
        return self.node.end

    @property
    def parent(self) -> Component | None:
        """The attention component before it; None at the beginning of a prompt."""
        node = self.node if self.kind else self.node.parent
        return None if node is None or node.is_root else node.attention

    @property
    def n_missing(self) -> int:
        """How many of its chunks are still to be read: the first ones."""
        n = 0
        while n < len(self.chunks) and self.chunks[n] is None:
            n += 1
        return n

    @property
    def is_evictable(self) -> bool:
        """Whether it may leave now: nothing holds it or needs its tokens."""
        node = self.node
        if self.held or node.parent is None:
            return False
        if self.kind:
            return (node.window if self.kind is Kind.WINDOW else node.state) is self
        return node.attention is self and not node.children

    def chunk_key(self, n_kept: int = 0) -> int:
        """Return a 32-bit number of the path up to the end of the chunk that follows some tokens.

        For what policies remember of components that left. Two paths may have the same one.
        """
        end = self.start
        for size in self.sizes:
            end += size
            if end - self.start > n_kept:
                break
        return self.node.key_at(end) ^ self.kind


class Node:
    """A run of tokens of one path of the tree.

    Attributes
    ----------
    parent : Node or None
        What comes before; None for a root, and for a node that has left the tree.
    children : dict of bytes to Node
        What follows, by its first token.
    tokens : bytes
        Its tokens, as little-endian 32-bit integers.
    start, end : int
        Tokens of the path before its first one, and up to its last one.
    attention : Component
        Its attention cells, which the tree gives it; a root has none.
    window, state : Component or None
        What else it holds.
    namespace : str or None
        Of a root: whose paths begin here.
    is_parting : bool
        Whether prompts have gone on from its end in different ways.
    """

    __slots__ = (
        "_key",
        "_names",
        "attention",
        "children",
        "end",
        "is_parting",
        "namespace",
        "parent",
        "start",
        "state",
        "tokens",
        "window",
    )

    def __init__(self, parent: Node | None, tokens: bytes, start: int, key: int) -> None:
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.tokens = tokens
        self.start, self.end = start, start + len(tokens) // TOKEN_SIZE
        self.attention: Component
        self.window: Component | None = None
        self.state: Component | None = None
        self.namespace: str | None = None
        self.is_parting = False
        self._key = key  # of the path before it
        self._names: list[bytes] | None = None

    def __repr__(self) -> str:
        return f"<Node: tokens {self.start} to {self.end}>"

    @property
    def n_tokens(self) -> int:
        """How many tokens it has."""
        return self.end - self.start

    @property
    def is_root(self) -> bool:
        """Whether paths begin here; a node that has left the tree is none."""
        return self.namespace is not None

    @property
    def root(self) -> Node:
        """Where its path begins."""
        node = self
        while node.parent is not None:
            node = node.parent
        return node

    def components(self) -> Iterator[Component]:
        """Yield what it holds."""
        for one in (self.attention, self.window, self.state):
            if one is not None:
                yield one

    def path(self) -> list[Node]:
        """Return this node and those before it, the last first, without the root."""
        found, node = list[Node](), self
        while node.parent is not None:
            found.append(node)
            node = node.parent
        return found

    def below(self) -> Iterator[Node]:
        """Yield the nodes that follow, each before those that follow it."""
        waiting = list(self.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    def key_at(self, end: int) -> int:
        """Return a 32-bit number of the path up to one of its tokens."""
        return zlib.crc32(self.tokens[: (end - self.start) * TOKEN_SIZE], self._key)

    # Names of blocks ----------------------------------------------------------------------------

    def names(self, block_size: int) -> list[bytes]:
        """Return the names of the blocks that end in this node; a root has the one it gives on.

        They are computed when they are first asked for.
        """
        unnamed, node = [], self
        while node._names is None:
            unnamed.append(node)
            assert node.parent is not None
            node = node.parent
        for node in reversed(unnamed):
            assert node.parent is not None
            step = block_size * TOKEN_SIZE
            text = node.text_from(node.start - node.start % block_size)
            node._names = block_names(node.parent.last_name(block_size), text, step)
        assert self._names is not None
        return self._names

    def last_name(self, block_size: int) -> bytes:
        """Return the name of the last block that ends in this node or before it."""
        node = self
        while not (names := node.names(block_size)):
            assert node.parent is not None
            node = node.parent
        return names[-1]

    def name_at(self, n_blocks: int, block_size: int) -> bytes:
        """Return the name of a block of the path by their number; of none that of the root."""
        node = self
        while node.parent is not None and node.start // block_size >= n_blocks:
            node = node.parent
        names = node.names(block_size)
        return names[n_blocks - node.start // block_size - 1] if node.parent else names[0]

    def text_from(self, begin: int) -> bytes:
        """Return the tokens of the path from a position at or before its start, to its end."""
        parts, node = [self.tokens], self
        while node.start > begin:
            assert node.parent is not None
            node = node.parent
            parts.append(node.tokens[max(0, begin - node.start) * TOKEN_SIZE :])
        return b"".join(reversed(parts))

    def n_blocks(self, block_size: int) -> int:
        """Return how many blocks end in this node."""
        return self.end // block_size - self.start // block_size

    # Changes, which the tree makes --------------------------------------------------------------

    def split(self, n_tokens: int, block_size: int) -> Node:
        """Put a new node of the first tokens before this one, which keeps the components."""
        size = n_tokens * TOKEN_SIZE
        head = Node(self.parent, self.tokens[:size], self.start, self._key)
        assert self.parent is not None
        self.parent.children[head.tokens[:TOKEN_SIZE]] = head
        self._key = head.key_at(head.end)
        self.parent, self.tokens, self.start = head, self.tokens[size:], head.end
        head.children[self.tokens[:TOKEN_SIZE]] = self
        if self._names is not None:
            n = head.n_blocks(block_size)
            head._names, self._names = self._names[:n], self._names[n:]
        return head

    def shorten(self, n_tokens: int, block_size: int) -> list[bytes]:
        """Keep the first tokens; return the names of the blocks that end beyond, where known."""
        self.tokens = self.tokens[: n_tokens * TOKEN_SIZE]
        self.end = self.start + n_tokens
        if self._names is None:
            return []
        n = self.n_blocks(block_size)
        gone, self._names = self._names[n:], self._names[:n]
        return gone


def new_root(namespace: str, name: bytes | None) -> Node:
    """Return where the paths of a namespace begin; without a name its blocks have none."""
    root = Node(None, b"", 0, zlib.crc32(namespace.encode("utf-8", "surrogatepass")))
    root.namespace = namespace
    root._names = None if name is None else [name]
    return root


# Which window cells are of use: those of complete windows.


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
