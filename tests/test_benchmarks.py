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

from benchmarks import report, settings, summary  # noqa: E402
from benchmarks.__main__ import dumps  # noqa: E402
from benchmarks.harness import Contestant, Plan, Row, interleave  # noqa: E402
from benchmarks.peers.workload import workload  # noqa: E402

PLAN = Plan(samples=3, slices=2)


@pytest.fixture(scope="module")
def process() -> Iterator[Contestant]:
    """One for all tests here: each of them opens a model and a context of its own."""
    command = [sys.executable, "-m", "benchmarks.peers.ours"]
    contestant = Contestant("pykvcache", command, {"PYTHONPATH": os.fspath(ROOT)})
    yield contestant
    contestant.close()


@pytest.fixture
def ours(process: Contestant, tmp_path: Path) -> Contestant:
    contestant = process
    model = os.fspath(make_model("llama", tmp_path))
    opened = settings.open_one(contestant, model, n_ctx=256, n_seq_max=4, threads=1)
    assert opened["n_vocab"] == 320
    assert opened["reported"] == {
        **settings.EQUAL,
        **{"n_ctx": 256, "n_batch": 256, "n_ubatch": 256, "n_seq_max": 4, "threads": 1},
    }
    assert contestant.ask("fill", n=16) == {}
    return contestant


def test_sides_take_turns_and_the_first_one_changes() -> None:
    order = []

    def side(name: str) -> dict[str, Any]:
        order.append(name)
        return {"seconds": len(order)}

    row = interleave("x", "s", {name: lambda name=name: side(name) for name in "ABC"}, PLAN)
    assert "".join(order) == "ABCBCACABABC"
    # The first round is the warm-up; samples of a place are of one round.
    assert row.samples == {"A": [6, 8, 10], "B": [4, 9, 11], "C": [5, 7, 12]}
    assert row.ratios("B", "A") == [4 / 6, 9 / 8, 11 / 10]


def answering(answer: dict[str, Any]) -> Contestant:
    """Return a contestant that answers everything alike."""
    program = (
        f"import sys\nfor line in sys.stdin: print({json.dumps(json.dumps(answer))}, flush=True)"
    )
    return Contestant("peer", [sys.executable, "-c", program])


def test_contestants_with_other_settings_are_not_measured() -> None:
    contestant = answering({"n_vocab": 9, "reported": {"n_batch": 2048, "threads": 1}})
    shape = {"n_ctx": 1024, "n_seq_max": 1, "threads": 1}
    why = "not on equal terms: n_batch 2048 instead of 512"
    assert settings.open_all({"peer": contestant}, "x", **shape) == {"peer": {"error": why}}
    assert contestant.ask("call") == {"error": why}


def test_each_call_runs_and_leaves_sequence_0(ours: Contestant) -> None:
    calls = ["pos_max", "copy", "copy_part", "remove", "remove_part", "keep", "add", "div"]
    calls += ["logits", "batch512", "batch512_list", "decode1", "can_resume"]
    for what in calls:
        assert ours.ask("call", what=what, slices=2)["seconds"] > 0, what
        if what != "decode1":
            assert ours.ask("held") == {"sequences": {"0": 16}}, what
    assert ours.ask("call", what="remove", slices=2, rounds=4)["seconds"] > 0


def test_many_generations_run_and_leave_nothing(ours: Contestant, tmp_path: Path) -> None:
    model = os.fspath(make_model("llama", tmp_path))
    settings.open_one(ours, model, n_ctx=1024, n_seq_max=4, threads=1)
    for what in ("best", "prompts", "arrivals"):
        wanted = sum(request.new for request in workload(what))
        for alone in (False, True):
            answer = ours.ask("many", what=what, slots=4, alone=alone)
            assert answer["tokens"] == wanted
            assert answer["seconds"] > 0
    assert ours.ask("steps", parallel=2, steps=4, depth=9)["seconds"] > 0
    assert set(ours.ask("idle", cells=500, steps=3)) == {"alone", "first", "seconds"}
    for what in ("fork", "sync"):
        assert ours.ask("sequence", what=what, n=64, slices=2)["seconds"] > 0
    assert ours.ask("held") == {"sequences": {}}


