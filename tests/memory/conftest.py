"""The bench fixture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from memory.kit import Bench, Case, Logits
from pykvcache import LlamaContext


@pytest.fixture
def bench(
    make_context: Callable[..., LlamaContext], fresh_logits: Callable[..., Logits]
) -> Callable[..., Bench]:
    """``bench(case, **options)``: a context of that memory, with its account."""

    def make(case: Case, **options: Any) -> Bench:
        ctx = make_context(case.name, **(case.options | options))
        return Bench(case, ctx, fresh_logits)

    return make
