"""Group 3: time to the first token of a prompt with a known prefix."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.harness import Answer, Contestant, Plan, Row, few, interleave, leave_out, show
from benchmarks.models import BUILD, medium
from benchmarks.settings import open_all
from benchmarks.setup import OURS

TITLE = "time to the first token with a shared prefix"
PREFIXES = (256, 1024, 4096)
THREADS = 2


#: Requests for what a binding does automatically.
SLOW = ("cyllama", "xllamacpp")
OWN = {
    "own prefix match": {
        "pykvcache": {"do": "prefix", "how": "fork"},
        "llama-cpp-python": {"do": "llama", "how": "prefix"},
        "xllamacpp": {"do": "prefix", "how": "prefix"},
    },
    "RAM cache": {
        "pykvcache": {"do": "prefix", "how": "memory"},
        "llama-cpp-python": {"do": "llama", "how": "cache"},
        "xllamacpp": {"do": "prefix", "how": "cache"},
    },
}


def run(contestants: Mapping[str, Contestant], plan: Plan) -> list[Row]:
    """Measure each way to get the prefix, on the 30M model."""
    open_all(contestants, medium(), n_ctx=8704, n_seq_max=2, threads=THREADS)
    rows = []
    for n in PREFIXES[: 2 if plan.quick else 3]:
        paths = {who: str(BUILD / f"prefix-{who}.state") for who in contestants}
        blob = str(BUILD / f"prefix-{n}.state")
        contestants[OURS].ask("make_blob", n=n, path=blob)
        for who, contestant in contestants.items():
            if "error" in contestant.ask("load_blob", path=blob):
                contestant.ask("fill", n=n)
            contestant.ask("keep_state", n=n, path=paths[who])
        ways: dict[str, dict[str, dict[str, Any]]] = {
            how: {who: {"do": "prefix", "how": how, "path": paths[who]} for who in contestants}
            for how in ("cold", "fork", "memory", "file")
        }
        for name, requests in (ways | OWN).items():
            sides = {
                who: partial(contestants[who].ask, n=n, **request)
                for who, request in requests.items()
                if who in contestants and not (name == "cold" and n > 1024 and who in SLOW)
            }
            slow = n == PREFIXES[-1] or (name == "cold" and n > PREFIXES[0])
            found = both(f"{name}, {n}", sides, few(plan) if slow else plan)
            for who in SLOW if name == "cold" else ():
                leave_out(found, who, "takes half a minute, and 1,024 tokens tell it")
            for who in ("C", "cyllama"):
                leave_out(found, who, "neither matches prefixes nor keeps states by itself")
            rows += found
    for path in BUILD.glob("prefix-*.state"):
        path.unlink()
    return rows


def both(name: str, sides: Mapping[str, Any], plan: Plan) -> list[Row]:
    """Measure once; return a row for the first token and one for the prefix alone."""
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
