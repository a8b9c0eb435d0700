"""A prefix cache: a chat and a tree of questions, of which only new tokens are evaluated.

Usage: python examples/prefix_cache.py [model.gguf]
"""

import sys

from pykvcache import LlamaContext, LlamaModel, PrefixCache, embedded_model_path

STORY = "Once upon a time there was a little village. This is the story of Lucy and Tom.\n"

path = sys.argv[1] if len(sys.argv) > 1 else embedded_model_path()
with LlamaModel(path) as model, LlamaContext(model, n_ctx=1024) as ctx:
    cache = PrefixCache(ctx, block_size=16)
    chat = STORY
    for turn in ("Tom has a dog.", "Lucy goes to the mill.", "The next morning"):
        chat += turn
        with cache.sequence(chat) as sequence:  # closing it stores new tokens in the cache
            chat += "".join(sequence.stream(20))
        print(f"chat: {sequence.reuse.evaluated:3} of {sequence.reuse.n_tokens:3} tokens evaluated")

    for question in ("Tom's dog is called", "Tom has", "Tom lives"):
        with cache.sequence(STORY + question) as sequence:
            answer = "".join(sequence.stream(6))
        reuse = sequence.reuse
        print(
            f"tree: {reuse.evaluated:3} of {reuse.n_tokens:3}: {question}{answer} ({reuse.reason})"
        )
    print(cache)
