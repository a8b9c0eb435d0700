"""Where memory is short: an error, and never an array of something else."""

from __future__ import annotations

from support.short_memory import run_short_of_memory

CHILD = """
import numpy as np
from pykvcache import LlamaContext, LlamaModel, LlamaSequence, embedded_model_path
ctx = LlamaContext(LlamaModel(embedded_model_path()), n_ctx=256, n_seq_max=2, n_threads=1)
ctx.decode(list(range(300, 325)))

right = ctx.native.get_state(0, None)
n = 0
for first in range(60):
    try: state = short(lambda: ctx.native.get_state(0, None), first, first + 1)
    except (MemoryError, SystemError): n += 1
    else: assert state.dtype == np.uint8 and (state == right).all(), first
    sequence = LlamaSequence(ctx, list(range(300, 315)))
    sequence.evaluate()
    try: short(sequence.park, first, first + 1)
    except (MemoryError, SystemError): n += 1
    assert np.isfinite(sequence.logits()).all(), first
    sequence.close()
assert n > 10, n
"""


def test_states_are_bytes_or_an_error() -> None:
    """NumPy makes an array of the items of a buffer where it has no memory to look at it."""
    run_short_of_memory(CHILD)
