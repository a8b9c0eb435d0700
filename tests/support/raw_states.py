"""A reader of raw states, written from docs/state-format.md."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pykvcache._native import lib


class Run(NamedTuple):
    """A run of bytes: the records of cells, or rows of one layer."""

    part: str
    what: str
    layer: int
    n_cells: int
    offset: int
    size: int


def runs(ctx: Any, state: npt.NDArray[np.uint8], *, whole: bool) -> Iterator[Run]:
    """Yield what a state of this context is made of, in its order."""
    data, at = state.tobytes(), 0

    def word(form: str = "<I") -> int:
        nonlocal at
        (value,) = struct.unpack_from(form, data, at)
        at += struct.calcsize(form)
        return int(value)

    first = word()
    at = 4 + first if whole else 8
    for layout in ctx.native.state_layout("get_state"):
        part, recurrent = layout["part"], layout["part"] == "recurrent"
        n_streams = 1 if recurrent else word()
        for _ in range(n_streams):
            n = word()
            start = at
            for _ in range(n):
                word()
                n_ids = word()
                at += 12 * layout["extended"] + 4 * n_ids
            if not n and not recurrent:
                continue
            if n:
                yield Run(part, "cells", 0, n, start, at - start)
            word()
            assert word() == layout["n_layer"]
            if lib.state_file_versions[0] >= 4 and not recurrent:
                word(), word()  # how the cache would rotate, whether or not the graph does
            for what, layer, kind, _, row_bytes, *_ in layout["rows"]:
                if what != "ple":
                    assert word() == kind
                at += 8
                if n:
                    yield Run(part, what, layer, n, at, row_bytes * n)
                at += row_bytes * n
    assert at == len(data)
