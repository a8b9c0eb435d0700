"""Load and use damaged copies of a model; run as ``python -m binding.damage_driver``.

The number of each copy is printed before it is loaded: a process that dies says which one did it,
and ``--first N --copies 1`` repeats that one.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from binding.gguf_map import Map, read_map
from pykvcache import KvCacheError, LlamaContext, LlamaModel


def every_cut(whole: bytes, place: Map) -> Iterator[bytes]:
    """The file as it is when it ends between two fields, inside one, or among the weights."""
    # After the last weight there may be padding, which no load misses.
    step = max(1, place.end // 40)
    cuts = {at + inside for at in place.boundaries for inside in (-1, 0, 1)}
    cuts |= {*range(place.data, place.end, step), place.end - 1, place.end - 32}
    for cut in sorted(cuts):
        if 0 <= cut < place.end:
            yield whole[:cut]


def every_zero(whole: bytes, place: Map) -> Iterator[bytes]:
    """The file with one field of its header zeroed."""
    for field in place.thinned():
        yield whole[: field.offset] + bytes(field.size) + whole[field.offset + field.size :]


DAMAGES = {"cuts": every_cut, "zeros": every_zero}


def use(path: Path) -> None:
    """Everything that reads what the file says."""
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
    """How many files this process has open; 0 where the system does not say."""
    return len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--damage", choices=DAMAGES, required=True)
    parser.add_argument("--first", type=int, default=0, help="skip so many copies")
    parser.add_argument("--copies", type=int, default=None, help="default: all")
    parser.add_argument("--every", type=int, default=1, help="take every n-th copy only")
    parser.add_argument("--folder", type=Path, default=Path())
    how = parser.parse_args()
    faulthandler.enable()
    files = open_files()
    whole, place = how.model.read_bytes(), read_map(how.model)
    path, outcomes = how.folder / "damaged.gguf", Counter[str]()
    copies = enumerate(DAMAGES[how.damage](whole, place))
    stop = None if how.copies is None else how.first + how.copies
    for number, copy in islice(copies, how.first, stop, how.every):
        path.write_bytes(copy)
        print(f"{how.damage}: copy {number}", flush=True)
        try:
            use(path)
            outcomes["fine"] += 1
        except (KvCacheError, ValueError, IndexError, MemoryError) as error:
            outcomes[type(error).__name__] += 1
    assert open_files() == files
    print(dict(outcomes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
