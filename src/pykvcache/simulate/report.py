"""Compare policies: tables and pictures of hit rates over cache size."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from pykvcache._arguments import as_file_name, as_float, as_int, as_list
from pykvcache._drawing import new_figure
from pykvcache.errors import ArgumentError, shown
from pykvcache.prefix.policies import DEFAULT, POLICIES
from pykvcache.simulate.replay import BOUND, Result, most_hits, replay
from pykvcache.simulate.traces import Trace, check_trace

__all__ = [
    "SIMPLE",
    "Report",
    "check_picture",
    "check_sizes",
    "compare",
    "draw",
    "margin_table",
]

#: Simple policies with which the default policy is compared.
SIMPLE = ("lru", "fifo", "lfu", "slru", "s3fifo", "cost-aware")


@dataclass(frozen=True)
class Report:
    """Hit rates of policies at several cache sizes, on one trace.

    Attributes
    ----------
    trace : Trace
        The replayed trace.
    shares : tuple of float
        Cache sizes as fractions of the blocks of an unlimited cache.
    results : dict
        For each policy, a result for each size; `BOUND` comes last.
    """

    trace: Trace
    shares: tuple[float, ...]
    results: dict[str, list[Result]]

    def table(self) -> str:
        """Return the hit rates in percent as Markdown."""
        rows = [["policy", *(f"{100 * share:g} %" for share in self.shares)]]
        for policy, results in self.results.items():
            rows.append([policy, *(f"{100 * result.hit_rate:.1f}" for result in results)])
        return _markdown(rows)

    def margins(self, policy: str = DEFAULT) -> list[float]:
        """Return, for each size, a policy's lead over the best simple one in percentage points.

        The simple policies are those of `SIMPLE` that were replayed.

        Raises
        ------
        ValueError
            If the policy, or all simple ones, were not replayed.
        """
        others = [self.results[name] for name in SIMPLE if name in self.results]
        if policy not in self.results or not others:
            raise ArgumentError(
                f"{policy} and a policy of {', '.join(SIMPLE)} were not both replayed",
                "policy",
                policy,
                tuple(SIMPLE),
            )
        return [
            100 * (mine.hit_rate - max(other.hit_rate for other in theirs))
            for mine, *theirs in zip(self.results[policy], *others, strict=True)
        ]


def margin_table(reports: Sequence[Report]) -> str:
    """Return the default policy's lead over the best simple one per trace, as Markdown."""
    rows = [["trace", *(f"{100 * share:g} %" for share in reports[0].shares)]]
    for report in reports:
        rows.append([report.trace.name, *(f"{margin:+.1f}" for margin in report.margins())])
    return _markdown(rows)


def _markdown(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows)
    lines = [f"| {' | '.join(row)} |" for row in cells]
    rules = [":" + "-" * (widths[0] + 1), *("-" * (width + 1) + ":" for width in widths[1:])]
    return "\n".join([lines[0], f"|{'|'.join(rules)}|", *lines[1:]])


def _one(trace: Trace, policy: str, n_blocks: int) -> Result:
    return most_hits(trace, n_blocks) if policy == BOUND else replay(trace, policy, n_blocks)


def _share(value: object) -> float:
    share = as_float(value, "shares", 0, sys.float_info.max)
    if not share:
        raise ArgumentError(f"a size must be above 0, not {shown(value)}", "shares", value, 0)
    return share


def check_sizes(shares: Iterable[float], jobs: int) -> tuple[tuple[float, ...], int]:
    """Return sizes and number of processes; raise like `compare`."""
    jobs = as_int(jobs, "jobs", 1, 2**15)
    return tuple(map(_share, as_list(shares, "shares", "numbers"))), jobs


def compare(
    trace: Trace,
    policies: Iterable[str] | None = None,
    shares: Sequence[float] = (0.01, 0.05, 0.1, 0.25),
    *,
    jobs: int = 1,
) -> Report:
    """Replay a trace with every policy at every size, and compute the bound.

    Parameters
    ----------
    trace
        The prompts.
    policies
        One or more names; default all.
    shares
        Cache sizes as fractions of the blocks of an unlimited cache.
    jobs
        Number of processes, each with one replay at a time.

    Raises
    ------
    ValueError
        If a policy is unknown, or a size is not positive and finite.
    """
    check_trace(trace)
    given_names = [policies] if isinstance(policies, str | bytes) else policies
    names = list(POLICIES) if given_names is None else as_list(given_names, "policies", "names")
    for name in names:
        if not isinstance(name, str):
            kind = type(name).__name__
            raise TypeError(f"policies must be names, not {kind}: replay() takes objects, too")
        if name not in POLICIES:
            raise ArgumentError(
                f"there is no policy {shown(name)}: choose one of {', '.join(POLICIES)}",
                "policies",
                name,
                tuple(POLICIES),
            )
    given, jobs = check_sizes(shares, jobs)
    names.append(BOUND)
    unique = trace.n_unique()
    sizes = [max(int(share * unique), 1) for share in given]
    if jobs > 1:
        with ProcessPoolExecutor(jobs) as pool:
            waiting = [[pool.submit(_one, trace, name, n) for n in sizes] for name in names]
            results = [[each.result() for each in row] for row in waiting]
    else:
        results = [[_one(trace, name, n) for n in sizes] for name in names]
    return Report(trace, given, dict(zip(names, results, strict=True)))


def check_picture(path: str | os.PathLike[str]) -> str:
    """Check the path of a picture before anything is replayed; raise like `draw`."""
    known = new_figure(1, 1).canvas.get_supported_filetypes()
    name, endings = as_file_name(path), tuple(f".{one}" for one in sorted(known))
    if os.path.splitext(name)[1].lower() not in endings:
        text = f"path is {shown(name)}: its suffix must be one of {', '.join(endings)}"
        raise ArgumentError(text, "path", name, endings)
    if not os.path.isdir(folder := os.path.dirname(name) or os.curdir):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder)
    return name


def draw(reports: Sequence[Report], path: str | os.PathLike[str]) -> None:
    """Draw hit rate over size, one plot per trace; needs matplotlib (extra ``plot``).

    Parameters
    ----------
    reports
        The reports to draw.
    path
        Output file; its suffix sets the format, for example ``.svg`` or ``.png``.

    Raises
    ------
    ValueError
        Matplotlib does not support the suffix, or there are no reports.
    ImportError
        matplotlib is not installed.
    """
    name = check_picture(path)
    reports = as_list(reports, "reports", "Reports")
    for report in reports:
        if not isinstance(report, Report):
            raise TypeError(f"reports must hold Reports, not {type(report).__name__}")
    if not reports:
        raise ArgumentError("there are no reports to draw", "reports", 0, 1)
    figure = new_figure(6 * len(reports), 4.5)
    pictures = figure.subplots(1, len(reports), squeeze=False)[0]
    for axes, report in zip(pictures, reports, strict=True):
        for i, (policy, results) in enumerate(report.results.items()):
            # Ten colours, then another marker.
            style = "k--" if policy == BOUND else "os^D"[i // 10 % 4] + "-"
            rates = [100 * result.hit_rate for result in results]
            axes.plot([100 * share for share in report.shares], rates, style, label=policy)
        axes.set(xscale="log", xlabel="size of the cache, % of all blocks", ylim=(0, None))
        axes.set_ylabel("prompt tokens found, %")
        axes.set_title(report.trace.name, parse_math=False)
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    figure.savefig(name)
