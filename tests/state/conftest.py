"""The bench fixture, with contexts long enough for a window to reuse its cells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from memory.kit import Bench, Case, Logits
from pykvcache import LlamaContext
from state.kit import LONG, MakeBench


@pytest.fixture
def bench(
    make_context: Callable[..., LlamaContext], fresh_logits: Callable[..., Logits]
) -> MakeBench:
    """``bench(case, **options)``: a long context of that memory, with its account."""

    def make(case: Case, **options: Any) -> Bench:
        ctx = make_context(case.name, **(case.options | LONG | options))
        return Bench(case, ctx, fresh_logits)

    return make
