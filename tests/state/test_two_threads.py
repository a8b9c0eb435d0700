"""Large states are copied by two threads: what one thread alone does, byte by byte."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memory.kit import Fresh, Load, Make, apart
from pykvcache import LlamaBatch, LlamaContext
from state.kit import WORDS, cells_of, next_logits
from support.models import RIGHT, make_model
from support.sanitizer import SANITIZED

#: 16 KiB per token, as f32: 400 tokens are more than the 4 MiB from which on two threads copy.
WIDE = {"n_embd": 512, "n_head_kv": 4, "n_layer": 4, "n_swa": 300}
LARGE = 4 << 20
FLASH = {"type_k": "f32", "type_v": "f32", "flash_attn": "enabled"}
SHAPES = [
    pytest.param("llama", {}, id="transposed"),
    pytest.param("llama", FLASH, id="rows", marks=pytest.mark.slow),
    pytest.param(
        "llama", {"kv_unified": False, "n_ctx": 2048}, id="streams", marks=pytest.mark.slow
    ),
    pytest.param("gemma3", {"swa_full": True}, id="window"),
]


def pair(
    name: str, options: dict[str, Any], make_context: Make, model: Load
) -> tuple[LlamaContext, LlamaContext]:
    """A context with one thread and one with two."""
    wide = model(name, **WIDE)
    one, two = (make_context(wide, **({"n_ctx": 1024} | options)) for _ in range(2))
    # One token is computed by one thread: flash attention depends on their number.
    two.set_n_threads(1, 2)
    return one, two


@pytest.mark.parametrize(("name", "options"), SHAPES)
def test_two_threads_do_what_one_does(
    name: str, options: dict[str, Any], make_context: Make, model: Load, fresh_logits: Fresh
) -> None:
    one, two = pair(name, options, make_context, model)
    one.decode(WORDS)
    state = one.get_state(0)
    assert len(state) > LARGE
    one.clear_kv_cache()
    one.set_state(state, 0)  # of a window it has what llama.cpp writes
    content = one.sequence_state(0).to_bytes()
    # Into an empty sequence, over itself, over another one, and next to other sequences' cells.
    for seq, words in ((0, WORDS[:0]), (0, WORDS), (1, WORDS[200:]), (2, WORDS[::-1])):
        for ctx in (one, two):
            ctx.clear_kv_cache()
            if len(words):
                ctx.decode(np.ascontiguousarray(words[:300]), seq_id=seq)
            ctx.decode(WORDS[50:70], seq_id=3)
            kept = cells_of(ctx, 3)
            ctx.set_state(state, seq)
            assert ctx.sequence_state(seq).to_bytes() == content
            assert cells_of(ctx, 3) == kept
        got = next_logits(two, seq)
        assert apart(got, next_logits(one, seq)) < RIGHT
        # Flash attention computes in an order that depends on the cells.
        if "flash_attn" not in options:
            want = fresh_logits(model(name, **WIDE), [*WORDS, 9], **({"n_ctx": 1024} | options))
            assert apart(got, want) < RIGHT


def test_scattered_cells(make_context: Make, model: Load) -> None:
    _, two = pair("llama", {}, make_context, model)
    tokens, pos = (np.repeat(column[:400], 2) for column in (WORDS, np.arange(400)))
    two.decode(LlamaBatch.from_arrays(tokens, pos, np.tile([0, 1], 400)))
    state, content = two.get_state(1), two.sequence_state(1).to_bytes()
    assert len(state) > LARGE
    two.clear_kv_cache_seq(1)
    two.decode(WORDS[:100], seq_id=2)  # takes every second cell
    two.set_state(state, 3)
    assert two.sequence_state(3).to_bytes() == content
    two.set_n_threads(1)
    assert two.sequence_state(3).to_bytes() == content


NO_THREAD = """
import resource, sys, threading
import numpy as np
from pykvcache import LlamaContext, LlamaModel
from pykvcache.kv import LayerKV, SequenceKV
ctx = LlamaContext(LlamaModel(sys.argv[1]), n_ctx=1024, n_seq_max=2, n_threads=1,
                   type_k="f32", type_v="f32", flash_attn="enabled")
ctx.decode(np.array([5], np.int32))
rng = np.random.default_rng(0)
layers = [
    LayerKV(*(rng.standard_normal((500, *layer.keys.shape[1:]), np.float32) for _ in "kv"))
    for layer in ctx.kv(0).layers
]
ctx.write_kv(SequenceKV(np.arange(500, dtype=np.int32), layers), 0)
state, content = ctx.get_state(0), ctx.sequence_state(0).to_bytes()
assert len(state) > 4 << 20
ctx.set_n_threads(1, 2)
resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
try:
    threading.Thread(target=print).start()
except RuntimeError:
    pass
else:
    raise SystemExit("threads can still be started here")
ctx.set_state(state, 1)
assert ctx.sequence_state(1).to_bytes() == content
print("well")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's limits")
@pytest.mark.skipif(SANITIZED, reason="AddressSanitizer cannot run with this limit")
def test_without_a_second_thread_the_first_copies_everything(model_folder: Path) -> None:
    path = make_model("llama", model_folder, **WIDE)
    # A stack that is larger than the limit: no thread gets one.
    done = subprocess.run(
        [
            "sh",
            "-c",
            'ulimit -s 67108864 && exec "$0" -c "$1" "$2"',
            sys.executable,
            NO_THREAD,
            str(path),
        ],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"GGML_NO_BACKTRACE": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("well"), done.stdout
    print(done.stdout)


SEVERAL = [
    ("llama", {"flash_attn": "disabled", "type_k": "f16", "type_v": "f16"}),
    ("llama", {"flash_attn": "enabled", "type_k": "q8_0", "type_v": "q4_0", "kv_unified": False}),
    ("qwen2vl", {}),
    ("llama", FLASH),
]


def test_several_contexts_copy_at_once(make_context: Make, model: Load) -> None:
    """Blocks and states, one context per thread, while another context computes."""
    several = [
        make_context(model(name, **WIDE), **({"n_ctx": 1024, "n_seq_max": 2} | options))
        for name, options in SEVERAL
    ]
    start, failed = threading.Barrier(len(several) + 1), list[BaseException]()
    busy = make_context("llama", n_ctx=512)
    busy.decode(WORDS[:50])
    wanted = busy.logits()

    def copy(ctx: LlamaContext) -> None:
        native, size, n = ctx.native, 40, 10
        try:
            native.set_n_threads(2, 2)
            ctx.decode(WORDS)
            start.wait(60)
            first = np.zeros((n, native.block_bytes() * size), np.uint8)
            assert first.nbytes > 512 << 10
            assert native.get_blocks(0, 0, size, list(first))
            for _ in range(2):
                again = np.zeros_like(first)
                native.set_blocks(1, [(block, size, size) for block in first])
                assert native.get_blocks(1, 0, size, list(again))
                np.testing.assert_array_equal(first, again)
                state = ctx.get_state(0)
                ctx.set_state(state, 1)
                assert ctx.sequence_state(1).to_bytes() == ctx.sequence_state(0).to_bytes()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=copy, args=(ctx,)) for ctx in several]
    for thread in threads:
        thread.start()
    start.wait(60)
    while any(thread.is_alive() for thread in threads):
        busy.clear_kv_cache()
        busy.decode(WORDS[:50])
        np.testing.assert_array_equal(busy.logits(), wanted)
    assert not failed, failed
