"""The default policy: whose votes count how much, and which block has the fewest."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from pykvcache._native.shadows import Shadow
from pykvcache.prefix.blocks import token_bytes
from pykvcache.prefix.policies import DEFAULT, Policy, make_policy
from pykvcache.prefix.policies.adaptive import Adaptive
from pykvcache.prefix.policies.simple import FIFO, LFU, LRU
from pykvcache.prefix.policies.votes import Votes
from pykvcache.prefix.runs import Run
from pykvcache.prefix.tree import BlockTree
from pykvcache.simulate import compare, replay, workload
from pykvcache.simulate.report import SIMPLE, margin_table


class ByVotes(Policy):
    """Votes alone: a test says what shadows let go."""

    declines = True

    def __init__(self, n_shadows: int) -> None:
        self.runs: dict[Run, None] = {}
        self.votes = Votes(n_shadows, self.runs)
        self.used = self.evictable = self.votes.used  # type: ignore[method-assign]

    def added(self, run: Run) -> None:
        self.runs[run] = None
        self.votes.added(run)
        self.votes.sent(run.path_keys)

    def split(self, head: Run, tail: Run) -> None:
        self.runs[head] = None
        self.votes.split(head, tail)

    def removing(self, run: Run, n_blocks: int) -> None:
        if n_blocks == run.n_blocks:
            del self.runs[run]
        self.votes.removing(run, n_blocks)

    def victim(self) -> Run | None:
        run, self.most_blocks = self.votes.least()
        return run


class Voted:
    """A tree by votes; each letter is a block of one token, and its shadows are one tree each."""

    def __init__(self, n_shadows: int) -> None:
        self.policy = ByVotes(n_shadows)
        self.votes = self.policy.votes
        self.tree = BlockTree(1, self.policy, max_bytes=10**9)
        self.start = self.tree.root("")._start_key

    def store(self, *words: str) -> None:
        for word in words:
            ask(self.tree, [ord(c) for c in word])

    def lose(self, shadow: int, word: str, n_blocks: int = 1) -> None:
        """Let a shadow's copy of a word lose its last blocks."""
        copy = Shadow("lru", 10**9)
        copy.insert(self.tree.match(token_bytes([ord(c) for c in word])).run.path_keys, 1)
        copy.max_bytes = copy.n_bytes - n_blocks
        self.votes.hear(1 << shadow, copy)

    def least(self) -> tuple[str, int]:
        run, n_blocks = self.votes.least()
        assert run is not None
        path = b"".join(one.text for one in reversed(list(run.path())))
        return "".join(chr(c) for c in memoryview(path).cast("I")), n_blocks

    def order(self) -> list[str]:
        """What leaves, one block after the other."""
        left = []
        while self.policy.runs:
            left.append(self.least()[0])
            self.tree.shrink(self.tree.n_bytes - 1)
        return left


def ask(tree: BlockTree, tokens: Sequence[int], size: int = 1) -> None:
    """What a cache does with a prompt."""
    text = token_bytes(tokens)
    match = tree.lookup(text)
    tree.extend(match.run, text[match.n_blocks * tree.step :], size)


def test_the_weight_of_those_who_vote_decides() -> None:
    cache = Voted(2)
    cache.store("a", "b", "c")
    cache.lose(0, "a")
    cache.lose(1, "b")
    for weights, expected in (([1, 0.5], "a"), ([0.5, 1], "b"), ([0.0, 0.5], "b"), ([3, 0], "a")):
        cache.votes.weigh(weights)
        assert cache.least() == (expected, 1), weights
    cache.votes.weigh([1, 0.5])
    assert cache.order() == ["a", "b", "c"]


def test_who_has_more_votes_of_no_weight_stays() -> None:
    cache = Voted(3)
    cache.store("a", "b")
    cache.votes.weigh([1, 0, 0])
    cache.lose(1, "b")
    assert cache.order() == ["b", "a"]


def test_among_equals_the_least_recently_used_goes_then_the_deepest() -> None:
    cache = Voted(2)
    cache.store("a", "b", "c", "a")
    assert cache.order() == ["b", "c", "a"]
    # Of one use, each time: both ends of "xy" have the same votes.
    cache.store("x", "xy", "z", "xy")
    assert cache.order() == ["z", "xy", "x"]


