"""Load and use damaged copies of a model; run as ``python -m binding.damage_driver``.

Prints the number of each copy before it is loaded: a process that dies says which one did it,
and ``--first N --copies 1`` repeats that one. ``--damage`` may be given several times, each with
the options of its own after it.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from random import Random

from binding.gguf_map import Map, read_map
from pykvcache import KvCacheError, LlamaContext, LlamaModel

LIMITS = [0, 1, 2, 2**16, 2**31 - 1, 2**31, 2**32 - 1]
"""Words that break sizes and counts."""
FLOATS = [0x7FC00000, 0xFF800000, 0x7F800000, 0xBF800000, 0x7F7FFFFF]
"""NaN, both infinities, minus one and the largest float32."""


def random_damage(whole: bytes, place: Map, rng: Random) -> bytes:
    """Change one to three places, mostly in the header."""
    data = bytearray(whole)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(4, place.data if rng.random() < 0.9 else len(data) - 8)
        kind = rng.randrange(3)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF])
        else:
            data[at : at + 4] = rng.choice(LIMITS + FLOATS).to_bytes(4, "little")
    return bytes(data)


def every_field(whole: bytes, place: Map) -> Iterator[bytes]:
    """Each field of the header in turn, with each value that might break it."""
    for field in place.thinned():
        width = min(field.size, 8)
        values = {value & (256**width - 1) for value in LIMITS}
        if width == 4:
            values |= set(FLOATS)
        values |= {(256**width - 1), 128 * 256 ** (width - 1)}
        old = int.from_bytes(whole[field.offset : field.offset + width], "little")
        values |= {(old + step) % 256**width for step in (-1, 1)}
        for value in sorted(values - {old}):
            data = bytearray(whole)
            data[field.offset : field.offset + width] = value.to_bytes(width, "little")
            yield bytes(data)


def every_cut(whole: bytes, place: Map) -> Iterator[bytes]:
    """The file as it is when it ends between two fields, inside one, or among the weights."""
    # After the last weight there may be padding, which nobody misses.
    step = max(1, place.end // 40)
    cuts = {at + inside for at in place.boundaries for inside in (-1, 0, 1)}
    cuts |= {*range(place.data, place.end, step), place.end - 1, place.end - 32}
    for cut in sorted(cuts):
        if 0 <= cut < place.end:
            yield whole[:cut]


def every_flip(whole: bytes, place: Map, seed: int) -> Iterator[bytes]:
    """One flipped bit, half of them in the header and half among the weights."""
    rng = Random(seed)
    while True:
        at = rng.randrange(0, place.data if rng.random() < 0.5 else len(whole))
        data = bytearray(whole)
        data[at] ^= 1 << rng.randrange(8)
        yield bytes(data)


def mixed(whole: bytes, place: Map, seed: int) -> Iterator[bytes]:
    """Several kinds of damage in one copy."""
    while True:
        yield random_damage(whole, place, Random(seed))
        seed += 1


def use(path: Path) -> None:
    """Everything that reads what the file says."""
    with LlamaModel(path) as model:
        assert repr(model)
        assert dict(model.metadata) is not None
        with contextlib.suppress(KvCacheError, ValueError):
            model.detokenize(model.tokenize("hello world"), special=True)
        # Two threads: an assertion on the second one could not be caught.
        with LlamaContext(model, n_ctx=256, n_seq_max=2, n_threads=2) as ctx:
            tokens = list(range(5, 45))
            if model.has_encoder:
                ctx.encode(tokens)
            ctx.decode(tokens)
            ctx.copy_kv_cache_seq(0, 1)
            with contextlib.suppress(KvCacheError):
                ctx.kv_cache_seq_add(0, 0, None, 2)
            list(ctx.generate([5], 3))


def damaged(whole: bytes, place: Map, how: argparse.Namespace) -> Iterator[tuple[int, bytes]]:
    """The copies that are asked for, with their numbers."""
    copies: Iterator[bytes]
    if how.damage == "fields":
        copies = every_field(whole, place)
    elif how.damage == "cuts":
        copies = every_cut(whole, place)
    else:
        make = mixed if how.damage == "mixed" else every_flip
        copies = islice(make(whole, place, how.seed), how.first + (how.copies or 100))
    stop = None if how.copies is None else how.first + how.copies
    return islice(enumerate(copies), how.first, stop, how.every)


def parts(arguments: list[str]) -> Iterator[list[str]]:
    """What is said of each damage, from one ``--damage`` to the next."""
    starts = [k for k, word in enumerate(arguments) if word == "--damage"] or [len(arguments)]
    for start, end in pairwise([*starts, len(arguments)]):
        yield arguments[: starts[0]] + arguments[start:end]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--damage", choices=["mixed", "fields", "cuts", "flips"], default="mixed")
    parser.add_argument("--copies", type=int, default=None, help="default: all; 100 if random")
    parser.add_argument("--first", type=int, default=0, help="skip so many copies")
    parser.add_argument("--every", type=int, default=1, help="take every n-th copy only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path())
    faulthandler.enable()
    seen: dict[str, dict[str, int]] = {}
    for part in parts(sys.argv[1:]):
        how = parser.parse_args(part)
        whole, place = how.model.read_bytes(), read_map(how.model)
        path, outcomes = how.folder / "damaged.gguf", Counter[str]()
        for number, copy in damaged(whole, place, how):
            path.write_bytes(copy)
            print(f"{how.damage}: copy {number}", flush=True)
            try:
                use(path)
                outcomes["fine"] += 1
            except (KvCacheError, ValueError, IndexError, MemoryError) as error:
                outcomes[type(error).__name__] += 1
        seen[how.damage] = dict(outcomes)
    print(seen)
    return 0


if __name__ == "__main__":
    sys.exit(main())
