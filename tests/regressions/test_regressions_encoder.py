"""What an encoder-decoder model, a classifier and the raw native calls must not be taken for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pykvcache import KvCacheError, LlamaBatch, LlamaContext, LlamaModel
from pykvcache.errors import ContextCreateError
from support.models import make_model

MakeContext = Callable[..., LlamaContext]


def words(n: int, seed: int = 0) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(5, 57, n).astype(np.int32)


@pytest.mark.hazard("N6")
@pytest.mark.parametrize("pooling", ["mean", "cls", "last", "rank"])
@pytest.mark.parametrize("embeddings", [True, False])
def test_encoder_output_is_never_pooled(
    make_context: MakeContext, pooling: str, embeddings: bool
) -> None:
    with pytest.raises(ContextCreateError, match="pool"):
        make_context("t5", pooling_type=pooling, embeddings=embeddings)


@pytest.mark.hazard("N5")
def test_copy_between_sequences_of_different_inputs_cannot_go_on(make_context: MakeContext) -> None:
    ctx = make_context("t5")
    ctx.clear_kv_cache()
    batch = LlamaBatch()
    batch.add_sequence(words(6, 1), 0)
    batch.add_sequence(words(9, 2), 1)
    ctx.encode(batch)
    ctx.decode([0, 7, 8, 9])
    ctx.copy_kv_cache_seq(0, 1)
    with pytest.raises(KvCacheError):
        ctx.decode([11], seq_id=1)
    ctx.decode([11])


@pytest.mark.hazard("N7")
def test_encoding_leaves_no_logits(make_context: MakeContext) -> None:
    ctx = make_context("t5")
    for _ in range(2):  # the second time the rows of a decode are still in the buffer
        with pytest.raises((IndexError, KvCacheError)):
            ctx.logits(0)
        ctx.decode([0, 7])
        ctx.logits()
        ctx.clear_kv_cache()
        ctx.encode(words(5))


@pytest.mark.hazard("N9")
@pytest.mark.parametrize("name", ["llama", "bert", "mamba"])
def test_rank_needs_a_classifier(make_context: MakeContext, name: str) -> None:
    with pytest.raises(ContextCreateError, match="classifier"):
        make_context(name, embeddings=True, pooling_type="rank")


CODE = """
import sys
from pykvcache import KvCacheError, LlamaModel, Sampler
model = LlamaModel(sys.argv[1])
for kind in (-5, 4, 5, 31, 36, 39, 999_999, 2**31 - 1):
    for keys in (True, False):
        try:
            model.native.heads_divisible(kind, keys)
        except (ValueError, KvCacheError):
            pass
sampler = Sampler()
try:
    type(sampler.native)({**sampler._params, "grammar": "root ::= [a]"}, None)
except (TypeError, ValueError, KvCacheError):
    pass
"""


def test_native_calls_survive_what_the_thin_classes_refuse(model_folder: Path) -> None:
    path = make_model("llama", model_folder)
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_model_closed_before_sampling(model_folder: Path) -> None:
    from pykvcache import Sampler

    model = LlamaModel(make_model("llama", model_folder))
    with LlamaContext(model, n_ctx=256, n_threads=1) as ctx:
        sampler = Sampler(grammar="root ::= [a-z ]+", model=model, seed=1)
        model.close()
        ctx.decode([5])
        assert 0 <= sampler.sample(ctx) < ctx.model.n_vocab
