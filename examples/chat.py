"""Chat in the terminal, with /undo for the last turn.

Only new tokens are evaluated: those of earlier turns are already in the memory.
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
            talk.sync(turns.pop())  # restores even what a full cache has dropped since
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
