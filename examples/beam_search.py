"""Beam search: fork the best continuations at every step, and drop the rest.

A fork shares the cells of its prefix, so a beam costs one token per step.

Usage: python examples/beam_search.py [model.gguf]
"""

import sys

import numpy as np

from pykvcache import LlamaContext, LlamaModel, LlamaSequence, embedded_model_path

PROMPT = "Once upon a time there was a little village. This is the story of"
WIDTH, LENGTH = 4, 20

path = sys.argv[1] if len(sys.argv) > 1 else embedded_model_path()
with LlamaModel(path) as model, LlamaContext(model, n_ctx=512, n_seq_max=2 * WIDTH) as ctx:
    beams = [(0.0, LlamaSequence(ctx, PROMPT))]
    for _ in range(LENGTH):
        found = []
        for score, beam in beams:
            logits = beam.logits().astype(np.float64)
            logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            likeliest = np.argsort(-logprobs, kind="stable")[:WIDTH].tolist()
            found += [(score + logprobs[token], beam, token) for token in likeliest]
        beams = []
        for score, beam, token in sorted(found, key=lambda one: -one[0])[:WIDTH]:
            beams.append((score, beam.fork()))
            beams[-1][1].append([token])

    for score, beam in beams:
        print(f"{score:7.2f} {beam.text!r}")
    print(f"{ctx.tokens_evaluated} tokens evaluated")
