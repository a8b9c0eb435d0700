"""Nodes of the prefix tree, their components, and what the tree takes and returns.

A node is a run of tokens that continues its parent's. It holds up to three components, each
counted, used and evicted on its own::

    attention   cells of layers without a window, for all tokens of the node
    window      cells of layers with a window, for the last tokens of the node
    state       the recurrent state and the logits after the node's last token

Cells are stored in chunks. A chunk ends at a multiple of the block size or at its node's end, so
that whole blocks are evicted, written to tiers and restored without being joined.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from itertools import accumulate
from typing import Any

from pykvcache._ranges import Range, deepest
from pykvcache.prefix.block_hash import TOKEN_SIZE, block_names

__all__ = [
    "NO_STATE",
    "Chunk",
    "Component",
    "EndState",
    "Hold",
    "Kind",
    "Match",
    "MemoryShape",
    "Node",
    "Offer",
    "Plan",
    "Resume",
    "cut",
    "incomplete",
    "is_resumable",
]


class Kind(IntEnum):
    """The kinds of components."""

    ATTENTION = 0
    WINDOW = 1
    STATE = 2


@dataclass(frozen=True)
class MemoryShape:
    """The properties of a memory that its tree depends on."""

    block_size: int
    attention_bytes: int = 1  # of one token's cells in layers without a window
    window_bytes: int = 0  # of those in layers with one
    #: Returns the first position whose window cells are needed to resume after n tokens. None if
    #: the memory has no window.
    window_start: Callable[[int], int] | None = None
    slack: int = 0  # extra window cells before a window, for prompts that diverge a little earlier
    needs_state: bool = False  # whether a sequence can resume only where a state was saved
    node_bytes: int = 0  # overhead of a node or component; 0 if only cells are counted
    chunk_bytes: int = 0  # overhead of a chunk
    #: Splits the cells of a chunk of n tokens: (kind, cells, n, at) -> two chunks.
    split: Callable[[Kind, Any, int, int], tuple[Any, Any]] | None = None

    @cached_property
    def is_plain(self) -> bool:
        """Whether a prompt can resume anywhere, with attention cells alone."""
        return self.window_start is None and not self.needs_state

    @cached_property
    def weight(self) -> float:
        """Tokens saved per byte, counting attention and window cells together."""
        each = self.attention_bytes + self.window_bytes
        return 1 / each if each else 1e300

    def deepest(self, limit: int, windows: Iterable[Range], states: Iterable[int]) -> int:
        """Return the last point, up to a limit, where a sequence can resume: see `deepest`."""
        return deepest(
            limit, windows, states, window_start=self.window_start, needs_state=self.needs_state
        )

    def window_begin(self, end: int, slack: int = 0) -> int:
        """Return the first token whose window cells are needed to resume; ``end`` if none are."""
        return end if self.window_start is None else max(0, self.window_start(end) - slack)

    def floor(self, position: int) -> int:
        """Return the start of the block that holds a position."""
        return position - position % self.block_size

    def cell_bytes(self, kind: Kind) -> int:
        """Return the bytes of one token's cells in a component."""
        return (self.attention_bytes, self.window_bytes, 0)[kind]


@dataclass(frozen=True, eq=False)
class EndState:
    """The recurrent state and the logits (``row``) after the last token of a node, or None."""

    state: Any = None
    row: Any = None

    @property
    def has_state(self) -> bool:
        """Whether a recurrent memory can resume from it."""
        return self.state is not None

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return sum(one.nbytes for one in (self.state, self.row) if one is not None)

    def adds_to(self, other: EndState) -> bool:
        """Return whether it has a state or logits that another one lacks."""
        return (other.state is None and self.has_state) or (
            other.row is None and self.row is not None
        )

    def with_all_of(self, other: EndState) -> EndState:
        """Return the union of both; where both have a value, the other's wins."""
        state = self.state if other.state is None else other.state
        return EndState(state, self.row if other.row is None else other.row)


#: Neither a state nor logits.
NO_STATE = EndState()


def cut(begin: int, end: int, block_size: int) -> list[int]:
    """Return the sizes of the chunks that hold the tokens of ``[begin, end)``."""
    if begin >= end:
        return []
    first = min(end, begin - begin % block_size + block_size)
    n_full, last = divmod(end - first, block_size)
    return [first - begin, *[block_size] * n_full, *([last] if last else [])]


