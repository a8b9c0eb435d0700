"""Chat in the terminal: a history that grows, and an answer that can be taken back with /undo.

Only what is new is evaluated: the tokens of earlier turns are in the memory already.
Usage: python examples/chat.py [model.gguf]     (a model's chat template needs the extra "cli")
"""

import sys

from pykvcache import LlamaContext, LlamaModel, LlamaSequence, Sampler, embedded_model_path

path = sys.argv[1] if len(sys.argv) > 1 else embedded_model_path()
ready = "> " if sys.stdin.isatty() else ""
with LlamaModel(path) as model, LlamaContext(model, n_ctx=2048) as ctx:
    talk, sampler = LlamaSequence(ctx), Sampler(seed=1)
    turns, messages = list[list[int]](), list[dict[str, str]]()
    print(ready and f"(/undo takes a turn back, Ctrl-D ends)\n{ready}", end="", flush=True)
    for line in sys.stdin:
        if line.strip() == "/undo" and turns:
            talk.sync(turns.pop())  # also what a full cache has dropped since
            del messages[-2:]
            print(f"(back to {len(talk)} tokens)\n{ready}", end="", flush=True)
            continue
        turns.append(talk.tokens.tolist())
        messages.append({"role": "user", "content": line.strip()})
        if model.chat_template:
            text = model.apply_chat_template(messages)
            talk.sync(model.tokenize(text, add_special=False, parse_special=True))
        else:
            talk.append(line)
        messages.append({"role": "assistant", "content": ""})
        for piece in talk.stream(60, sampler, stop="\n", on_full="shift"):
            messages[-1]["content"] += piece
            print(piece, end="", flush=True)
        print(f"  [{ctx.tokens_evaluated} tokens evaluated so far]\n{ready}", end="", flush=True)
