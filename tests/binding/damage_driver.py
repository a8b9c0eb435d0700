"""Load and use damaged copies of a model; run as ``python -m binding.damage_driver``.

Prints the seed of each copy before it is loaded: a process that dies says which one did it.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import sys
from collections import Counter
from pathlib import Path
from random import Random

from pykvcache import KvCacheError, LlamaContext, LlamaModel

HEADER = 12_000
"""Bytes of a test model before its weights, roughly."""
LIMITS = [0, 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 0x7FC00000, 0xFF800000]
"""Words that break sizes and numbers: the last two are NaN and minus infinity."""


def damage(whole: bytes, rng: Random) -> bytes:
    """Change one to three places, mostly in the header."""
    data = bytearray(whole)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(4, HEADER if rng.random() < 0.9 else len(data) - 8)
        kind = rng.randrange(3)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF])
        else:
            data[at : at + 4] = rng.choice(LIMITS).to_bytes(4, "little")
    return bytes(data)


def use(path: Path) -> None:
    """Everything that reads what the file says."""
    with LlamaModel(path) as model:
        assert repr(model)
        assert dict(model.metadata) is not None
        with contextlib.suppress(KvCacheError, ValueError):
            model.detokenize(model.tokenize("hello world"), special=True)
        with LlamaContext(model, n_ctx=256, n_seq_max=2, n_threads=2) as ctx:
            tokens = list(range(5, 45))
            if model.has_encoder:
                ctx.encode(tokens)
            ctx.decode(tokens)
            ctx.copy_kv_cache_seq(0, 1)
            with contextlib.suppress(KvCacheError):
                ctx.kv_cache_seq_add(0, 0, None, 2)
            list(ctx.generate([5], 3))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--copies", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path())
    options = parser.parse_args()
    faulthandler.enable()
    whole, path = options.model.read_bytes(), options.folder / "damaged.gguf"
    seen: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + options.copies):
        path.write_bytes(damage(whole, Random(seed)))
        print(f"seed {seed}", flush=True)
        try:
            use(path)
            seen["fine"] += 1
        except (KvCacheError, ValueError, IndexError, MemoryError) as error:
            seen[type(error).__name__] += 1
    print(dict(seen))
    return 0


if __name__ == "__main__":
    sys.exit(main())