@dataclass(eq=False, slots=True)
class Component:
    """One component of a node: the unit that policies rank, evicted on its own.

    The tree creates and changes components; policies read them and store their own data in `notes`
    and `stamp`.

    Attributes
    ----------
    chunks : list
        Cells of each chunk, or the one `EndState`; None for cells still to be read.
    sizes : list of int
        Tokens of each chunk; empty for a state.
    start : int
        Number of tokens on the path before its first token (for a state: before the state).
    uses, created, last_use : int
        How often prompts used it; when it was created and last used, on the tree's clock.
    priority : int
        The highest priority that a sequence gave it; lower priorities are evicted first.
    weight : float
        Tokens saved per byte.
    held : int
        Number of sequences and pins that hold it.
    is_speculative : bool
        Whether it was saved speculatively, and no prompt has used it yet: window cells or a state
        inside a prompt, not at a boundary that the caller named. Such components are evicted first.
    """

    node: Node
    kind: Kind
    created: int
    weight: float
    priority: int
    chunks: list[Any] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    start: int = field(init=False)
    n_tokens: int = 0
    n_bytes: int = 0
    n_counted: int = 0  # with the overhead that counts towards the budget
    uses: int = 0
    held: int = 0
    last_use: int = field(init=False)
    is_speculative: bool = False
    notes: Any = None
    stamp: int = -1

    def __post_init__(self) -> None:
        self.start, self.last_use = self.node.start, self.created

    def __repr__(self) -> str:
        name = self.kind.name.lower()
        return f"<Component: {name} of tokens {self.start} to {self.end}, {self.uses} uses>"

    @property
    def end(self) -> int:
        """Number of tokens on the path up to its end."""
        return self.node.end

    @property
    def parent(self) -> Component | None:
        """The attention component before it; None at the beginning of a prompt."""
        node = self.node if self.kind else self.node.parent
        return None if node is None or node.is_root else node.attention

    @property
    def n_missing(self) -> int:
        """Number of its first chunks that are still to be read."""
        n = 0
        while n < len(self.chunks) and self.chunks[n] is None:
            n += 1
        return n

    def n_chunks(self, end: int) -> int:
        """Return the number of its first chunks that end at token ``end`` or before."""
        return bisect_right(list(accumulate(self.sizes)), end - self.start)

    @property
    def is_evictable(self) -> bool:
        """Whether it may be evicted now: nothing holds it or needs its tokens."""
        node = self.node
        if self.held or node.parent is None:
            return False
        if self.kind:
            return (node.window if self.kind is Kind.WINDOW else node.state) is self
        return node.attention is self and not node.children

    def chunk_key(self, n_kept: int = 0) -> int:
        """Return a 32-bit checksum of the path up to the chunk after n_kept tokens, for ghosts."""
        n = self.n_chunks(self.start + n_kept) + 1
        return self.node.key_at(self.start + sum(self.sizes[:n])) ^ self.kind


