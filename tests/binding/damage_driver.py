"""Load and use damaged copies of a model.

``python -m binding.damage_driver MODEL FOLDER cuts|zeros COPIES SEED``. The number of each copy is
printed before it is loaded: a process that dies says which one did it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
from collections import Counter
from pathlib import Path
from random import Random

import gguf

from pykvcache import KvCacheError, LlamaContext, LlamaModel


def damaged(reader: gguf.GGUFReader, how: str, rng: Random) -> bytes:
    """A copy that ends in or after one of its parts, or has a field of its header zeroed."""
    whole = reader.data.tobytes()
    field = rng.choice([*reader.fields.values(), *(tensor.field for tensor in reader.tensors)])
    parts = [len(part.tobytes()) for part in field.parts]
    i = rng.choice([*range(len(parts))[:6], *range(len(parts))[-6:]])
    at = field.offset + sum(parts[:i])
    if how == "zeros":
        return whole[:at] + bytes(parts[i]) + whole[at + parts[i] :]
    # After the last weight there may be padding, which no load misses.
    end = max(int(tensor.data_offset + tensor.n_bytes) for tensor in reader.tensors)
    return whole[: rng.choice([at, at + 1, end - 1, rng.randrange(reader.data_offset, end)])]


def use(path: Path) -> None:
    with LlamaModel(path) as model:
        assert repr(model)
        assert dict(model.metadata) is not None
        with contextlib.suppress(KvCacheError, ValueError):
            model.detokenize(model.tokenize("hello world"), special=True)
        # Two threads: an assertion on the second one must come out of the first.
        with LlamaContext(model, n_ctx=256, n_seq_max=2, n_threads=2) as ctx:
            tokens = list(range(5, 45))
            if model.has_encoder:
                ctx.encode(tokens)
            ctx.decode(tokens)
            ctx.copy_kv_cache_seq(0, 1)
            with contextlib.suppress(KvCacheError):
                ctx.kv_cache_seq_add(0, 0, None, 2)
            list(ctx.generate([5], 3))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0


def main(model: str, folder: str, how: str, copies: str, seed: str) -> None:
    faulthandler.enable()
    rng, reader = Random(seed), gguf.GGUFReader(model)
    files, path, outcomes = open_files(), Path(folder) / "damaged.gguf", Counter[str]()
    for number in range(int(copies)):
        path.write_bytes(damaged(reader, how, rng))
        print(f"{how}: copy {number}", flush=True)
        try:
            use(path)
            outcomes["fine"] += 1
        except (KvCacheError, ValueError, IndexError, MemoryError) as error:
            outcomes[type(error).__name__] += 1
    assert open_files() == files
    print(dict(outcomes))


if __name__ == "__main__":
    main(*sys.argv[1:])
