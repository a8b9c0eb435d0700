"""Ask about a story, remove the question, and ask another: the story is evaluated once.

Usage: python examples/rewind.py [model.gguf]
"""

import sys

from pykvcache import LlamaContext, LlamaModel, embedded_model_path

STORY = (
    "Once upon a time there was a little village by the sea. "
    "This is the story of Lucy, Tom and Mara.\n"
    "Lucy has a red kite. Lucy lives by the river. Tom is a baker. "
    "Tom has a dog called Biscuit. Mara likes pancakes."
)
QUESTIONS = ("What does Mara like?", "What is Tom's dog called?", "Where does Lucy live?")

path = sys.argv[1] if len(sys.argv) > 1 else embedded_model_path()
with LlamaModel(path) as model, LlamaContext(model, n_ctx=512) as ctx:
    ctx.decode(model.tokenize(STORY))
    end = ctx.kv_cache_seq_pos_max(0) + 1
    # Attention can be rewound; a recurrent state and a window need a copy made before.
    here = None if ctx.memory_kind == "attention" else ctx.get_partial_state(0)

    for question in QUESTIONS:
        before = ctx.tokens_evaluated
        asked = f'\nThe reader asks, "{question}" The story says, "'
        answer = list(ctx.generate(model.tokenize(asked, add_special=False), 12))
        text = model.detokenize(answer).split('"')[0].strip()
        print(f"{question} {text}  ({ctx.tokens_evaluated - before} tokens evaluated)")

        # Remove question and answer.
        if here is None:
            ctx.clear_kv_cache_seq(0, end)
        else:
            ctx.set_partial_state(here)

    print(f"the story: {end} tokens, evaluated once")
