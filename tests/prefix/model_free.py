"""A cache without a model: cells are the tokens themselves, so that each can be checked."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pykvcache.prefix.block_hash import TOKEN_SIZE
from pykvcache.prefix.node import (
    Component,
    EndState,
    Hold,
    Kind,
    Match,
    MemoryShape,
    Node,
    Offer,
    Resume,
    is_resumable,
)
from pykvcache.prefix.policies import Policy
from pykvcache.prefix.tree import PrefixTree

Tokens = list[int]


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Return tokens as the tree takes them."""
    return array("I", tokens).tobytes()


@dataclass(frozen=True)
class State:
    """A recurrent state: of which tokens, and how large."""

    tokens: bytes
    nbytes: int


@dataclass(frozen=True)
class Kinds:
    """Which parts a memory has, and how large they are."""

    window: int = 0
    attention_bytes: int = 10
    window_bytes: int = 0
    state_bytes: int = 0
    slack: int = 0

    def shape(self, block_size: int, overhead: int = 0) -> MemoryShape:
        """Return what the tree knows of it."""
        window = self.window
        return MemoryShape(
            block_size,
            self.attention_bytes,
            self.window_bytes,
            (lambda n: max(0, n - window + 1)) if window else None,
            slack=self.slack,
            needs_state=self.state_bytes > 0,
            node_bytes=overhead,
            chunk_bytes=overhead // 4,
            split=lambda kind, cells, n, at: (cells[: 4 * at], cells[4 * at :]),
        )


PLAIN = Kinds()
WINDOW = Kinds(window=12, window_bytes=40, slack=3)
RECURRENT = Kinds(attention_bytes=0, state_bytes=300)
HYBRID = Kinds(state_bytes=300)
HYBRID_WINDOW = Kinds(window=9, window_bytes=30, state_bytes=200)
ALL = {
    "plain": PLAIN,
    "window": WINDOW,
    "recurrent": RECURRENT,
    "hybrid": HYBRID,
    "hybrid-window": HYBRID_WINDOW,
}


class Model:
    """A tree, and what a memory would give it.

    Parameters
    ----------
    kinds
        Which parts the memory has.
    block_size, budget, policy, overhead
        Of the tree.
    cells
        How many window cells a memory has: of longer prompts those in the middle are gone.
    """

    def __init__(
        self,
        kinds: Kinds,
        block_size: int,
        budget: int,
        policy: str | Policy = "lru",
        *,
        overhead: int = 0,
        cells: int = 1 << 30,
        root: Callable[[str], bytes] | None = None,
    ) -> None:
        self.kinds, self.cells = kinds, cells
        self.tree = PrefixTree(
            kinds.shape(block_size, overhead), policy, max_bytes=budget, root=root
        )
        self.evaluated = 0

    def begin(
        self, prompt: Tokens, namespace: str = "", priority: int = 0
    ) -> tuple[int, Hold | None]:
        """Look a prompt up; return how many tokens are there, and what is held for it."""
        tokens = token_bytes(prompt)
        match = self.tree.match(tokens, namespace)
        resume = self.tree.resume(match, len(prompt) - 1)
        check_content(match, resume, tokens)
        self.tree.use(match, resume, priority)
        hold = self.tree.hold(match, resume)
        self.tree.fit()
        return resume.n, hold

    def give(
        self, prompt: Tokens, answer: Tokens, begun: int = 0, namespace: str = "", priority: int = 0
    ) -> None:
        """Give the tree what was evaluated."""
        text = prompt + answer
        tokens, n = token_bytes(text), len(text)
        states: dict[int, EndState] = {}
        if self.kinds.state_bytes:
            places = {n, len(prompt)} | {len(prompt) - 2**k for k in range(6)}
            for at in places:
                if at > begun:
                    state = State(tokens[: at * TOKEN_SIZE], self.kinds.state_bytes)
                    states[at] = EndState(state)
        windows = [(max(0, n - self.cells), n)] if self.kinds.window else []
        offer = Offer(n, windows, states, [len(prompt)], priority)
        match = self.tree.match(tokens, namespace)
        plan = self.tree.plan(match, offer)
        if plan is not None:
            match, _ = self.tree.insert(tokens, plan, match, namespace)
            fill(self.tree.holes(match))

    def ask(self, prompt: Tokens, answer: Tokens = (), namespace: str = "") -> int:  # type: ignore[assignment]
        """Begin, evaluate, give and release; return how many tokens of the prompt were new."""
        begun, hold = self.begin(prompt, namespace)
        self.give(prompt, [*answer], begun, namespace)
        if hold is not None:
            self.tree.release(hold)
            self.tree.fit()
        new = len(prompt) - begun
        self.evaluated += new
        return new


def fill(components: list[Component]) -> None:
    """Put the tokens of each chunk where its cells belong."""
    for one in components:
        at = (one.start - one.node.start) * TOKEN_SIZE
        for i, size in enumerate(one.sizes):
            cells = one.node.tokens[at : at + size * TOKEN_SIZE]
            assert one.chunks[i] in (None, cells)
            one.chunks[i] = cells
            at += size * TOKEN_SIZE


