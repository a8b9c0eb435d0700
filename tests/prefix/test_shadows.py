"""Shadows choose as the policies' classes do: the same blocks leave in the same order."""

from __future__ import annotations

import ctypes
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pykvcache._native.shadows import POLICIES as SHADOWS
from pykvcache._native.shadows import (
    BlockVotes,
    Shadow,
    block_keys,
    hit_density,
    last_key,
    most_hits,
)
from pykvcache.prefix.blocks import token_bytes
from pykvcache.prefix.policies import POLICIES
from pykvcache.prefix.policies.density import HitDensity
from pykvcache.prefix.runs import Run
from pykvcache.prefix.tree import BlockTree
from pykvcache.simulate import WORKLOADS, replay, workload
from support.sanitizer import SANITIZED


class Twins:
    """A tree with a policy's class, and its shadow, that are told the same."""

    def __init__(self, name: str, max_bytes: int) -> None:
        self.gone: list[bytes] = []
        policy = POLICIES[name]()
        self.policy = policy
        self.tree = BlockTree(1, policy, max_bytes=max_bytes, on_remove=self.note)
        self.shadow = Shadow(name, max_bytes)

    def note(self, run: Run, first: int) -> None:
        self.gone.append(run.tokens[4 * first : 4 * run.n_blocks])

    def send(self, tokens: bytes, size: int) -> None:
        self.gone.clear()
        match = self.tree.lookup(tokens)
        self.tree.extend(match.run, tokens[4 * match.n_blocks :], size)
        assert self.shadow.send(tokens, size) == match.n_blocks
        self.check()

    def insert(self, tokens: bytes, size: int) -> None:
        self.gone.clear()
        self.tree.insert(tokens, size)
        self.shadow.insert(tokens, size)
        self.check()

    def resize(self, max_bytes: int) -> None:
        self.gone.clear()
        self.tree.max_bytes = max_bytes
        self.shadow.max_bytes = max_bytes
        self.check()

    def check(self) -> None:
        assert self.shadow.gone == b"".join(self.gone)
        tree, shadow = self.tree, self.shadow
        assert (shadow.n_bytes, shadow.n_blocks) == (tree.n_bytes, tree.n_blocks)
        assert (shadow.n_runs, shadow.max_bytes) == (tree.n_runs, tree.max_bytes)


