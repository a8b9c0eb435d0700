"""Each policy against traces small enough to work out by hand, and policies of a user's own."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest

from prefix.model_free import token_bytes
from pykvcache import LlamaContext, PrefixCache
from pykvcache.errors import KvCacheError
from pykvcache.prefix.node import Component, Kind, MemoryShape, Offer
from pykvcache.prefix.policies import DEFAULT, POLICIES, Policy, make_policy
from pykvcache.prefix.policies.hit_density import HitDensity
from pykvcache.prefix.policies.simple import LRU, CostAware
from pykvcache.prefix.tree import PrefixTree
from support.examples import some

Make = Callable[..., LlamaContext]


def ask(tree: PrefixTree, tokens: bytes) -> int:
    match = tree.match(tokens)
    tree.use(match, tree.resume(match, match.n))
    plan = tree.plan(match, Offer(len(tokens) // 4))
    if plan is not None:
        tree.insert(tokens, plan, match)
    return match.n


def prompts(policy: str | Policy, budget: int, text: str) -> PrefixTree:
    tree = PrefixTree(MemoryShape(1), policy, max_bytes=budget)
    for word in text.split():
        ask(tree, token_bytes([ord(letter) for letter in word]))
    return tree


def kept(tree: PrefixTree) -> str:
    letters = (chr(c) for node in tree.nodes() for c in memoryview(node.tokens).cast("I"))
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
        # A prompt that was loaded is stored anew.
        ("llama-server", 4, "ab cd ab e", "abe"),
        ("mlx-lm", 4, "ab cd ab e", "abe"),
        # What a stored prompt went on from goes right after it.
        ("mlx-lm", 6, "a xyz abc w", "abcw"),
        ("mlx-lm", 6, "a abc xyz w vu", "uvwxyz"),
    ],
)
def test_what_is_kept(policy: str, budget: int, text: str, expected: str) -> None:
    assert kept(prompts(policy, budget, text)) == expected


def test_the_default_is_one_of_them() -> None:
    assert DEFAULT in POLICIES
    with pytest.raises(ValueError, match="no policy 'best': choose one of lru, "):
        make_policy("best")
    with pytest.raises(TypeError, match="not int"):
        make_policy(3)  # type: ignore[arg-type]


def test_cost_aware_lets_old_fame_fade() -> None:
    many = " ".join("bcdefghijklmnopqrstuvwxyz")
    assert "a" in kept(prompts("cost-aware", 4, f"a a a {many[:10]}"))
    assert "a" not in kept(prompts("cost-aware", 4, f"a a a {many}"))
    assert "a" in kept(prompts("lfu", 4, f"a a a {many}"))


def test_cost_aware_knows_that_later_tokens_cost_more() -> None:
    policy = CostAware()
    tree = PrefixTree(MemoryShape(64), policy, max_bytes=10**9)
    for n, token in ((64 * 400, 1), (64, 2)):
        ask(tree, token_bytes([token] * n))
    short, long = sorted((node.attention for node in tree.nodes()), key=lambda one: one.end)  # type: ignore[union-attr]
    assert policy.priority(long) > 2 * policy.priority(short)  # type: ignore[arg-type]


def hit_share(policy: str, trace: list[list[int]], budget: int) -> float:
    tree = PrefixTree(MemoryShape(1), policy, max_bytes=budget)
    return sum(ask(tree, token_bytes(prompt)) for prompt in trace) / sum(map(len, trace))


def documents(n: int, length: int) -> list[list[int]]:
    return [[1000 * i + j for j in range(length)] for i in range(n)]


def test_hit_density_gives_equal_results_for_equal_calls() -> None:
    trace = [x[: 1 + (i * j) % 17] for i, x in enumerate(documents(200, 17)) for j in (1, 3, 7)]
    assert len({hit_share("hit-density", trace, 200) for _ in range(3)}) == 1


def test_hit_density_remembers_a_bounded_number_of_components() -> None:
    policy = HitDensity()
    tree = PrefixTree(MemoryShape(1), policy, max_bytes=30)
    for i in range(3000):
        ask(tree, token_bytes([i]))
    assert sum(map(len, policy._leaves.values())) <= 31
    assert len(policy._ghosts) <= 4 * (31 + 64)


def n_alive() -> int:
    gc.collect()
    return sum(isinstance(one, Component) for one in gc.get_objects())


@pytest.mark.parametrize("policy", some(POLICIES, "hit-density", "s3fifo"))
@pytest.mark.parametrize("drop", [PrefixTree.forget, lambda tree, _: tree.clear()])
def test_a_policy_keeps_no_component_that_was_forgotten(
    policy: str, drop: Callable[[PrefixTree, bytes], None]
) -> None:
    """A server that forgets chats below its budget does not grow."""
    tree, before = PrefixTree(MemoryShape(1), policy, max_bytes=10**9), n_alive()
    for i in range(1000):
        tokens = token_bytes([i, i + 1, i + 2])
        ask(tree, tokens)
        ask(tree, tokens)
        drop(tree, tokens)
    assert not list(tree.nodes())
    assert tree.n_bytes == 0
    assert n_alive() - before < 150


def test_hit_density_computes_nothing_before_something_has_to_leave() -> None:
    """A cache with room for everything would spend milliseconds for no choice."""
    policy = HitDensity()
    tree = PrefixTree(MemoryShape(1), policy, max_bytes=1000)
    for i in range(1000):
        ask(tree, token_bytes([i]))
        ask(tree, token_bytes([i // 2]))
    assert not policy._density
    ask(tree, token_bytes([1000]))
    assert policy._density
    assert tree.n_blocks == 1000


class Wrong(LRU):
    def __init__(self, where: str, what: object) -> None:
        super().__init__()
        self.where, self.what = where, what

    def _wrong(self, where: str) -> Any:
        if where != self.where:
            return None
        self.where = ""
        if isinstance(self.what, BaseException):
            raise self.what
        return self.what(self) if callable(self.what) else self.what

    def used(self, one: Component) -> None:
        self._wrong("used")
        super().used(one)

    def removing(self, one: Component, n_tokens: int) -> None:
        self._wrong("removing")
        super().removing(one, n_tokens)

    def victim(self) -> Component | None:
        return self._wrong("victim") or super().victim()


def inner(policy: LRU) -> Component:
    one = policy.victim()
    assert one is not None
    while one.parent is not None:
        one = one.parent
    return one


def foreign(policy: LRU) -> Component:
    victim = policy.victim()
    assert victim is not None
    return Component(victim.node, Kind.ATTENTION, 0, 1.0, 0)


@pytest.mark.parametrize(
    ("where", "what", "error"),
    [
        ("victim", "a text", TypeError),
        ("victim", inner, ValueError),
        ("victim", foreign, ValueError),
        ("victim", ZeroDivisionError("mine"), ZeroDivisionError),
        ("used", ZeroDivisionError("mine"), ZeroDivisionError),
        ("removing", ZeroDivisionError("mine"), ZeroDivisionError),
    ],
    ids=["text", "inner", "foreign", "victim", "used", "removing"],
)
def test_a_policy_that_goes_wrong_is_one_error_and_the_cache_goes_on(
    where: str, what: object, error: type[Exception], make_context: Make
) -> None:
    """The error comes out of one call; the cache is empty then, and is used as before."""
    ctx = make_context("llama", n_ctx=512)
    dice = random.Random(3)
    shared = [dice.randrange(5, 50) for _ in range(24)]
    with PrefixCache(ctx, block_size=8, ram_bytes=60_000, policy=Wrong(where, what)) as cache:
        caught: list[Exception] = []
        for i in range(30):
            prompt = shared + [dice.randrange(5, 50) for _ in range(60)]
            sequence = None
            try:
                sequence = cache.sequence(prompt)
                sequence.evaluate()
                sequence.close()
            except Exception as problem:
                caught.append(problem)
            assert sequence is None or sequence.close() is None, i
        (problem,) = caught
        assert isinstance(problem, error)
        assert isinstance(problem, (KvCacheError, ZeroDivisionError, TypeError))
        with cache.sequence([*shared, 7]) as sequence:
            assert sequence.reuse.ram == 24
        assert cache.stats().ram_bytes <= 60_000


def test_a_class_in_place_of_a_policy_object_is_named() -> None:
    with pytest.raises(TypeError, match="a Policy object, not the class LRU"):
        make_policy(LRU)  # type: ignore[arg-type]
