"""A saved context: all sequences, and the cells they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pykvcache._arguments import TokenInput, as_int
from pykvcache.errors import SequenceIdError, shown
from pykvcache.state.container import Container, Tensor
from pykvcache.state.facts import Fingerprint
from pykvcache.state.layout import IntArray, Part
from pykvcache.state.saved import (
    Saved,
    check_tokens,
    json_of,
    layouts_of,
    read_fingerprint,
    read_ints,
    read_metadata,
    read_part,
    write_ints,
    write_part,
)
from pykvcache.state.sequence import SequenceState

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ContextState"]


class ContextState(Saved):
    """The saved state of a whole context; cells shared by sequences are stored once.

    Created by `LlamaContext.context_state`, `load` and `from_bytes`. Immutable. It can be
    restored to a context with the same number of streams (``kv_unified``, and ``n_seq_max``
    without it). `sequence` extracts one sequence, which any context can restore.
    """

    kind = "context"

    def __init__(
        self,
        parts: Sequence[Sequence[Part]],
        fingerprint: Fingerprint,
        firsts: Mapping[int, int],
        *,
        tokens: Mapping[int, TokenInput] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__([streams[0].layout for streams in parts], fingerprint, metadata)
        self._parts = tuple(tuple(part.freeze() for part in streams) for streams in parts)
        self._firsts = {int(seq): int(first) for seq, first in sorted(firsts.items())}
        if tokens is not None and not isinstance(tokens, Mapping):
            raise TypeError(
                f"tokens must map sequence ids to tokens, not be {type(tokens).__name__}"
            )
        given = {as_int(s, "a key of tokens", 0, 2**31 - 1): t for s, t in (tokens or {}).items()}
        self._tokens = {s: check_tokens(t, self._count(s), s) for s, t in sorted(given.items())}

    @property
    def parts(self) -> tuple[tuple[Part, ...], ...]:
        """The cells: per kind of cache, one part per stream."""
        return self._parts

    @property
    def firsts(self) -> dict[int, int]:
        """First position of each non-empty sequence."""
        return dict(self._firsts)

    @property
    def sequence_ids(self) -> list[int]:
        """Ids of the non-empty sequences."""
        return list(self._firsts)

    @property
    def tokens(self) -> dict[int, IntArray]:
        """Token ids by sequence, if they were given; read-only arrays."""
        return dict(self._tokens)

    @property
    def n_tokens(self) -> int:
        """Tokens over all sequences; shared tokens count once per sequence."""
        return sum(self._count(seq) for seq in self._firsts)

    def _count(self, seq: int) -> int:
        for part in self._parts[0]:
            positions = part.positions[_cells_of(part, seq)]
            if len(positions):
                is_state = part.layout.part == "recurrent"
                return int(positions[0]) - self._firsts[seq] + 1 if is_state else len(positions)
        return 0

    @property
    def nbytes(self) -> int:
        """Size of keys, values and states in bytes."""
        return sum(t.nbytes for streams in self._parts for part in streams for t in part.tensors)

    def __repr__(self) -> str:
        return (
            f"<ContextState: sequences {self.sequence_ids}, {self._fingerprint.memory}, "
            f"{self.nbytes} bytes>"
        )

    def sequence(self, seq_id: int) -> SequenceState:
        """Return one sequence; its cells are copied unless they are contiguous.

        Raises
        ------
        SequenceIdError
            The state has no cells of that sequence.
        """
        seq = as_int(seq_id, "seq_id", -(2**63), 2**63)
        if seq not in self._firsts:
            held = ", ".join(map(str, self._firsts)) or "none"
            raise SequenceIdError(
                seq,
                max(self._firsts, default=-1) + 1,
                f"the state has no cells of sequence {seq}: it holds {held}",
            )
        parts = []
        for streams in self._parts:
            found = [part.take(_cells_of(part, seq)) for part in streams]
            parts.append(next((part for part in found if len(part)), found[0]))
        return SequenceState(
            parts,
            self._fingerprint,
            first=self._firsts[seq],
            tokens=self._tokens.get(seq),
            metadata=self._metadata,
        )

    # Files --------------------------------------------------------------------------------

    def _text(self) -> dict[str, str]:
        pairs = ",".join(f"[{seq},{first}]" for seq, first in self._firsts.items())
        streams = ",".join(str(len(streams)) for streams in self._parts)
        return {"firsts": f"[{pairs}]", "streams": f"[{streams}]"}

    def _tensors(self) -> list[Tensor]:
        tensors = [write_ints(f"tokens.{seq}", given) for seq, given in self._tokens.items()]
        for streams in self._parts:
            for i, part in enumerate(streams):
                tensors += write_part(f"{part.layout.part}.{i}", part)
        return tensors

    @classmethod
    def _parsed(cls, container: Container) -> Self:
        tensors = container.tensors
        firsts = {_int(seq): _int(first) for seq, first in json_of(container, "firsts")}
        streams = [_int(n) for n in json_of(container, "streams")]
        layouts = layouts_of(container)
        if not 0 < len(layouts) == len(streams) or not all(1 <= n <= 256 for n in streams):
            raise ValueError("its streams are invalid")
        parts = [
            [read_part(tensors, f"{layout.part}.{i}", layout, members=True) for i in range(n)]
            for layout, n in zip(layouts, streams, strict=True)
        ]
        if firsts != _firsts_of(parts[0], firsts):
            raise ValueError("its sequences do not match its cells")
        tokens = {
            int(name.removeprefix("tokens.")): read_ints(tensors, name, (-1,))
            for name in tensors
            if name.startswith("tokens.")
        }
        return cls(
            parts,
            read_fingerprint(container),
            firsts,
            tokens=tokens,
            metadata=read_metadata(container),
        )


def _int(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"{shown(value)} is not an integer")
    return value


def _owners(part: Part) -> tuple[npt.NDArray[np.intp], IntArray]:
    """Return (cell, sequence) pairs as two arrays."""
    assert part.members is not None
    offsets, ids = part.members
    return np.repeat(np.arange(len(part)), np.diff(offsets)), ids


def _cells_of(part: Part, seq: int) -> slice | npt.NDArray[np.intp]:
    """Return the cell indices of a sequence, as a slice if they are contiguous."""
    cells, ids = _owners(part)
    found: npt.NDArray[np.intp] = cells[ids == seq]
    if len(found) == 0:
        return slice(0, 0)
    if int(found[-1] - found[0]) + 1 == len(found):
        return slice(int(found[0]), int(found[-1]) + 1)
    return found


def _firsts_of(streams: Sequence[Part], claimed: Mapping[int, int]) -> dict[int, int]:
    """Return each sequence's first position; a recurrent part relies on `claimed`."""
    firsts: dict[int, int] = {}
    for part in streams:
        cells, ids = _owners(part)
        if (ids < 0).any() or len(np.unique(cells * 2**32 + ids)) != len(ids):
            raise ValueError("a cell names a sequence twice")
        for seq in np.unique(ids).tolist():
            lowest = int(part.positions[cells[ids == seq]].min())
            if part.layout.part == "recurrent":
                lowest = claimed[seq] if 0 <= claimed.get(seq, -1) <= lowest else -1
            firsts[seq] = min(lowest, firsts.get(seq, lowest))
    return firsts
