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

from benchmarks import absent, report, settings, summary, target_generate, targets, texts  # noqa: E402
from benchmarks.__main__ import dumps  # noqa: E402
from benchmarks.groups import growth, reuse  # noqa: E402
from benchmarks.harness import AGAIN, Contestant, Plan, Row, interleave  # noqa: E402
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


def test_failures_are_reported_and_asked_once() -> None:
    asked = []

    def refuse() -> dict[str, Any]:
        asked.append(1)
        return {"error": "it has no such call"}

    row = interleave("x", "s", {"A": lambda: {"seconds": 1.0}, "B": refuse}, PLAN)
    assert row.errors == {"B": "it has no such call"}
    assert list(row.samples) == ["A"]
    assert len(asked) == 1


def test_contestants_with_other_prompts_are_not_compared() -> None:
    """A peer whose answers were lost sent shorter prompts, and seemed to evaluate less."""

    def side(total: int) -> dict[str, Any]:
        return {"evaluated": 10, "total": total, "seconds": 1.0}

    sides = {"pykvcache": lambda: side(1000), "a": lambda: side(995), "b": lambda: side(800)}
    row = reuse.counted("x", sides, PLAN)
    assert [*row.samples] == ["pykvcache", "a"]
    assert row.errors == {"b": "its prompts had 800 tokens: another workload"}


def test_a_missing_contestant_answers_the_reason() -> None:
    contestant = Contestant("peer", ["/nowhere"])
    contestant.missing = "not installed: no wheel"
    assert contestant.ask("open") == {"error": "not installed: no wheel"}


def test_a_contestant_that_dies_is_reported() -> None:
    contestant = Contestant("peer", [sys.executable, "-c", "import sys; sys.exit(3)"])
    assert "ended with 3" in contestant.ask("open")["error"]


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


def test_nothing_is_measured_after_an_open_that_failed() -> None:
    contestant = answering({"error": "no such model"})
    settings.open_one(contestant, "x", n_ctx=256, n_seq_max=1, threads=1)
    assert contestant.ask("call") == {"error": "no such model"}
    contestant.close()


def test_a_group_is_not_measured_in_the_context_of_a_process_that_died() -> None:
    contestant = Contestant("peer", [sys.executable, "-c", "input(); raise SystemExit(3)"])
    why = contestant.ask("call")
    assert "ended with 3" in why["error"]
    assert contestant.ask("fill") == why
    assert contestant.process is None


@pytest.mark.parametrize(
    "what", ["pos_max", "copy", "copy_part", "remove", "remove_part", "keep", "add", "div"]
)
def test_each_memory_call_runs_and_leaves_sequence_0(ours: Contestant, what: str) -> None:
    assert ours.ask("call", what=what, slices=2)["seconds"] > 0
    assert ours.ask("held") == {"sequences": {"0": 16}}


@pytest.mark.parametrize("what", [*growth.AGAIN_AND_AGAIN, "div"])
def test_a_call_may_be_repeated_in_a_slice(ours: Contestant, what: str) -> None:
    rounds = growth.rounds_of(what, 4)
    assert rounds > 1
    assert ours.ask("call", what=what, slices=2, rounds=rounds)["seconds"] > 0
    assert ours.ask("held") == {"sequences": {"0": 16}}


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


def test_the_targets_of_many_generations_are_judged() -> None:
    rows = {
        "best of 8, 8 at once": Row("", "tokens/s", {"pykvcache": [99], "C": [100], AGAIN: [98]}),
        "step of 8, tiny": Row("", "s", {"pykvcache": [130e-6], "C": [100e-6]}),
        "token next to 8,000 idle cells, parked": Row("", "s", {"pykvcache": [1.04]}),
        "the same alone": Row("", "s", {"pykvcache": [1.0]}),
        "fork of 4,096 tokens": Row("", "s", {"pykvcache": [301e-6]}),
    }
    group = {"generate": rows}
    assert target_generate.together(group).met
    assert target_generate.server(group).met is None
    assert target_generate.step(group).met is False
    assert target_generate.idle(group).met
    assert target_generate.fork(group).met is False
    assert target_generate.sync(group).met is None


@pytest.mark.parametrize("what", ["logits", "batch512", "batch512_list", "decode1", "can_resume"])
def test_each_other_call_runs(ours: Contestant, what: str) -> None:
    assert ours.ask("call", what=what, slices=2)["seconds"] > 0


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


@pytest.mark.parametrize("what", ["hashing", "memcpy", "copying", "save", "save_new", "load"])
def test_another_thread_counts_during_work(ours: Contestant, what: str) -> None:
    assert ours.ask("keep_state", n=16)["bytes"] > 0
    assert ours.ask("progress", what=what, seconds=0.01)["per_second"] > 0


@pytest.mark.parametrize("what", ["save", "save_new", "load", "load_over", "memcpy", "memcpy_new"])
def test_states_are_saved_and_loaded(ours: Contestant, what: str) -> None:
    assert ours.ask("keep_state", n=16)["bytes"] > 0
    assert ours.ask("state", what=what, slices=2)["seconds"] > 0


def decode_row(name: str, over: float, again: float) -> Row:
    samples = {"pykvcache": [30e-6 + over] * 3, "C": [30e-6] * 3, AGAIN: [30e-6 + again] * 3}
    return Row(f"decode1, {name}", "s", samples)


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
        decode_row("tiny, 1 thread", over=3e-6, again=1e-6),
        decode_row("30M, 2 threads", over=50e-6, again=-40e-6),
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


