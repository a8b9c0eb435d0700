"""The radix tree of the RAM cache: cached tokens, their components, and eviction."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from pykvcache._ranges import Range, gaps, overlaps, union
from pykvcache.errors import ArgumentError
from pykvcache.prefix.block_hash import TOKEN_SIZE, NameRoot, common_tokens
from pykvcache.prefix.node import (
    Component,
    EndState,
    Hold,
    Kind,
    Match,
    MemoryShape,
    Node,
    Offer,
    Plan,
    Resume,
    cut,
    incomplete,
    is_resumable,
)
from pykvcache.prefix.policies import Policy, make_policy

__all__ = ["PrefixTree"]


class PrefixTree:
    """A radix tree over tokens. Not thread-safe: the cache has a lock.

    `match`, `resume` and `plan` change nothing. The hashes (names) of removed blocks are in
    `removed` until the cache takes them; without a ``root`` blocks have none.

    A component is evicted after those that need it, together with what is useless without it:
    attention cells are evicted from the leaves, incomplete windows are removed entirely, and tokens
    after which no prompt can resume are removed with the last window or state after them.
    ``max_bytes`` bounds all components, nodes and the policy's bookkeeping.
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
        self.evicted_bytes = 0  # since the cache reset it
        self.removed: list[bytes] = []
        self._root_name = root
        self._roots: dict[str, Node] = {}
        self._speculative: OrderedDict[Component, None] = OrderedDict()
        self._is_ours = isinstance(policy, str)
        self.policy = make_policy(policy)
        #: If lowered, the next change evicts. Held nodes stay, even above the budget.
        self.max_bytes = max_bytes
        self.policy.max_notes = max_bytes // 16 if shape.node_bytes else None
        self.policy.resize(max_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes of components and nodes, and of the policy's bookkeeping if overhead counts."""
        return self.n_bytes + (self.policy.n_bytes if self.shape.node_bytes else 0)

    # Looking up ---------------------------------------------------------------------------------

    def match(self, tokens: bytes, namespace: str = "") -> Match:
        """Return the longest cached prefix of some tokens; changes nothing."""
        node, at = self._roots.get(namespace) or self._new_root(namespace), 0
        while (child := node.children.get(tokens[at : at + TOKEN_SIZE])) is not None:
            text = child.tokens
            if not tokens.startswith(text, at):
                return Match(child, child.start + common_tokens(text, tokens, at))
            node = child
            at += len(text)
        return Match(node, node.end)

    def resume(self, match: Match, limit: int) -> Resume:
        """Return the last point up to ``limit`` tokens where a prompt can resume."""
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
        """Count a use of everything that `resume` needs: attention cells, a window, a state.

        Nodes are split at the chunks where the used parts begin and end. A chunk in which the
        prompt diverges is not counted, unless it ends at a branch; one in which it ends is.
        """
        self.clock += 1
        if match.n < match.node.end:
            # The prompt diverges or ends within a node.
            self._split_before(match.node, match.n)
            self.policy.passed(match.node.attention)
        node = self._node_of(match.node, resume.n)
        split = self._split_after if resume.n < match.n else self._split_before
        for each in split(node, resume.n).path():
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
        if one.is_speculative:
            self._promote(one)
        self.policy.used(one)

    def _promote(self, one: Component) -> None:
        """Hand a speculative component to the policy."""
        one.is_speculative = False
        del self._speculative[one]
        self.policy.added(one)
        if one.is_evictable:
            self.policy.evictable(one)

    def _windows(self, node: Node, first: int, n: int) -> list[Component]:
        """Return the window cells of ``[first, n)`` on the path to a node, split at the first."""
        found: list[Component] = []
        for each in node.path():
            if each.end <= first:
                break
            if each.window is None or each.window.start >= n:
                continue
            if each.start < first:
                self._split_before(each, first)
            if each.window is not None:
                found.append(each.window)
        return found

    # Splitting ----------------------------------------------------------------------------------

    def _split_before(self, node: Node, n: int) -> Node:
        """Split a node before the chunk that holds token n; return the head."""
        if n >= node.end:
            return node
        return self._boundary(node, max(node.start, n - n % self.shape.block_size))

    def _split_after(self, node: Node, n: int) -> Node:
        """Split a node after the chunk that holds the last of the first n tokens."""
        return self._boundary(node, min(node.end, n + -n % self.shape.block_size))

    def _boundary(self, node: Node, at: int) -> Node:
        """Return the node that ends at token ``at``; split this one there if necessary."""
        if at == node.end or node.parent is None:
            return node
        return node.parent if at == node.start else self._split(node, at)

    def _split(self, node: Node, at: int) -> Node:
        head = node.split(at - node.start, self.shape.block_size)
        head.attention = self._split_component(node.attention, head)
        if node.window is not None and node.window.start < at:
            one = head.window = self._split_component(node.window, head)
            if one.is_evictable and not one.is_speculative:
                self.policy.evictable(one)
        return head

    def _split_component(self, tail: Component, head_node: Node) -> Component:
        head = Component(head_node, tail.kind, self.clock, tail.weight, tail.priority)
        head.created, head.last_use, head.uses = tail.created, tail.last_use, tail.uses
        n = tail.n_chunks(head_node.end)
        left = head_node.end - tail.start - sum(tail.sizes[:n])
        head.sizes, head.chunks = tail.sizes[:n], tail.chunks[:n]
        tail.sizes, tail.chunks = tail.sizes[n:], tail.chunks[n:]
        if left:
            size, cells = tail.sizes[0], tail.chunks[0]
            halves = (None, None)
            if cells is not None and self.shape.split is not None:
                halves = self.shape.split(tail.kind, cells, size, left)
            head.sizes.append(left)
            head.chunks.append(halves[0])
            tail.sizes[0], tail.chunks[0] = size - left, halves[1]
        self._count(head)
        self._count(tail)
        if tail.kind is Kind.WINDOW:
            head.held = tail.held
        if tail.is_speculative:
            head.is_speculative = True
            self._speculative[head] = None
            self._speculative.move_to_end(head, last=False)
        else:
            self.policy.split(head, tail)
        return head

    def _count(self, one: Component) -> None:
        """Count the tokens and bytes of a component whose chunks have changed."""
        shape = self.shape
        if one.kind is Kind.STATE:
            n_bytes = sum(end.nbytes for end in one.chunks)
        else:
            one.n_tokens = sum(one.sizes)
            n_bytes = one.n_tokens * shape.cell_bytes(one.kind)
            n_bytes += len(one.sizes) * shape.chunk_bytes
        one.start = one.node.end - one.n_tokens
        overhead = shape.node_bytes if one.chunks else 0
        if overhead and one.kind is Kind.ATTENTION:
            overhead += len(one.node.tokens)
        self.n_bytes += n_bytes + overhead - one.n_counted
        one.n_bytes, one.n_counted = n_bytes, n_bytes + overhead

    # Holding ------------------------------------------------------------------------------------

    def hold(self, match: Match, resume: Resume) -> Hold | None:
        """Hold everything that a resume point needs; return None if that is nothing."""
        node = self._node_of(match.node, resume.n)
        if node.parent is None:
            return None
        if resume.n < node.end:
            # Tokens after the chunk in which it ends may be evicted.
            node = self._split_after(node, resume.n)
        first = node.end
        if resume.window_first < resume.n:
            window = self._node_of(node, resume.window_first + 1).window
            first = resume.window_first if window is None else window.start
        hold = Hold(node, first, resume.state)
        for one in self._held_by(hold):
            if one.is_speculative:
                self._promote(one)
            one.held += 1
        return hold

    def hold_again(self, hold: Hold) -> None:
        """Count a second hold of the same components."""
        for one in self._held_by(hold):
            one.held += 1

    def release(self, hold: Hold, *, is_use: bool = True) -> None:
        """Release a hold; with ``is_use`` its components count as used now."""
        if is_use:
            self.clock += 1
            for node in hold.node.path():
                node.attention.last_use = self.clock
        for one in self._held_by(hold):
            one.held -= 1
            if is_use:
                one.last_use = self.clock
            if one.is_evictable:
                self.policy.evictable(one)
        if not self.shape.is_plain and hold.node.parent is not None:
            self._drop_useless(hold.node)

    @staticmethod
    def _held_by(hold: Hold) -> list[Component]:
        """Return the components of a hold; none if they were cleared."""
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
        """Return the part of an offer that is missing and fits; None if there is none.

        ``match`` is the match of the offered tokens. An unlimited plan may exceed the budget.
        """
        shape, windows, states = self.shape, offer.windows, set(offer.states)
        n = offer.n
        if not shape.is_plain:
            windows = [*match.windows(), *windows]
            states = {at for at, end in offer.states.items() if end.has_state}
            states.update(match.states())
            n = shape.deepest(n, windows, states)
        ends, slack = [end for end in offer.ends if 0 < end < n], shape.slack
        shared = list[int]()
        if shape.needs_state and (at := shape.deepest(max([0, *ends]) - 1, windows, states)) > 0:
            # The last resume point before the prompt's end; other prompts can use it, too.
            shared = [at]
        elif shape.window_start is not None and (at := self._divergence(match, n)) < n - slack:
            at = shape.deepest(at, windows, states)
            # If only one window fits, it is kept where it saves the most tokens.
            shared = [at] if 2 * at > n else []
        ends = sorted({*ends, *shared})
        budget = self.max_bytes if is_limited else math.inf
        while n and self._least_bytes(n, [*ends, n], slack, offer) > budget:
            if ends != shared:
                ends = shared
            elif shared:
                n, ends, shared = shared[0], [], []
            elif slack:
                # Without slack, the prefix ends `slack` tokens earlier, where prompts may diverge.
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
        diverged = 0 if shape.window_start is None else self._divergence(match, n)
        return Plan(n, missing, taken, [*ends, n], offer.priority, slack, diverged)

    @staticmethod
    def _divergence(match: Match, n: int) -> int:
        """Return where other prompts diverge from the first n tokens; 0 if unknown."""
        node = match.node
        is_known = bool(node.children) or node.diverges or match.n < node.end
        return min(n, match.n) if is_known else 0

    def _least_bytes(self, n: int, ends: Sequence[int], slack: int, offer: Offer) -> int:
        """Return the bytes of a prompt of n tokens with resume points at ``ends``."""
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
        # The policy's bookkeeping grows with each eviction.
        return size + (self.policy.n_bytes + self.max_bytes // 128 if shape.node_bytes else 0)

    def _fewer(self, n: int, offer: Offer) -> int:
        """Return how many of the first n - 1 tokens fit, in whole blocks."""
        size = self.shape.block_size
        fits = bisect_right(
            range(size, n, size),
            self.max_bytes,
            key=lambda end: self._least_bytes(end, [end], 0, offer),
        )
        return fits * size

    def _missing_windows(self, match: Match, offer: Offer, n: int) -> list[Range]:
        """Return the tokens of an offer whose window cells the tree lacks and can use."""
        shape = self.shape
        wanted = union((first, min(last, n)) for first, last in offer.windows if first < n)
        if shape.needs_state:
            # Prompts resume at states with a complete window only, so other windows are useless.
            there = union([*match.windows(), *wanted])
            begins = union(
                (shape.window_begin(at, shape.slack), at)
                for at in {*offer.states, *match.states()}
                if at <= n
                and any(first <= shape.window_begin(at) and at <= last for first, last in there)
            )
            wanted = overlaps(wanted, begins)
        return overlaps(wanted, gaps(match.windows(), n))

    def insert(
        self, tokens: bytes, plan: Plan, match: Match, namespace: str = "", *, keep: bool = False
    ) -> tuple[Match, Hold | None]:
        """Insert a plan made from this match, with empty cells, and evict to make room for it.

        Returns the match of what is cached now, for `holes`, and with ``keep`` a hold of all of
        it, even above the budget.
        """
        self.clock += 1
        tokens = tokens[: plan.n * TOKEN_SIZE]
        node = self._node_of(match.node, plan.n)
        if plan.n > match.n:
            node = self._append(
                self._boundary(node, match.n), tokens[match.n * TOKEN_SIZE :], plan.priority
            )
        # States first: their nodes end there, so windows up to them need no whole chunks.
        for at, end in plan.states.items():
            self._add_state(self._boundary(self._node_of(node, at), at), end, plan.priority)
        for first, last in plan.windows:
            self._add_windows(node, first, last, plan.priority)
        if plan.divergence:
            self._boundary(self._node_of(node, plan.divergence), plan.divergence).diverges = True
        has_more = not self.shape.is_plain
        for each in node.path():
            each.attention.last_use = self.clock
            has_more |= each.state is not None
        if has_more:
            for end_at in plan.ends:
                self._keep_end(node, end_at, plan)
        hold = None
        if keep or not self.policy.declines:
            # The new tokens are evicted last, even if the policy ranks unused components lowest.
            match = Match(node, node.end)
            hold = self.hold(match, self.resume(match, plan.n))
        fits = self.fit()
        if hold is not None and not keep:
            self.release(hold, is_use=False)
            hold = None
            if not fits:
                self.fit()
        if node.parent is None or node.end < plan.n:  # evicted at once, or in part
            return self.match(tokens, namespace), hold
        return Match(node, plan.n), hold

    @staticmethod
    def holes(match: Match) -> list[Component]:
        """Return the components of a path that lack contents, deepest first."""
        return [
            one
            for node in match.node.path()
            for one in (node.attention, node.window)
            if one is not None and one.chunks and one.chunks[0] is None
        ]

    def discard(self, components: Iterable[Component]) -> None:
        """Remove inserted components whose cells cannot be read (one path, deepest first)."""
        for one in components:
            node = one.node
            if one.kind is Kind.ATTENTION:
                self._drop_leaf(node)
            elif node.window is one:
                self._drop_chunks(one, 0, one.n_missing)
                self._drop_useless(node)

    def _append(self, parent: Node, tokens: bytes, priority: int) -> Node:
        node = Node(parent, tokens, parent.end, parent.key_at(parent.end))
        parent.children[tokens[:TOKEN_SIZE]] = node
        if parent.is_root:
            self._note_root(parent)
        self.n_blocks += node.n_blocks(self.shape.block_size)
        weight = self.shape.weight
        one = node.attention = Component(node, Kind.ATTENTION, self.clock, weight, priority)
        one.sizes = cut(node.start, node.end, self.shape.block_size)
        one.chunks = [None] * len(one.sizes)
        self._count(one)
        self.policy.added(one)
        self.policy.evictable(one)
        return node

    def _new_speculative(self, node: Node, kind: Kind, priority: int) -> Component:
        one = Component(node, kind, self.clock, self.shape.weight, priority)
        one.is_speculative = True
        self._speculative[one] = None
        return one

    def _add_windows(self, node: Node, first: int, last: int, priority: int) -> None:
        """Add speculative window cells of ``[first, last)`` where a path lacks them."""
        for each in node.path():
            begin, end = max(first, each.start), each.end
            if each.window is not None:
                end = each.window.start
            if last < end:
                end = self.shape.floor(last)
            if begin < end:
                self._prepend_windows(each, begin, end, priority)

    def _prepend_windows(self, node: Node, begin: int, end: int, priority: int) -> None:
        """Add speculative window cells of ``[begin, end)``, in front of a node's window if any."""
        one = node.window
        if one is None or end < one.start or not one.is_speculative:
            # Window cells are those of a node's last tokens, and these are evicted before others.
            node = self._boundary(node, end)
        if node.window is None:
            node.window = self._new_speculative(node, Kind.WINDOW, priority)
        one = node.window
        sizes = cut(begin, end, self.shape.block_size)
        one.sizes, one.chunks = [*sizes, *one.sizes], [None] * len(sizes) + one.chunks
        self._count(one)

    def _add_state(self, node: Node, end: EndState, priority: int) -> None:
        before = next((at.end for at in node.path() if at is not node and at.state), 0)
        one = node.state
        if one is None:
            one = node.state = self._new_speculative(node, Kind.STATE, priority)
            one.chunks = [EndState()]
        known = one.chunks[0]
        one.chunks = [end.with_all_of(known)]
        self.n_states += end.has_state and not known.has_state
        saved = node.end - before
        self._count(one)
        one.weight = saved / max(1, saved * self.shape.attention_bytes + one.n_bytes)

    def _keep_end(self, node: Node, end: int, plan: Plan) -> None:
        """Promote the window and the state at a likely resume point."""
        node = self._node_of(node, end)
        wanted = self._windows(node, self.shape.window_begin(end, plan.slack), end)
        if node.state is not None and node.end == end:
            wanted.append(node.state)
        for one in wanted:
            one.last_use = self.clock
            one.priority = max(one.priority, plan.priority)
            if one.is_speculative:
                self._promote(one)
            if one.is_evictable:
                self.policy.evictable(one)  # its priority may have changed

    # Evicting -----------------------------------------------------------------------------------

    def fit(self) -> bool:
        """Evict until the budget is met; return False if held components prevent that."""
        policy, has_notes = self.policy, self.shape.node_bytes > 0
        while (excess := self.n_bytes + (policy.n_bytes if has_notes else 0) - self.max_bytes) > 0:
            one = next(iter(self._speculative), None) or policy.victim()
            if one is None:
                return False
            if not self._is_ours:
                self._check(one)
            before = self.n_bytes
            self._remove(one, self._n_leaving(one, excess))
            self.evicted_bytes += before - self.n_bytes
        return True

    def _check(self, one: Component) -> None:
        """Raise if a user's policy chose a victim that is not evictable."""
        if not isinstance(one, Component):
            kind = type(one).__name__
            raise TypeError(f"the policy's victim() must return a Component or None, not {kind}")
        root = one.node.root
        if not one.is_evictable or self._roots.get(str(root.namespace)) is not root:
            why = "not evictable (see is_evictable)"
            if one.is_evictable:
                why = "not in this cache: create a new policy object for each cache and replay"
            text = f"the policy's victim() returned {one}, which is {why}"
            raise ArgumentError(text, "victim", repr(one))

    def _n_leaving(self, one: Component, excess: int) -> int:
        if one.kind is Kind.STATE or (self.policy.whole and not one.is_speculative):
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
        """Evict n chunks (the last attention cells, the first window cells) and useless others."""
        node, parent = one.node, one.node.parent
        if one.kind is Kind.ATTENTION:
            self._shorten(node, sum(one.sizes[: len(one.sizes) - n]))
        elif one.kind is Kind.WINDOW:
            self._drop_chunks(one, 0, n)
        else:
            self._drop(one)
        if not self.shape.is_plain and parent is not None:
            self._drop_useless(node if node.parent is not None else parent)

    def _shorten(self, node: Node, n_tokens: int) -> None:
        """Keep only the first n_tokens of a leaf, and their components."""
        if node.state is not None:
            self._drop(node.state)
        if node.window is not None:
            n = node.window.n_chunks(node.start + n_tokens)
            self._drop_chunks(node.window, n, len(node.window.sizes))
        one = node.attention
        n = one.n_chunks(node.start + n_tokens)
        self._tell_removing(one, node.n_tokens - n_tokens)
        if self._root_name is not None:
            node.names(self.shape.block_size)
        self.n_blocks -= node.n_blocks(self.shape.block_size)
        key = node.tokens[:TOKEN_SIZE]
        self.removed += node.shorten(n_tokens, self.shape.block_size)
        self.n_blocks += node.n_blocks(self.shape.block_size)
        del one.sizes[n:], one.chunks[n:]
        self._count(one)
        if node.window is not None:
            self._count(node.window)
        if n_tokens:
            return
        parent, node.parent = node.parent, None
        assert parent is not None
        del parent.children[key]
        if parent.is_root:
            self._note_root(parent)
        elif parent.attention.is_evictable:
            self.policy.evictable(parent.attention)

    def _tell_removing(self, one: Component, n_tokens: int) -> None:
        if not one.is_speculative:
            self.policy.removing(one, n_tokens)

    def _drop_chunks(self, one: Component, begin: int, end: int) -> None:
        """Drop chunks at the front or the end of a window."""
        if begin == 0 and end == len(one.sizes):
            self._drop(one)
        elif begin < end:
            self._tell_removing(one, sum(one.sizes[begin:end]))
            del one.sizes[begin:end], one.chunks[begin:end]
            self._count(one)

    def _drop(self, one: Component) -> None:
        self._tell_removing(one, one.n_tokens)
        if one.is_speculative:
            del self._speculative[one]
        if one.kind is Kind.WINDOW:
            one.node.window = None
        else:
            one.node.state = None
            self.n_states -= one.chunks[0].has_state
        one.sizes, one.chunks = [], []
        self._count(one)

    # Useless components -------------------------------------------------------------------------

    def _drop_useless(self, node: Node) -> None:
        """Drop what became useless when this node, or a node after it, lost a component."""
        lost = [node]
        if self.shape.window_start is not None and not node.is_root:
            top = node
            while (above := top.parent) is not None and above.window is not None:
                if is_resumable(self.shape, above):
                    break
                top = above  # its window may have been of use only for its continuations
            # Without a window, the node cannot be reached from above.
            tops = [top] if top is node or node.window is not None else [node, top]
            for each in incomplete(self.shape, tops):
                for one in (each.window, each.state):
                    if one is not None and not one.held:
                        self._drop(one)
                        lost.append(each)
        for each in lost:
            while (before := each.parent) is not None and not self._is_needed(each):
                self._shorten(each, 0)
                each = before

    def _is_needed(self, node: Node) -> bool:
        """Return whether a node has children or holds, or a prompt can resume at its end."""
        return bool(node.children or node.attention.held) or is_resumable(self.shape, node)

    # Paths and namespaces -----------------------------------------------------------------------

    def forget(self, tokens: bytes, namespace: str = "") -> list[bytes]:
        """Remove tokens and their continuations, unless held, and ancestors of no other use.

        Returns the tokens of every path that extended them.
        """
        match = self.match(tokens, namespace)
        node = match.node
        if match.n * TOKEN_SIZE < len(tokens) and (node.children or match.n < node.end):
            return []  # the continuations belong to other prompts
        paths = [end.text_from(0) for end in (node, *node.below()) if end.end > match.n]
        for each in reversed(list(node.below())):
            self._drop_leaf(each)
        for each in node.path():
            # Nodes without a resume point were already removed with their children.
            if each.parent is not None and not self._drop_leaf(each):
                break
        return paths

    def _drop_leaf(self, node: Node) -> bool:
        """Drop a node without children or holds; return whether it was dropped."""
        if not node.attention.is_evictable:
            return False
        before = node.parent
        self._shorten(node, 0)
        if not self.shape.is_plain and before is not None:
            self._drop_useless(before)
        return True

    def clear(self, namespace: str | None = None) -> None:
        """Remove all tokens of a namespace, or of all, held ones included."""
        for root in self.roots(namespace):
            for node in reversed(list(root.below())):
                for one in node.components():
                    one.held = 0
                self._shorten(node, 0)

    def roots(self, namespace: str | None = None) -> list[Node]:
        """Return the root of a namespace, or all roots, that have children."""
        if namespace is None:
            return list(self._roots.values())
        return [self._roots[namespace]] if namespace in self._roots else []

    def nodes(self, namespace: str | None = None) -> Iterator[Node]:
        """Yield every node of a namespace, or of all, parents first."""
        for root in self.roots(namespace):
            yield from root.below()

    def _new_root(self, namespace: str) -> Node:
        name = None if self._root_name is None else self._root_name(namespace)
        return Node.new_root(namespace, name)

    def _note_root(self, root: Node) -> None:
        """Keep a root while it has children."""
        namespace = str(root.namespace)
        if root.children and namespace not in self._roots:
            self._roots[namespace] = root
            self.n_bytes += self._root_bytes(namespace)
        elif not root.children and self._roots.pop(namespace, None) is not None:
            self.n_bytes -= self._root_bytes(namespace)

    def _root_bytes(self, namespace: str) -> int:
        """Return the bytes of a root and its name, which may be long."""
        if not self.shape.node_bytes:
            return 0
        return self.shape.node_bytes + len(namespace) * (1 if namespace.isascii() else 8)
