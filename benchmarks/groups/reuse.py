"""Group 11: prompts with shared prefixes, one after the other: tokens evaluated again."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from benchmarks.harness import Answer, Contestant, Plan, Row, interleave, leave_out, show
from benchmarks.models import STORIES, medium, smallest
from benchmarks.settings import open_all, open_one
from benchmarks.setup import OURS

TITLE = "reuse of prompts that share beginnings"
PLENTY = 1024
SMALL = 8


class Alone(NamedTuple):
    """Prompts that share nothing: length, memory of a full cache in MiB, and number per round."""

    n_tokens: int
    full_mib: int
    n: int


ALONE = {
    "story model": Alone(450, 8, 24),
    "story model, 2,000 tokens": Alone(2000, 32, 6),
    "30M": Alone(450, 64, 24),
    "135M": Alone(450, 64, 4),
}
PEERS = (OURS, "llama-cpp-python", "xllamacpp")
PROCESSOR, ENDS = ", processor", ", begin and close"
NOTES = ("ideal", "total", "distinct", "seconds", "bytes", "cell_bytes")


def run(contestants: Mapping[str, Contestant], plan: Plan) -> list[Row]:
    """Play the workloads, then measure single steps."""
    who = {name: contestants[name] for name in PEERS if name in contestants}
    open_all(who, STORIES, n_ctx=4096, n_seq_max=4, threads=2)
    rows = []
    once = Plan(1, 1, 1, plan.quick)
    for work in ("chat", "tree"):
        for name, ram in (("plenty of RAM", PLENTY), (f"{SMALL} MiB", SMALL)):
            sides = {
                peer: partial(c.ask, "reuse", work=work, ram_mib=ram, quick=plan.quick)
                for peer, c in who.items()
            }
            rows.append(counted(f"{work}, {name}", sides, once))
    for name in ("story model", "story model, 2,000 tokens"):
        rows += alone(who[OURS], name, plan)
    rows += steps(who[OURS], plan)
    open_one(who[OURS], medium(), n_ctx=4096, n_seq_max=4, threads=2)
    rows += alone(who[OURS], "30M", plan)
    open_one(who[OURS], smallest(), n_ctx=4096, n_seq_max=4, threads=2)
    rows += alone(who[OURS], "135M", plan)
    leave_out(rows, "C", "has no cache of prompts")
    leave_out(rows, "cyllama", "has no cache of prompts")
    return rows


def counted(name: str, sides: Mapping[str, Any], plan: Plan) -> Row:
    """Count tokens, which are deterministic: one run without a warm-up is enough."""
    row = Row(name, "tokens")
    for who, side in sides.items():
        answer: Answer = side()
        if "error" in answer:
            row.errors[who] = answer["error"]
            continue
        # Rounding may change where answers end, hardly more.
        total = row.notes.get("total", {}).get(OURS, answer["total"])
        if abs(answer["total"] - total) > total / 50:
            row.errors[who] = f"its prompts had {answer['total']:,} tokens: another workload"
            continue
        took = f"{answer['evaluated']:,} of {answer['total']:,} tokens"
        seconds = f", {answer['seconds']:.1f} s" if "seconds" in answer else ""
        print(f"    {name}: {who} {took}{seconds}", file=sys.stderr)
        row.samples[who] = [float(answer["evaluated"])]
        for key in NOTES:
            if key in answer:
                row.notes.setdefault(key, {})[who] = answer[key]
    show(row, 1, "tokens")
    return row


def alone(ours: Contestant, name: str, plan: Plan) -> list[Row]:
    """Send prompts that share nothing, each with and without a cache in direct succession."""
    rows, one = [], ALONE[name]
    for cache, ram in (("new", PLENTY), ("full", one.full_mib)):
        parts = ("", PROCESSOR, ENDS)
        three = [Row(f"nothing shared, {name}, {cache} cache{part}", "s") for part in parts]
        for turn in range(plan.samples + 1):
            n = 4 if plan.quick else one.n
            answer = ours.ask("strangers", ram_mib=ram, n_prompts=n, n_tokens=one.n_tokens)
            for row, suffix in zip(three, parts, strict=True):
                if "error" in answer:
                    row.errors[OURS] = answer["error"]
                elif turn:
                    for how in ("with a cache", "without", "copying the blocks"):
                        if how + suffix in answer:
                            row.samples.setdefault(how, []).extend(answer[how + suffix])
        for row in three:
            show(row, 1e3, "ms", base="without")
        rows += three
    return rows


def steps(ours: Contestant, plan: Plan) -> list[Row]:
    """Restore 4,096 tokens from blocks or one state, and look them up among 100,000 blocks."""
    n = 512 if plan.quick else 4096
    opened = open_one(ours, medium(), n_ctx=8704, n_seq_max=2, threads=2)
    if "error" not in opened:
        ours.ask("fill", n=n)
    back = Row(f"restore, {n}", "s")
    for _ in range(plan.samples):
        answer = ours.ask("restore_blocks", n=n)
        if "error" in answer:
            back.errors[OURS] = answer["error"]
            break
        for how in ("blocks", "whole"):
            back.samples.setdefault(how, []).append(float(answer[how]))
    show(back, 1e3, "ms", base="whole")
    size = 2_000 if plan.quick else 100_000
    look = interleave(
        f"lookup, {size}", "s", {OURS: partial(ours.ask, "lookup", n_blocks=size)}, plan
    )
    show(look, 1e6, "us")
    new = interleave(
        f"lookup of a new prompt, {size}",
        "s",
        {OURS: partial(ours.ask, "lookup_new", n_blocks=size)},
        plan,
    )
    show(new, 1e6, "us")
    return [back, look, new]
