"""Architectures that llama.cpp loads and gets wrong on ordinary use: refused, with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from pykvcache import LlamaContext, LlamaModel
from pykvcache._native import lib
from pykvcache.errors import ContextCreateError, UnsupportedOperation
from support import vocab
from support.blueprint import Sizes
from support.models import make_model, write_gguf
from support.odd_models import cogvlm, gpt2


def test_a_graph_that_gives_logits_of_all_tokens_is_refused(tmp_path: Path) -> None:
    """llama.cpp reads the first rows instead of the requested ones."""
    path = tmp_path / "cogvlm.gguf"
    write_gguf(path, cogvlm(Sizes(n_head_kv=4), len(vocab.spm())), vocab.spm(), 0)
    with LlamaModel(path) as model, pytest.raises(ContextCreateError, match="logits of all tokens"):
        LlamaContext(model, n_ctx=64)


@pytest.mark.hazard("N190")
def test_a_learned_position_is_not_shifted(tmp_path: Path) -> None:
    path = tmp_path / "gpt2.gguf"
    write_gguf(path, gpt2(Sizes(), len(vocab.spm())), vocab.spm(), 0)
    with LlamaModel(path) as model, LlamaContext(model, n_ctx=64, n_seq_max=1) as ctx:
        ctx.decode(list(range(5, 25)))
        assert not ctx.kv_cache_can_shift()
        with pytest.raises(UnsupportedOperation, match="learned table"):
            ctx.kv_cache_seq_add(0, None, None, 5)
        with pytest.raises(UnsupportedOperation, match="learned table"):
            ctx.remove(0, 4, 8)
        assert ctx.kv_cache_seq_pos_max(0) == 19
        ctx.clear_kv_cache_seq(0, 10, None)
        ctx.decode([7])


@pytest.mark.hazard("N245")
@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("llama", True),
        ("gemma3", True),
        ("llama_bpe", True),
        ("mamba", False),
        ("jamba", False),
        ("lfm2", False),
        ("deepseek32", False),
    ],
)
def test_amx_is_for_models_that_multiply_single_matrices(
    name: str, wanted: bool, model_folder: Path
) -> None:
    """Recurrent layers multiply one matrix per sequence, MLA one per head."""
    path = make_model(name, model_folder)
    assert lib.multiplies_single_matrices(bytes(path)) == wanted
