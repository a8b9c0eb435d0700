"""The settings of all contexts, and the check of reported settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from benchmarks.harness import Answer, Contestant

#: Common settings, in llama.h's numbers: flash attention 1 is on (llama.cpp's "auto" here), type 1
#: is f16. All sequences share the cells, windows keep all cells.
EQUAL = {"n_batch": 512, "n_ubatch": 512, "flash_attn": 1, "type_k": 1, "type_v": 1}


def open_all(
    contestants: Mapping[str, Contestant],
    model: str | os.PathLike[str] | None = None,
    **shape: Any,
) -> dict[str, Answer]:
    """Open the same context for all contestants; exclude those that report other settings.

    Parameters
    ----------
    model
        Absent: the loaded model.
    **shape
        ``n_ctx``, ``n_seq_max`` and ``threads``.
    """
    answers: dict[str, Answer] = {}
    for who, contestant in contestants.items():
        # A server does not report its vocabulary size.
        known = next((a["n_vocab"] for a in answers.values() if "n_vocab" in a), 0)
        answers[who] = open_one(contestant, model, n_vocab=known, **shape)
    return answers


def open_one(
    contestant: Contestant,
    model: str | os.PathLike[str] | None = None,
    n_vocab: int = 0,
    **shape: Any,
) -> Answer:
    """Open a context and compare reported with requested settings."""
    # llama.cpp clips batches to the context.
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
