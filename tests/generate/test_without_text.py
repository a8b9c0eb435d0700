"""Contexts go on where tokens have no text: models without a vocabulary, and closed ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from pykvcache import BatchGenerator, LlamaContext, LlamaModel, PrefixCache
from pykvcache.errors import ClosedError
from support.models import EXACT, make_model

KNOWN = [5, 6, 7, 8, 9] * 3


@pytest.fixture(params=["no vocabulary", "closed"])
def context(request: pytest.FixtureRequest, model_folder: Path) -> LlamaContext:
    name = "llama_none" if request.param == "no vocabulary" else "llama"
    model = LlamaModel(make_model(name, model_folder))
    context = LlamaContext(model, n_ctx=256, n_seq_max=3, n_threads=1, **EXACT)
    if request.param == "closed":
        model.close()
    return context


def test_a_prefix_cache_explains_itself_in_token_ids(context: LlamaContext) -> None:
    with context, PrefixCache(context, block_size=4) as cache:
        with cache.sequence(KNOWN) as first:
            wanted = list(first.generate(4))
            other = cache.sequence([*KNOWN[:7], 30, 31])  # beside one in use
            assert other.reuse.live == 7
            assert other.reuse.reason == "token 7 is 30: the closest cached prompt has 7"
            assert "9 tokens" in other._repr_html_()
        with cache.sequence([*KNOWN[:6], 40]) as third:
            assert third.reuse.first_difference == 6
        assert "5 6 7 8" in str(cache.tree())
        assert BatchGenerator(cache).submit(KNOWN, 4).wait().tokens.tolist() == wanted


def test_a_request_whose_model_is_closed_ends_alone(model_folder: Path) -> None:
    model = LlamaModel(make_model("llama", model_folder))
    with LlamaContext(model, n_ctx=256, n_threads=1, **EXACT) as context:
        alone = BatchGenerator(context).submit([7, 8], 6).wait().tokens.tolist()
        generator = BatchGenerator(context)
        stops, plain = generator.submit([5, 6], 6, stop=["?"]), generator.submit([7, 8], 6)
        aborted = generator.submit([9], 6, stop=["?"])
        generator.step()
        model.close()
        aborted.abort()
        generator.run(progress=False)
        assert plain.tokens.tolist() == alone
        assert aborted.finish_reason == "aborted"
        assert stops.finish_reason == "error"
        with pytest.raises(ClosedError, match="the model is closed"):
            stops.wait()
