"""Group 10: first token of a prompt from a tier, write-behind, slow tiers."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from benchmarks.harness import Contestant, Plan, Row, few, interleave, show
from benchmarks.models import BUILD, medium
from benchmarks.settings import open_all

TITLE = "a cache that outlives the process"
OURS = "pykvcache"
#: Contestants with files: llama.cpp's session files, called from C, and a server's slots.
FILES = ("C", "xllamacpp")
LENGTHS = (256, 1024, 4096)
#: Seconds per request and bytes per second of artificially slow folders.
SLOW = ((0.0, 1e9), (0.001, 1e8), (0.02, 3e7), (0.1, 1e7), (0.5, 1e6), (3.0, 1e5))


def run(contestants: Mapping[str, Contestant], plan: Plan) -> list[Row]:
    """Measure the 30M model with two threads."""
    ours = {OURS: contestants[OURS]}
    open_all(ours, medium(), n_ctx=8704, n_seq_max=4, threads=2)
    others = {who: contestants[who] for who in FILES if who in contestants}
    open_all(others, medium(), n_ctx=8704, n_seq_max=2, threads=2)
    folder = BUILD / "tier"
    rows = []
    with redis_server() as url:
        for n in LENGTHS[: 2 if plan.quick else 3]:
            rows.append(own_files(ours[OURS], others, n, plan))
            rows += first_tokens(ours[OURS], n, str(folder), url, plan)
    ours[OURS].ask("tier", where=str(folder), n=LENGTHS[1])
    # More samples: the ratio of two evaluations varies more than a tier may cost.
    more = plan if plan.quick else Plan(3 * plan.samples, plan.few)
    for latency, bandwidth in SLOW[:: 2 if plan.quick else 1]:
        ask = partial(
            ours[OURS].ask, "tier_slow", latency=latency, bandwidth=bandwidth, n=LENGTHS[1]
        )
        name = f"{latency * 1e3:.0f} ms a request, {bandwidth / 1e6:g} MB/s"
        rows.append(interleave(f"compared with evaluating: {name}", "ratio", {OURS: ask}, more))
        show(rows[-1], 1, "")
    rows.append(written_behind(ours[OURS], plan))
    shutil.rmtree(folder, ignore_errors=True)
    return rows


def written_behind(ours: Contestant, plan: Plan) -> Row:
    """Generate with and without write-behind in direct succession."""
    row = Row("a token while blocks are written", "s")
    for turn in range(plan.samples + 1):
        answer = ours.ask("tier_write", n=1024, steps=256, pairs=1 if plan.quick else 8)
        if "error" in answer:
            row.errors[OURS] = answer["error"]
        elif turn:
            for how in ("written behind", "no tier"):
                row.samples.setdefault(how, []).extend(answer[how])
    show(row, 1e6, "us", base="no tier")
    return row


def own_files(ours: Contestant, others: Mapping[str, Contestant], n: int, plan: Plan) -> Row:
    """Measure the first token from llama.cpp's session file and from a server's slot."""
    blob = BUILD / f"tier-{n}.state"
    paths = {who: BUILD / f"tier-{n}-{who}.state" for who in others}
    ours.ask("make_blob", n=n, path=str(blob))
    for who, contestant in others.items():
        if "error" in contestant.ask("load_blob", path=str(blob)):
            contestant.ask("fill", n=n)
        contestant.ask("keep_state", n=n, path=str(paths[who]))
    sides = {
        who: partial(contestant.ask, "prefix", how="file", n=n, tail=1, path=str(paths[who]))
        for who, contestant in others.items()
    }
    name = f"first token, a file of llama.cpp's own, {n}"
    row = interleave(name, "s", sides, few(plan), lambda answer: float(answer["first"]))
    for path in (blob, *paths.values()):
        path.unlink(missing_ok=True)
    show(row, 1e3, "ms")
    return row


def first_tokens(ours: Contestant, n: int, folder: str, url: str | None, plan: Plan) -> list[Row]:
    """Measure each tier at one length."""
    rows = []
    evaluate = interleave(
        f"first token, evaluated, {n}",
        "s",
        {OURS: partial(ours.ask, "tier", where=None, n=n)},
        few(plan),
    )
    rows.append(evaluate)
    name = f"first token, the last one decoded alone, {n}"
    rows.append(interleave(name, "s", {OURS: partial(ours.ask, "tier_last", n=n)}, plan))
    show(rows[-1], 1e3, "ms")
    tiers: dict[str, tuple[str | None, bool]] = {
        "RAM": (None, False),
        "folder, page cache": (folder, False),
        "folder, cold": (folder, True),
        "Redis": (url, False),
    }
    for name, (where, cold) in tiers.items():
        row = Row(f"first token, {name}, {n}", "s")
        if name == "Redis" and url is None:
            row.errors[OURS] = "neither valkey-server nor redis-server is on PATH"
        else:
            shutil.rmtree(folder, ignore_errors=True)
            ours.ask("tier", where=where, n=n)
            ask = partial(ours.ask, "tier_first", n=n, cold=cold)
            row = interleave(row.name, "s", {OURS: ask}, plan, note=["evaluated"])
        rows.append(row)
        show(row, 1e3, "ms")
    ours.ask("tier_close")
    return rows


@contextlib.contextmanager
def redis_server() -> Iterator[str | None]:
    """Run a Redis server on loopback; None if not installed."""
    path = shutil.which("valkey-server") or shutil.which("redis-server")
    if path is None:
        yield None
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command: list[Any] = [path, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(500):
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.01)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()
