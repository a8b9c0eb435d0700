"""Targets of prefix reuse."""

from __future__ import annotations

import itertools
import statistics

from benchmarks.harness import Row
from benchmarks.verdicts import US, Rows, Verdict, span

SERVER = "xllamacpp"
MODELS = ("story model", "story model, 2,000 tokens", "30M", "135M")


def noted(row: Row, what: str) -> float:
    """Return one of our notes."""
    return float(row.notes[what][US])


def enough(groups: dict[str, Rows]) -> Verdict:
    """At most 2 % over ideal with plenty of memory."""
    text = "shared prefixes, plenty of RAM: at most 2 % more tokens evaluated than are new"
    found = {
        name: row.samples[US][0] / noted(row, "ideal")
        for name, row in groups.get("reuse", {}).items()
        if name.endswith("plenty of RAM") and US in row.samples
    }
    if not found:
        return Verdict("reuse_enough", text, "-", None)
    figure = ", ".join(f"{name}: {value:.3f} of the ideal" for name, value in found.items())
    return Verdict("reuse_enough", text, figure, max(found.values()) <= 1.02)


def stored_once(groups: dict[str, Rows]) -> Verdict:
    """At most 1.05 of the bytes without duplicates."""
    text = "shared prefixes, plenty of RAM: at most 1.05 of the bytes of distinct tokens"
    shares, words = {}, []
    for name, row in groups.get("reuse", {}).items():
        if not name.endswith("plenty of RAM") or US not in row.samples:
            continue
        least = noted(row, "distinct") * noted(row, "cell_bytes")
        work = name.split(",")[0]
        shares[f"{work} {noted(row, 'bytes') / least:.3f}"] = noted(row, "bytes") / least
        for who, taken in row.notes["bytes"].items():
            words.append(f"{work}, {who}: {taken / 2**20:.1f} of {least / 2**20:.1f} MiB")
    if not shares:
        return Verdict("reuse_bytes", text, "-", None)
    figure = "; ".join([", ".join(shares), *words])
    return Verdict("reuse_bytes", text, figure, max(shares.values()) <= 1.05)


def small(groups: dict[str, Rows]) -> Verdict:
    """At least 40 % fewer than llama-server at 8 MiB."""
    text = "shared prefixes, 8 MiB: at least 40 % fewer tokens evaluated than llama-server"
    row = groups.get("reuse", {}).get("chat, 8 MiB")
    if row is None or US not in row.samples or SERVER not in row.samples:
        return Verdict("reuse_small", text, "-", None)
    ours, theirs = row.samples[US][0], row.samples[SERVER][0]
    figure = f"{100 * (1 - ours / theirs):.0f} % fewer: {ours:,.0f} and {theirs:,.0f}"
    return Verdict("reuse_small", text, figure, ours <= 0.6 * theirs)


def restore(groups: dict[str, Rows]) -> Verdict:
    """At most 1.2 times a whole state."""
    text = "restore of 4,096 tokens from 64 blocks: at most 1.2 times a whole state"
    row = groups.get("reuse", {}).get("restore, 4096")
    if row is None or "blocks" not in row.samples:
        return Verdict("reuse_restore", text, "-", None)
    ratios = row.ratios("blocks", "whole")
    figure = f"{span(ratios, 'times', 2)}; {span(row.samples['blocks'], 'ms', 2, 1e3)}"
    return Verdict("reuse_restore", text, figure, statistics.median(ratios) <= 1.2)


def lookup(groups: dict[str, Rows]) -> Verdict:
    """At most 50 microseconds."""
    text = "lookup of 4,096 tokens among 100,000 blocks: at most 50 us"
    rows = groups.get("reuse", {})
    row, new = rows.get("lookup, 100000"), rows.get("lookup of a new prompt, 100000")
    if row is None or US not in row.samples:
        return Verdict("reuse_lookup", text, "-", None)
    figure = span(row.samples[US], "us", 1, 1e6)
    if new is not None and US in new.samples:
        figure += f"; of a new prompt {span(new.samples[US], 'us', 1, 1e6)}"
    return Verdict("reuse_lookup", text, figure, row.median(US) <= 5e-5)


def alone(groups: dict[str, Rows]) -> Verdict:
    """At least 0.99 of the same without a cache."""
    text = "prompts that share nothing: at least 0.99 of the throughput without a cache"
    rows, words, values = groups.get("reuse", {}), [], []
    for model, cache in itertools.product(MODELS, ("new", "full")):
        row = rows.get(f"nothing shared, {model}, {cache} cache")
        if row is None or "without" not in row.samples:
            continue
        ratios, plain = row.ratios("without", "with a cache"), row.median("without")
        low, middle, high = (f"{value:.3f}" for value in statistics.quantiles(ratios, n=4))
        ends = rows.get(f"nothing shared, {model}, {cache} cache, begin and close")
        value = statistics.median(ratios)
        words.append(f"{model}, {cache} cache: ")
        if ends is not None and "without" in ends.samples:
            # Decodes vary by ten percent; the added time does not.
            value = plain / (plain + ends.median("with a cache") - ends.median("without"))
            words[-1] += f"{value:.3f}, if only opening and closing take longer; whole requests "
        values.append(value)
        words[-1] += f"{middle} over {len(ratios)} pairs (quartiles {low} to {high})"
        own = rows.get(f"nothing shared, {model}, {cache} cache, processor")
        if own is not None and (of_own := own.ratios("without", "with a cache")):
            words[-1] += f"; in processor time {statistics.median(of_own):.3f}"
        if copies := row.samples.get("copying the blocks"):
            floor = plain / (plain + statistics.median(copies))
            words[-1] += f"; copying blocks alone {floor:.3f}"
    if not words:
        return Verdict("reuse_alone", text, "-", None)
    figure = "; ".join(said for _, said in sorted(zip(values, words, strict=True)))
    return Verdict("reuse_alone", text, figure, min(values) >= 0.99)
