"""Store blocks on disk, and evaluate only tokens that no earlier prompt had.

Usage: python examples/prefix_store.py [model.gguf]
"""

import hashlib
import sys
import tempfile
from itertools import count
from pathlib import Path

from pykvcache import LlamaContext, LlamaModel, SequenceState, embedded_model_path

SIZE = 8  # tokens per block
STORY = (
    "Once upon a time there was a little village by the sea. "
    "This is the story of Lucy, Tom and Mara.\n"
    "Lucy has a red kite. Lucy lives by the river. Tom is a baker. "
    "Tom has a dog called Biscuit. Mara likes pancakes."
)
ENDS = (" One morning", "\nTom said", ' One day Lucy said, "')

path = sys.argv[1] if len(sys.argv) > 1 else embedded_model_path()
with tempfile.TemporaryDirectory() as store, LlamaModel(path) as model:
    for end in ENDS:
        with LlamaContext(model, n_ctx=512) as ctx:
            if ctx.memory_kind != "attention":
                sys.exit(
                    f"{path} has {ctx.memory_kind} memory, which cannot be cut into blocks of "
                    "tokens: examples/prefix_cache.py works with every model"
                )
            prompt = model.tokenize(STORY + end)
            # A block's name depends on all tokens up to its end, like its keys and values.
            names = [
                Path(store, hashlib.sha256(prompt[:at].tobytes()).hexdigest())
                for at in range(SIZE, len(prompt), SIZE)
            ]
            n = next(i for i in count() if i == len(names) or not names[i].exists())
            if n:
                blocks = [SequenceState.load(name) for name in names[:n]]
                ctx.restore_sequence(SequenceState.join(blocks), 0)
            told = model.detokenize(list(ctx.generate(prompt[n * SIZE :], 12)))
            fresh = ctx.sequence_state(0).blocks(SIZE)[n : len(names)]
            for name, block in zip(names[n:], fresh, strict=True):
                block.save(name)
            print(
                f"{len(prompt)} tokens: {n} blocks from the store, {len(fresh)} new; "
                f"{len(prompt) - n * SIZE} tokens read; {end.strip()}{told}"
            )
