"""The simulator against examples worked out by hand, a search of all choices, made-up traces."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path

import numpy as np
import pytest

from pykvcache.prefix.node import Node as Run
from pykvcache.prefix.policies import DEFAULT, POLICIES
from pykvcache.prefix.policies.simple import LRU
from pykvcache.simulate import (
    WORKLOADS,
    Trace,
    compare,
    draw,
    most_hits,
    read_trace,
    replay,
    workload,
)
from pykvcache.simulate.__main__ import main
from pykvcache.simulate.replay import BOUND
from pykvcache.simulate.report import SIMPLE, margin_table

Prefix = tuple[int, ...]


def letters(text: str, **facts: int) -> Trace:
    """A trace in which each word is a prompt, and each letter with all before it a block."""
    words = text.split()
    prompts = [[word[: i + 1] for i in range(len(word))] for word in words]
    return Trace.from_ids("letters", prompts, **facts)


def test_the_hits_of_a_small_trace() -> None:
    # Of 4 places: ab and ax share a, so abx fit; cd evicts b (older than x); then ab finds a only.
    trace = letters("ab ax cd ab ax", block_size=10)
    assert trace.n_tokens == 100
    result = replay(trace, "lru", 4)
    # ax finds a: 10. abxcd is one too many: b goes. ab finds a: 10, and pushes x out, which was
    # used before c and d. ax finds a: 10.
    assert result.hit_tokens == 30
    assert result.hit_rate == 0.3
    # All five blocks fit: a, ab, ax.
    assert replay(trace, "lru", 5).hit_tokens == 50


def test_the_part_of_a_last_block_counts_as_such() -> None:
    trace = Trace.from_ids("x", [[1, 2], [1, 2]], [15, 15], block_size=10)
    assert replay(trace, "lru", 2).hit_tokens == 15
    assert most_hits(trace, 2).hit_tokens == 15


def random_trace(seed: int, n_prompts: int = 60, width: int = 3) -> Trace:
    rng = random.Random(seed)
    words: list[str] = []
    for _ in range(n_prompts):
        base = rng.choice(words) if words and rng.random() < 0.7 else ""
        base = base[: rng.randint(0, len(base))]
        words.append(base + "".join(rng.choice("abc") for _ in range(rng.randint(1, width))))
    return letters(" ".join(words))


@pytest.mark.parametrize("policy", POLICIES)
def test_without_a_limit_each_block_is_evaluated_once(policy: str) -> None:
    trace = random_trace(1)
    assert replay(trace, policy, 10**6).hit_tokens == trace.n_blocks - trace.n_unique()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("size", [4, 12])
def test_no_policy_beats_the_bound(policy: str, size: int) -> None:
    for seed in range(5):
        trace = random_trace(seed)
        bound = most_hits(trace, size).hit_tokens
        assert replay(trace, policy, size).hit_tokens <= bound
        assert most_hits(trace, size + 1).hit_tokens >= bound


def best_by_search(trace: Trace, size: int) -> int:
    states = {frozenset[int](): 0}
    for ids in trace.prompts:
        following: dict[frozenset[int], int] = {}
        for kept, hits in states.items():
            found = sum(1 for _ in itertools.takewhile(kept.__contains__, ids.tolist()))
            there = kept | set(ids.tolist())
            for n in range(min(size, len(there)) + 1):
                for choice in itertools.combinations(sorted(there), n):
                    key = frozenset(choice)
                    following[key] = max(following.get(key, 0), hits + found)
        states = following
    return max(states.values())


@pytest.mark.parametrize("seed", range(8))
def test_the_bound_is_the_best_of_all(seed: int) -> None:
    trace = random_trace(seed, n_prompts=7, width=2)
    for size in (1, 2, 3):
        assert most_hits(trace, size).hit_tokens == best_by_search(trace, size)


def test_no_prompt_and_no_block_have_a_bound() -> None:
    assert most_hits(Trace("none", 1, [], []), 5).hit_tokens == 0
    assert most_hits(Trace("empty", 1, [np.empty(0, np.uint32)] * 2, [0, 0]), 5).hit_tokens == 0
    assert most_hits(letters("ab ac ab"), 0).hit_tokens == 0
    assert most_hits(letters("ab ac ab"), 10**30).hit_tokens == 3


def test_the_table_and_the_picture(tmp_path: Path) -> None:
    trace = random_trace(3)
    report = compare(trace, ["lru", "lfu"], [0.1, 1.0])
    assert [*report.results] == ["lru", "lfu", BOUND]
    best = (trace.n_blocks - trace.n_unique()) / trace.n_blocks
    assert report.results["lru"][1].hit_rate == report.results[BOUND][1].hit_rate == best
    lines = report.table().splitlines()
    names = [line.split("|")[1].strip(" :-") for line in lines]
    assert names == ["policy", "", "lru", "lfu", BOUND]
    assert lines[0].split("|")[2:4] == [" 10 % ", " 100 % "]
    assert f"{100 * best:.1f}" in lines[-1]
    assert len({len(line) for line in lines}) == 1
    pytest.importorskip("matplotlib")
    draw([report, report], tmp_path / "rates.svg")
    assert "letters" in (tmp_path / "rates.svg").read_text()


def test_bad_choices_raise() -> None:
    trace = random_trace(3)
    with pytest.raises(ValueError, match="no policy 'best'"):
        compare(trace, ["best"])
    with pytest.raises(ValueError, match="must be above 0, not 0"):
        compare(trace, shares=[0.5, 0])
    with pytest.raises(ValueError, match="no policy 'best'"):
        compare(trace, "best")
    assert [*compare(trace, "lru", [1.0]).results] == ["lru", BOUND]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.jsonl"
    path.write_text('{"hash_ids": [1, 2], "input_length": 30}\n' * 3)
    assert main([str(path), "--policy", "lru", "--size", "50", "100"]) == 0
    out = capsys.readouterr().out
    assert "small: 3 prompts, 90 tokens, 6 blocks of 16, 2 of them distinct" in out
    assert "| lru    | 35.6 |  66.7 |" in out
    again = [str(path), "--policy", "lru", "--policy", "fifo", "--size", "50", "--size", "100"]
    assert main(again) == 0  # an option that is given again adds to it
    out = capsys.readouterr().out
    assert "| lru    | 35.6 |  66.7 |" in out
    assert "| fifo   |" in out
    assert main([str(tmp_path / "absent")]) == 1
    assert "absent" in capsys.readouterr().err
    assert main([str(path), "--size", "-1"]) == 1
    capsys.readouterr()
    for wrong in (["--size", "0"], ["--jobs", "0"]):  # before anything is read
        assert main([str(tmp_path / "absent"), *wrong]) == 1
        assert "absent" not in capsys.readouterr().err


@pytest.mark.parametrize("jobs", [2])
def test_processes_find_the_same(jobs: int) -> None:
    trace = random_trace(4)
    one, many = (compare(trace, ["lru", "s3fifo"], [0.2], jobs=n) for n in (1, jobs))
    assert one.results == many.results


def test_long_prompts_cost_runs_and_not_blocks() -> None:
    """A session of 100 turns of 1,000 blocks each: the policy hears of turns."""

    class Counted(LRU):
        calls = 0

        def used(self, run: Run) -> None:
            self.calls += 1
            super().used(run)

    blocks = np.arange(100_000, dtype=np.uint32)
    turns = [blocks[: 1000 * (i + 1)] for i in range(100)]
    trace = Trace("long", 1, turns, [len(x) for x in turns])
    policy = Counted()
    assert replay(trace, policy, 10**6).hit_tokens == trace.n_blocks - 100_000
    assert policy.calls == sum(range(100))


TRACES = Path(os.environ.get("PYKVCACHE_TRACES", "."))


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
    with pytest.raises(ValueError, match="no workload 'best': choose one of chat, "):
        workload("best")


@pytest.mark.parametrize(
    ("name", "share"),
    [
        *(("chat", 0.05), ("scan", 0.05)),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("loop", 0.2), ("agents", 0.02))),
        ("twice", 0.5),
    ],
)
def test_the_default_is_close_to_the_best_simple_policy(name: str, share: float) -> None:
    """Each of these is served badly by some policy."""
    report = compare(workload(name, 2000), [*SIMPLE, DEFAULT], [share])
    assert report.margins()[0] > -1, margin_table([report])


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


@pytest.mark.slow
def test_the_page_of_policies_has_the_table_that_the_command_prints() -> None:
    text = (Path(__file__).parents[2] / "docs/policies.md").read_text(encoding="utf-8")
    shares, policies = [0.01, 0.05, 0.1, 0.25], [*SIMPLE, DEFAULT]
    reports = [compare(workload(name, 2000), policies, shares) for name in WORKLOADS]
    assert margin_table(reports) in text
    margins = [margin for report in reports for margin in report.margins()]
    below, above = sum(one < -1 for one in margins), sum(one > 1 for one in margins)
    counts = f"below the best in {below} of the {len(margins)} cases, and more than a point above"
    assert f"{counts} it in {above}." in text.replace("\n", " ")
