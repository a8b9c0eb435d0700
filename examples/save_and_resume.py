"""Evaluate a story once, save it, and answer questions about it in another context.

Usage: python examples/save_and_resume.py [model.gguf]
"""

import sys
import tempfile
from pathlib import Path

from pykvcache import LlamaContext, LlamaModel, SequenceState, describe_state, embedded_model_path
from pykvcache.errors import StateDamaged

STORY = (
    "Once upon a time there was a little village by the sea. "
    "This is the story of Lucy, Tom and Mara.\n"
    "Lucy has a red kite. Lucy lives by the river. Tom is a baker. "
    "Tom has a dog called Biscuit. Mara likes pancakes."
)
ASKED = '\nThe reader asks, "What is Tom\'s dog called?" The story says, "'

path = sys.argv[1] if len(sys.argv) > 1 else embedded_model_path()
model = LlamaModel(path)
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder, "story.state")
    with LlamaContext(model, n_ctx=512) as ctx:
        story = model.tokenize(STORY)
        ctx.decode(story)
        size = ctx.save_sequence(file, 0, tokens=story, metadata={"title": "By the sea"})
        print(f"saved {len(story)} tokens in {size} bytes")

    info = describe_state(file)
    print(f"{info.metadata['title']}: {info.n_tokens} tokens, {info.fingerprint.memory} memory")

    # Another context of another size; everything is checked before it changes.
    with LlamaContext(model, n_ctx=1024, n_seq_max=2, kv_unified=False) as ctx:
        state = ctx.load_sequence(file, 1)
        assert state.tokens is not None
        answer = list(ctx.generate(model.tokenize(ASKED, add_special=False), 12, seq_id=1))
        print(f"read again: {model.detokenize(state.tokens[-6:])!r}")
        print(f"answered: {model.detokenize(answer).split(chr(34))[0].strip()}")
        print(f"evaluated here: {ctx.tokens_evaluated} tokens")

    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    try:
        SequenceState.from_bytes(data)
    except StateDamaged as error:
        print(f"one flipped bit: {error}")
