"""Parts as tensors of a container, and back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from pykvcache.errors import StateDamaged
from pykvcache.state.container import SIZES, Container, Tensor
from pykvcache.state.layout import IntArray, Part, PartLayout

__all__ = ["json_of", "layouts_of", "read_ints", "read_part", "write_ints", "write_part"]

#: ``ggml_type`` to safetensors types; quantised blocks are stored as bytes.
_DTYPES = {0: "F32", 1: "F16", 30: "BF16"}


def json_of(container: Container, key: str) -> Any:
    """Parse a header value that is JSON."""
    try:
        return json.loads(container.metadata[key])
    except (KeyError, ValueError, RecursionError):
        raise StateDamaged(f"the state's header has no valid {key}", what=key) from None


def layouts_of(container: Container) -> tuple[PartLayout, ...]:
    """Parse the layouts of a state's parts."""
    try:
        return tuple(PartLayout.from_json(part) for part in json_of(container, "layout"))
    except (ValueError, TypeError, KeyError, IndexError):
        raise StateDamaged("the state's layout is invalid", what="layout") from None


def write_ints(name: str, values: IntArray) -> Tensor:
    """Return int32 values as a tensor."""
    data = np.ascontiguousarray(values, "<i4")
    return Tensor(name, "I32", values.shape, data.reshape(-1).view(np.uint8))


def read_ints(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> IntArray:
    """Return a copy of an int32 tensor; -1 in `shape` matches any length.

    A copy, because another program may truncate a mapped file.
    """
    tensor = _find(tensors, name)
    fits = len(tensor.shape) == len(shape) and all(
        b in (-1, a) for a, b in zip(tensor.shape, shape, strict=True)
    )
    if tensor.dtype != "I32" or not fits:
        raise StateDamaged(f"the shape or type of {name} differs from its layout", what=name)
    values: IntArray = np.frombuffer(tensor.data, "<i4").reshape(tensor.shape)
    return values.astype(np.int32)


def _find(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    try:
        return tensors[name]
    except KeyError:
        raise StateDamaged(f"the state has no {name}", what=name) from None


def write_part(prefix: str, part: Part) -> Iterator[Tensor]:
    """Yield the tensors of one stream of a part."""
    yield write_ints(f"{prefix}.positions", part.positions)
    if part.ext is not None:
        yield write_ints(f"{prefix}.ext", part.ext)
    if part.members is not None:
        yield write_ints(f"{prefix}.offsets", part.members[0])
        yield write_ints(f"{prefix}.sequences", part.members[1])
    for i, (name, dtype, shape) in enumerate(_described(prefix, part)):
        data = np.ascontiguousarray(part.tensors[i]).reshape(-1)
        yield Tensor(name, dtype, shape, data)


def _described(prefix: str, part: Part) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    for i, rows in enumerate(part.layout.rows):
        dtype = _DTYPES.get(rows.type, "U8")
        shape = part.shape(i)
        if dtype != "U8":
            if part.is_transposed(i):
                shape = shape[:2]
            elif rows.n_head:
                shape = (len(part), rows.n_head, rows.head_dim)
            else:
                shape = (len(part), rows.row_bytes // SIZES[dtype])
        yield f"{prefix}.layers.{rows.layer}.{rows.what}", dtype, shape


def read_part(
    tensors: Mapping[str, Tensor], prefix: str, layout: PartLayout, *, members: bool
) -> Part:
    """Read one stream of a part; check all sizes against the layout."""
    positions = read_ints(tensors, f"{prefix}.positions", (-1,))
    n = len(positions)
    ext = read_ints(tensors, f"{prefix}.ext", (n, 3)) if layout.extended else None
    pair = None
    if members:
        offsets = read_ints(tensors, f"{prefix}.offsets", (n + 1,))
        ids = read_ints(tensors, f"{prefix}.sequences", (-1,))
        if offsets[0] != 0 or offsets[-1] != len(ids) or (np.diff(offsets) < 1).any():
            raise StateDamaged(f"{prefix}.offsets are invalid", what=f"{prefix}.offsets")
        pair = offsets, ids
    part = Part(layout, positions, ext, (), pair)
    data = []
    for i, (name, dtype, shape) in enumerate(_described(prefix, part)):
        tensor = _find(tensors, name)
        if (tensor.dtype, tensor.shape) != (dtype, shape):
            raise StateDamaged(f"the shape or type of {name} differs from its layout", what=name)
        wanted = part.shape(i)
        if tensor.data.nbytes != prod(wanted):
            raise StateDamaged(f"the size of {name} differs from its layout", what=name)
        data.append(tensor.data.reshape(wanted))
    return replace(part, tensors=tuple(data))
