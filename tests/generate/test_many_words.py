"""Large vocabularies: the threads that decode choose, too, and every text is what it is alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pykvcache import BatchGenerator, LlamaContext, LlamaModel, LlamaSequence, Sampler
from support import attention_models, vocab
from support.models import EXACT, Sizes, write_gguf

N_VOCAB = 40_000
N_REQUESTS = 7


def sampler(i: int) -> Sampler:
    bias = {int(t): 4.0 for t in np.random.default_rng(i).integers(0, N_VOCAB, 5)}
    return (
        Sampler(temperature=0),
        Sampler(temperature=1, top_k=0, top_p=0.9, seed=i),
        Sampler(temperature=0.8, top_k=40, seed=i, repeat_penalty=1.3, logit_bias=bias),
        Sampler(temperature=0, logit_bias=bias, presence_penalty=0.5),
    )[i % 4]


def test_texts_generated_in_a_batch_equal_those_generated_alone(tmp_path: Path) -> None:
    path = tmp_path / "wide.gguf"
    plan = attention_models.llama(Sizes(n_layer=1), N_VOCAB)
    write_gguf(path, plan, vocab.dummy(N_VOCAB), 0)
    rng = np.random.default_rng(0)
    prompts = rng.integers(5, N_VOCAB, (N_REQUESTS, 9)).tolist()
    options: dict[str, Any] = {"n_ctx": 512, "n_seq_max": 8, **EXACT}
    with LlamaModel(path) as model:
        alone = []
        with LlamaContext(model, **options) as ctx:
            for i, prompt in enumerate(prompts):
                with LlamaSequence(ctx, prompt) as sequence:
                    alone.append(list(sequence.generate(12, sampler(i))))
        for n_threads in (1, 2, 5):
            with (
                LlamaContext(model, n_threads_batch=n_threads, **options) as ctx,
                BatchGenerator(ctx) as generator,
            ):
                handles = [generator.submit(p, 12, sampler(i)) for i, p in enumerate(prompts)]
                generator.run()
                assert [list(handle.tokens) for handle in handles] == alone
    assert len({tuple(text) for text in alone}) == N_REQUESTS
