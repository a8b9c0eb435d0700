"""``python -m pykvcache.simulate TRACE ...``: a table for each trace, and a picture."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from pykvcache.prefix.policies import POLICIES
from pykvcache.simulate.report import compare, draw
from pykvcache.simulate.traces import read_trace

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pykvcache.simulate",
        description="Replay traces against policies of eviction: prompt tokens found, in %.",
    )
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="JSON lines, plain or gzip")
    parser.add_argument(
        "--policy", nargs="+", default=list(POLICIES), choices=POLICIES, help="default: all"
    )
    parser.add_argument(
        "--size",
        nargs="+",
        type=float,
        default=[1, 5, 10, 25],
        metavar="PERCENT",
        help="of the blocks that a cache without limit would hold (1 5 10 25)",
    )
    parser.add_argument(
        "--block-size", type=int, metavar="TOKENS", help="default: what the lengths tell"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes (1)")
    parser.add_argument("--plot", metavar="FILE", help="draw it, too: .svg, .png (matplotlib)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 1 after a failure, which is one line on stderr."""
    options = _parser().parse_args(argv)
    reports = []
    try:
        for path in options.traces:
            begun = time.perf_counter()
            trace = read_trace(path, options.block_size)
            print(
                f"\n{trace.name}: {len(trace.prompts):,} prompts, {trace.n_tokens:,} tokens, "
                f"{trace.n_blocks:,} blocks of {trace.block_size}, {trace.n_unique():,} of them "
                "different\n",
                flush=True,
            )
            shares = [percent / 100 for percent in options.size]
            reports.append(compare(trace, options.policy, shares, jobs=options.jobs))
            print(reports[-1].table())
            print(f"\n{time.perf_counter() - begun:.1f} s", flush=True)
        if options.plot:
            draw(reports, options.plot)
    except (OSError, ValueError, ImportError) as error:
        print(f"pykvcache.simulate: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
