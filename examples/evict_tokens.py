"""Evict tokens by properties of their keys, and measure the cost.

In stories of the model, half and three quarters of the tokens are dropped in NumPy by several
rules. The cost is the rise in cross-entropy of the next 64 tokens, in nats per token. Layers
share cells, so a token's score is the mean over all layers. The first and the last 16 always stay.

Usage: python examples/evict_tokens.py [model.gguf]
"""

import sys

import numpy as np

from pykvcache import LlamaBatch, LlamaContext, LlamaModel, Sampler, embedded_model_path

PROMPT = "Once upon a time there was a little village. Lucy has a red kite. Tom is a baker."
STORIES, LENGTH, SCORED, RECENT = 8, 400, 64, 16

path = sys.argv[1] if len(sys.argv) > 1 else embedded_model_path()
with LlamaModel(path) as model, LlamaContext(model, n_ctx=1024, n_seq_max=2) as ctx:
    if ctx.memory_kind != "attention":
        sys.exit(f"{ctx.memory_kind} memory holds more than keys and values of single tokens")
    nats: dict[str, list[float]] = {}
    for seed in range(STORIES):
        ctx.clear_kv_cache()
        tokens = model.tokenize(PROMPT)
        told = list(ctx.generate(tokens, LENGTH, Sampler(temperature=0.8, seed=seed)))
        tokens = np.append(tokens, np.array(told, np.int32))
        read = len(tokens) - SCORED
        if read < 4 * RECENT:
            sys.exit("the stories of this model are too short to drop parts of them")
        ctx.clear_kv_cache_seq(0, read)  # remove the part to be scored
        whole = ctx.kv(0, dtype=np.float32)
        keys = np.mean([np.linalg.norm(x.keys, axis=-1).mean(-1) for x in whole.layers], axis=0)
        values = np.mean([np.linalg.norm(x.values, axis=-1).mean(-1) for x in whole.layers], axis=0)
        rules = {  # the higher the score, the longer a token stays
            "the newest": np.arange(read, dtype=float),
            "at random": np.random.default_rng(seed).random(read),
            "small keys": -keys,
            "large keys": keys,
            "large values": values,
        }
        choices = [("whole cache", rules["the newest"], 1.0)]
        choices += [(f"{r}, {s:.0%} kept", rules[r], s) for s in (0.5, 0.25) for r in rules]
        for name, score, share in choices:
            order = np.argsort(np.r_[-np.inf, -score[1:-RECENT], np.full(RECENT, -np.inf)])
            ctx.write_kv(whole.select(np.sort(order[: int(share * read)])), 1)
            batch = LlamaBatch(SCORED, 2)
            batch.add_sequence(tokens[read:-1], 1, True, start=read)
            ctx.decode(batch)
            rows = np.stack([ctx.logits(i) for i in range(len(batch))]).astype(float)
            rows -= np.logaddexp.reduce(rows, axis=1, keepdims=True)
            nats.setdefault(name, []).append(-rows[range(len(rows)), tokens[read + 1 :]].mean())

    base = np.array(nats.pop("whole cache"))
    print(f"whole cache: {base.mean():.3f} nats per token, over {STORIES} stories")
    for name, surprise in nats.items():
        more = np.array(surprise) - base
        print(f"{name:23} {more.mean():+.3f}  ({more.min():+.3f} to {more.max():+.3f})")
