"""Targets of prefixes and states."""

from __future__ import annotations

import statistics

from benchmarks.verdicts import US, Rows, Verdict, below, least, medians, span, worst_of

#: Allowed time of a fork, in milliseconds.
FORK = 0.3


def fork(groups: dict[str, Rows]) -> Verdict:
    """At most 0.3 ms for 4,096 tokens."""
    text = f"`copy_kv_cache_seq` of 4,096 tokens: at most {FORK} ms"
    row = groups.get("prefix", {}).get("prefix there, fork, 4096")
    if row is None or US not in row.samples:
        return Verdict("fork", text, "-", None)
    ours = [seconds * 1e3 for seconds in row.samples[US]]
    figure = f"{span(ours, 'ms', 3)}, {sum(ms > FORK for ms in ours)} of {len(ours)} samples above"
    if "C" in row.samples:
        figure += f"; C {span(row.samples['C'], 'ms', 3, 1e3)}"
    return Verdict("fork", text, figure, statistics.median(ours) <= FORK)


def restore(groups: dict[str, Rows]) -> Verdict:
    """At least 300 times faster than prefill."""
    text = "restore of 4,096 tokens: at least 300 times faster than prefill"
    rows = groups.get("prefix", {})
    cold, memory = (rows.get(f"prefix there, {how}, 4096") for how in ("cold", "memory"))
    if cold is None or memory is None or US not in memory.samples or US not in cold.samples:
        return Verdict("restore", text, "-", None)
    slow, fast = cold.samples[US], memory.samples[US]
    ratio = cold.median(US) / memory.median(US)
    figure = f"{ratio:,.0f} times ({min(slow) / max(fast):,.0f} to {max(slow) / min(fast):,.0f}): "
    figure += f"{span(slow, 's', 2)}, {span(fast, 'ms', 2, 1e3)}"
    return Verdict("restore", text, figure, ratio >= 300)


def copies(groups: dict[str, Rows]) -> Verdict:
    """At least 0.9 of C's memcpy between two buffers; into a new object, of NumPy's copy."""
    text = "state copy: at least 0.9 of memcpy"
    rows = groups.get("state", {})
    found = {}
    for name, row in rows.items():
        what, _, size = name.partition(", ")
        fresh = what == "save_new"
        base = rows.get(f"memcpy_new, {size}" if fresh else f"memcpy, {size}")
        if what not in ("save", "save_new", "load", "load_over") or base is None:
            continue
        plain = base.samples.get(US if fresh or "C" not in base.samples else "C", [])
        if row.samples.get(US) and plain:
            found[name] = [a / b for a, b in zip(row.samples[US], plain, strict=False)]
    if not found:
        return Verdict("copies", text, "-", None)
    judged = {name: ratios for name, ratios in found.items() if not name.endswith(" thread")}
    values = medians(judged)
    low = below(values, 0.9)
    figure = worst_of(judged, least(values), "", 2) + low
    # A context with one thread copies with one thread.
    alone = {name: ratios for name, ratios in found.items() if name not in judged}
    if alone:
        figure += "; not judged: " + ", ".join(f"{n} {span(r, '', 2)}" for n, r in alone.items())
    return Verdict("copies", text, figure, not low)


def _told(name: str) -> str:
    """Return a row's name in words."""
    what, _, size = name.removeprefix("file_").partition(", ")
    verbs = {"save": "replacing", "make": "creating", "load": "loading"}
    return f"{verbs[what]} {size}" if what in verbs else name


def files(groups: dict[str, Rows]) -> Verdict:
    """Save 5 times as fast as llama.cpp's own file, load no slower, from 16 MiB on."""
    text = "state files of 16 MiB and more: save 5 times as fast as llama.cpp's, load no slower"
    rows = {
        name: row
        for name, row in groups.get("state", {}).items()
        if name.startswith("file_") and "C" in row.samples
    }
    found = {name: row.ratios(US, "C") for name, row in rows.items() if US in row.samples}
    judged = {name: r for name, r in found.items() if not name.endswith(" 1 MiB")}
    if not judged:
        return Verdict("files", text, "-", None)
    met = all(v >= (1 if "load" in name else 5) for name, v in medians(judged).items())
    figure = ", ".join(
        f"{_told(name)} {span(ratios, 'times', 1)}" for name, ratios in judged.items()
    )
    small = [f"{name} {span(r, '', 1)}" for name, r in found.items() if name not in judged]
    if small:
        figure += "; not judged: " + ", ".join(small)
    # A lower bound for any file: a bare write of existing bytes.
    bare = {
        name.rpartition(", ")[2]: row.median("C") / rows[made].median("C")
        for name, row in rows.items()
        if name.startswith("file_write") and (made := name.replace("write", "make")) in rows
    }
    if bare:
        figure += "; a bare write(2) instead of llama.cpp's new file: "
        figure += ", ".join(f"{size} {value:.1f}" for size, value in bare.items())
    return Verdict("files", text, figure, met)