@pytest.mark.parametrize("workload_name", WORKLOADS)
@pytest.mark.parametrize("name", sorted(SHADOWS))
def test_the_same_blocks_leave_in_the_same_order(name: str, workload_name: str) -> None:
    trace = workload(workload_name, 150)
    for share in (0.03, 0.3):
        twins = Twins(name, int(trace.n_unique() * share))
        for ids in trace.prompts:
            twins.send(ids.tobytes(), 1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", sorted(SHADOWS))
def test_any_calls_have_the_same_results(name: str, seed: int) -> None:
    """Budgets that change, blocks of any size, and paths that no prompt had."""
    rng = random.Random(seed)
    twins = Twins(name, 40)
    talks = [[i] for i in range(10)]
    for _ in range(700):
        talk = rng.choice(talks)
        del talk[rng.randint(1, 12) :]
        talk += [rng.randrange(9) for _ in range(rng.randrange(6))]
        tokens, size = token_bytes(talk), rng.choice([1, 1, 2, 5, 0])
        if name == "adaptive":  # as the simulator calls it
            twins.send(tokens, 1)
        else:
            (twins.send if rng.random() < 0.7 else twins.insert)(tokens, size)
        if rng.random() < 0.05:
            twins.resize(rng.choice([0, 3, 40, 90, 10**6]))
        if rng.random() < 0.7:
            continue
        path = token_bytes([*talk, 99])
        found = twins.tree.match(path)
        assert twins.shadow.n_known(path) == found.n_blocks
        uses = [run.uses for run, n in found.parts() for _ in range(n)]
        assert [twins.shadow.uses_at(path, i) for i in range(-1, len(talk) + 1)] == [
            0,
            *uses,
            *[0] * (len(talk) + 1 - len(uses)),
        ]


def test_it_learns_the_same_chances() -> None:
    twins = Twins("hit-density", 200)
    for ids in workload("mixed", 1500).prompts:
        twins.send(ids.tobytes(), 1)
    policy = twins.policy
    assert isinstance(policy, HitDensity)
    ended, density = twins.shadow.learned()
    assert ended == policy._ended.tobytes()
    assert density == policy._density.tobytes()
    assert len(density) > 0
    pupil = HitDensity()
    pupil.learn_from(twins.shadow)
    assert (pupil._ended == policy._ended).all()
    assert pupil._density == policy._density
    pupil.learn_from(Shadow("lru", 10))  # has learned nothing
    assert (pupil._ended == policy._ended).all()


def test_the_density_is_that_of_the_gittins_index() -> None:
    """Computed here again, from the definition."""
    rng = np.random.default_rng(1)
    uses, unused, inside = rng.integers(0, 30, (3, 72, 40)).astype(np.float32)
    ended = np.stack([uses, unused, inside])
    widths = np.diff(8 * 2.0 ** (np.arange(41) / 2) - 8)

    def reached(lives: np.ndarray) -> np.ndarray:
        result: np.ndarray = np.cumsum(lives[:, ::-1], 1)[:, ::-1] - lives / 2
        return result

    ended64 = ended.astype(np.float64)
    some, every = ended64[:2].sum(0), ended64.sum(0)
    guess = 0.06 * np.exp(-np.arange(40) / 14)
    chance = (ended64[0].sum(0) + 10 * guess) / (reached(some).sum(0) + 10)
    chance = np.minimum(chance, 0.9)
    factor = (ended64[[0, 2]].sum((0, 2)) + 2) / ((reached(every) * chance).sum(1) + 2)
    used = 1 - (1 - chance) ** factor[:, None]
    expected = np.zeros((72, 40))
    for age in range(40):
        left = np.cumprod(1 - used[:, age:], 1)
        before = np.hstack([np.ones((72, 1)), left[:, :-1]])
        time = np.cumsum(before * (1 - used[:, age:] / 2) * widths[age:], 1)
        expected[:, age] = ((1 - left) / time).max(1)
    found = np.frombuffer(hit_density(ended.tobytes())).reshape(72, 40)
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize("name", sorted(SHADOWS))
def test_a_name_and_its_class_find_the_same(name: str) -> None:
    trace = workload("mixed", 300)
    mine = replay(trace, name, 100)
    assert mine.hit_tokens == replay(trace, POLICIES[name](), 100).hit_tokens > 0
    assert replay(trace, name, 10**30).hit_tokens == replay(trace, "lru", 10**9).hit_tokens


def test_every_policy_has_a_shadow() -> None:
    assert set(POLICIES) == SHADOWS


def test_numbers_of_blocks_go_on_from_each_other() -> None:
    tokens = token_bytes(range(100))
    for step in (4, 12, 64, 400, 404):
        keys = np.frombuffer(block_keys(tokens, step, 7), np.uint32)
        assert len(keys) == len(tokens) // step == len(set(keys.tolist()))
        for n in range(1, len(keys) + 1):
            assert last_key(tokens, step, n, 7) == keys[n - 1]
            after = block_keys(tokens[n * step :], step, int(keys[n - 1]))
            assert after == keys[n:].tobytes()
        assert last_key(tokens, step, 0, 7) == 7
    many = np.frombuffer(block_keys(np.zeros(10**5, np.int32).tobytes(), 4, 0), np.uint32)
    assert len(set(many.tolist())) > 10**5 - 10  # of 2**32


IDS, SIZES = np.arange(3, dtype=np.uint32), np.array([1, 2])
WRONG: list[tuple[Callable[[], object], type[Exception]]] = [
    (lambda: Shadow("best", 5), ValueError),
    (lambda: Shadow("\ud800", 5), ValueError),
    (lambda: Shadow("lru\0", 5), ValueError),
    (lambda: Shadow("lru", "5"), TypeError),  # type: ignore[arg-type]
    (lambda: Shadow("lru", 5.0), TypeError),  # type: ignore[arg-type]
    (lambda: Shadow("lru", 5).send(token_bytes([1]), None), TypeError),  # type: ignore[arg-type]
    (lambda: Shadow("lru", 5).send(None, 1), TypeError),  # type: ignore[arg-type]
    (lambda: BlockVotes(0), ValueError),
    (lambda: BlockVotes(11), ValueError),
    (lambda: BlockVotes(2).weigh([1.0]), ValueError),
    (lambda: BlockVotes(2).of(-1), OverflowError),
    (lambda: hit_density(b""), ValueError),
    (lambda: block_keys(b"12345678", 0, 1), ValueError),
    (lambda: last_key(b"12345678", 4, 3, 1), ValueError),
    (lambda: last_key(b"12345678", 4, 2**62, 1), ValueError),
    (lambda: last_key(b"12345678", 2**62, 4, 1), ValueError),
    (lambda: most_hits(IDS, SIZES, SIZES, 1, -1), ValueError),
    (lambda: most_hits(IDS, SIZES, SIZES, -1, 1), ValueError),
    (lambda: most_hits(IDS, SIZES, SIZES[:1], 1, 1), ValueError),
    (lambda: most_hits(IDS[:1], SIZES, SIZES, 1, 1), ValueError),
    (lambda: most_hits(IDS, -SIZES, SIZES, 1, 1), ValueError),
]


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_wrong_arguments_raise(case: int) -> None:
    call, error = WRONG[case]
    with pytest.raises(error):
        call()


def test_nothing_is_empty() -> None:
    shadow = Shadow("lru", 5)
    assert shadow.send(b"", 1) == shadow.send(b"123", 1) == 0  # no whole number
    assert shadow.n_runs == shadow.n_blocks == 0
    assert BlockVotes(2).alike(b"") == 0
    assert BlockVotes(2).least() == -1


def allocated() -> int:
    """What malloc has given out."""
    libc = ctypes.CDLL(None)

    class Mallinfo2(ctypes.Structure):
        # As malloc.h has them; those between are not read.
        _fields_ = (
            ("before", 4 * ctypes.c_size_t),
            ("hblkhd", ctypes.c_size_t),
            ("between", 2 * ctypes.c_size_t),
            ("uordblks", ctypes.c_size_t),
            ("after", 2 * ctypes.c_size_t),
        )

    libc.mallinfo2.restype = Mallinfo2
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)


