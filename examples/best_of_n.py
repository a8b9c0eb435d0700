"""Best of n: sample several answers at once, keep the most likely one.

The prompt is evaluated once, and every step is one decode for all samples.

Usage: python examples/best_of_n.py [model.gguf]
"""

import sys

from pykvcache import BatchGenerator, LlamaContext, LlamaModel, Sampler, embedded_model_path

PROMPT = "Once upon a time there was a little village. This is the story of"
N = 8

path = sys.argv[1] if len(sys.argv) > 1 else embedded_model_path()
with LlamaModel(path) as model, LlamaContext(model, n_ctx=1024, n_seq_max=N) as ctx:
    generator = BatchGenerator(ctx)
    samples = generator.submit(PROMPT, 40, Sampler(seed=1), n=N, logprobs=1)
    generator.run()

    scored = []
    for sample in samples:
        chosen = zip(sample.tokens.tolist(), sample.logprobs, strict=True)
        total = sum(logprobs[token] for token, logprobs in chosen)
        scored.append((total / len(sample.tokens), sample.text.strip()))
    for score, text in sorted(scored, reverse=True):
        print(f"{score:6.2f} {text!r}")
    print(f"{ctx.tokens_evaluated} tokens evaluated")
