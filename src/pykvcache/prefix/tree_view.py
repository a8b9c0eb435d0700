"""A view of the tree of a cache, as text and as a figure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pykvcache.model import LlamaModel
from pykvcache.prefix.block_hash import TOKEN_SIZE, split_space
from pykvcache.prefix.node import Node
from pykvcache.prefix.tree import PrefixTree
from pykvcache.sequence.text import text_of

__all__ = ["CacheTree", "TreeNode", "view_tree"]

_LINES = 200  # printed at most
_TEXT_TOKENS, _LETTERS = 20, 40


@dataclass(frozen=True)
class TreeNode:
    """A node of the view: a run of tokens after those of its parent."""

    namespace: str
    depth: int  # number of its ancestors
    start: int  # position of its first token
    n_tokens: int
    n_blocks: int  # full blocks that end in this node; 0 for a tail shorter than a block
    n_bytes: int  # of its cells, window cells, state and logits
    uses: int  # number of later prompts that used these tokens
    is_held: bool  # whether a live sequence or a pin holds it or a node below it
    has_checkpoint: bool  # whether a recurrent state is cached at its end
    text: str  # the beginning of its text
    n_window: int = 0  # number of its last tokens whose window cells are cached


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
        lines = [f"... {len(self.nodes) - _LINES:,} more"] if len(self.nodes) > _LINES else []
        later: set[int] = set()  # the depths at which another branch follows below
        for at in range(len(self.nodes) - 1, -1, -1):
            node = self.nodes[at]
            bars = "".join("│  " if depth in later else "   " for depth in range(node.depth))
            if at < _LINES:
                branch = "├─ " if node.depth in later else "└─ "
                lines.append(f"{bars}{branch}{_words(node)}")
            later = {depth for depth in later if depth < node.depth} | {node.depth}
            if at == 0 or self.nodes[at - 1].namespace != node.namespace:
                later = set()
                if at < _LINES:
                    lines.append(f"namespace {node.namespace!r}")
        return "\n".join(reversed(lines))


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
        namespace, _ = split_space(str(root.namespace))
        held: set[Node] = set()
        for node in root.below():
            if any(one.held for one in node.components()):
                held.update(node.path())
        waiting = [(root, -1)]
        while waiting:
            node, depth = waiting.pop()
            if node is not root:
                one = TreeNode(
                    namespace,
                    depth,
                    node.start,
                    node.n_tokens,
                    node.n_blocks(tree.shape.block_size),
                    sum(one.n_bytes for one in node.components()),
                    node.attention.uses,
                    node in held,
                    node.end_state.has_state,
                    _beginning(node.tokens, model),
                    0 if node.window is None else node.window.n_tokens,
                )
                nodes.append(one)
            children = list(node.children.values())
            children.sort(key=lambda child: child.attention.created, reverse=True)
            waiting += [(child, depth + 1) for child in children]
    return CacheTree(tuple(nodes), tree.shape.block_size)


def _beginning(tokens: bytes, model: LlamaModel) -> str:
    ids = np.frombuffer(tokens[: _TEXT_TOKENS * TOKEN_SIZE], np.int32)
    text = text_of(model, ids)
    if text is None:
        text = " ".join(map(str, ids))
    return text if len(text) <= _LETTERS else text[: _LETTERS - 3] + "..."
