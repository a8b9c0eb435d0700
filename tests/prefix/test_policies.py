"""Each policy against a case small enough to work out by hand."""

from __future__ import annotations

import pytest

from pykvcache.prefix.blocks import token_bytes
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
