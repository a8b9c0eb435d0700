"""Log-probabilities of the tokens of a prompt."""

from __future__ import annotations

import numpy as np
import pytest

from memory.kit import Make
from pykvcache import LlamaSequence
from pykvcache.errors import NoKvCacheSlot
from pykvcache.sequence import logprobs as module
from pykvcache.sequence.logprobs import prompt_logprobs
from support.logprobs import log_probabilities
from support.models import EXACT, RIGHT

TOKENS = np.random.default_rng(5).integers(5, 200, 60, dtype=np.int32)
NAMES = ["llama", "gemma3", "mamba", "jamba", "lfm2_swa"]


@pytest.mark.parametrize("name", NAMES)
def test_they_are_those_of_one_decode_even_if_sequences_part_it(
    make_context: Make, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"n_ctx": 512, "swa_full": False, **EXACT}
    rows = log_probabilities(make_context(name, n_seq_max=1, **options), TOKENS)
    ctx = make_context(name, n_seq_max=1, **options)
    other = LlamaSequence(ctx, TOKENS[::-1])
    monkeypatch.setattr(module, "MOST_LOGITS", 7 * ctx.model.n_vocab)
    likeliest, n_parts = module.likeliest, 0

    def interrupted(row: np.ndarray, n: int, chosen: int) -> dict[int, float]:
        nonlocal n_parts
        n_parts += sequence.seq_id is not None  # a new part made it live
        other.append([7])
        other.evaluate()  # takes the only id
        return likeliest(row, n, chosen)

    monkeypatch.setattr(module, "likeliest", interrupted)
    sequence = LlamaSequence(ctx, TOKENS)
    sequence.evaluate()  # what is evaluated already is scored, too
    found = prompt_logprobs(sequence, 3)
    assert n_parts == 9
    for i, scores in enumerate(found):
        for token, value in scores.items():
            assert value == pytest.approx(rows[i, token], abs=RIGHT)
        assert TOKENS[i + 1] in scores
        assert list(scores.values())[:3] == sorted(scores.values(), reverse=True)[:3]
        assert max(scores.values()) == pytest.approx(rows[i].max(), abs=RIGHT)
    last = sequence.logits().astype(np.float64)
    np.testing.assert_allclose(last - np.logaddexp.reduce(last), rows[-1], atol=RIGHT)


def test_one_token_has_none(make_context: Make) -> None:
    assert prompt_logprobs(LlamaSequence(make_context("llama"), [7]), 1) == []


def test_too_many_tokens_are_refused_before_one_is_evaluated(make_context: Make) -> None:
    ctx = make_context("llama", n_ctx=256)
    with pytest.raises(NoKvCacheSlot):
        prompt_logprobs(LlamaSequence(ctx, np.resize(TOKENS, 257)), 1)
    assert ctx.tokens_evaluated == 0
