"""``python -m pykvcache.simulate TRACE ...``: a table for each trace, and optionally a picture."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

from pykvcache.prefix.policies import DEFAULT, POLICIES
from pykvcache.simulate.report import (
    SIMPLE,
    check_picture,
    check_sizes,
    compare,
    draw,
    margin_table,
)
from pykvcache.simulate.traces import read_trace
from pykvcache.simulate.workloads import WORKLOADS, workload

__all__ = ["main"]


def _n_processors() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pykvcache.simulate",
        description="Replay traces against eviction policies; print hit rates in % of tokens.",
    )
    parser.add_argument(
        "traces",
        nargs="+",
        metavar="TRACE",
        help="JSON lines, plain or gzip; or a synthetic workload: workload:NAME with NAME one of "
        f"{', '.join(WORKLOADS)}, or workload:all",
    )
    parser.add_argument(
        "--policy", nargs="+", action="extend", choices=POLICIES, help="default: all"
    )
    parser.add_argument(
        "--size",
        nargs="+",
        action="extend",
        type=float,
        metavar="PERCENT",
        help="cache sizes in %% of the blocks of an unlimited cache (1 5 10 25)",
    )
    parser.add_argument(
        "--block-size", type=int, metavar="TOKENS", help="default: derived from the lengths"
    )
    parser.add_argument(
        "--jobs", type=int, default=_n_processors(), help="processes (default: one per processor)"
    )
    parser.add_argument(
        "--prompts", type=int, default=4000, help="prompts per synthetic workload (4000)"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw a picture: .svg, .png (matplotlib)")
    return parser


def _paths(traces: Sequence[str]) -> list[str]:
    every = [f"workload:{name}" for name in WORKLOADS]
    return [path for given in traces for path in (every if given == "workload:all" else [given])]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 1 after an error, printed as one line on stderr."""
    options = _parser().parse_args(argv)
    policies, sizes = options.policy or list(POLICIES), options.size or [1, 5, 10, 25]
    reports = []
    try:
        shares, jobs = check_sizes([percent / 100 for percent in sizes], options.jobs)
        if options.plot:
            check_picture(options.plot)
        for path in _paths(options.traces):
            begun = time.perf_counter()
            kind, _, name = path.partition(":")
            if kind == "workload":
                trace = workload(name, options.prompts)
            else:
                trace = read_trace(path, options.block_size)
            print(
                f"\n{trace.name}: {len(trace.prompts):,} prompts, {trace.n_tokens:,} tokens, "
                f"{trace.n_blocks:,} blocks of {trace.block_size}, {trace.n_unique():,} of them "
                "distinct\n",
                flush=True,
            )
            reports.append(compare(trace, policies, shares, jobs=jobs))
            print(reports[-1].table())
            print(f"\n{time.perf_counter() - begun:.1f} s", flush=True)
        played = [name for name in SIMPLE if name in policies]
        if DEFAULT in policies and played:
            print(f"\n{DEFAULT}, points above the best of {', '.join(played)}:\n")
            print(margin_table(reports))
        if options.plot:
            draw(reports, options.plot)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except (OSError, ValueError, ImportError) as error:
        print(f"pykvcache.simulate: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
