"""Measure and write the report.

    python -m benchmarks                          everything, into docs/
    python -m benchmarks --only calls --quick     one group, few samples, into build/bench/

Groups: calls, throughput, generate, prefix, tiers, reuse, state, arrays, footprint, growth,
portable; also real and serve, which are measured only if named.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import environment, setup
from benchmarks.harness import Plan, closing
from benchmarks.models import BUILD, ROOT
from benchmarks.settings import EQUAL

#: Measured only if named: they need a model of 250 MB, and the server.
NAMED = ("real", "serve")
GROUPS = (
    *("calls", "throughput", "generate", "prefix", "tiers", "reuse", "state"),
    *("arrays", "footprint", "growth", "portable"),
)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", action="append", choices=GROUPS + NAMED, help="a group; may be repeated"
    )
    parser.add_argument("--skip", action="append", choices=GROUPS, default=[], help="not this one")
    parser.add_argument("--quick", action="store_true", help="few samples: to see that it works")
    parser.add_argument("--brief", action="store_true", help="2 samples of what takes seconds")
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--peers", default=",".join(setup.PEERS), help="comma-separated")
    parser.add_argument("--out", type=Path, help="folder; default: docs, or build/bench/out")
    parser.add_argument("--merge", action="store_true", help="keep the other groups of the JSON")
    return parser.parse_args()


def main() -> None:
    """Run as a program."""
    options = arguments()
    whole = not options.only and not options.quick
    out = options.out or (ROOT / "docs" if whole or options.merge else BUILD / "out")
    plan = Plan(2, 2, 4, quick=True) if options.quick else Plan(options.samples, options.samples)
    if options.brief:
        plan = Plan(plan.samples, min(2, plan.samples), plan.slices, plan.quick)
    begin = time.perf_counter()
    names = [name for name in options.peers.split(",") if name]
    contestants, took = setup.contestants(names)
    result: dict[str, Any] = {
        "machine": environment.machine(),
        "versions": environment.versions(contestants),
        "models": environment.models(),
        "setup_seconds": took,
        "first_setup_seconds": setup.first_costs(),
        "samples": plan.samples,
        "samples_of_what_takes_seconds": plan.few,
        "groups": {},
    }
    path = out / "benchmarks.json"
    reported: dict[str, list[str]] = {}
    if options.merge and path.exists():
        earlier = json.loads(path.read_text())
        result |= {key: earlier[key] for key in ("groups", "setup_seconds")}
        for group in result["groups"].values():  # with their machine and commit
            group.setdefault("cpu", earlier["machine"]["cpu"])
            group.setdefault("commit", earlier["versions"]["commit"])
        reported |= earlier.get("settings", {}).get("reported", {})
        few = {int(n) for n in re.findall(r"\d+", str(earlier["samples_of_what_takes_seconds"]))}
        ends = sorted({min(few | {plan.few}), max(few | {plan.few})})
        result["samples_of_what_takes_seconds"] = " to ".join(map(str, ends))
    for name in options.only or GROUPS:
        if name in options.skip:
            continue
        group = importlib.import_module(f"benchmarks.groups.{name}")
        print(f"{name}: {group.TITLE}", file=sys.stderr)
        start, load = time.perf_counter(), os.getloadavg()
        # thin is only for the group calls.
        who = {n: c for n, c in contestants.items() if n != "thin" or name == "calls"}
        with closing(contestants):
            rows = group.run(who, plan)
        result["groups"][name] = {
            "title": group.TITLE,
            "seconds": round(time.perf_counter() - start, 1),
            "load_before_and_after": [load[0], os.getloadavg()[0]],
            "cpu": result["machine"]["cpu"],
            "commit": result["versions"]["commit"],
            "rows": [row.as_json() for row in rows],
        }
    for name, contestant in contestants.items():
        # A remeasured group may open fewer contexts than the others.
        reported.setdefault(name, [])
        reported[name] = sorted({*reported[name], *contestant.reported})
    result["settings"] = {"same": EQUAL, "reported": reported}
    result["seconds"] = round(time.perf_counter() - begin, 1)
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(dumps(result))
    from benchmarks import plots, report, targets

    report.write(result, out / "benchmarks.md")
    if out == ROOT / "docs":
        report.write_readme(result, ROOT / "README.md")
    plots.draw(result, out / "benchmarks")
    for verdict in targets.judge(report.rows_by_group(result)):
        if verdict.figure != "-":
            print(f"  {': '.join(verdict.line()[2:0:-1])} [{verdict.text}]", file=sys.stderr)
    print(f"{result['seconds']} s; wrote {path} and {out / 'benchmarks.md'}", file=sys.stderr)


def dumps(result: dict[str, Any]) -> str:
    """Return JSON with one measured row per line."""
    text = json.dumps({**result, "groups": {}}, indent=1)
    head, tail = text.split('"groups": {}')
    groups = []
    for name, group in result["groups"].items():
        rows = ",\n   ".join(json.dumps(row) for row in group["rows"])
        rest = json.dumps({key: value for key, value in group.items() if key != "rows"})
        groups.append(f'"{name}": {rest[:-1]}, "rows": [\n   {rows}\n  ]}}')
    return head + '"groups": {\n  ' + ",\n  ".join(groups) + "\n }" + tail + "\n"


if __name__ == "__main__":
    main()
