"""K and V stored in blocks: where that is wrong it is refused, elsewhere it is nearly exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pykvcache import LlamaContext
from pykvcache.enums import FlashAttention
from pykvcache.errors import ContextCreateError

QUANTIZED = ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]


@pytest.mark.hazard("C6", "C7")
@pytest.mark.parametrize("flash", ["auto", FlashAttention.ENABLED, "disabled"])
@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("name", ["type_k", "type_v"])
def test_blocks_that_do_not_divide_the_head_are_refused(
    model: Any, name: str, kind: str, flash: Any
) -> None:
    with pytest.raises(ContextCreateError, match=name):
        LlamaContext(model("llama"), flash_attn=flash, **{name: kind})


@pytest.mark.parametrize("kind", QUANTIZED)
def test_a_quantized_cache_gives_nearly_the_same_logits(make_context: Any, kind: str) -> None:
    tokens = np.arange(10, 74, dtype=np.int32)
    alike = 0.999 if kind == "q8_0" else 0.97
    exact = make_context("llama_h64")
    exact.decode(tokens)
    for options in ({"type_k": kind}, {"type_k": kind, "type_v": kind, "flash_attn": "auto"}):
        ctx = make_context("llama_h64", **options)
        ctx.decode(tokens)
        same = float(np.corrcoef(ctx.logits(), exact.logits())[0, 1])
        assert alike < same < 1, options


@pytest.mark.hazard("C7")
@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_values_need_flash_attention(model: Any, kind: str) -> None:
    with pytest.raises(ContextCreateError, match="flash_attn"):
        LlamaContext(model("llama_h64"), type_v=kind, flash_attn="disabled")
