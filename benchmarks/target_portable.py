"""Targets of the portable wheel."""

from __future__ import annotations

from benchmarks.groups.portable import NATIVE, PORTABLE
from benchmarks.verdicts import Rows, Verdict, below, least, medians, span, worst_of

MB = 1e6


def speed(groups: dict[str, Rows]) -> Verdict:
    """At least 0.95 of a native build."""
    text = "portable wheel: at least 0.95 of a native build's tokens per second"
    rows = [row for row in groups.get("portable", {}).values() if row.unit == "tokens/s"]
    found = {row.name: row.ratios(PORTABLE, NATIVE) for row in rows}
    found = {name: ratios for name, ratios in found.items() if ratios}
    if not found:
        return Verdict("portable_speed", text, "-", None)
    values = medians(found)
    low = below(values, 0.95)
    return Verdict("portable_speed", text, worst_of(found, least(values), "", 2) + low, not low)


def size(groups: dict[str, Rows]) -> Verdict:
    """At most 15 MB."""
    text = "portable wheel: at most 15 MB"
    row = groups.get("portable", {}).get("wheel")
    if row is None or PORTABLE not in row.samples:
        return Verdict("portable_size", text, "-", None)
    own, native = row.median(PORTABLE) / MB, row.median(NATIVE) / MB
    return Verdict("portable_size", text, f"{own:.1f} MB; native {native:.1f} MB", own <= 15)


def import_time(groups: dict[str, Rows]) -> Verdict:
    """At most 1.1 times a native build's."""
    text = "portable wheel: import in at most 1.1 times a native build's"
    row = groups.get("portable", {}).get("import")
    if row is None or not row.ratios(PORTABLE, NATIVE):
        return Verdict("portable_import", text, "-", None)
    # The minimum, because load only adds time.
    ratio = min(row.samples[PORTABLE]) / min(row.samples[NATIVE])
    figure = f"{ratio:.2f} by the lowest samples; {span(row.samples[PORTABLE], 'ms', 0, 1e3)}, "
    figure += f"native {span(row.samples[NATIVE], 'ms', 0, 1e3)}"
    return Verdict("portable_import", text, figure, ratio <= 1.1)
