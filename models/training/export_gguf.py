"""Write a checkpoint as GGUF: ``python models/training/export_gguf.py --work-dir DIR``."""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np
import torch
from net import Shape
from tokenizer import MERGES, Tokenizer

DEFAULT_OUT = Path(__file__).resolve().parent.parent / "stories.gguf"
DESCRIPTION = (
    "A very small story model for demonstrations of the KV cache: its stories state facts "
    "early and need them again hundreds of tokens later."
)
PROMPTS = (
    "Once upon a time",
    "Mara has a red kite. Tom lives in the mill. Anna likes plums.",
    "Once upon a time there was a quiet village. This is the story of Rosa, Ben and Lily.\n"
    "Rosa has a golden flute. Ben is a baker. Ben's dog is called Pepper. "
    "Lily lives by the lake.",
)
# Statements stay plain text; questions and answers become the reader's and the story's.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if not loop.first %} {% endif -%}
{%- if message.role == 'assistant' -%}
The story says, "{{ message.content | trim }}"
{%- elif (message.content | trim).endswith('?') -%}
The reader asks, "{{ message.content | trim }}"
{%- else -%}
{{ message.content | trim }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and (messages[-1].content | trim).endswith('?') %} The story says, "
{%- endif -%}"""


def write_vocabulary(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    """Describe the tokenizer."""
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    kinds = [control if i <= tokenizer.eos else normal for i in range(len(tokenizer))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokenizer.vocabulary)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(tokenizer.bos)
    writer.add_eos_token_id(tokenizer.eos)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def write_shape(writer: gguf.GGUFWriter, shape: Shape) -> None:
    """Describe the network."""
    writer.add_context_length(shape.n_ctx_train)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layer)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_freq_base)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work-dir", type=Path, required=True, help="where train.py left off")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    args = parser.parse_args()

    state = torch.load(args.work_dir / "checkpoint.pt")
    writer = gguf.GGUFWriter(args.out, "llama")
    writer.add_name("pykvcache stories")
    writer.add_description(DESCRIPTION)
    writer.add_license("MIT")
    writer.add_array("pykvcache.prompts", PROMPTS)
    writer.add_uint32("pykvcache.trained_steps", state["step"])
    write_shape(writer, Shape(**state["shape"]))
    write_vocabulary(writer, Tokenizer())
    for name, weight in state["net"].items():
        kind = np.float16 if weight.dim() == 2 else np.float32
        writer.add_tensor(name, weight.numpy().astype(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"{args.out}: {args.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
