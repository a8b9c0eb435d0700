"""Run many prompts on few sequence ids: some run together, and the rest wait.

Usage: python examples/many_prompts.py [model.gguf]
"""

import sys
import time

from pykvcache import BatchGenerator, LlamaContext, LlamaModel, Sampler, embedded_model_path

NAMES = ["Lucy", "Tom", "Mara", "Ben", "Zoe", "Paul", "Nora", "Sam"]
PROMPTS = [f"Once upon a time there was a {size} village. This is the story of {name}"
           for name in NAMES for size in ("little", "quiet")]  # fmt: skip

path = sys.argv[1] if len(sys.argv) > 1 else embedded_model_path()
with LlamaModel(path) as model, LlamaContext(model, n_ctx=1024, n_seq_max=8) as ctx:
    start = time.perf_counter()
    generator = BatchGenerator(ctx)
    handles = [generator.submit(prompt, 30, Sampler(seed=i), stop="\n\n")
               for i, prompt in enumerate(PROMPTS)]  # fmt: skip
    generator.run()

    for handle in handles:
        wait = 1000 * (handle.times.tokens[0] - handle.times.queued) if handle.times.tokens else 0
        print(f"{wait:5.0f} ms, {handle.finish_reason:6} {handle.text.strip()!r}")
    n = sum(len(handle.tokens) for handle in handles)
    print(f"{n} tokens, {n / (time.perf_counter() - start):.0f} per second")
