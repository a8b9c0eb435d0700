"""The default policy against the best simple one, on made-up traces and on the two real ones."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from pykvcache.prefix.policies.adaptive import Adaptive

from pykvcache.prefix.policies import DEFAULT, make_policy
from pykvcache.prefix.policies.simple import FIFO, LFU, LRU
from pykvcache.prefix.tree import BlockTree
from pykvcache.simulate import WORKLOADS, Trace, compare, read_trace, replay, workload
from pykvcache.simulate.report import SIMPLE, margin_table

TRACES = Path(os.environ.get("PYKVCACHE_TRACES", "."))
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_are_drawn_with_a_seed(name: str) -> None:
    one, two, other = (workload(name, 300, seed) for seed in (1, 1, 2))
    assert [x.tolist() for x in one.prompts] == [x.tolist() for x in two.prompts]
    assert [len(x) for x in one.prompts] != [len(x) for x in other.prompts]
    assert len(one.prompts) == 300
    assert one.n_tokens == one.n_blocks > one.n_unique()
    # An id stands for all before it: what comes before a block is always the same.
    before: dict[int, int] = {}
    for ids in one.prompts:
        path = [-1, *ids.tolist()]
        for left, right in itertools.pairwise(path):
            assert before.setdefault(right, left) == left


def test_an_unknown_workload_raises() -> None:
    with pytest.raises(ValueError, match="no workload 'best': known are chat, "):
        workload("best")


@pytest.mark.parametrize(
    ("name", "share"),
    [("chat", 0.05), ("scan", 0.05), ("loop", 0.2), ("agents", 0.02), ("twice", 0.5)],
)
def test_the_default_is_close_to_the_best_simple_policy(name: str, share: float) -> None:
    """Each of these is served badly by some policy: no simple one passes them all."""
    report = compare(workload(name, 2000), [*SIMPLE, DEFAULT], [share])
    assert report.margins()[0] > -1, margin_table([report])


def test_no_simple_policy_is_close_everywhere() -> None:
    """What the test above says of the default fails for each of the others."""
    reports = [
        compare(workload(name, 1000), SIMPLE, [share])
        for name, share in [("turns_in_order", 0.1), ("twice", 0.5), ("scan", 0.05), ("news", 0.01)]
    ]
    for policy in SIMPLE:
        assert min(report.margins(policy)[0] for report in reports) < -1, policy


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKLOADS)
def test_the_default_is_within_a_point_everywhere(name: str) -> None:
    report = compare(workload(name, 4000), [*SIMPLE, DEFAULT], SHARES)
    assert min(report.margins()) > -1, margin_table([report])


@pytest.mark.slow
@pytest.mark.skipif(
    not (TRACES / "mooncake_conversation.jsonl.gz").exists(),
    reason="PYKVCACHE_TRACES names no folder with the traces",
)
@pytest.mark.parametrize("name", ["mooncake_conversation", "lmcache_miniswe_b16"])
def test_the_default_is_within_a_point_on_real_traces(name: str) -> None:
    trace = read_trace(TRACES / f"{name}.jsonl.gz")
    report = compare(trace, [*SIMPLE, DEFAULT], (0.01, 0.05, 0.1, 0.25))
    assert min(report.margins()) > -1, margin_table([report])


def test_the_leader_changes_with_the_prompts() -> None:
    """Popular prompts among those that come once: LFU keeps them, though others led before."""
    popular = [
        [10**6 + i // 2 % 6] if i % 2 or i < 100 else [10**7 + 10 * i + j for j in range(5)]
        for i in range(2000)
    ]
    trace = Trace.from_ids("popular", popular)
    policy = Adaptive({"fifo": FIFO, "lru": LRU, "lfu": LFU}, half_life=200)
    mine = replay(trace, policy, 20).hit_tokens
    found = {name: replay(trace, name, 20).hit_tokens for name in ("fifo", "lru", "lfu")}
    assert policy.leader == "lfu"
    assert mine > 0.9 * found["lfu"] > 2 * found["lru"]


def test_shadows_stay_within_their_share() -> None:
    """Of little memory for notes, experts are given up; one is left, and eviction goes on."""
    policy = make_policy("adaptive")
    assert isinstance(policy, Adaptive)
    tree = BlockTree(1, policy, max_bytes=3_000_000, run_bytes=1_000)
    trace = workload("mixed", 600)
    seen = set()
    for ids in trace.prompts:
        tokens = ids.tobytes()
        match = tree.lookup(tokens)
        tree.extend(match.run, tokens[4 * match.n_blocks :], 5_000)
        assert policy.n_bytes <= 3_000_000 // 16 + 100_000
        assert tree.used_bytes <= 3_000_000
        seen.add(len(policy._shadows))
    assert len(seen) > 1
    assert tree.n_blocks > 50


@pytest.mark.parametrize("with_points", [False, True])
@pytest.mark.parametrize("max_bytes", [20_000, 100_000, 300_000, 1_000_000, 3_000_000])
def test_shadows_that_there_is_no_room_for_cost_no_block(max_bytes: int, with_points: bool) -> None:
    """The first block that leaves makes shadows: they are given up before more blocks leave."""
    tree = BlockTree(1, "adaptive", max_bytes=max_bytes, run_bytes=1_000)
    largest, left = 0, 0
    for ids in workload("mixed", 1500).prompts:
        tokens = ids.tobytes()
        before = tree.n_blocks
        match = tree.lookup(tokens)
        run = tree.extend(match.run, tokens[4 * match.n_blocks :], 1_000)
        if with_points and run is not None:
            tree.add_checkpoint(run, 500, 10)
        assert tree.used_bytes <= max_bytes
        largest = max(largest, len(ids))
        left = max(left, before - tree.n_blocks)
    assert tree.n_blocks
    # No more leave at once than a prompt takes, with the runs and the notes.
    assert left <= 2 * largest + max_bytes // 16_000
