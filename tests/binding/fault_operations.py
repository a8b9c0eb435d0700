"""The operations that `fault_driver` runs while allocations fail, on one context each time.

Each takes a `Stage` and does one thing; what it returns is the same in every run that succeeds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pykvcache import BatchGenerator, LlamaBatch, LlamaContext, LlamaModel, Sampler
from pykvcache.errors import UnsupportedOperation
from support.models import EXACT, MODELS, ModelInfo

FIRST = np.arange(5, 17)
"""What sequence 0 holds."""

SECOND = np.arange(30, 39)
"""What sequence 1 holds."""

NEXT = np.arange(50, 70)
"""What is appended to sequence 0."""

GRAMMAR = 'root ::= "a" root | [b-z]*'


@dataclass
class Stage:
    """A model, a context that holds FIRST and SECOND, and what operations need of others."""

    path: Path
    model: LlamaModel
    info: ModelInfo
    ctx: LlamaContext
    made: dict[str, Any] = field(default_factory=dict)
    """What `prepare` made beforehand."""


def options(info: ModelInfo) -> dict[str, Any]:
    """Options of every context here; graphs small enough that a context is made in milliseconds."""
    sizes = {"n_ctx": 128, "n_batch": 16, "n_ubatch": 8, "n_seq_max": 4, "n_threads": 2}
    if info.is_embedder:
        return sizes | {"n_ubatch": 16, "embeddings": True, "pooling_type": "mean"}
    if info.has_encoder:
        sizes |= {"n_ubatch": 16, "n_seq_max": 1}
    return {**EXACT, **sizes}


def fill(ctx: LlamaContext, info: ModelInfo) -> None:
    """Let a new or cleared context hold FIRST and SECOND."""
    if info.has_encoder:
        ctx.encode(FIRST)
    if info.has_memory:
        ctx.decode(FIRST, seq_id=0)
        if not info.has_encoder:
            ctx.decode(SECOND, seq_id=1)


def create(stage: Stage) -> None:
    LlamaContext(stage.model, **options(stage.info)).close()


def load(stage: Stage) -> None:
    LlamaModel(stage.path).close()


def decode(stage: Stage) -> None:
    stage.ctx.decode([7], seq_id=0)


def append(stage: Stage) -> None:
    stage.ctx.decode(NEXT, seq_id=0)


def batch(stage: Stage) -> None:
    if stage.info.has_encoder:
        raise UnsupportedOperation("batch", "a second sequence needs an input of its own")
    both = LlamaBatch()
    both.add(40, stage.ctx.kv_cache_seq_pos_max(0) + 1, 0, logits=True)
    both.add(41, stage.ctx.kv_cache_seq_pos_max(1) + 1, 1, logits=True)
    stage.ctx.decode(both)


def encode(stage: Stage) -> None:
    if stage.info.has_encoder:
        stage.ctx.clear_kv_cache()  # it holds what was decoded for another input
    stage.ctx.encode(NEXT[:12])


def copy(stage: Stage) -> None:
    stage.ctx.copy_kv_cache_seq(0, 2)


def remove_part(stage: Stage) -> None:
    stage.ctx.clear_kv_cache_seq(0, 8)


def remove_all(stage: Stage) -> None:
    stage.ctx.clear_kv_cache_seq(0)


def keep(stage: Stage) -> None:
    stage.ctx.kv_cache_seq_keep(1)


def shift(stage: Stage) -> None:
    stage.ctx.remove(0, 2, 5)
    stage.ctx.kv_cache_update()


def divide(stage: Stage) -> None:
    stage.ctx.kv_cache_seq_div(0, 0, None, 2)
    stage.ctx.kv_cache_update()


def clear(stage: Stage) -> None:
    stage.ctx.clear_kv_cache()


def look(stage: Stage) -> bytes:
    ctx = stage.ctx
    facts = [ctx.memory_info, ctx.n_cells_used, ctx.sequences(), ctx.can_resume(0, 8)]
    return repr([*facts, ctx.cells()]).encode()


def get_state(stage: Stage) -> bytes:
    return bytes(stage.ctx.get_state(0))


def get_whole(stage: Stage) -> bytes:
    return bytes(stage.ctx.get_state())


def set_state(stage: Stage) -> None:
    stage.ctx.set_state(stage.made["state"], 1)


def set_whole(stage: Stage) -> None:
    stage.ctx.set_state(stage.made["whole"])


def save(stage: Stage) -> None:
    with tempfile.TemporaryDirectory() as folder:
        stage.ctx.save_sequence(Path(folder) / "one", 0)


def restore(stage: Stage) -> None:
    stage.ctx.restore_sequence(stage.made["sequence"], 1)


def restore_context(stage: Stage) -> None:
    stage.ctx.restore_context(stage.made["context"])


def partial(stage: Stage) -> None:
    state = stage.ctx.get_partial_state(0)
    stage.ctx.decode([9], seq_id=0)
    stage.ctx.set_partial_state(state)


def kv(stage: Stage) -> bytes:
    return repr(stage.ctx.kv(0)).encode() + repr(stage.ctx.kv(0, copy=False)).encode()


def write_kv(stage: Stage) -> None:
    stage.ctx.write_kv(stage.made["kv"], 1)


def sample(stage: Stage) -> bytes:
    plain = Sampler(temperature=0)
    rich = Sampler(temperature=0.7, repeat_penalty=1.1, seed=5, grammar=GRAMMAR, model=stage.model)
    row = stage.made["row"]
    found = [s.sample(row) for s in (plain, rich, rich.clone())]
    rich.reset()
    return repr(found).encode()


def generate(stage: Stage) -> bytes:
    return repr(
        list(stage.ctx.generate([7, 8], 3, seq_id=0, sampler=Sampler(temperature=0)))
    ).encode()


def compact(stage: Stage) -> bytes:
    ctx = stage.ctx
    ctx.decode(NEXT, seq_id=2)
    ctx.decode(FIRST, seq_id=3)
    ctx.clear_kv_cache_seq(2)  # below it
    return repr(ctx.kv_cache_compact()).encode()


def blocks(stage: Stage) -> bytes:
    native, n = stage.ctx.native, len(FIRST)
    block = np.empty(native.block_bytes() * n, np.uint8)
    if not len(block) or not native.get_block(0, 0, n, block):
        raise UnsupportedOperation("blocks", "this memory has none")
    first, end = native.window_range(0)
    window = np.empty(native.block_bytes("window") * (end - first), np.uint8)
    if native.has_window:
        native.get_block(0, first, end - first, window, "window")
    state = native.get_state_part(0) if native.has_state_part else None
    kept = [(window, end - first, end - first)] if native.has_window else []
    native.set_blocks(1, [(block, n, n)], kept, first, state)
    return block.tobytes() + window.tobytes()


def batch_generator(stage: Stage) -> bytes:
    generator = BatchGenerator(stage.ctx)
    asked = [generator.submit([7, 8 + i], max_tokens=3) for i in range(2)]
    generator.run()
    for one in asked:
        if one.error is not None:
            raise one.error
    return repr([one.tokens.tolist() for one in asked]).encode()


def long_text(stage: Stage) -> bytes:
    # As long as it has to be for signals to be heard.
    tokens = stage.model.tokenize("abc defg  hi " * 400)
    return repr([len(tokens), stage.model.detokenize(tokens)]).encode()


def text(stage: Stage) -> bytes:
    tokens = stage.model.tokenize("abc defg<s>hi", parse_special=True)
    said = stage.model.detokenize(tokens)
    facts = [stage.model.metadata, stage.model.description, stage.model.token_to_piece(7), said]
    return repr([tokens.tolist(), *facts]).encode()


OPERATIONS: dict[str, Callable[[Stage], bytes | None]] = {
    one.__name__: one
    for one in (
        create,
        load,
        decode,
        append,
        batch,
        encode,
        copy,
        remove_part,
        remove_all,
        keep,
        shift,
        divide,
        clear,
        look,
        get_state,
        get_whole,
        set_state,
        set_whole,
        save,
        restore,
        restore_context,
        partial,
        kv,
        write_kv,
        sample,
        generate,
        compact,
        blocks,
        batch_generator,
        long_text,
        text,
    )
}


def prepare(stage: Stage) -> None:
    """Make what operations take, where this memory has it."""
    ctx, made = stage.ctx, stage.made
    for name, make in {
        "state": lambda: ctx.get_state(0),
        "whole": lambda: ctx.get_state(),
        "sequence": lambda: ctx.sequence_state(0),
        "context": lambda: ctx.context_state(),
        "kv": lambda: ctx.kv(0),
        "row": lambda: ctx.logits(),
    }.items():
        try:
            made[name] = make()
        except (UnsupportedOperation, IndexError):
            continue


__all__ = ["FIRST", "MODELS", "NEXT", "OPERATIONS", "Stage", "fill", "options", "prepare"]