def test_targets_are_judged_by_the_medians() -> None:
    found = {v.key: v for v in targets.judge({"calls": report.rows_of(calls_result(), "calls")})}
    # 90 - 5 - 25 = 60 is met; 900 - 500 - 25 = 375 is not.
    assert found["memory_cost"].met is False
    figure = found["memory_cost"].figure
    assert "375 ns (375 to 375) at worst (`remove`), of 2; above: remove 375;" in figure
    assert found["memory_peer"].met is True
    assert found["batch"].met is True
    assert found["decode_cost"].met is False
    told, _, noisy = found["decode_cost"].figure.partition("C differs from itself by more: ")
    assert told.startswith("tiny, 1 thread: 3.00 us (3.00 to 3.00), C against C 1.00 us")
    assert noisy.startswith("30M, 2 threads: 50.00 us (50.00 to 50.00), C against C -40.00 us")
    assert found["throughput"].met is None
    assert found["throughput"].line()[2] == "not measured"


def portable_result(speed: float, size: float, seconds: float) -> dict[str, Row]:
    return {
        row.name: row
        for row in (
            Row("decode", "tokens/s", {"portable": [speed * 9] * 3, "native": [9.0] * 3}),
            Row("prefill", "tokens/s", {"portable": [9.0] * 3, "native": [9.0] * 3}),
            Row("import", "s", {"portable": [seconds, 5.0], "native": [0.1, 0.2]}),
            Row("wheel", "bytes", {"portable": [size], "native": [6e6]}),
        )
    }


def test_the_portable_wheel_is_judged_by_speed_size_and_import() -> None:
    def met(rows: dict[str, Row]) -> list[bool | None]:
        found = {v.key: v for v in targets.judge({"portable": rows})}
        return [found[f"portable_{key}"].met for key in ("speed", "size", "import")]

    assert met(portable_result(0.96, 14e6, 0.105)) == [True] * 3
    assert met(portable_result(0.94, 16e6, 0.12)) == [False] * 3
    assert met({}) == [None] * 3
    table = report.WRITERS["portable"](portable_result(0.5, 14e6, 0.1))
    assert "| decode, tokens/s | 4.50 (4.50 to 4.50) | 9.00 (9.00 to 9.00) | 0.50" in table


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
    assert "- cyllama: `pos_max`, `batch512`, `decode1" in text


def test_figures_of_the_readme_are_those_of_the_benchmarks() -> None:
    """`python -m benchmarks.report docs/benchmarks.json` writes them again."""
    result = json.loads((ROOT / "docs" / "benchmarks.json").read_text(encoding="utf-8"))
    table = summary.on_gemma(report.rows_by_group(result))
    assert len(table.splitlines()) == len(summary.ON_GEMMA) + 2
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{report.BEGIN}\n\n{table}\n\n{report.END}" in readme
    assert table in (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert result["machine"]["cpu"] in readme
    assert len({group["cpu"] for group in result["groups"].values()}) == 1


def test_groups_of_other_machines_are_named() -> None:
    result = json.loads((ROOT / "docs" / "benchmarks.json").read_text())
    for group in result["groups"].values():
        group.pop("cpu", None)
        group.pop("commit", None)
    assert texts.elsewhere(result) == ""
    result["groups"]["state"] |= {"cpu": "Old One", "commit": "abc"}
    result["groups"]["growth"] |= {"cpu": "Old One", "commit": "abc"}
    assert (
        texts.elsewhere(result)
        == "- Carried over from earlier runs: state, growth on Old One, commit abc\n"
    )
    assert "\n- Carried over from earlier runs: state" in texts.machine(result)


def test_missing_rows_are_grouped_by_reason() -> None:
    def row(name: str, **errors: str) -> Row:
        return Row(name, "s", {"pykvcache": [1.0]}, errors)

    rows = [
        row("save, 1 MiB", cyllama="no", C="no"),
        row("save, 16 MiB", cyllama="no", C="no"),
        row("load, 1 MiB", cyllama="no"),
        row("load, 16 MiB"),
        row("empty1", cyllama="no"),
    ]
    text = absent.listed({row.name: row for row in rows})
    assert text.splitlines() == [
        *("Not measured:", ""),
        "- cyllama: `save`, `load` (1 MiB): no",
        "- C: `save`: no",
    ]
    assert absent.listed({}) == ""
    rows = [row("a, 1 cell", C="slow", cyllama="slow"), row("b", C="slow", cyllama="slow")]
    text = absent.listed({row.name: row for row in rows})
    assert text.endswith("\n- C, cyllama: everything here: slow")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.00026, "0.00026"), (0.0042, "0.0042"), (0.26, "0.26"), (12.34, "12.3"), (0.0, "0.00")],
)
def test_small_figures_keep_their_digits(value: float, text: str) -> None:
    assert report.number(value) == text


def test_plots_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks import plots

    plots.draw(calls_result(), tmp_path)
    assert (tmp_path / "calls.png").read_bytes().startswith(b"\x89PNG")


def test_rows_of_servers_have_a_separate_table() -> None:
    rows = {
        "decode": Row("decode", "tokens/s", {"portable": [90.0], "native": [100.0]}),
        "state": Row("state", "s", {"two servers": [0.002], "without servers": [0.001]}),
    }
    first, second = report.in_pairs(rows).split("\n\n")
    assert "decode, tokens/s" in first
    assert "state" not in first
    assert "| state, ms |" in second
    assert "| 2.00 (2.00 to 2.00) |" in second
