"""The default policy against the best simple one, on made-up traces and on the two real ones."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from pykvcache.prefix.policies import DEFAULT
from pykvcache.simulate import WORKLOADS, compare, read_trace, workload
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