def test_tokens_are_generated_while_blocks_are_written(ours: Contestant, tmp_path: Path) -> None:
    folder = os.fspath(tmp_path / "tier")
    assert ours.ask("tier", where=folder, n=96)["seconds"] > 0
    assert ours.ask("tier_last", n=96)["seconds"] > 0
    answer = ours.ask("tier_write", n=128, steps=1, pairs=1)
    assert {name: len(took) for name, took in answer.items()} == {"written behind": 1, "no tier": 1}


def test_throughput_and_prefixes_count_their_tokens(ours: Contestant) -> None:
    assert ours.ask("decode", parallel=3, steps=4, depth=8)["tokens"] == 3
    assert ours.ask("prefill", parallel=2, tokens=32)["tokens"] == 32
    assert ours.ask("fill", n=16) == {}
    assert ours.ask("prefix", how="cold", n=16, tail=4)["evaluated"] == 20
    assert ours.ask("prefix", how="fork", n=16, tail=4)["evaluated"] == 4
    assert ours.ask("append", tokens=8)["tokens"] == 8
    assert ours.ask("held") == {"sequences": {"0": 16}}
    assert ours.ask("share") == {}
    assert ours.ask("held") == {"sequences": {str(s): 16 for s in range(4)}}
    assert ours.ask("call", what="nonsense") == {"error": "it has no such call"}


def test_states_are_saved_and_loaded_and_another_thread_counts_meanwhile(ours: Contestant) -> None:
    assert ours.ask("keep_state", n=16)["bytes"] > 0
    for what in ("hashing", "memcpy", "copying", "save", "save_new", "load"):
        assert ours.ask("progress", what=what, seconds=0.01)["per_second"] > 0, what
    for what in ("save", "save_new", "load", "load_over", "memcpy", "memcpy_new"):
        assert ours.ask("state", what=what, slices=2)["seconds"] > 0, what


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
        Row(
            "remove",
            "s",
            {"pykvcache": [9e-7] * 3, "C": [5e-7] * 3},
            {"cyllama": "it has no such call"},
        ),
        Row("batch512", "s", {"pykvcache": [2.5e-6] * 3, "C": [5e-7] * 3}),
        Row("decode1, tiny", "s", {"pykvcache": [33e-6] * 3, "C": [30e-6] * 3}),
    ]
    return {
        "machine": {"cpu": "x", "cpus": 2, "memory": "1", "system": "s", "OMP_WAIT_POLICY": None},
        "versions": {
            **{"python": "3", "compiler": "c", "commit": "0", "llama.cpp": "l"},
            "C": {"binding": "llama.h"},
            "cyllama": {"binding": "cyllama"},
        },
        "settings": {"same": settings.EQUAL, "reported": {"C": ["n_ctx"], "cyllama": []}},
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


def test_the_report_holds_every_figure_and_every_reason(tmp_path: Path) -> None:
    result = calls_result()
    assert json.loads(dumps(result)) == result
    report.write(json.loads(dumps(result)), tmp_path / "benchmarks.md")
    text = (tmp_path / "benchmarks.md").read_text()
    text += (tmp_path / "benchmarks-tables.md").read_text()
    assert "| 90.0 (90.0 to 90.0) | 5.00 | - | 400 |" in text
    assert "33.0 (33.0 to 33.0)" in text
    assert "- cyllama: `remove`: it has no such call\n" in text
    assert "n_batch 512, n_ubatch 512, flash_attn 1" in text
    # Who was never asked is said to be so, not left as a dash.
    assert "- cyllama: `pos_max`, `batch512`" in text


def test_figures_of_the_readme_are_those_of_the_benchmarks() -> None:
    """`python -m benchmarks.report docs/benchmarks.json` writes them again."""
    result = json.loads((ROOT / "docs" / "benchmarks.json").read_text(encoding="utf-8"))
    table = summary.on_gemma(report.rows_by_group(result))
    assert table.count("\n|") == len(summary.ON_GEMMA) + 1
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{report.BEGIN}\n\n{table}\n\n{report.END}" in readme
    assert table in (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert result["machine"]["cpu"] in readme
    assert len({group["cpu"] for group in result["groups"].values()}) == 1
