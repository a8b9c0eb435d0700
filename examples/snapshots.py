"""Try several endings of a story from one snapshot in memory, with recurrent models, too.

Usage: python examples/snapshots.py [model.gguf]
"""

import sys

import numpy as np

from pykvcache import LlamaContext, LlamaModel, Sampler, embedded_model_path

START = "Lucy has a red kite. Lucy lives by the river. Tom is a baker. One morning"

path = sys.argv[1] if len(sys.argv) > 1 else embedded_model_path()
with LlamaModel(path) as model, LlamaContext(model, n_ctx=512) as ctx:
    start = model.tokenize(START)
    ctx.decode(start[:-1])
    # One buffer for all snapshots, so that taking one allocates nothing.
    room = np.empty(ctx.state_size(0), np.uint8)
    snapshot = ctx.get_state(0, out=room)
    print(f"snapshot: {len(start) - 1} tokens, {len(snapshot)} bytes")
    for seed in range(1, 4):
        ctx.set_state(snapshot, 0)
        sampler = Sampler(temperature=0.9, seed=seed)
        tokens = list(ctx.generate(start[-1:], 16, sampler))
        print(f"end {seed}:{model.detokenize(tokens)}")
    print(f"{ctx.tokens_evaluated} tokens evaluated")
