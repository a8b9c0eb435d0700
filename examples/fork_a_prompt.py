"""Evaluate a prompt once and continue it in several ways.

Usage: python examples/fork_a_prompt.py [model.gguf]
"""

import sys

from pykvcache import LlamaContext, LlamaModel, Sampler, embedded_model_path

PROMPT = (
    "Once upon a time there was a little village by the sea. "
    "This is the story of Lucy, Tom and Mara.\n"
    "Lucy has a red kite. Lucy lives by the river. Tom is a baker. Mara likes pancakes.\n"
)
FORKS = 4
LENGTH = 30

path = sys.argv[1] if len(sys.argv) > 1 else embedded_model_path()
with LlamaModel(path) as model, LlamaContext(model, n_ctx=1024, n_seq_max=FORKS + 1) as ctx:
    prompt = model.tokenize(PROMPT)

    # Sequence 0 has the prompt except its last token, which each fork evaluates to get logits.
    ctx.decode(prompt[:-1], seq_id=0)
    print(f"prompt: {ctx.tokens_evaluated} tokens evaluated")

    for fork in range(1, FORKS + 1):
        # The fork shares the cells of sequence 0 without computing or copying.
        ctx.copy_kv_cache_seq(0, fork)
        sampler = Sampler(temperature=0.4 * fork, seed=fork)
        tokens = list(ctx.generate(prompt[-1:], LENGTH, sampler, seq_id=fork))
        print(f"\nfork {fork}: {model.detokenize(tokens).strip()}")

    anew = ctx.tokens_evaluated + (FORKS - 1) * (len(prompt) - 1)
    print(f"\nin all: {ctx.tokens_evaluated} tokens evaluated; without forks: {anew}")
