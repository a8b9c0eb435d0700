"""Targets of a prefix cache's tiers."""

from __future__ import annotations

import statistics

from benchmarks.harness import Row
from benchmarks.verdicts import US, Rows, Verdict, span

#: Required speedup over evaluating 4,096 tokens.
FOLDER, REDIS = 300.0, 60.0
#: Allowed ratios: slow tiers to evaluating, tokens during write-behind to tokens without.
SLOWEST, WRITING = 1.05, 1.02


def first_token(groups: dict[str, Rows], what: str, factor: float, key: str) -> Verdict:
    """At least `factor` times faster than evaluating."""
    text = f"TTFT, 4,096 cached tokens and 1 new, {what}: {factor:.0f} times faster than cold"
    rows = groups.get("tiers", {})
    loaded = rows.get(f"first token, {what}, 4096")
    alone = rows.get("first token, evaluated, 4096")
    if loaded is None or alone is None or not loaded.samples or not alone.samples:
        return Verdict(key, text, "-", None)
    base = statistics.median(alone.samples[US])
    ratios = [base / one for one in loaded.samples[US]]
    cold, warm = base * 1e3, loaded.median(US) * 1e3
    figure = f"{span(ratios, 'times', 0)}: {cold:,.0f} ms cold, {warm:.3g} ms"
    floors = {"RAM": "the cache's own memory", "the last one decoded alone": "the last token alone"}
    for name, words in floors.items():
        floor = rows.get(f"first token, {name}, 4096")
        if floor is not None and floor.samples:
            figure += f"; {words} {base / floor.median(US):.0f} times"
    return Verdict(key, text, figure, statistics.median(ratios) >= factor)


def folder(groups: dict[str, Rows]) -> Verdict:
    """Judge a folder in the page cache."""
    return first_token(groups, "folder, page cache", FOLDER, "tier_folder")


def redis(groups: dict[str, Rows]) -> Verdict:
    """Judge a server on loopback."""
    return first_token(groups, "Redis", REDIS, "tier_redis")


def slow(groups: dict[str, Rows]) -> Verdict:
    """At most 5 percent slower than evaluating."""
    text = f"tiers of any speed: at most {SLOWEST} of evaluating without tiers"
    rows = groups.get("tiers", {})
    found = {
        name.partition(": ")[2]: row.samples[US]
        for name, row in rows.items()
        if row.unit == "ratio" and row.samples
    }
    if not found:
        return Verdict("tier_slow", text, "-", None)
    worst = max(found, key=lambda name: statistics.median(found[name]))
    figure = f"{span(found[worst], '', 3)}, the worst of {len(found)} tiers ({worst})"
    return Verdict("tier_slow", text, figure, statistics.median(found[worst]) <= SLOWEST)


def writing(groups: dict[str, Rows]) -> Verdict:
    """Judge decodes during write-behind."""
    text = f"a token during write-behind: at most {WRITING} of one without"
    row: Row | None = groups.get("tiers", {}).get("a token while blocks are written")
    ratios = row.ratios("written behind", "no tier") if row is not None else []
    if not ratios:
        return Verdict("tier_writing", text, "-", None)
    low, middle, high = (f"{value:.3f}" for value in statistics.quantiles(ratios, n=4))
    figure = f"{middle} over {len(ratios)} pairs (quartiles {low} to {high})"
    return Verdict("tier_writing", text, figure, statistics.median(ratios) <= WRITING)
