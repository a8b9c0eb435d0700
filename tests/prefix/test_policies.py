"""Each policy against a case small enough to work out by hand."""

from __future__ import annotations

import pytest
from pykvcache.prefix.policies.density import HitDensity

from pykvcache.prefix.block_hash import token_bytes
from pykvcache.prefix.policies import DEFAULT, POLICIES, make_policy
from pykvcache.prefix.tree import BlockTree


def prompts(policy: str, budget: int, text: str, size: int = 1) -> BlockTree:
    """A cache after some prompts; each letter is a block of one token."""
    tree = BlockTree(1, policy, max_bytes=budget)
    for word in text.split():
        tokens = token_bytes([ord(c) for c in word])
        match = tree.match(tokens)
        run = tree.use(match)
        tree.extend(run, tokens[match.n_blocks * 4 :], size)
    return tree


def kept(tree: BlockTree) -> str:
    """The letters that are kept, in the order of the alphabet."""
    letters = (chr(c) for run in tree.runs() for c in memoryview(run.text).cast("I"))
    return "".join(sorted(letters))


@pytest.mark.parametrize(
    ("policy", "budget", "text", "expected"),
    [
        # a was used after b and c were.
        ("lru", 3, "a b c a d", "acd"),
        ("vllm", 3, "a b c a d", "acd"),
        ("fifo", 3, "a b c a d", "bcd"),
        # The end of the older prompt goes, block by block.
        ("lru", 5, "abcd xyz", "abxyz"),
        ("fifo", 5, "abcd xyz", "abxyz"),
        # A beginning that others go on from stays with them.
        ("lru", 4, "ab abcd xy", "abxy"),
        ("fifo", 4, "ab abcd xy", "abxy"),
        # b was used twice, a once.
        ("lfu", 2, "a a b b b c", "bc"),
        ("lfu", 3, "a a b b b c x", "abx"),
        # Used again is protected: what comes once does not push it out.
        ("slru", 5, "a a b b c d e f g", "abefg"),
        ("lru", 5, "a a b b c d e f g", "cdefg"),
        # Protection is for 80 % at most (4 of 5); a was used least recently and is on probation.
        ("slru", 5, "a b c d e a b c d e x", "bcdex"),
        # One small place, of ten: what passes it once leaves, what was used moves on.
        ("s3fifo", 10, "a a b b c d e f g h i j k l", "abefghijkl"),
        # k and l left the small queue; k comes back and stays where scans do not reach.
        ("s3fifo", 4, "a a b b c c k l k m n o p", "bckp"),
        # The whole prompt leaves, not only as much of it as must.
        ("llama-server", 5, "abcd xyz", "xyz"),
        ("mlx-lm", 5, "abcd xyz", "xyz"),
        # A prompt that was loaded is stored anew, or is not.
        ("llama-server", 4, "ab cd ab e", "abe"),
        ("mlx-lm", 4, "ab cd ab e", "cde"),
        # What a stored prompt went on from goes right after it.
        ("mlx-lm", 6, "a xyz abc w", "abcw"),
        ("mlx-lm", 6, "a abc xyz w vu", "uvwxyz"),
    ],
)
def test_what_is_kept(policy: str, budget: int, text: str, expected: str) -> None:
    assert kept(prompts(policy, budget, text)) == expected


def test_cost_aware_keeps_what_costs_most_per_byte() -> None:
    tree = BlockTree(1, "cost-aware", max_bytes=50)
    # Two blocks of equal tokens: one takes four times the memory of the other.
    tree.insert(token_bytes([1]), 40)
    tree.insert(token_bytes([2]), 10)
    tree.insert(token_bytes([3]), 10)
    assert {run.text for run in tree.runs()} == {token_bytes([2]), token_bytes([3])}


def test_cost_aware_lets_old_fame_fade() -> None:
    many = " ".join("bcdefghijklmnopqrstuvwxyz")
    assert "a" in kept(prompts("cost-aware", 4, f"a a a {many[:10]}"))
    assert "a" not in kept(prompts("cost-aware", 4, f"a a a {many}"))
    assert "a" in kept(prompts("lfu", 4, f"a a a {many}"))


