"""The targets, and whether the figures meet them."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from benchmarks import target_generate as generate
from benchmarks import target_portable as portable
from benchmarks import target_reuse as reuse
from benchmarks import target_states as states
from benchmarks import target_tiers as tiers
from benchmarks.harness import AGAIN, Row
from benchmarks.verdicts import US, Rows, Verdict, below, least, medians, span, worst_of

MEMORY = (
    *("pos_max", "pos_min", "can_shift", "copy", "copy_part", "copy_over"),
    *("remove", "remove_part", "keep", "add", "div"),
)
PEER = "llama-cpp-python"
#: Allowed time of a decode over C, in microseconds.
DECODE = 2.0


def differences(row: Row, who: str, other: str, less: float = 0.0) -> list[float]:
    """Return, per round, the time of one contestant minus another's, minus `less`."""
    pairs = zip(row.samples.get(who, []), row.samples.get(other, []), strict=False)
    return [a - b - less for a, b in pairs]


def over_c(row: Row, empty: Row | None) -> list[float]:
    """Return, per sample, our time minus C's and an empty method's."""
    base = statistics.median(empty.samples[US]) if empty is not None and empty.samples else 0.0
    return differences(row, US, "C", base)


def over_thin(row: Row) -> list[float]:
    """Return, per sample, our time minus that of the same C call in a bare Cython method."""
    return differences(row, US, "thin")


def judge(groups: dict[str, Rows]) -> list[Verdict]:
    """Compare every target with the medians."""
    checks: list[Callable[[dict[str, Rows]], Verdict]] = [
        memory_cost,
        memory_peer,
        decode_cost,
        throughput,
        generate.together,
        generate.server,
        generate.step,
        generate.idle,
        generate.fork,
        generate.sync,
        states.fork,
        states.restore,
        states.copies,
        states.files,
        tiers.folder,
        tiers.redis,
        tiers.slow,
        tiers.writing,
        batch,
        reuse.enough,
        reuse.stored_once,
        reuse.small,
        reuse.restore,
        reuse.lookup,
        reuse.alone,
        portable.speed,
        portable.size,
        portable.import_time,
    ]
    return [check(groups) for check in checks]


def memory_cost(groups: dict[str, Rows]) -> Verdict:
    """At most 60 ns over C plus an empty method."""
    from benchmarks.groups.calls import CALLS

    text = "memory operation: at most 60 ns more than C and an empty method call together"
    rows = groups.get("calls", {})
    found = {
        what: [ns * 1e9 for ns in over_c(rows[what], rows.get(CALLS[what]))]
        for what in MEMORY
        if what in rows and over_c(rows[what], None)
    }
    if not found:
        return Verdict("memory_cost", text, "-", None)
    values = medians(found)
    over = [what for what, value in values.items() if value > 60]
    figure = worst_of(found, max(values, key=values.__getitem__), "ns", 0, "operations")
    if over:
        figure += "; above: " + ", ".join(f"{what} {values[what]:.0f}" for what in over)
    # A busy processor has two speeds, and the samples of a pair may differ in speed.
    lowest = {
        what: (lowest_of(rows, what, US) - lowest_of(rows, what, "C")) * 1e9
        - lowest_of(rows, CALLS[what], US) * 1e9
        for what in values
    }
    figure += "; by the lowest samples: "
    figure += ", ".join(f"{what} {value:.0f}" for what, value in lowest.items())
    return Verdict("memory_cost", text, figure, not over)


def lowest_of(rows: Rows, what: str, who: str) -> float:
    """Return the lowest sample; 0 without samples."""
    row = rows.get(what)
    return min(row.samples[who]) if row is not None and row.samples.get(who) else 0.0


def memory_peer(groups: dict[str, Rows]) -> Verdict:
    """At least 3 times faster than llama-cpp-python."""
    text = "memory operation: at least 3 times faster than llama-cpp-python"
    rows = groups.get("calls", {})
    found = {
        what: rows[what].ratios(PEER, US)
        for what in MEMORY
        if what in rows and rows[what].ratios(PEER, US)
    }
    if not found:
        return Verdict("memory_peer", text, "-", None)
    values = medians(found)
    low = below(values, 3)
    return Verdict(
        "memory_peer", text, worst_of(found, least(values), "times", 2, "operations") + low, not low
    )


def decode_cost(groups: dict[str, Rows]) -> Verdict:
    """At most 2 microseconds over C for one token, where C against C is as close."""
    text = f"one-token decode: within {DECODE:.0f} us of C"
    clear, noisy = [], []
    for name, row in groups.get("calls", {}).items():
        over = differences(row, US, "C")
        if not name.startswith("decode1") or not over:
            continue
        itself = differences(row, AGAIN, "C")
        noise = statistics.median(abs(x) for x in itself) * 1e6 if itself else 0.0
        words = f"{name.removeprefix('decode1, ')}: {span(over, 'us', 2, 1e6)}"
        if itself:
            words += f", C against C {span(itself, 'us', 2, 1e6)}"
        if noise <= DECODE:
            clear.append((statistics.median(over) * 1e6, words))
        else:
            noisy.append(words)
    if not clear and not noisy:
        return Verdict("decode_cost", text, "-", None)
    clear.sort(reverse=True)
    figure = "; ".join(words for _, words in clear)
    if noisy:
        figure += f"{'; ' if clear else ''}where {DECODE:.0f} us is within the noise, because "
        figure += "C differs from itself by more: " + "; ".join(noisy)
    met = all(value <= DECODE for value, _ in clear) if clear else None
    return Verdict("decode_cost", text, figure, met)


def throughput(groups: dict[str, Rows]) -> Verdict:
    """At least 0.99 of C."""
    text = "throughput: at least 0.99 of C"
    rows = groups.get("throughput", {})
    found = {name: row.ratios(US, "C") for name, row in rows.items() if row.ratios(US, "C")}
    if not found:
        return Verdict("throughput", text, "-", None)
    values = medians(found)
    low = [name for name, value in values.items() if value < 0.99]
    figure = worst_of(found, least(values), "", 3)
    if low:
        figure += f", {len(low)} miss the target"
    figure += f"; {pooled(found)}"
    # The difference of the same program from itself is the noise.
    for name, who in (("C against C", AGAIN), (PEER, PEER)):
        other = {n: r.ratios(who, "C") for n, r in rows.items() if r.ratios(who, "C")}
        if other:
            own = medians(other).values()
            figure += f"; {name}: {pooled(other)}; rows {min(own):.3f} to {max(own):.3f}, "
            figure += f"{sum(value < 0.99 for value in own)} below"
    return Verdict("throughput", text, figure, not low)


def pooled(found: dict[str, list[float]]) -> str:
    """Write the median and quartiles of all ratios."""
    every = [ratio for ratios in found.values() for ratio in ratios]
    if len(every) < 2:
        return f"{every[0]:.3f}"
    low, middle, high = statistics.quantiles(every, n=4)
    return f"{middle:.3f} over all {len(every)} pairs (quartiles {low:.3f} to {high:.3f})"


def batch(groups: dict[str, Rows]) -> Verdict:
    """At most 3 microseconds for 512 tokens from an array."""
    text = "batch of 512 from an array: at most 3 us"
    row = groups.get("calls", {}).get("batch512")
    if row is None or US not in row.samples:
        return Verdict("batch", text, "-", None)
    return Verdict("batch", text, span(row.samples[US], "us", 2, 1e6), row.median(US) <= 3e-6)
