"""Shifts and divisions of keys that are stored with fewer bits.

A key is unpacked, rotated and packed again, so each move rounds once more. The tolerances are
about three times what was measured over some seeds, moves included; a key that is left where it
was, or turned the wrong way, is 9 off or more on these models.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from memory.ledger_kit import Twin
from pykvcache import LlamaContext, LlamaModel
from pykvcache.errors import UnsupportedOperation
from support.ledger import END
from support.models import make_model

TOLERANCE = {
    "f32": 1e-3,
    "f16": 0.02,
    "q8_0": 0.4,
    "q5_1": 2.0,
    "q5_0": 2.5,
    "q4_1": 4.0,
    "q4_0": 4.0,
    "iq4_nl": 5.0,
}
UNMOVED = 7.0
"""Less than what a division that moves positions but not keys makes."""

HEADS = {"head64": {}, "head256": {"n_head": 1, "n_head_kv": 1}}


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("type_k", TOLERANCE)
def test_keys_of_every_type_are_moved_rightly(
    type_k: str,
    head: str,
    unified: bool,
    make_context: Callable[..., LlamaContext],
    model: Callable[..., LlamaModel],
    model_folder: Path,
) -> None:
    sizes = HEADS[head]
    ctx = make_context(model("llama_h64", **sizes), type_k=type_k, kv_unified=unified, n_ctx=1024)
    t = Twin(ctx, make_model("llama_h64", model_folder, **sizes), TOLERANCE[type_k])
    t.decode(0, 40)
    t.div(0, None, None, 2)
    t.decode(0, 1)
    t.add(0, None, None, 100)
    t.update()
    t.decode(0, 1)
    # The tolerance tells right from wrong: the same again without moving the keys.
    t.ledger.div(0, 0, END, 2)
    t.ledger.decode(0, [7])
    t.ctx.decode([7])
    assert abs(t.ctx.logits() - t.ledger.logits).max() > UNMOVED


@pytest.mark.parametrize("flash_attn", ["enabled", "auto"])
def test_flash_attention_sees_moved_keys(
    flash_attn: str, make_context: Callable[..., LlamaContext], model_folder: Path
) -> None:
    ctx = make_context("llama_h64", type_k="f16", type_v="f16", flash_attn=flash_attn)
    t = Twin(ctx, make_model("llama_h64", model_folder), 0.1)  # f16 keys, values and products
    t.decode(0, 40)
    t.remove(0, 10, 20)
    t.add(0, 20, None, -10)
    t.decode(0, 1)
    t.div(0, None, None, 3)
    t.decode(0, 1)


@pytest.mark.hazard("M26")
@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
def test_bf16_keys_are_not_moved(
    unified: bool, make_context: Callable[..., LlamaContext], model_folder: Path
) -> None:
    ctx = make_context("llama_h64", type_k="bf16", kv_unified=unified, n_ctx=1024)
    t = Twin(ctx, make_model("llama_h64", model_folder), 0.2)
    t.decode(0, 20)
    assert not ctx.kv_cache_can_shift()
    with pytest.raises(UnsupportedOperation, match="bf16"):
        ctx.kv_cache_seq_add(0, None, None, 3)
    with pytest.raises(UnsupportedOperation, match="bf16"):
        ctx.kv_cache_seq_div(0, None, None, 2)
    ctx.kv_cache_update()
    t.decode(0, 1)
    t.remove(0, 5, 10)
    t.decode(0, 1)
