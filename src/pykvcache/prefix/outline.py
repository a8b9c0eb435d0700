"""What a cache holds, as a tree to look at: text, and a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pykvcache._drawing.tree import Bar, draw_tree
from pykvcache.context import LlamaContext
from pykvcache.prefix.kept import parts_of
from pykvcache.prefix.options import as_namespace
from pykvcache.prefix.pieces import taken
from pykvcache.prefix.ram import RamTier
from pykvcache.prefix.runs import Run
from pykvcache.sequence.pool import SequencePool
from pykvcache.sequence.text import text_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["CacheTree", "OutlineMethods", "TreeNode"]

_LINES = 200  # of what is printed


@dataclass(frozen=True)
class TreeNode:
    """A node of the outline: tokens that are kept together, after those of its parents.

    Attributes
    ----------
    namespace
        Whose they are.
    depth
        How many nodes come before.
    start, n_tokens
        First token, and how many.
    n_blocks
        Full blocks; 0 for the tokens after the last full block of a prompt.
    n_bytes
        What their keys and values take, with the state and the logits at their end.
    uses
        How often a prompt began with them after they were stored.
    is_held
        Whether a sequence in use or a pin holds them, or what follows them.
    has_checkpoint
        Whether the state of windows and recurrent memories is kept at their end.
    text
        The beginning of their text.
    """

    namespace: str
    depth: int
    start: int
    n_tokens: int
    n_blocks: int
    n_bytes: int
    uses: int
    is_held: bool
    has_checkpoint: bool
    text: str


@dataclass(frozen=True)
class CacheTree:
    """The nodes of a cache at one time, parents first. ``print`` shows them."""

    nodes: tuple[TreeNode, ...]
    block_size: int

    def __iter__(self) -> Iterator[TreeNode]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    def __str__(self) -> str:
        if not self.nodes:
            return "(empty)"
        lines, space = [], None
        for at, node in enumerate(self.nodes[:_LINES]):
            if node.namespace != space:
                space = node.namespace
                lines.append(repr(space) if space else "''")
            lines.append(self._indent(at) + _words(node))
        if len(self.nodes) > _LINES:
            lines.append(f"... {len(self.nodes) - _LINES:,} more")
        return "\n".join(lines)

    def _indent(self, at: int) -> str:
        """Return the lines that lead to a node: a bar where one before it has more branches."""
        node, marks = self.nodes[at], []
        for depth in range(node.depth + 1):
            goes_on = False
            for later in self.nodes[at + 1 : at + 1 + _LINES]:
                if later.namespace != node.namespace or later.depth < depth:
                    break
                if later.depth == depth:
                    goes_on = True
                    break
            last = depth == node.depth
            marks.append(("├─ " if last else "│  ") if goes_on else ("└─ " if last else "   "))
        return "".join(marks)


def _words(node: TreeNode) -> str:
    end = node.start + node.n_tokens
    facts = [f"[{node.start}..{end - 1}]"]
    if node.n_blocks:
        facts.append(f"{node.n_blocks} block{'s' * (node.n_blocks != 1)}")
    else:
        facts.append("tail")
    facts.append(f"{node.n_bytes:,} bytes")
    facts.append(f"used {node.uses}x" if node.uses else "unused")
    if node.has_checkpoint:
        facts.append("checkpoint")
    if node.is_held:
        facts.append("held")
    return f"{', '.join(facts)}: {node.text!r}"


def _bytes_of(things: Iterable[Any]) -> int:
    return sum(taken(thing) for thing in things if thing is not None)


class OutlineMethods:
    """Looking at all that is kept; part of `PrefixCache`."""

    _ctx: LlamaContext
    _ram: RamTier
    _block_size: int
    _pool: SequencePool
    _check_open: Callable[[], None]

    def tree(self, namespace: str | None = None) -> CacheTree:
        """Return what is kept in memory, as a tree: ``print(cache.tree())``.

        Parameters
        ----------
        namespace
            Whose; default: everybody's.
        """
        wanted = None if namespace is None else as_namespace(namespace)
        with self._pool.hold():
            self._check_open()
            self._ram.check()
            return CacheTree(tuple(self._nodes(wanted)), self._block_size)

    def _nodes(self, space: str | None) -> list[TreeNode]:
        """Return what is in the tree of a namespace, or of all."""
        nodes: list[TreeNode] = []
        for root in self._ram.tree.roots():
            if space is None or root.namespace == space:
                self._add_below(root, nodes)
        return nodes

    def _add_below(self, root: Run, nodes: list[TreeNode]) -> None:
        space, size = root.namespace or "", self._block_size
        waiting: list[tuple[Run, int]] = [(root, -1)]
        held = {id(part) for run in self._ram.tree.runs(space) if run.held for part in run.path()}
        while waiting:
            run, depth = waiting.pop()
            if not run.is_root:
                point = run.checkpoint
                nodes.append(
                    TreeNode(
                        space,
                        depth,
                        run.start * size,
                        run.n_blocks * size,
                        run.n_blocks,
                        _bytes_of([*run.payloads, *(point.payloads if point else ())]),
                        run.uses,
                        id(run) in held,
                        point is not None,
                        self._beginning(run.text),
                    )
                )
            for tail in self._ram.tails_at(run):
                n = len(tail.tokens) // 4
                if n:
                    text = self._beginning(tail.tokens)
                    start = run.end * size
                    has_state = tail.rest is not None
                    nodes.append(
                        TreeNode(
                            space,
                            depth + 1,
                            start,
                            n,
                            0,
                            _bytes_of(parts_of(tail)),
                            0,
                            False,
                            has_state,
                            text,
                        )
                    )
            children = sorted(run.children.values(), key=lambda child: child.created, reverse=True)
            waiting += [(child, depth + 1) for child in children]

    def _beginning(self, tokens: bytes) -> str:
        ids = np.frombuffer(tokens[:80], np.int32)
        text = text_of(self._ctx.model, ids)
        if text is None:
            text = " ".join(map(str, ids))
        return text if len(text) <= 40 else text[:37] + "..."

    def plot(self, namespace: str | None = None) -> Figure:
        """Draw what is kept: tokens from left to right, branches below each other.

        Needs ``pykvcache[plot]``. The darker, the more often used; framed is what sequences in use
        and pins hold; hatched is what comes after the last full block of a prompt.

        Parameters
        ----------
        namespace
            Whose; default: everybody's.

        Returns
        -------
        matplotlib.figure.Figure
            Not registered with pyplot: ``figure.savefig("tree.svg")``; notebooks show it.

        Raises
        ------
        ImportError
            matplotlib is not installed.
        """
        tree = self.tree(namespace)
        bars = [
            Bar(
                node.depth,
                node.start,
                node.n_tokens,
                node.uses,
                node.is_held,
                not node.n_blocks,
                node.has_checkpoint,
                node.text,
                node.namespace,
            )
            for node in tree
        ]
        ram = self._ram
        title = (
            f"{ram.tree.n_blocks:,} blocks of {self._block_size} tokens, "
            f"{ram.nbytes / 2**20:,.1f} of {ram.max_bytes / 2**20:,.1f} MiB"
        )
        return draw_tree(bars, title)
