"""What every context is opened with, stated once, and checked against what each reports."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from benchmarks.harness import Answer, Contestant

#: The same for everybody, in llama.h's own numbers: flash attention 1 is on (what llama.cpp's
#: "auto" chooses here), type 1 is f16. All sequences share the cells, windows keep all of theirs.
EQUAL = {"n_batch": 512, "n_ubatch": 512, "flash_attn": 1, "type_k": 1, "type_v": 1}


def open_all(
    contestants: Mapping[str, Contestant],
    model: str | os.PathLike[str] | None = None,
    **shape: Any,
) -> dict[str, Answer]:
    """Open the same context everywhere; who reports other settings is out, and says why.

    Parameters
    ----------
    model
        Absent: the model that is loaded.
    **shape
        ``n_ctx``, ``n_seq_max`` and ``threads``.
    """
    answers: dict[str, Answer] = {}
    for who, contestant in contestants.items():
        # A server does not tell the size of its vocabulary.
        known = next((a["n_vocab"] for a in answers.values() if "n_vocab" in a), 0)
        answers[who] = open_one(contestant, model, n_vocab=known, **shape)
    return answers


def open_one(
    contestant: Contestant,
    model: str | os.PathLike[str] | None = None,
    n_vocab: int = 0,
    **shape: Any,
) -> Answer:
    """Open a context and compare what it reports with what it was asked for."""
    # llama.cpp makes no batch longer than its context.
    most = {name: min(EQUAL[name], shape["n_ctx"]) for name in ("n_batch", "n_ubatch")}
    asked = {**EQUAL, **most, **shape}
    path = {} if model is None else {"model": os.fspath(model)}
    answer = contestant.ask("open", **path, n_vocab=n_vocab, **asked)
    contestant.unopened = answer.get("error")
    reported = answer.get("reported", {})
    other = [
        f"{key} {value} instead of {asked[key]}"
        for key, value in reported.items()
        if value != asked[key]
    ]
    if other:
        contestant.missing = "not on equal terms: " + ", ".join(other)
        contestant.close()
        return {"error": contestant.missing}
    contestant.reported.update(reported)
    return answer
