"""The targets, and whether the figures meet them."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks import texts
from benchmarks.harness import Row

Rows = dict[str, Row]

MEMORY = (
    *("pos_max", "pos_min", "can_shift", "copy", "copy_part", "copy_over"),
    *("remove", "remove_part", "keep", "add", "div"),
)
US, PEER = "pykvcache", "llama-cpp-python"


def over_c(row: Row, empty: Row | None) -> list[float]:
    """Return, sample by sample, what ours takes beyond C and an empty method."""
    base = statistics.median(empty.samples[US]) if empty is not None and empty.samples else 0.0
    pairs = zip(row.samples.get(US, []), row.samples.get("C", []), strict=False)
    return [ours - c - base for ours, c in pairs]


def over_thin(row: Row) -> list[float]:
    """Return, sample by sample, what ours takes beyond the same C call in a bare Cython method."""
    pairs = zip(row.samples.get(US, []), row.samples.get("thin", []), strict=False)
    return [ours - thin for ours, thin in pairs]


@dataclass(frozen=True)
class Verdict:
    """One target with its figure."""

    key: str
    text: str
    figure: str
    met: bool | None

    def line(self) -> list[str]:
        """Return a row of the table."""
        word = "not measured" if self.met is None else "met" if self.met else "missed"
        return [self.text, self.figure, word, "" if self.met else texts.REASONS.get(self.key, "")]


def judge(groups: dict[str, Rows]) -> list[Verdict]:
    """Compare every target with the medians."""
    checks: list[Callable[[dict[str, Rows]], Verdict]] = [
        memory_cost,
        memory_peer,
        decode_cost,
        throughput,
        fork,
        restore,
        copies,
        files,
        batch,
    ]
    return [check(groups) for check in checks]


def listed(values: dict[str, float], worst: str, unit: str, digits: int = 0) -> str:
    """Write the worst of several figures with its name, and how many there are."""
    return f"{values[worst]:,.{digits}f} {unit} at worst (`{worst}`), of {len(values)}"


def below(values: dict[str, float], limit: float) -> str:
    """Name the figures below a limit; empty where there are none."""
    low = [f"{name} {value:.2f}" for name, value in values.items() if value < limit]
    return "; below: " + ", ".join(low) if low else ""


def memory_cost(groups: dict[str, Rows]) -> Verdict:
    """At most 60 ns over C and an empty method."""
    from benchmarks.groups.calls import CALLS

    text = "memory operation: at most 60 ns over C and an empty method call"
    rows = groups.get("calls", {})
    values = {
        what: statistics.median(over_c(rows[what], rows.get(CALLS[what]))) * 1e9
        for what in MEMORY
        if what in rows and over_c(rows[what], None)
    }
    if not values:
        return Verdict("memory_cost", text, "-", None)
    over = [what for what, value in values.items() if value > 60]
    figure = listed(values, max(values, key=values.__getitem__), "ns")
    if over:
        figure += "; above: " + ", ".join(f"{what} {values[what]:.0f}" for what in over)
    # A busy processor has two speeds, and a pair of samples may have one each.
    lowest = {
        what: (lowest_of(rows, what, US) - lowest_of(rows, what, "C")) * 1e9
        - lowest_of(rows, CALLS[what], US) * 1e9
        for what in values
    }
    figure += "; by the lowest samples: "
    figure += ", ".join(f"{what} {value:.0f}" for what, value in lowest.items())
    return Verdict("memory_cost", text, figure, not over)


def lowest_of(rows: Rows, what: str, who: str) -> float:
    """Return the lowest sample, 0 where there is none."""
    return min(rows[what].samples.get(who, [0.0])) if what in rows else 0.0


def memory_peer(groups: dict[str, Rows]) -> Verdict:
    """At least 3 times faster than llama-cpp-python."""
    text = "memory operation: at least 3 times faster than llama-cpp-python"
    rows = groups.get("calls", {})
    values = {
        what: statistics.median(rows[what].ratios(PEER, US))
        for what in MEMORY
        if what in rows and rows[what].ratios(PEER, US)
    }
    if not values:
        return Verdict("memory_peer", text, "-", None)
    low = below(values, 3)
    figure = listed(values, min(values, key=values.__getitem__), "times", 2)
    return Verdict("memory_peer", text, figure + low, not low)


def decode_cost(groups: dict[str, Rows]) -> Verdict:
    """At most 2 microseconds over C for one token, where nothing but overhead is measured."""
    text = "one-token decode: within 2 us of C (tiny model, 1 thread)"
    row = groups.get("calls", {}).get("decode1, tiny, 1 thread")
    if row is None or not over_c(row, None):
        return Verdict("decode_cost", text, "-", None)
    value = statistics.median(over_c(row, None)) * 1e6
    lowest = (min(row.samples[US]) - min(row.samples["C"])) * 1e6
    figure = f"{value:.2f} us; {lowest:.2f} us by the lowest samples"
    return Verdict("decode_cost", text, figure, value <= 2)


def throughput(groups: dict[str, Rows]) -> Verdict:
    """At least 0.99 of C."""
    text = "throughput: at least 0.99 of C"
    values = {
        name: statistics.median(row.ratios(US, "C"))
        for name, row in groups.get("throughput", {}).items()
        if row.ratios(US, "C")
    }
    if not values:
        return Verdict("throughput", text, "-", None)
    low = [name for name, value in values.items() if value < 0.99]
    middle = statistics.median(values.values())
    figure = f"{middle:.3f} in the middle, " + listed(
        values, min(values, key=values.__getitem__), "", 3
    )
    if low:
        figure += f"; {len(low)} below"
    # How far the very same program is from itself says what can be told apart here.
    itself = [
        statistics.median(row.ratios("C again", "C"))
        for row in groups["throughput"].values()
        if row.ratios("C again", "C")
    ]
    if itself:
        figure += f"; C beside itself: {statistics.median(itself):.3f} in the middle, "
        figure += f"{min(itself):.3f} to {max(itself):.3f}, "
        figure += f"{sum(value < 0.99 for value in itself)} below"
    return Verdict("throughput", text, figure, not low)


def fork(groups: dict[str, Rows]) -> Verdict:
    """At most 0.3 ms for 4,096 tokens."""
    text = "fork of 4,096 tokens: at most 0.3 ms"
    row = groups.get("prefix", {}).get("prefix there, fork, 4096")
    if row is None or US not in row.samples:
        return Verdict("fork", text, "-", None)
    ours, c = row.median(US) * 1e3, row.median("C") * 1e3
    return Verdict("fork", text, f"{ours:.3f} ms; C {c:.3f} ms", ours <= 0.3)


def restore(groups: dict[str, Rows]) -> Verdict:
    """At least 300 times faster than prefill."""
    text = "restore of 4,096 tokens: at least 300 times faster than prefill"
    rows = groups.get("prefix", {})
    cold, memory = (rows.get(f"prefix there, {how}, 4096") for how in ("cold", "memory"))
    if cold is None or memory is None or US not in memory.samples or US not in cold.samples:
        return Verdict("restore", text, "-", None)
    ratio = cold.median(US) / memory.median(US)
    figure = f"{ratio:,.0f} times ({cold.median(US):.2f} s, {memory.median(US) * 1e3:.2f} ms)"
    return Verdict("restore", text, figure, ratio >= 300)


def copies(groups: dict[str, Rows]) -> Verdict:
    """At least 0.9 of memcpy between two buffers of malloc; both, in C, where C was measured."""
    text = "state copy: at least 0.9 of memcpy"
    rows = groups.get("state", {})
    values = {}
    for name, row in rows.items():
        what, _, size = name.partition(", ")
        base = rows.get(f"memcpy_new, {size}" if what == "save_new" else f"memcpy, {size}")
        if (
            what not in ("save", "save_new", "load", "load_over")
            or base is None
            or US not in row.samples
        ):
            continue
        plain = base.samples.get("C", base.samples[US])
        values[name] = statistics.median(
            a / b for a, b in zip(row.samples[US], plain, strict=False)
        )
    if not values:
        return Verdict("copies", text, "-", None)
    low = below(values, 0.9)
    figure = listed(values, min(values, key=values.__getitem__), "", 2) + low
    return Verdict("copies", text, figure, not low)


def files(groups: dict[str, Rows]) -> Verdict:
    """Save 5 times as fast as llama.cpp's own file, load no slower, from 16 MiB on."""
    text = "state files: save 5 times as fast as llama.cpp's, load no slower"
    rows = {
        name: row
        for name, row in groups.get("state", {}).items()
        if name.startswith("file_") and not name.endswith(" 1 MiB") and "C" in row.samples
    }
    values = {
        name: statistics.median(r.ratios(US, "C")) for name, r in rows.items() if US in r.samples
    }
    if not values:
        return Verdict("files", text, "-", None)
    met = all(value >= (1 if "load" in name else 5) for name, value in values.items())
    # Nothing that writes a file can be faster than a bare write of bytes that are there.
    least = {
        name: row.median("C") / rows[name.replace("write", "make")].median("C")
        for name, row in rows.items()
        if name.startswith("file_write")
    }
    figure = ", ".join(f"{name} {value:.1f}" for name, value in values.items())
    if least:
        figure += "; a bare write(2) in place of a new file of llama.cpp's: "
        figure += ", ".join(f"{value:.1f}" for value in least.values())
    return Verdict("files", text, figure, met)


def batch(groups: dict[str, Rows]) -> Verdict:
    """At most 3 microseconds for 512 tokens from an array."""
    text = "batch of 512 from an array: at most 3 us"
    row = groups.get("calls", {}).get("batch512")
    if row is None or US not in row.samples:
        return Verdict("batch", text, "-", None)
    value = row.median(US) * 1e6
    return Verdict("batch", text, f"{value:.2f} us", value <= 3)