def test_only_as_many_leave_as_are_alike() -> None:
    cache = Voted(2)
    cache.store("abcde")
    cache.lose(1, "abcde", 2)
    assert cache.least() == ("abcde", 2)
    cache.lose(0, "abcde", 1)
    assert cache.least() == ("abcde", 1)
    cache.store("x" * 500)
    cache.lose(0, "x" * 500, 400)
    cache.lose(1, "x" * 500, 400)
    cache.store("abcde")
    assert cache.least() == ("x" * 500, 400)


def test_a_block_that_comes_back_has_all_votes_again() -> None:
    cache = Voted(2)
    cache.store("a", "b")
    cache.lose(0, "a")
    cache.lose(1, "a")
    assert cache.least() == ("a", 1)
    cache.votes.sent(cache.tree.match(token_bytes([ord("a")])).run.keys)
    cache.lose(0, "b")
    assert cache.order() == ["b", "a"]


def test_where_nothing_may_leave_nothing_is_chosen() -> None:
    cache = Voted(2)
    assert cache.votes.least() == (None, 1)
    cache.store("a")
    run = cache.tree.match(token_bytes([ord("a")])).run
    cache.tree.hold(run)
    assert cache.votes.least() == (None, 1)
    cache.tree.release(run)
    assert cache.least() == ("a", 1)


def test_what_is_never_stored_is_forgotten() -> None:
    votes = Votes(6, [])
    tree = BlockTree(1, "lru", max_bytes=0)
    for i in range(3000):
        run = Run(
            tree.root(""), token_bytes([i, i]), 4, start=0, start_key=i, block_bytes=1,
            tokens_saved=1, now=0,
        )  # fmt: skip
        votes.sent(run.keys)
    assert len(votes._blocks) < 300
    assert votes.n_bytes < 300 * 200


# The policy -------------------------------------------------------------------------------------


def begun(max_bytes: int = 60, n: int = 300, **options: float) -> tuple[Adaptive, BlockTree]:
    """A policy after some prompts."""
    policy = Adaptive({"lru": LRU, "lfu": LFU, "fifo": FIFO}, **options)
    tree = BlockTree(1, policy, max_bytes=max_bytes)
    for ids in workload("mixed", n).prompts:
        ask(tree, ids)
    assert policy._votes is not None
    return policy, tree


def weights(policy: Adaptive) -> list[float]:
    assert policy._votes is not None
    return list(policy._votes.weights)


def test_a_shadow_that_found_less_weighs_less() -> None:
    policy, _ = begun()
    policy._hits = {"lru": 10_000.0, "lfu": 9_800.0, "fifo": 0.0}
    policy._weigh()
    assert weights(policy) == pytest.approx([1, 0.368, 0], abs=0.005)
    policy._hits = dict.fromkeys(policy._hits, 0.0)  # nothing is known
    policy._weigh()
    assert weights(policy) == [1, 1, 1]
    policy._hits = {"lru": 1e300, "fifo": 0.0}  # the other one was given up
    policy._weigh()
    assert weights(policy) == [1, 0, pytest.approx(0)]


def test_old_hits_fade() -> None:
    policy, tree = begun(half_life=10)
    policy._hits = dict.fromkeys(policy._hits, 1024.0)
    for i in range(100):
        ask(tree, [10**6 + i])
    assert list(policy._hits.values()) == [pytest.approx(1)] * 3


@pytest.mark.parametrize("room", [1, 2, 7, 60])
def test_votes_are_what_the_shadows_hold(room: int) -> None:
    """After every prompt, with answers, branches, holds, other budgets, and blocks of any size."""
    rng = random.Random(room)
    policy = make_policy(DEFAULT)
    assert isinstance(policy, Adaptive)
    tree = BlockTree(1, policy, max_bytes=room)
    held: list[Run] = []
    talks = [[i] for i in range(12)]
    for step in range(400):
        talk = rng.choice(talks)
        del talk[rng.randint(1, 12) :]
        talk += [rng.randrange(9) for _ in range(rng.randrange(6))]
        ask(tree, talk, rng.choice([1, 1, 2]))
        answer = token_bytes([*talk, step])
        tree.insert(answer, 1)
        run = tree.match(answer).run
        if not run.is_root and rng.random() < 0.1:
            tree.hold(run)
            held.append(run)
        while len(held) > 2 or (held and rng.random() < 0.3):
            tree.release(held.pop(0))
        if step == 200:
            tree.clear()
            held.clear()
        if step % 100 == 50:
            tree.max_bytes = rng.randint(1, 2 * room)
        check_votes(policy, tree)
    assert policy._votes is not None
    assert tree.n_bytes <= tree.max_bytes or held