def test_cost_aware_knows_that_later_tokens_cost_more() -> None:
    policy = make_policy("cost-aware")
    tree = BlockTree(64, policy, max_bytes=10**9)
    run = tree.insert(token_bytes(range(64 * 400)), 10)
    short = tree.insert(token_bytes([9] * 64), 10)
    assert run is not None
    assert short is not None
    assert policy.priority(run) > 2 * policy.priority(short)  # type: ignore[attr-defined]


@pytest.mark.parametrize("policy", POLICIES)
def test_prompts_that_share_a_beginning_store_it_once(policy: str) -> None:
    tree = prompts(policy, 100, "abcx abcy abcz abc ab")
    assert kept(tree) == "abcxyz"


@pytest.mark.parametrize("policy", POLICIES)
def test_two_caches_of_one_name_share_nothing(policy: str) -> None:
    first, second = make_policy(policy), make_policy(policy)
    assert first is not second
    assert make_policy(first) is first


def test_the_default_is_one_of_them() -> None:
    assert DEFAULT in POLICIES


def hit_share(policy: str, trace: list[list[int]], budget: int) -> float:
    tree = BlockTree(1, policy, max_bytes=budget)
    hits = 0
    for prompt in trace:
        tokens = token_bytes(prompt)
        match = tree.match(tokens)
        hits += match.n_blocks
        tree.extend(tree.use(match), tokens[4 * match.n_blocks :], 1)
    return hits / sum(map(len, trace))


def documents(n: int, length: int) -> list[list[int]]:
    return [[1000 * i + j for j in range(length)] for i in range(n)]


def test_hit_density_keeps_a_part_of_what_comes_round_in_turn() -> None:
    """Where LRU evicts each document just before it comes again; half of them fit."""
    trace = documents(20, 10) * 30
    assert hit_share("lru", trace, 100) == 0
    assert hit_share("hit-density", trace, 100) > 0.3


def test_hit_density_keeps_what_was_used_lately_where_that_comes_back() -> None:
    """Sessions one after the other, each of ten prompts: what is over never comes back."""
    trace = [x[: 5 + n] for x in documents(100, 20) for n in range(10)]
    assert hit_share("hit-density", trace, 40) > hit_share("lru", trace, 40) - 0.01 > 0.6


def test_hit_density_keeps_popular_beginnings_among_what_comes_once() -> None:
    """Prompts of a common beginning, used every tenth time, among others that come once."""
    popular = documents(10, 10)
    trace = [
        popular[i // 4 % 10] + [10**6 + i]
        if i % 4 == 0
        else [10**7 + 100 * i + j for j in range(10)]
        for i in range(2000)
    ]
    assert hit_share("lru", trace, 150) < 0.01
    assert hit_share("hit-density", trace, 150) > 0.1


def test_hit_density_counts_saved_tokens_by_bytes() -> None:
    """Of two that are alike but for their size the larger leaves."""
    tree = BlockTree(1, "hit-density", max_bytes=50)
    for token, size in ((1, 40), (2, 10), (3, 10)):
        tree.insert(token_bytes([token]), size)
    assert {run.text for run in tree.runs()} == {token_bytes([2]), token_bytes([3])}


def test_hit_density_gives_equal_results_for_equal_calls() -> None:
    trace = [x[: 1 + (i * j) % 17] for i, x in enumerate(documents(200, 17)) for j in (1, 3, 7)]
    assert len({hit_share("hit-density", trace, 200) for _ in range(3)}) == 1


def test_hit_density_remembers_a_bounded_number_of_runs() -> None:
    policy = HitDensity()
    tree = BlockTree(1, policy, max_bytes=30)
    for i in range(3000):
        tree.insert(token_bytes([i]), 1)
    assert len(policy._leaves) <= 31
    assert len(policy._ghosts) <= 4 * (31 + 64)


def test_hit_density_weighs_nothing_before_something_has_to_leave() -> None:
    """Milliseconds of a cache that has room for everything would be spent for no choice."""
    policy = HitDensity()
    tree = BlockTree(1, policy, max_bytes=1000)
    for i in range(1000):
        tree.insert(token_bytes([i]), 1)
        tree.lookup(token_bytes([i // 2]))
    assert not policy._density
    assert policy._ended.any() or policy._new
    tree.insert(token_bytes([1000]), 1)
    assert len(policy._density)
    assert tree.n_blocks == 1000
