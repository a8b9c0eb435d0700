"""A view of the tree of a cache, as text and as a figure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pykvcache._drawing.tree import draw_tree
from pykvcache.model import LlamaModel
from pykvcache.prefix.block_hash import TOKEN_SIZE, split_space
from pykvcache.prefix.node import Node
from pykvcache.prefix.tree import PrefixTree
from pykvcache.sequence.text import text_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["CacheTree", "TreeNode", "plot_tree", "view_tree"]

_LINES = 200  # printed at most
_TEXT_TOKENS, _LETTERS = 20, 40


@dataclass(frozen=True)
class TreeNode:
    """A node of the view: a run of tokens after those of its parent.

    Attributes
    ----------
    namespace
        Its namespace.
    depth
        Number of its ancestors.
    start, n_tokens
        Position of its first token, and number of its tokens.
    n_blocks
        Number of full blocks that end in this node; 0 for a tail shorter than a block.
    n_bytes
        Bytes of its components: cells, window cells, state and logits.
    uses
        Number of later prompts that used these tokens.
    is_held
        Whether a live sequence or a pin holds it or a node below it.
    has_checkpoint
        Whether a recurrent state is cached at its end.
    text
        The beginning of its text.
    n_window
        Number of its last tokens whose window cells are cached.
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
    n_window: int = 0


@dataclass(frozen=True)
class CacheTree:
    """A snapshot of the nodes of a cache, parents first. ``print`` shows them."""

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
        """Return the lines that lead to a node: a bar for each ancestor with later siblings."""
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
    facts.append(f"{node.n_bytes:,} bytes")
    facts.append(f"used {node.uses}x" if node.uses else "unused")
    if node.n_window:
        facts.append(f"window of {'all' if node.n_window == node.n_tokens else node.n_window}")
    if node.has_checkpoint:
        facts.append("state")
    if node.is_held:
        facts.append("held")
    return f"{', '.join(facts)}: {node.text!r}"


def view_tree(tree: PrefixTree, model: LlamaModel, space: str | None) -> CacheTree:
    """Return a view of one space, or of all."""
    nodes: list[TreeNode] = []
    for root in tree.roots(space):
        held: set[Node] = set()
        for node in root.below():
            if any(one.held for one in node.components()):
                held.update(node.path())
        waiting = [(root, -1)]
        while waiting:
            node, depth = waiting.pop()
            if node is not root:
                namespace, _ = split_space(str(root.namespace))
                nodes.append(_view(node, depth, namespace, tree, model, node in held))
            children = list(node.children.values())
            children.sort(key=lambda child: child.attention.created, reverse=True)
            waiting += [(child, depth + 1) for child in children]
    return CacheTree(tuple(nodes), tree.shape.block_size)


def _view(
    node: Node, depth: int, namespace: str, tree: PrefixTree, model: LlamaModel, is_held: bool
) -> TreeNode:
    end = node.state.chunks[0] if node.state is not None else None
    return TreeNode(
        namespace,
        depth,
        node.start,
        node.n_tokens,
        node.n_blocks(tree.shape.block_size),
        sum(one.n_bytes for one in node.components()),
        node.attention.uses,
        is_held,
        end is not None and end.has_state,
        _beginning(node.tokens, model),
        0 if node.window is None else node.window.n_tokens,
    )


def _beginning(tokens: bytes, model: LlamaModel) -> str:
    ids = np.frombuffer(tokens[: _TEXT_TOKENS * TOKEN_SIZE], np.int32)
    text = text_of(model, ids)
    if text is None:
        text = " ".join(map(str, ids))
    return text if len(text) <= _LETTERS else text[: _LETTERS - 3] + "..."


def plot_tree(view: CacheTree, title: str) -> Figure:
    """Draw a view: tokens from left to right, branches below each other; needs matplotlib."""
    return draw_tree(view.nodes, title)