needs_counts = pytest.mark.skipif(
    SANITIZED or sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallinfo2"),
    reason="glibc's malloc says what it gave out",
)


def taken_by(make: Callable[[], Any]) -> tuple[int, int]:
    """What an object takes, and what it says that it takes."""
    taken, kept = [], []
    for _ in range(3):  # others allocate, too, and most of all the first time
        before = allocated()
        kept.append(make())
        taken.append(allocated() - before)
    return min(taken), kept[0].memory


@needs_counts
@pytest.mark.parametrize("name", sorted(SHADOWS))
def test_what_it_takes_is_counted(name: str) -> None:
    trace = workload("mixed", 3000)
    prompts = [ids.tobytes() for ids in trace.prompts]

    def make() -> Shadow:
        shadow = Shadow(name, trace.n_unique() // 3)
        for tokens in prompts:
            shadow.send(tokens, 1)
        return shadow

    taken, counted = taken_by(make)
    assert 0.95 * taken < counted < 1.5 * taken + 20_000


@needs_counts
@pytest.mark.parametrize("name", sorted(SHADOWS - {"adaptive"}))
def test_what_leaves_takes_no_memory(name: str) -> None:
    """Where a budget is lowered, too: otherwise shadows are given up that have room."""
    prompts = [token_bytes([i, 1]) for i in range(20_000)]

    def make() -> Shadow:
        shadow = Shadow(name, 40_000)
        for tokens in prompts:
            shadow.send(tokens, 1)
        shadow.max_bytes = 40
        for tokens in prompts[:300]:
            shadow.send(tokens, 1)
        return shadow

    taken, counted = taken_by(make)
    assert 0.95 * taken < counted < 1_500_000
    assert make().n_runs <= 40


@needs_counts
@pytest.mark.parametrize("left", [20_000, 10_240, 100, 0])
def test_what_votes_take_is_counted(left: int) -> None:
    keys = [block_keys(token_bytes([i]), 4, 0) for i in range(20_000)]

    def make() -> BlockVotes:
        votes = BlockVotes(6)
        for i, key in enumerate(keys):
            votes.sent(key)
            votes.place(i, int.from_bytes(key, sys.byteorder), i, 1)
        for i in range(20_000 - left):
            votes.withdraw(i)
            votes.forget(keys[i])
            assert votes.least() == i + 1 or i == 19_999
        return votes

    taken, counted = taken_by(make)
    assert 0.95 * taken - 4000 < counted < 1.1 * taken + 1000
    assert taken < 300 * left + 200_000


def test_a_shadow_that_votes_no_more_has_no_votes() -> None:
    key = block_keys(token_bytes([1]), 4, 0)
    votes = BlockVotes(3)
    votes.sent(key)
    number = int.from_bytes(key, sys.byteorder)
    assert (votes.of(number), votes.of(number + 1)) == (7, 7)
    votes.drop(0b10)
    assert (votes.of(number), votes.of(number + 1)) == (5, 5)
    votes.place(1, number, 1, 1)
    votes.gone(1, key)
    votes.drop(0b100)
    assert votes.of(number) == 0
    assert votes.least() == 1


def test_all_but_some_blocks_are_forgotten() -> None:
    keys = [block_keys(token_bytes([i]), 4, 0) for i in range(1000)]
    votes = BlockVotes(6)
    votes.sent(b"".join(keys))
    votes.keep(b"".join(keys[:10]))
    assert len(votes) == 10


NO_MEMORY = """
import resource
from pykvcache._native.shadows import Shadow
tokens = bytes(400 << 20)
shadow = Shadow("s3fifo", 1 << 40)
shadow.send(b"1234", 1)
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (100 << 20),) * 2)
for call in (lambda: shadow.send(tokens, 1), lambda: shadow.send(b"1234", 1)):
    try:
        call()
    except (MemoryError, ValueError) as error:
        print(type(error).__name__)
"""


@pytest.mark.skipif(SANITIZED or sys.platform != "linux", reason="limits the process's addresses")
def test_what_had_no_memory_is_not_asked_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_MEMORY], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.split() == ["MemoryError", "ClosedError"]
