"""The benchmarks' harness, our contestant and the report work; no time is judged here."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.models import make_model

ROOT = Path(__file__).parents[1]
# The tests' import path holds tests/ alone.
sys.path.insert(0, os.fspath(ROOT))

from benchmarks import report, targets  # noqa: E402
from benchmarks.__main__ import dumps  # noqa: E402
from benchmarks.harness import Contestant, Plan, Row, interleave  # noqa: E402

PLAN = Plan(samples=3, slices=2)


@pytest.fixture
def ours(tmp_path: Path) -> Iterator[Contestant]:
    command = [sys.executable, "-m", "benchmarks.peers.ours"]
    contestant = Contestant("pykvcache", command, {"PYTHONPATH": os.fspath(ROOT)})
    model = os.fspath(make_model("llama", tmp_path))
    opened = contestant.ask("open", model=model, n_ctx=256, n_seq_max=4, n_batch=64, threads=1)
    assert opened == {"n_vocab": 320}
    assert contestant.ask("fill", n=16) == {}
    yield contestant
    contestant.close()


def test_sides_take_turns_after_a_round_of_warm_up() -> None:
    order = []

    def side(name: str, seconds: float) -> dict[str, Any]:
        order.append(name)
        return {"seconds": seconds * len(order)}

    row = interleave("x", "s", {"A": lambda: side("A", 1.0), "B": lambda: side("B", 2.0)}, PLAN)
    assert order == ["A", "B"] * 4
    assert row.samples == {"A": [3.0, 5.0, 7.0], "B": [8.0, 12.0, 16.0]}
    assert row.ratios("B", "A") == [8 / 3, 12 / 5, 16 / 7]


def test_what_cannot_be_measured_is_said_and_asked_once() -> None:
    asked = []

    def refuse() -> dict[str, Any]:
        asked.append(1)
        return {"error": "not there: x"}

    row = interleave("x", "s", {"A": lambda: {"seconds": 1.0}, "B": refuse}, PLAN)
    assert row.errors == {"B": "not there: x"}
    assert list(row.samples) == ["A"]
    assert len(asked) == 1


def test_a_contestant_that_was_not_installed_answers_why() -> None:
    contestant = Contestant("peer", ["/nowhere"])
    contestant.missing = "not installed: no wheel"
    assert contestant.ask("open") == {"error": "not installed: no wheel"}


def test_a_contestant_that_dies_is_reported() -> None:
    contestant = Contestant("peer", [sys.executable, "-c", "import sys; sys.exit(3)"])
    assert "ended with 3" in contestant.ask("open")["error"]


@pytest.mark.parametrize(
    "what", ["pos_max", "copy", "copy_part", "remove", "remove_part", "keep", "add", "div"]
)
def test_each_memory_call_runs_and_leaves_sequence_0(ours: Contestant, what: str) -> None:
    assert ours.ask("call", what=what, slices=2)["seconds"] > 0
    assert ours.ask("held") == {"sequences": {"0": 16}}


@pytest.mark.parametrize("what", ["logits", "batch512", "batch512_list", "decode1", "can_resume"])
def test_each_other_call_runs(ours: Contestant, what: str) -> None:
    assert ours.ask("call", what=what, slices=2)["seconds"] > 0


def test_throughput_and_prefixes_count_their_tokens(ours: Contestant) -> None:
    assert ours.ask("decode", parallel=3, steps=4, depth=8)["tokens"] == 3
    assert ours.ask("prefill", parallel=2, tokens=32)["tokens"] == 32
    assert ours.ask("fill", n=16) == {}
    assert ours.ask("prefix", how="cold", n=16, tail=4)["evaluated"] == 20
    assert ours.ask("prefix", how="fork", n=16, tail=4)["evaluated"] == 4
    assert "not there" in ours.ask("call", what="nonsense")["error"]


def calls_result() -> dict[str, Any]:
    rows = [
        Row(
            "empty1",
            "s",
            {"pykvcache": [2e-8, 3e-8, 2.5e-8]},
            {},
            {"statement": {"pykvcache": "e"}},
        ),
        Row(
            "pos_max",
            "s",
            {"pykvcache": [9e-8] * 3, "C": [5e-9] * 3, "llama-cpp-python": [4e-7] * 3},
        ),
        Row("remove", "s", {"pykvcache": [9e-7] * 3, "C": [5e-7] * 3}, {"cyllama": "not there: x"}),
        Row("batch512", "s", {"pykvcache": [2.5e-6] * 3, "C": [5e-7] * 3}),
        Row("decode1, tiny, 1 thread", "s", {"pykvcache": [33e-6] * 3, "C": [30e-6] * 3}),
    ]
    return {
        "machine": {"cpu": "x", "cpus": 2, "memory": "1", "system": "s", "OMP_WAIT_POLICY": None},
        "versions": {"python": "3", "compiler": "c", "commit": "0", "llama.cpp": "l"},
        "models": {"stories": {"bytes": 1}, "30M": {"parameters": 30, "what": "w"}},
        "setup_seconds": {"C": 1.0},
        "first_setup_seconds": {"peer": 9},
        "samples": 3,
        "samples_of_what_takes_seconds": 2,
        "groups": {
            "calls": {
                "title": "cost of one call",
                "seconds": 1.0,
                "load_before_and_after": [0.0, 1.0],
                "rows": [row.as_json() for row in rows],
            }
        },
    }


def test_targets_are_judged_by_the_medians() -> None:
    found = {v.key: v for v in targets.judge({"calls": report.rows_of(calls_result(), "calls")})}
    # 90 - 5 - 25 = 60 is met; 900 - 500 - 25 = 375 is not.
    assert found["memory_cost"].met is False
    assert "375 ns at worst (`remove`), of 2; above: remove 375;" in found["memory_cost"].figure
    assert found["memory_peer"].met is True
    assert found["batch"].met is True
    assert found["decode_cost"].met is False
    assert found["throughput"].met is None
    assert found["throughput"].line()[2] == "not measured"


def test_the_report_holds_every_figure_and_every_reason(tmp_path: Path) -> None:
    result = calls_result()
    assert json.loads(dumps(result)) == result
    report.write(json.loads(dumps(result)), tmp_path / "benchmarks.md")
    text = (tmp_path / "benchmarks.md").read_text()
    assert "| 90.0 (90.0 to 90.0) | 5.00 | - | 400 |" in text
    assert "cyllama, remove: not there: x" in text
    assert "33.0 (33.0 to 33.0)" in text


def test_plots_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks import plots

    plots.draw(calls_result(), tmp_path)
    assert (tmp_path / "calls.png").read_bytes().startswith(b"\x89PNG")
