"""Group 3: time to the first token of a prompt whose beginning was seen before."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.harness import Answer, Contestant, Plan, Row, few, interleave, show
from benchmarks.models import BUILD, medium

TITLE = "time to the first token with a shared prefix"
PREFIXES = (256, 1024, 4096)
TAIL = 16
THREADS = 2


def run(contestants: Mapping[str, Contestant], plan: Plan) -> list[Row]:
    """Measure each way to have the prefix, on the 30M model."""
    shape = {"n_ctx": 8704, "n_seq_max": 2, "n_batch": 512, "threads": THREADS}
    for who, contestant in contestants.items():
        more = {"n_vocab": 32_000} if who == "xllamacpp" else {}
        contestant.ask("open", model=str(medium()), **shape, **more)
    rows = []
    for n in PREFIXES[: 2 if plan.quick else 3]:
        paths = {who: str(BUILD / f"prefix-{who}.state") for who in contestants}
        low = {w: c for w, c in contestants.items() if w != "xllamacpp"}
        blob = str(BUILD / f"prefix-{n}.state")
        contestants["pykvcache"].ask("make_blob", n=n, path=blob)
        for who, contestant in low.items():
            if "error" in contestant.ask("load_blob", path=blob):
                contestant.ask("fill", n=n)
            contestant.ask("keep_state", n=n, path=paths[who])
        for how in ("cold", "fork", "memory", "file"):
            sides = {
                who: partial(c.ask, "prefix", how=how, n=n, path=paths[who])
                for who, c in (contestants if how == "cold" else low).items()
                # A wheel for any processor takes minutes here, and says nothing new.
                if who != "cyllama" or n < PREFIXES[-1]
            }
            rows += both(f"{how}, {n}", sides, few(plan) if how == "cold" and n > 256 else plan)
        peer = "llama-cpp-python"
        pairs = {
            "own prefix match": {
                peer: {"do": "llama", "how": "prefix"},
                "xllamacpp": {"do": "prefix", "how": "prefix"},
                "pykvcache": {"do": "prefix", "how": "fork"},
            },
            "RAM cache": {
                peer: {"do": "llama", "how": "cache"},
                "pykvcache": {"do": "prefix", "how": "memory"},
            },
        }
        for name, requests in pairs.items():
            sides = {
                who: partial(contestants[who].ask, n=n, **request)
                for who, request in requests.items()
                if who in contestants
            }
            rows += both(f"{name}, {n}", sides, few(plan) if n == PREFIXES[-1] else plan)
    for path in BUILD.glob("prefix-*.state"):
        path.unlink()
    return rows


def both(name: str, sides: Mapping[str, Any], plan: Plan) -> list[Row]:
    """Measure once; one row for the first token, one for the prefix alone being there."""
    answers: dict[str, list[Answer]] = {who: [] for who in sides}

    def keep(who: str) -> Answer:
        answer: Answer = sides[who]()
        answers[who].append(answer)
        return answer

    first = interleave(
        f"first token, {name}",
        "s",
        {who: partial(keep, who) for who in sides},
        plan,
        lambda answer: float(answer["first"]),
        ["evaluated", "bytes"],
    )
    ready = Row(f"prefix there, {name}", "s", errors=dict(first.errors))
    for who in first.samples:
        if who != "xllamacpp":  # a server does not tell
            ready.samples[who] = [float(a["ready"]) for a in answers[who][1:]]
    show(first, 1e3, "ms")
    show(ready, 1e3, "ms")
    return [first, ready]