def check_votes(policy: Adaptive, tree: BlockTree) -> None:
    """Compare what votes say with the shadows themselves, and with the choice."""
    votes = policy._votes
    if votes is None:
        return
    assert set(policy._runs) == set(tree.runs())
    totals = {}
    for run in tree.runs():
        keys = run.path_keys
        assert run.state == run.keys
        for at in range(run.start, run.end):
            bits = sum(
                (shadow.n_known(keys[: 4 * at + 4]) == at + 1) << i
                for i, shadow in enumerate(policy._shadows.values())
            )
            assert votes.of(memoryview(keys).cast("I")[at]) == bits
        if run.is_evictable:
            totals[run] = sum(w for i, w in enumerate(votes.weights) if bits >> i & 1)
    chosen, n_blocks = votes.least()
    assert (chosen is None) == (not totals)
    if chosen is not None:
        assert 1 <= n_blocks <= chosen.n_blocks
        assert totals[chosen] == pytest.approx(min(totals.values()), abs=1e-7)


@pytest.mark.parametrize("max_bytes", [0, 1, 10**12])
@pytest.mark.parametrize("size", [0, 1, 3, 10**9])
def test_any_budget_and_any_size_of_blocks(max_bytes: int, size: int) -> None:
    tree = BlockTree(2, DEFAULT, max_bytes=max_bytes)
    for ids in ([1, 2], [1, 2, 3, 4], [], [7], list(range(5000)), [1, 2, 5, 6], list(range(5000))):
        for _ in range(3):
            ask(tree, ids, size)
            assert tree.n_bytes <= max_bytes
    tree.max_bytes = 0
    assert tree.n_bytes == 0
    tree.max_bytes = 10 * size
    ask(tree, list(range(100)), size)
    assert tree.n_bytes <= 10 * size


def test_a_checkpoint_ends_the_votes() -> None:
    policy, tree = begun()
    run = tree.insert(token_bytes([10**7, 10**7 + 1]), 1)
    assert run is not None
    assert tree.add_checkpoint(run, 3, 2) is not None
    assert policy._votes is None
    assert policy.most_blocks == Policy.most_blocks
    for ids in workload("mixed", 300, 2).prompts:
        ask(tree, ids)
        assert tree.n_bytes <= 60
    assert policy.leader in ("lru", "lfu", "fifo")


def test_it_begins_anew_where_a_call_was_cut_short() -> None:
    """Of the shadows nobody knows what they heard of."""
    policy, tree = begun()
    tree.renew_policy(list(tree.runs()))
    assert policy._bytes == tree.n_bytes
    assert policy._votes is None
    for ids in workload("mixed", 300, 2).prompts:
        ask(tree, ids)
        check_votes(policy, tree)
    assert tree.n_bytes == 60


def test_an_expert_that_evicts_whole_prompts_does_not_where_it_is_outvoted() -> None:
    experts: dict[str, Callable[[], Policy]] = {
        "mlx-lm": lambda: make_policy("mlx-lm"),
        "lru": LRU,
    }
    policy = Adaptive(experts)
    tree = BlockTree(1, policy, max_bytes=10)
    assert policy.whole
    for ids in ([1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11]):
        ask(tree, ids)
    assert not policy.whole
    assert tree.n_blocks == 10


@pytest.mark.parametrize(
    ("name", "seed", "share"), [("daily", 2, 0.2), ("scan", 4, 0.2), ("even", 4, 0.35)]
)
def test_little_is_lost_where_another_policy_comes_to_the_front(
    name: str, seed: int, share: float
) -> None:
    """A policy that follows the best of the last prompts alone is 2.5 to 3.3 points below here."""
    report = compare(workload(name, 1000, seed), [*SIMPLE, DEFAULT], [share])
    assert report.margins()[0] > -1, margin_table([report])


def test_equal_prompts_give_equal_results() -> None:
    trace = workload("phases", 500)
    assert replay(trace, DEFAULT, 50) == replay(trace, DEFAULT, 50)