def check_content(match: Match, resume: Resume, tokens: bytes) -> None:
    """Check that what is resumed is there, and belongs to the tokens."""
    n = resume.n
    for kind, begin in ((Kind.ATTENTION, 0), (Kind.WINDOW, resume.window_first)):
        if begin < n:
            first, chunks = match.chunks(kind, begin, n)
            assert first <= begin
            text = b"".join(cells[: used * TOKEN_SIZE] for cells, _, used in chunks)
            assert text == tokens[first * TOKEN_SIZE : n * TOKEN_SIZE], kind
    if resume.state is not None:
        assert resume.state.chunks[0].state.tokens == tokens[: n * TOKEN_SIZE]


def check_tree(
    tree: PrefixTree,
    holds: Iterable[Hold] = (),
    check_content: Callable[[Node, MemoryShape], None] | None = None,
) -> None:
    """Check every account of a tree, that nothing in it is useless, and each node's content."""
    shape, nodes = tree.shape, list(tree.nodes())
    n_bytes, n_blocks, n_states = 0, 0, 0
    held: Counter[Component] = Counter()
    for hold in holds:
        held.update(tree._held_by(hold))
    for node in nodes:
        parent = node.parent
        assert parent is not None
        assert parent.children[node.tokens[:4]] is node
        assert node.start == parent.end
        assert node.n_tokens > 0
        assert node._key == parent.key_at(parent.end)
        n_blocks += node.n_blocks(shape.block_size)
        n_states += node.state is not None and node.state.chunks[0].has_state
        n_bytes += len(node.tokens) if shape.node_bytes else 0
        assert node.attention is not None
        assert node.attention.n_tokens == node.n_tokens == sum(node.attention.sizes)
        for one in node.components():
            assert one.node is node
            assert one.held == held[one], one
            n_bytes += one.n_bytes + shape.node_bytes
            assert one.is_speculative == (one in tree._speculative)
            assert not (one.is_speculative and one.held)
            assert len(one.sizes) == len(one.chunks) or one.kind is Kind.STATE
            assert all(chunk is not None for chunk in one.chunks)
        (check_content or check_chunks)(node, shape)
        if tree._root_name is not None:
            assert len(node.names(shape.block_size)) == node.n_blocks(shape.block_size)
        if not node.children and not node.attention.held:
            assert is_resumable(tree.shape, node), f"{node} is a dead end"
        if node.window is not None:
            assert is_useful(tree, node), f"the window of {node} is in no complete one"
    for root in tree.roots():
        assert root.children, "a root that nothing follows"
        n_bytes += tree._root_bytes(str(root.namespace))
    counted = (tree.n_bytes, tree.n_blocks, tree.n_states)
    assert counted == (n_bytes, n_blocks, n_states)
    assert set(tree._speculative) <= {one for node in nodes for one in node.components()}
    if tree.used_bytes > tree.max_bytes:
        assert not any(one.is_evictable for node in nodes for one in node.components())


def check_chunks(node: Node, shape: MemoryShape) -> None:
    """Check that chunks lie in blocks, and hold the tokens that they should."""
    for one in (node.attention, node.window):
        if one is None:
            continue
        at, ends = one.start, {node.start}
        assert at >= node.start
        for size, cells in zip(one.sizes, one.chunks, strict=True):
            assert 0 < size <= shape.block_size
            assert at // shape.block_size == (at + size - 1) // shape.block_size
            first = (at - node.start) * TOKEN_SIZE
            assert cells == node.tokens[first : first + size * TOKEN_SIZE]
            at += size
            ends.add(at)
        assert at == node.end
        if one is node.attention:
            whole = ends
        else:
            assert ends >= {end for end in whole if end > one.start}


def is_useful(tree: PrefixTree, node: Node) -> bool:
    """Return whether some prompt can go on from an end whose window holds cells of a node."""
    if is_resumable(tree.shape, node):
        return True
    return any(
        child.window is not None
        and child.window.n_tokens == child.n_tokens
        and is_useful(tree, child)
        for child in node.children.values()
    )


def prompts(rng: random.Random, n: int, letters: int = 4) -> list[tuple[Tokens, Tokens]]:
    """Return prompts and answers: chats, questions about one text, and some of their own."""
    texts: list[Tokens] = []
    system = [rng.randrange(letters) for _ in range(rng.randrange(5, 20))]
    found = []
    for _ in range(n):
        kind = rng.random()
        new = [rng.randrange(letters) for _ in range(rng.randrange(1, 14))]
        if texts and kind < 0.5:
            prompt = rng.choice(texts[-6:]) + new
        elif texts and kind < 0.75:
            base = rng.choice(texts)
            prompt = base[: rng.randrange(len(base) + 1)] + new
        else:
            prompt = system + new
        prompt = prompt[:80]
        answer = [rng.randrange(letters) for _ in range(rng.randrange(5))]
        texts.append(prompt + answer)
        found.append((prompt, answer))
    return found
