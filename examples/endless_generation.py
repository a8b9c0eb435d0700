"""Generate more text than fits into the context: drop the oldest part, close the gap, continue.

The beginning of the prompt stays. Kept tokens are not evaluated again, which is fast, but their
keys and values were computed while the dropped tokens were visible, so the result differs from a
fresh run over the kept tokens.

Usage: python examples/endless_generation.py [model.gguf]
"""

import sys

from pykvcache import LlamaContext, LlamaModel, Sampler, embedded_model_path
from pykvcache.errors import NoKvCacheSlot

PROMPT = "Once upon a time there was a little village. This is the story of Lucy and Tom.\n"
NEXT_SCENE = "\nThe next morning Tom walks to the mill."
TOTAL = 600

path = sys.argv[1] if len(sys.argv) > 1 else embedded_model_path()
with LlamaModel(path) as model, LlamaContext(model, n_ctx=256, n_seq_max=1) as ctx:
    if not ctx.kv_cache_can_shift():
        sys.exit("the memory of this model cannot be shifted")
    sampler = Sampler(temperature=0.8, seed=1)
    scene = model.tokenize(NEXT_SCENE, add_special=False).tolist()
    pending = model.tokenize(PROMPT).tolist()
    keep, shifts = len(pending), 0

    for _ in range(TOTAL):
        text = model.detokenize(pending)
        while pending:
            try:
                ctx.decode(pending)
                pending = []
            except NoKvCacheSlot as full:
                pending = pending[full.n_decoded :]  # the decoded ones stay
                end = ctx.kv_cache_seq_pos_max(0) + 1
                drop = (end - keep) // 2
                if not ctx.clear_kv_cache_seq(0, keep, keep + drop):
                    sys.exit("the memory of this model cannot drop a part of a sequence")
                ctx.kv_cache_seq_add(0, keep + drop, None, -drop)
                shifts += 1
                print(f" [{end} tokens: dropped {drop}]", end="")
        print(text, end="", flush=True)

        token = sampler.sample(ctx)
        pending = scene if model.is_eog(token) else [token]

    print(f"\n\n{ctx.tokens_evaluated} tokens evaluated, {shifts} shifts, {ctx.n_ctx} cells")
