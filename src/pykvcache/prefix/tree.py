"""The prefix tree: which tokens are known, with which cells, and what leaves when room is short."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from pykvcache._ranges import Range, gaps, overlaps, union
from pykvcache.errors import ArgumentError
from pykvcache.prefix.block_hash import TOKEN_SIZE, NameRoot, common_tokens
from pykvcache.prefix.match import Hold, Match, Offer, Plan, Resume
from pykvcache.prefix.node import (
    Component,
    EndState,
    Kind,
    MemoryShape,
    Node,
    cut,
    incomplete,
    is_resumable,
    new_root,
)
from pykvcache.prefix.policies import Policy, make_policy

__all__ = ["PrefixTree"]


class PrefixTree:
    """A radix tree over tokens that keeps to a budget in bytes.

    `match` and `plan` change nothing. `use`, `insert`, `hold`, `release`, `fit`, `forget` and
    `clear` do; what was released leaves with the next `fit`. The names of blocks that left are in
    `removed` until the cache takes them. Not safe for several threads: the cache has the lock.

    A component leaves with everything that is useless without it, and never before what needs it:
    attention cells leave from the ends of the tree, windows that are no longer complete leave
    whole, and tokens that no prompt can go on from leave with the last window or state after them.

    ``max_bytes`` bounds all components and nodes, and what the policy notes. Without a ``root``
    blocks have no names.
    """

    def __init__(
        self,
        shape: MemoryShape,
        policy: str | Policy = "lru",
        *,
        max_bytes: int,
        root: NameRoot | None = None,
    ) -> None:
        self.shape = shape
        self.clock = 0
        self.n_bytes = self.n_blocks = 0
        self.n_states = 0  # recurrent ones
        self.evicted_bytes = 0  # since the cache set it back
        self.removed: list[bytes] = []
        self._root_name = root
        self._roots: dict[str, Node] = {}
        self._spare: OrderedDict[Component, None] = OrderedDict()
        self._is_ours = isinstance(policy, str)
        self.policy = make_policy(policy)
        #: Lowering it evicts with the next change. Held nodes stay, even above the budget.
        self.max_bytes = max_bytes
        self.policy.max_notes = max_bytes // 16 if shape.node_bytes else None
        self.policy.resize(max_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes of components and nodes, and of what the policy notes where overhead counts."""
        return self.n_bytes + (self.policy.n_bytes if self.shape.node_bytes else 0)

    # Looking up ---------------------------------------------------------------------------------

    def match(self, tokens: bytes, namespace: str = "") -> Match:
        """Return the longest known beginning of a namespace's tokens; changes nothing."""
        node, at = self._roots.get(namespace) or self._new_root(namespace), 0
        while (child := node.children.get(tokens[at : at + TOKEN_SIZE])) is not None:
            text = child.tokens
            if not tokens.startswith(text, at):
                return Match(child, child.start + common_tokens(text, tokens, at))
            node = child
            at += len(text)
        return Match(node, node.end)

    def resume(self, match: Match, limit: int) -> Resume:
        """Return where a prompt can go on, after at most so many tokens; changes nothing."""
        shape, limit = self.shape, min(match.n, limit)
        if shape.is_plain:
            return Resume(limit, limit)
        n = shape.deepest(limit, match.windows(), match.states())
        state = None
        if shape.needs_state:
            state = next((node.state for node in match.nodes() if node.end == n), None)
        return Resume(n, shape.window_begin(n), state)

    # Using --------------------------------------------------------------------------------------

    def use(self, match: Match, resume: Resume, priority: int = 0) -> None:
        """Count a use by a prompt: of the attention cells before a place, its window, its state.

        Nodes are split where what is used begins or ends, at whole chunks. A chunk in which the
        prompt diverges is not counted; one in which it ends is.
        """
        self.clock += 1
        if match.n < match.node.end:
            # The prompt diverges within a node, or ends there.
            self._split_at_chunk(match.node, match.n)
            self.policy.passed(match.node.attention)
        node = self._node_of(match.node, resume.n)
        if resume.n < match.n:
            last = self._boundary(node, self._chunk_after(node, resume.n))
        else:
            last = self._split_at_chunk(node, resume.n)
        for each in last.path():
            self._count_use(each.attention, priority)
        if resume.window_first < resume.n:
            for one in self._windows(node, resume.window_first, resume.n):
                self._count_use(one, priority)
        if resume.state is not None:
            self._count_use(resume.state, priority)

    @staticmethod
    def _node_of(node: Node, n: int) -> Node:
        """Return the node of a path that holds the last of its first n tokens, or the root."""
        while node.start >= n and node.parent is not None:
            node = node.parent
        return node

    def _count_use(self, one: Component, priority: int) -> None:
        one.uses += 1
        one.last_use = self.clock
        one.priority = max(one.priority, priority)
        if one.is_spare:
            self._promote(one)
        self.policy.used(one)

    def _promote(self, one: Component) -> None:
        """Let the policy rank a component that was spare."""
        one.is_spare = False
        del self._spare[one]
        self.policy.added(one)
        if one.is_evictable:
            self.policy.evictable(one)

    def _windows(self, node: Node, first: int, n: int) -> list[Component]:
        """Return the window cells of the tokens of ``[first, n)`` on the path to a node.

        A node is split where they begin: what lies before them stays as it was, spare or not.
        """
        found: list[Component] = []
        for each in node.path():
            if each.end <= first:
                break
            if each.window is None or each.window.start >= n:
                continue
            if each.start < first:
                self._split_at_chunk(each, first)
            if each.window is not None:
                found.append(each.window)
        return found

    # Splitting ----------------------------------------------------------------------------------

    def _split_at_chunk(self, node: Node, n: int) -> Node:
        """Split a node at the last chunk that ends at n tokens or before; return what is before."""
        if n >= node.end or node.parent is None:
            return node
        return self._boundary(node, self._chunk_before(node, n))

    @staticmethod
    def _chunk_before(node: Node, n: int) -> int:
        """Return the last end of a chunk of a node at n tokens or before, or its start."""
        at = node.start
        for size in node.attention.sizes:
            if at + size > n:
                break
            at += size
        return at

    @staticmethod
    def _chunk_after(node: Node, n: int) -> int:
        """Return the first end of a chunk of a node at n tokens or after."""
        at = node.start
        for size in node.attention.sizes if at < n else ():
            at += size
            if at >= n:
                break
        return at

    def _boundary(self, node: Node, at: int) -> Node:
        """Return the node that ends at a token of this one, which is split there if need be."""
        if at == node.end or node.parent is None:
            return node
        return node.parent if at == node.start else self._split(node, at)

    def _split(self, node: Node, at: int) -> Node:
        """Split a node after some tokens of its path; return the new node of the first ones."""
        head = node.split(at - node.start, self.shape.block_size)
        self.n_bytes += self.shape.node_bytes
        head.attention = self._split_component(node.attention, head)
        if node.window is not None and node.window.start < at:
            one = head.window = self._split_component(node.window, head)
            if one.is_evictable and not one.is_spare:
                self.policy.evictable(one)
        return head

    def _split_component(self, tail: Component, head_node: Node) -> Component:
        """Give the cells of the tokens of a new node to a component of it."""
        head = Component(head_node, tail.kind, self.clock, tail.weight, tail.priority)
        head.created, head.last_use, head.uses = tail.created, tail.last_use, tail.uses
        left, n = head_node.end - tail.start, 0
        while left >= tail.sizes[n]:
            left -= tail.sizes[n]
            n += 1
        head.sizes, head.chunks = tail.sizes[:n], tail.chunks[:n]
        tail.sizes, tail.chunks = tail.sizes[n:], tail.chunks[n:]
        if left:
            size, cells = tail.sizes[0], tail.chunks[0]
            halves = (None, None)
            if cells is not None:
                halves = self.shape.split(tail.kind, cells, size, left)
            head.sizes.append(left)
            head.chunks.append(halves[0])
            tail.sizes[0], tail.chunks[0] = size - left, halves[1]
        self._count(head)
        self._count(tail)
        if tail.kind is Kind.WINDOW:
            head.held = tail.held
            self.n_bytes += self.shape.node_bytes
        if tail.is_spare:
            head.is_spare = True
            self._spare[head] = None
            self._spare.move_to_end(head, last=False)
        else:
            self.policy.split(head, tail)
        return head

    def _count(self, one: Component) -> None:
        """Count the bytes and tokens of a component as they are now."""
        shape = self.shape
        if one.kind is Kind.STATE:
            n_bytes = sum(end.nbytes for end in one.chunks)
        else:
            one.n_tokens = sum(one.sizes)
            n_bytes = one.n_tokens * shape.cell_bytes(one.kind)
            n_bytes += len(one.sizes) * shape.chunk_bytes
        one.start = one.node.end - one.n_tokens
        self.n_bytes += n_bytes - one.n_bytes
        one.n_bytes = n_bytes

    # Holding ------------------------------------------------------------------------------------

    def hold(self, match: Match, resume: Resume) -> Hold | None:
        """Keep what was used just now until it is released; None where that is nothing."""
        node = self._node_of(match.node, resume.n)
        if node.parent is None:
            return None
        if resume.n < node.end:
            # What follows the chunk in which it ends may be evicted.
            node = self._boundary(node, self._chunk_after(node, resume.n))
        first = node.end
        if resume.window_first < resume.n:
            first = self._node_of(node, resume.window_first + 1).start
        hold = Hold(node, first, resume.state)
        for one in self._held_by(hold):
            if one.is_spare:
                self._promote(one)
            one.held += 1
        return hold

    def hold_again(self, hold: Hold) -> Hold | None:
        """Return a hold on what another one keeps; None where that was cleared."""
        if hold.node.parent is None:
            return None
        for one in self._held_by(hold):
            one.held += 1
        return Hold(hold.node, hold.window_first, hold.state)

    def release(self, hold: Hold, *, is_use: bool = True) -> None:
        """Release a hold; now counts as the last use of what it kept, or does not."""
        released = self._held_by(hold)
        for one in released:
            one.held -= 1
        if is_use:
            self.clock += 1
            for node in hold.node.path():
                node.attention.last_use = self.clock
        for one in released:
            if is_use:
                one.last_use = self.clock
            if one.is_evictable:
                self.policy.evictable(one)
        if not self.shape.is_plain and hold.node.parent is not None:
            self._drop_useless(hold.node)

    @staticmethod
    def _held_by(hold: Hold) -> list[Component]:
        """Return the components that a hold keeps; none once they were cleared."""
        node = hold.node
        if node.parent is None:
            return []
        found = [node.attention]
        if hold.state is not None:
            found.append(hold.state)
        while node.parent is not None and node.end > hold.window_first:
            if node.window is not None:
                found.append(node.window)
            node = node.parent
        return found

    # Inserting ----------------------------------------------------------------------------------

    def plan(self, match: Match, offer: Offer, *, is_limited: bool = True) -> Plan | None:
        """Return what of an offer is missing and can fit; None where that is nothing.

        ``match`` is what is known of the offered tokens. Where the plan is not limited it need not
        fit into the budget.
        """
        shape, windows, states = self.shape, offer.windows, set(offer.states)
        n = offer.n
        if not shape.is_plain:
            windows = [*match.windows(), *windows]
            states = {at for at, end in offer.states.items() if end.has_state}
            states.update(match.states())
            n = shape.deepest(n, windows, states)
        ends, slack = [end for end in offer.ends if 0 < end < n], shape.slack
        parting = list[int]()
        if shape.needs_state and (at := shape.deepest(max([0, *ends]) - 1, windows, states)) > 0:
            # The last place before the prompt's end. Other prompts can begin there, too.
            parting = [at]
        elif shape.window_start is not None and (at := self._parting(match, n)) < n - slack:
            at = shape.deepest(at, windows, states)
            # Where one window alone fits, it stands where it spares most tokens.
            parting = [at] if 2 * at > n else []
        ends = sorted({*ends, *parting})
        budget = self.max_bytes if is_limited else math.inf
        while n and self._least_bytes(n, [*ends, n], slack, offer) > budget:
            if ends != parting:
                ends = parting
            elif parting:
                n, ends, parting = parting[0], [], []
            elif slack:
                # Where prompts may part, before the end, is where it ends now.
                n, slack = shape.deepest(max(0, n - slack), windows, states), 0
            else:
                n = shape.deepest(self._fewer(n, offer), windows, states)
        missing = [] if shape.window_start is None else self._missing_windows(match, offer, n)
        taken: dict[int, EndState] = {}
        for at, end in offer.states.items():
            if 0 < at <= n and end.adds_to(match.end_at(at)):
                taken[at] = end
        if n <= match.n and not missing and not taken:
            return None
        parted = 0 if shape.window_start is None else self._parting(match, n)
        return Plan(n, missing, taken, [*ends, n], offer.priority, slack, parted)

    @staticmethod
    def _parting(match: Match, n: int) -> int:
        """Return after how many of n tokens other prompts went on differently; 0 if unknown."""
        node = match.node
        parts = bool(node.children) or node.is_parting or not match.is_whole
        return min(n, match.n) if parts else 0

    def _least_bytes(self, n: int, ends: Sequence[int], slack: int, offer: Offer) -> int:
        """Return how many bytes a prompt of n tokens takes that can go on from some ends."""
        shape = self.shape
        size = n * (shape.attention_bytes + (TOKEN_SIZE if shape.node_bytes else 0))
        size += shape.chunk_bytes * (n // shape.block_size + 1 + len(ends))
        size += shape.node_bytes * (2 + 3 * len(ends))
        if shape.window_start is not None:
            covered, first = 0, n
            for end in sorted(ends, reverse=True):
                begin = shape.floor(shape.window_begin(end, slack))
                covered += max(0, min(end, first) - begin)
                first = min(first, begin)
            size += covered * shape.window_bytes
            size += shape.chunk_bytes * (covered // shape.block_size + 1 + len(ends))
        if shape.needs_state:
            size += len(ends) * max([end.nbytes for end in offer.states.values()], default=0)
        # The notes of the policy grow with each eviction.
        return size + (self.policy.n_bytes + self.max_bytes // 128 if shape.node_bytes else 0)

    def _fewer(self, n: int, offer: Offer) -> int:
        """Return a number of tokens below n that may fit where n do not."""
        shape = self.shape
        excess = self._least_bytes(n, [n], 0, offer) - self.max_bytes
        each = shape.attention_bytes + shape.chunk_bytes / shape.block_size
        if shape.window_start is not None and shape.window_start(n) == 0:
            each += shape.window_bytes
        less = max(1, min(n, int(excess / each))) if each else n
        return shape.floor(n - less)

    def _missing_windows(self, match: Match, offer: Offer, n: int) -> list[Range]:
        """Return the tokens of an offer whose window cells the tree lacks and can use."""
        shape = self.shape
        wanted = union((first, min(last, n)) for first, last in offer.windows if first < n)
        if shape.needs_state:
            # A prompt goes on from states alone: other windows are of no use.
            places = [at for at in {*offer.states, *match.states()} if at <= n]
            begins = union((shape.window_begin(at, shape.slack), at) for at in places)
            wanted = overlaps(wanted, begins)
        return overlaps(wanted, gaps(match.windows(), n))

    def insert(
        self, tokens: bytes, plan: Plan, match: Match, namespace: str = "", *, keep: bool = False
    ) -> tuple[Match, Hold | None]:
        """Insert a plan, its cells without contents, and evict to make room for it.

        ``plan`` was made of this match just now. With ``keep`` all of it is held, even above the
        budget.

        Returns
        -------
        match : Match
            The plan's tokens that are there now; `holes` returns the components to fill.
        hold : Hold or None
            What was held.
        """
        self.clock += 1
        tokens = tokens[: plan.n * TOKEN_SIZE]
        node = self._node_of(match.node, plan.n)
        if plan.n > match.n:
            node = self._append(
                self._boundary(node, match.n), tokens[match.n * TOKEN_SIZE :], plan.priority
            )
        for first, last in plan.windows:
            self._add_windows(node, first, last, plan.priority)
        for at, end in plan.states.items():
            self._add_state(self._boundary(self._node_of(node, at), at), end, plan.priority)
        if plan.parting:
            self._boundary(self._node_of(node, plan.parting), plan.parting).is_parting = True
        has_more = not self.shape.is_plain
        for each in node.path():
            each.attention.last_use = self.clock
            has_more |= each.state is not None
        if has_more:
            for end_at in plan.ends:
                self._keep_end(node, end_at, plan)
        hold = None
        if keep or not self.policy.declines:
            # All else goes first, whatever the policy thinks of something that was never used.
            match = Match(node, node.end)
            hold = self.hold(match, self.resume(match, plan.n))
        fits = self.fit()
        if hold is not None and not keep:
            self.release(hold, is_use=False)
            hold = None
            if not fits:
                self.fit()
        if node.parent is None or node.end < plan.n:  # it has left, or its end
            return self.match(tokens, namespace), hold
        return Match(node, plan.n), hold

    @staticmethod
    def holes(match: Match) -> list[Component]:
        """Return the components of a path with chunks that are None, the last first."""
        return [
            one
            for node in match.node.path()
            for one in (node.attention, node.window)
            if one is not None and one.chunks and one.chunks[0] is None
        ]

    def discard(self, components: Iterable[Component]) -> None:
        """Drop what was inserted and cannot be filled: components of one path, the last first."""
        for one in components:
            node = one.node
            if one.kind is Kind.ATTENTION:
                self._drop_leaf(node)
            elif node.window is one:
                self._drop_chunks(one, 0, one.n_missing)
                self._drop_useless(node)

    def _append(self, parent: Node, tokens: bytes, priority: int) -> Node:
        """Add a node of tokens that the tree does not know."""
        node = Node(parent, tokens, parent.end, parent.key_at(parent.end))
        if parent.is_root:
            self._keep_root(parent)
        parent.children[tokens[:TOKEN_SIZE]] = node
        self.n_blocks += node.n_blocks(self.shape.block_size)
        self.n_bytes += self._overhead(node)
        weight = self.shape.weight
        one = node.attention = Component(node, Kind.ATTENTION, self.clock, weight, priority)
        one.sizes = cut(node.start, node.end, self.shape.block_size)
        one.chunks = [None] * len(one.sizes)
        self._count(one)
        self.policy.added(one)
        self.policy.evictable(one)
        return node

    def _overhead(self, node: Node) -> int:
        """Return the bytes of a node without its components' contents."""
        return self.shape.node_bytes + len(node.tokens) if self.shape.node_bytes else 0

    def _new_spare(self, node: Node, kind: Kind, priority: int) -> Component:
        one = Component(node, kind, self.clock, self.shape.weight, priority)
        one.is_spare = True
        self._spare[one] = None
        self.n_bytes += self.shape.node_bytes
        return one

    def _add_windows(self, node: Node, first: int, last: int, priority: int) -> None:
        """Add spare window cells for tokens of a path that has none for them."""
        for each in node.path():
            if each.end <= first:
                return
            limit = each.end if each.window is None else each.window.start
            if limit <= each.start or each.start >= last:
                continue
            if last < limit:
                # Window cells are those of a node's last tokens.
                limit = self._chunk_before(each, last)
                if limit <= max(first, each.start):
                    continue
                each = self._boundary(each, limit)
            self._prepend_windows(each, max(first, each.start), limit, priority)

    def _prepend_windows(self, node: Node, begin: int, end: int, priority: int) -> None:
        """Add spare window cells of ``[begin, end)`` to a node that has those after."""
        one = node.window
        if one is not None and not one.is_spare:
            # These are spare and leave first: in a node of their own, from a whole chunk on.
            at = self._chunk_before(node, end)
            if begin < at:
                head = self._boundary(node, at)
                self._prepend_windows(head, begin, at, priority)
                begin = at
        if begin >= end:
            return
        if one is None:
            one = node.window = self._new_spare(node, Kind.WINDOW, priority)
        sizes = cut(begin, end, self.shape.block_size)
        one.sizes, one.chunks = [*sizes, *one.sizes], [None] * len(sizes) + one.chunks
        self._count(one)

    def _add_state(self, node: Node, end: EndState, priority: int) -> None:
        """Put a state at the end of a node; what one there has and this one has not stays."""
        before = next((at.end for at in node.path() if at is not node and at.state), 0)
        one = node.state
        if one is None:
            one = node.state = self._new_spare(node, Kind.STATE, priority)
            one.chunks = [EndState()]
        known = one.chunks[0]
        one.chunks = [end.with_all_of(known)]
        self.n_states += end.has_state and not known.has_state
        saved = node.end - before
        self._count(one)
        one.weight = saved / max(1, saved * self.shape.attention_bytes + one.n_bytes)

    def _keep_end(self, node: Node, end: int, plan: Plan) -> None:
        """Keep the window and the state at a place where prompts are likely to go on."""
        node = self._node_of(node, end)
        wanted = self._windows(node, self.shape.window_begin(end, plan.slack), end)
        if node.state is not None and node.end == end:
            wanted.append(node.state)
        for one in wanted:
            one.last_use = self.clock
            one.priority = max(one.priority, plan.priority)
            if one.is_spare:
                self._promote(one)
            if one.is_evictable:
                self.policy.evictable(one)  # which has another priority now

    # Leaving ------------------------------------------------------------------------------------

    def fit(self) -> bool:
        """Evict until the budget is kept, or all that is left is held: False then."""
        policy, has_notes = self.policy, self.shape.node_bytes > 0
        while (excess := self.n_bytes + (policy.n_bytes if has_notes else 0) - self.max_bytes) > 0:
            one = next(iter(self._spare), None) or policy.victim()
            if one is None:
                return False
            if not self._is_ours:
                self._check(one)
            before = self.n_bytes
            self._remove(one, self._n_leaving(one, excess))
            self.evicted_bytes += before - self.n_bytes
        return True

    def _check(self, one: Component) -> None:
        """Raise where a user's policy has chosen something that may not leave."""
        if not isinstance(one, Component):
            kind = type(one).__name__
            raise TypeError(f"victim of the policy must be a Component or None, not {kind}")
        root = one.node.root
        if not one.is_evictable or self._roots.get(str(root.namespace)) is not root:
            raise ArgumentError(
                f"victim of the policy is {one}, which may not leave", "victim", repr(one)
            )

    def _n_leaving(self, one: Component, excess: int) -> int:
        """Return how many chunks of a component leave, so that a budget is kept."""
        if one.kind is Kind.STATE or (self.policy.whole and not one.is_spare):
            return len(one.chunks)
        cell, chunk = self.shape.cell_bytes(one.kind), self.shape.chunk_bytes
        n = 0
        sizes = one.sizes if one.kind is Kind.WINDOW else reversed(one.sizes)
        for size in sizes:
            n += 1
            excess -= size * cell + chunk
            if excess <= 0:
                break
        return n

    def _remove(self, one: Component, n: int) -> None:
        """Remove n chunks, of attention cells the last ones, and all that is useless then."""
        node, parent = one.node, one.node.parent
        if one.kind is Kind.ATTENTION:
            kept = sum(one.sizes[: len(one.sizes) - n])
            self._shorten(node, kept)
        elif one.kind is Kind.WINDOW:
            self._drop_chunks(one, 0, n)
        else:
            self._drop(one)
        if not self.shape.is_plain and parent is not None:
            self._drop_useless(node if node.parent is not None else parent)

    def _shorten(self, node: Node, n_tokens: int) -> None:
        """Keep the first tokens of a leaf, and what belongs to them."""
        if node.state is not None:
            self._drop(node.state)
        if node.window is not None:
            n, at = len(node.window.sizes), node.end
            while n and at > node.start + n_tokens:
                n -= 1
                at -= node.window.sizes[n]
            self._drop_chunks(node.window, n, len(node.window.sizes))
        one, n, at = node.attention, 0, 0
        while at < n_tokens:
            at += one.sizes[n]
            n += 1
        self._tell_removing(one, node.n_tokens - n_tokens)
        if self._root_name is not None:
            node.names(self.shape.block_size)
        self.n_bytes -= self._overhead(node)
        self.n_blocks -= node.n_blocks(self.shape.block_size)
        key = node.tokens[:TOKEN_SIZE]
        self.removed += node.shorten(n_tokens, self.shape.block_size)
        del one.sizes[n:], one.chunks[n:]
        self._count(one)
        if node.window is not None:
            self._count(node.window)
        if n_tokens:
            self.n_bytes += self._overhead(node)
            self.n_blocks += node.n_blocks(self.shape.block_size)
            return
        parent, node.parent = node.parent, None
        assert parent is not None
        del parent.children[key]
        if parent.is_root:
            self._forget_root(parent)
        elif parent.attention.is_evictable:
            self.policy.evictable(parent.attention)

    def _tell_removing(self, one: Component, n_tokens: int) -> None:
        if not one.is_spare:
            self.policy.removing(one, n_tokens)

    def _drop_chunks(self, one: Component, begin: int, end: int) -> None:
        """Drop some chunks of window cells, at their front or their end."""
        if begin == 0 and end == len(one.sizes):
            self._drop(one)
        elif begin < end:
            self._tell_removing(one, sum(one.sizes[begin:end]))
            del one.sizes[begin:end], one.chunks[begin:end]
            self._count(one)

    def _drop(self, one: Component) -> None:
        self._tell_removing(one, one.n_tokens)
        if one.is_spare:
            del self._spare[one]
        if one.kind is Kind.WINDOW:
            one.node.window = None
        else:
            one.node.state = None
            self.n_states -= one.chunks[0].has_state
        one.sizes, one.chunks = [], []
        self._count(one)
        self.n_bytes -= self.shape.node_bytes

    # Components that are useless now ------------------------------------------------------------

    def _drop_useless(self, node: Node) -> None:
        """Drop what is of no use any more, after a node lost something, or one that followed it."""
        lost = [node]
        if self.shape.window_start is not None and not node.is_root:
            self._drop_incomplete(node, lost)
            # Windows before it may have been of use for what went on from it.
            above = node.parent
            while above is not None and above.window is not None:
                if is_resumable(self.shape, above):
                    break
                self._drop_incomplete(above, lost)
                if above.window is not None:
                    break
                above = above.parent
        for each in lost:
            while (before := each.parent) is not None and not self._is_needed(each):
                self._shorten(each, 0)
                each = before

    def _is_needed(self, node: Node) -> bool:
        """Return whether a node has followers or holders, or a prompt can go on from its end."""
        return bool(node.children or node.attention.held) or is_resumable(self.shape, node)

    def _drop_incomplete(self, top: Node, lost: list[Node]) -> None:
        """Drop windows that are not complete, from a node on, and the states at their ends."""
        for node in incomplete(self.shape, top):
            for one in (node.window, node.state):
                if one is not None and not one.held:
                    self._drop(one)
                    lost.append(node)

    # All of it ----------------------------------------------------------------------------------

    def continuations(self, tokens: bytes, namespace: str = "") -> list[bytes]:
        """Return the paths that go on from some tokens, whole."""
        match = self.match(tokens, namespace)
        if match.n * TOKEN_SIZE < len(tokens):
            return []
        ends = [match.node, *match.node.below()]
        return [
            b"".join(node.tokens for node in reversed(end.path()))
            for end in ends
            if end.end > match.n
        ]

    def forget(self, tokens: bytes, namespace: str = "") -> None:
        """Drop some tokens, all that goes on from them, and all that only they need.

        Held tokens stay, and those before them.
        """
        match = self.match(tokens, namespace)
        node = match.node
        if match.n * TOKEN_SIZE < len(tokens) and (node.children or not match.is_whole):
            return  # what follows belongs to other prompts
        for each in reversed(list(node.below())):
            self._drop_leaf(each)
        for each in node.path():
            # One that nothing goes on from left with what followed it.
            if each.parent is not None and not self._drop_leaf(each):
                return

    def _drop_leaf(self, node: Node) -> bool:
        """Drop a node that nothing follows or holds; return whether it left."""
        if not node.attention.is_evictable:
            return False
        before = node.parent
        self._shorten(node, 0)
        if not self.shape.is_plain and before is not None:
            self._drop_useless(before)
        return True

    def clear(self, namespace: str | None = None) -> None:
        """Drop all tokens of a namespace, or of all; held ones too: holds keep nothing then."""
        for root in self.roots(namespace):
            for node in reversed(list(root.below())):
                for one in node.components():
                    one.held = 0
                self._shorten(node, 0)

    def roots(self, namespace: str | None = None) -> list[Node]:
        """Return the root of a namespace, or of all, where anything follows it."""
        if namespace is None:
            return list(self._roots.values())
        return [self._roots[namespace]] if namespace in self._roots else []

    def nodes(self, namespace: str | None = None) -> Iterator[Node]:
        """Yield every node of a namespace, or of all, each before those that follow it."""
        for root in self.roots(namespace):
            yield from root.below()

    def _new_root(self, namespace: str) -> Node:
        """Return a root for a namespace; it is kept once something follows it."""
        return new_root(namespace, None if self._root_name is None else self._root_name(namespace))

    def _keep_root(self, root: Node) -> None:
        namespace = str(root.namespace)
        if namespace not in self._roots:
            self._roots[namespace] = root
            self.n_bytes += self._root_bytes(namespace)

    def _forget_root(self, root: Node) -> None:
        namespace = str(root.namespace)
        if not root.children and self._roots.pop(namespace, None) is not None:
            self.n_bytes -= self._root_bytes(namespace)

    def _root_bytes(self, namespace: str) -> int:
        """Return the bytes of a root and its name, which may be long."""
        if not self.shape.node_bytes:
            return 0
        return self.shape.node_bytes + len(namespace) * (1 if namespace.isascii() else 8)