@dataclass(eq=False, slots=True)
class Node:
    """A run of tokens of the tree, which ends after ``end`` tokens of its path."""

    parent: Node | None  # None for a root, and for a node that was removed from the tree
    tokens: bytes  # little-endian 32-bit integers
    start: int  # number of tokens on the path before its first token
    _key: int  # checksum of the path before it
    children: dict[bytes, Node] = field(default_factory=dict)  # by their first token
    end: int = field(init=False)
    attention: Component = field(init=False)  # set by the tree; a root has none
    window: Component | None = None
    state: Component | None = None
    namespace: str | None = None  # the space of a root
    diverges: bool = False  # whether prompts have diverged at its end
    _names: list[bytes] | None = None

    def __post_init__(self) -> None:
        self.end = self.start + len(self.tokens) // TOKEN_SIZE

    def __repr__(self) -> str:
        return f"<Node: tokens {self.start} to {self.end}>"

    @property
    def n_tokens(self) -> int:
        """Number of its tokens."""
        return self.end - self.start

    @property
    def is_root(self) -> bool:
        """Whether it is a root; a node that was removed from the tree is not."""
        return self.namespace is not None

    @property
    def root(self) -> Node:
        """The root of its path."""
        node = self
        while node.parent is not None:
            node = node.parent
        return node

    @property
    def end_state(self) -> EndState:
        """The state and the logits after its last token."""
        if self.state is None:
            return NO_STATE
        end: EndState = self.state.chunks[0]
        return end

    @property
    def has_whole_window(self) -> bool:
        """Whether it has the window cells of all its tokens."""
        return self.window is not None and self.window.start == self.start

    def components(self) -> Iterator[Component]:
        """Yield its components."""
        for one in (self.attention, self.window, self.state):
            if one is not None:
                yield one

    def path(self) -> list[Node]:
        """Return this node and its ancestors, deepest first, without the root."""
        found, node = list[Node](), self
        while node.parent is not None:
            found.append(node)
            node = node.parent
        return found

    def below(self) -> Iterator[Node]:
        """Yield its descendants, parents first."""
        waiting = list(self.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    def key_at(self, end: int) -> int:
        """Return a 32-bit checksum of the path up to token ``end``."""
        return zlib.crc32(self.tokens[: (end - self.start) * TOKEN_SIZE], self._key)

    # Block hashes (names) -----------------------------------------------------------------------

    def names(self, block_size: int) -> list[bytes]:
        """Return the hashes of the blocks that end in this node, or the root's own hash."""
        for node in reversed(self.path()) if self._names is None else ():
            if node._names is None and node.parent is not None:
                n_before, rest = divmod(node.start, block_size)
                name = node.parent.name_at(n_before, block_size)
                text = node.text_from(node.start - rest)
                node._names = block_names(name, text, block_size * TOKEN_SIZE)
        assert self._names is not None
        return self._names

    def name_at(self, n_blocks: int, block_size: int) -> bytes:
        """Return the hash of the path's block number ``n_blocks`` (from 1), or the root's for 0."""
        node = self
        while node.parent is not None and node.start // block_size >= n_blocks:
            node = node.parent
        names = node.names(block_size)
        return names[n_blocks - node.start // block_size - 1] if node.parent else names[0]

    def text_from(self, begin: int) -> bytes:
        """Return the tokens of the path from ``begin``, at most its start, to its end."""
        parts, node = [self.tokens], self
        while node.start > begin:
            assert node.parent is not None
            node = node.parent
            parts.append(node.tokens[max(0, begin - node.start) * TOKEN_SIZE :])
        return b"".join(reversed(parts))

    def n_blocks(self, block_size: int) -> int:
        """Return the number of blocks that end in this node."""
        return self.end // block_size - self.start // block_size

    # Changes by the tree ------------------------------------------------------------------------

    def split(self, n_tokens: int, block_size: int) -> Node:
        """Insert a new node of the first tokens before this one, which keeps the components."""
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
        """Keep the first tokens; return the hashes of the removed blocks, if computed."""
        self.tokens = self.tokens[: n_tokens * TOKEN_SIZE]
        self.end = self.start + n_tokens
        if self._names is None:
            return []
        n = self.n_blocks(block_size)
        gone, self._names = self._names[n:], self._names[:n]
        return gone

    @classmethod
    def new_root(cls, namespace: str, name: bytes | None) -> Node:
        """Return a new root; without a name its blocks have no hashes."""
        root = cls(None, b"", 0, zlib.crc32(namespace.encode("utf-8", "surrogatepass")))
        root.namespace = namespace
        root._names = None if name is None else [name]
        return root


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


# Only complete windows are of use.


def is_resumable(shape: MemoryShape, node: Node) -> bool:
    """Return whether a prompt can resume at the end of a node."""
    if shape.needs_state and not node.end_state.has_state:
        return False
    first, each = shape.window_begin(node.end), node
    while first < each.end and each.parent is not None:
        if each.window is None or each.window.start > max(first, each.start):
            return False
        each = each.parent
    return True


def incomplete(shape: MemoryShape, tops: Iterable[Node]) -> list[Node]:
    """Return the nodes from ``tops`` down with cells in no complete window, deepest first."""
    waiting, found, connected = [*tops], list[Node](), set[Node]()
    while waiting:
        node = waiting.pop()
        if not is_resumable(shape, node):
            found.append(node)
            waiting += (child for child in node.children.values() if child.window is not None)
        elif node.has_whole_window:  # the windows after it are complete, too
            connected.add(node)
    useless = list[Node]()
    for node in reversed(found):
        if connected.isdisjoint(node.children.values()):
            useless.append(node)
        elif node.has_whole_window:
            connected.add(node)
    return useless
