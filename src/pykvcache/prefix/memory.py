"""Copies cells and states out of a context's memory, and back into it."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from pykvcache._native import lib
from pykvcache._ranges import Range
from pykvcache.context import LlamaContext
from pykvcache.errors import KvCacheError, UnsupportedOperation
from pykvcache.prefix.block_hash import root_name, split_space
from pykvcache.prefix.node import Chunk, Kind, MemoryShape
from pykvcache.prefix.stores import Envelope
from pykvcache.sequence.cells import SequenceCells
from pykvcache.sequence.checkpoints import CheckpointPolicy
from pykvcache.state.layout import BLOCK_PARTS

__all__ = ["BlockCheckpoints", "BufferPool", "CacheMemory", "Cells"]

Buffer = npt.NDArray[np.uint8]

#: Overhead in bytes of a node or component, and of a chunk (by tracemalloc).
_NODE_BYTES, _CHUNK_BYTES = 800, 250
#: Upper bound on the bytes of free buffers.
_MOST_FREE = 64 << 20
#: Maximum number of tokens between two checkpoints of a prompt.
_SPACING = 512


@dataclass(frozen=True)
class Cells:
    """The cells and the state to restore for the first n tokens of a sequence."""

    n: int
    attention: list[Chunk]  # from the first token on
    window: list[Chunk]  # none if the memory has no window
    window_first: int  # their first token
    state: Any = None  # the recurrent state, if the memory has one


@dataclass(frozen=True)
class BlockCheckpoints(CheckpointPolicy):
    """Checkpoints where prompts are likely to resume.

    States are saved after the last full block of each prompt, and 1, 3, 7, 15... blocks before it.
    """

    block_size: int = 64
    needs_state: bool = False
    n_window: int = 1 << 31  # a prompt of at most this many tokens keeps all its window cells

    @property
    def chunk(self) -> int:
        """Tokens per chunk of window cells."""
        return self.block_size

    def next_stop(self, begin: int, end: int) -> int:
        """Return where to pause next: every ``spacing`` tokens, and more often near the end."""
        if not self.max_bytes or (not self.needs_state and end <= self.n_window):
            return end
        block = self.block_size
        stops = [super().next_stop(begin, end) // block * block]
        if self.needs_state:
            n_blocks = end // block
            before = (n_blocks - 2**k + 1 for k in range(n_blocks.bit_length() + 1))
            stops += [block * n for n in before]
        return min([n for n in stops if begin < n < end], default=end)


class CacheMemory:
    """Reads and writes cells and states of llama.cpp's memory; no other module of a cache does.

    Free buffers take at most an eighth of ``ram_bytes``.
    """

    def __init__(self, context: LlamaContext, block_size: int, ram_bytes: int) -> None:
        self._ctx, self._native = context, context.native
        native = self._native
        self.layouts = {
            Kind.ATTENTION: native.block_layout("attention"),
            Kind.WINDOW: native.block_layout("window"),
        }
        attention, window = (layout.cell_bytes for layout in self.layouts.values())
        self._has_cells = attention + window > 0
        n_swa = context.model.n_swa if window else 0
        self.shape = MemoryShape(
            block_size,
            attention,
            window,
            native.window_needed if window else None,
            # With recurrent states a prompt can resume only where a state was saved.
            slack=0 if native.has_state_part else n_swa // 4,
            needs_state=native.has_state_part,
            node_bytes=_NODE_BYTES,
            chunk_bytes=_CHUNK_BYTES,
            split=self._split,
        )
        most = min(ram_bytes // 8, _MOST_FREE)
        overhead = Envelope.overhead  # of a block that comes from a tier
        sizes = [max(1, block_size * cell + overhead) for cell in (attention, window)]
        self._pools = [BufferPool(size, most // 2) for size in sizes]

    def checkpoints(self, max_bytes: int) -> BlockCheckpoints:
        """Return where live sequences save checkpoints."""
        shape, n_cells, room = self.shape, 1 << 31, _SPACING
        if shape.window_start is not None:
            layout = self._native.state_layout("PrefixCache")
            n_cells = min(int(part["n_cells"]) for part in layout if part["part"] == "window")
            # So few tokens between checkpoints that no window cells are lost in between.
            room = min(room, n_cells - self._ctx.model.n_swa)
        spacing = max(room // shape.block_size, 1) * shape.block_size
        return BlockCheckpoints(max_bytes, spacing, shape.block_size, shape.needs_state, n_cells)

    # Buffers ------------------------------------------------------------------------------------

    @property
    def free_bytes(self) -> int:
        """Bytes of free buffers."""
        attention, window = self._pools
        return len(attention.free) * attention.size + len(window.free) * window.size

    def trim(self, max_bytes: int = 0) -> None:
        """Free buffers beyond a limit in bytes."""
        for pool in self._pools:
            pool.trim(max_bytes)
            max_bytes -= pool.free_bytes

    def take(self, size: int) -> memoryview:
        """Return a buffer of ``size`` bytes, for a record loaded from a tier."""
        pool = self._pools[0] if size <= self._pools[0].size else self._pools[1]
        return pool.take(size).data

    def close(self) -> None:
        """Free the free buffers, and keep none from now on."""
        for pool in self._pools:
            pool.close()

    # Copying out --------------------------------------------------------------------------------

    def windows(self, seq_id: int) -> list[Range]:
        """Return the range of tokens whose window cells a sequence has."""
        if self.shape.window_start is None:
            return []
        first, last = self._native.window_range(seq_id)
        return [(first, last)] if first < last else []

    def read(
        self, cells: SequenceCells, kind: Kind, begin: int, sizes: Sequence[int]
    ) -> list[Buffer]:
        """Return the cells of consecutive chunks of a sequence with an id.

        Window cells are shared with its checkpoints. Raises `KvCacheError` if some are missing, or
        NaN.
        """
        found: list[Buffer] = []
        if kind is Kind.WINDOW:
            for size in sizes:
                found.append(self.join(kind, cells.window_cells(begin, begin + size)))
                begin += size
            return found
        cell, pool, seq_id = self.shape.attention_bytes, self._pools[kind], cells.ledger.seq_id
        found = [pool.take(size * cell) for size in sizes]
        at = 0
        for size, same in groupby(sizes if cell else ()):  # one call for chunks of equal size
            end = at + len(list(same))
            if not self._native.get_blocks(seq_id, begin, size, found[at:end], part="attention"):
                raise UnsupportedOperation("PrefixCache", "the sequence lacks some of these cells")
            begin += size * (end - at)
            at = end
        for buffer in found:
            buffer.setflags(write=False)
        return found

    def read_state(self, seq_id: int) -> lib.StatePart | None:
        """Copy the recurrent state of a sequence; None if that is not possible."""
        try:
            return self._native.get_state_part(seq_id)
        except KvCacheError:
            return None

    def make_state(self, content: Buffer, n: int) -> lib.StatePart:
        """Return the state after n tokens from bytes that another context wrote.

        Raises `StateError` or ValueError if they are something else.
        """
        state = self._native.make_state_part(content)
        if state.end != n:
            raise ValueError(f"the state is that after {state.end} tokens, not {n}")
        return state

    # Restoring ----------------------------------------------------------------------------------

    def put(self, seq_id: int, cells: Cells) -> None:
        """Restore cells into a sequence, all or none; raise `NoKvCacheSlot` without room."""
        self._native.set_blocks(
            seq_id,
            cells.attention if self._has_cells else [],
            cells.window,
            cells.window_first,
            cells.state,
            known_values=True,
        )

    def least_cut(self, cells: Cells) -> int:
        """Return the smallest number of tokens to which restored cells can be truncated."""
        if self.shape.needs_state:
            return cells.n
        return self._native.least_cut(cells.window_first) if cells.window else 0

    # Chunks -------------------------------------------------------------------------------------

    def part(self, kind: Kind, cells: Buffer, begin: int, n: int) -> Buffer:
        """Return a copy of the n cells of a chunk from ``begin`` on."""
        out = np.empty(n * self.shape.cell_bytes(kind), np.uint8)
        if len(out):
            self.layouts[kind].copy_cells(cells, begin, n, out, 0)
        out.setflags(write=False)
        return out

    def _split(self, kind: Kind, cells: Buffer, n: int, at: int) -> tuple[Buffer, Buffer]:
        return self.part(kind, cells, 0, at), self.part(kind, cells, at, n - at)

    def join(self, kind: Kind, chunks: Sequence[Chunk]) -> Buffer:
        """Return the chunks of one block as one buffer."""
        if len(chunks) == 1 and chunks[0][1] == chunks[0][2]:
            whole: Buffer = chunks[0][0]
            return whole
        n, at = sum(used for _, _, used in chunks), 0
        out = self._pools[kind].take(n * self.shape.cell_bytes(kind))
        for cells, _, used in chunks:
            if len(out):
                self.layouts[kind].copy_cells(cells, 0, used, out, at)
            at += used
        out.setflags(write=False)
        return out

    # Identity -----------------------------------------------------------------------------------

    @cached_property
    def digests(self) -> dict[str, bytes]:
        """The digests that block hashes depend on, for `root_name`.

        They leave out the numbers of cells and sequences, streams and ``swa_full``: contexts that
        differ in these share blocks.
        """
        ctx = self._ctx
        fingerprint = ctx.fingerprint
        parts: Any
        if not self._native.has_layout:
            parts = ctx.memory_info  # nothing leaves this context
        elif self.shape.is_plain:
            parts = [(part.to_json(), None) for part in ctx._layouts]
        else:
            parts = [2, *(part.to_json() for part in ctx._layouts)]  # the second version
        layout = repr((parts, fingerprint.causal, fingerprint.n_swa, ()))
        return {
            "model": bytes.fromhex(fingerprint.model),
            "rope": bytes.fromhex(fingerprint.rope_digest),
            "layout": hashlib.sha256(layout.encode()).digest(),
        }

    def root(self, space: str) -> bytes:
        """Return the hash from which the blocks of a space start."""
        namespace, adapters = split_space(space)
        size = self.shape.block_size
        return root_name(**self.digests, block_size=size, namespace=namespace, adapters=adapters)

    def state_bytes(self) -> int:
        """Return the approximate bytes of a sequence's recurrent state."""
        parts = self._native.state_layout("PrefixCache")
        return sum(row[4] for part in parts if part["part"] == "recurrent" for row in part["rows"])

    def tail_bytes(self) -> int:
        """Return an upper bound on the bytes of a tail record without its cells."""
        size = 4096 + 4 * self._ctx.model.n_vocab
        for part in self._native.state_layout("PrefixCache"):
            if part["part"] not in (*BLOCK_PARTS, "window"):
                per_cell = 64 + sum(row[4] for row in part["rows"])
                size += per_cell * part["n_cells"] + 64 * len(part["rows"]) + 16 * part["n_stream"]
        return size


#: Smaller buffers are left to the allocator, which reuses their memory anyway.
MIN_POOLED_BYTES = 128 << 10


class BufferPool:
    """A pool of buffers of one size: their memory is reused once nothing refers to it.

    The system clears each page of new memory at the first write: filling 37 MB of new buffers
    takes 50 ms, of reused ones 10 ms. ``max_bytes`` limits the free list. Any thread may call any
    method and drop any array.
    """

    def __init__(self, size: int, max_bytes: int) -> None:
        self.size = size
        self._max_free = max_bytes // size if size >= MIN_POOLED_BYTES else 0
        self._buffer_type = _buffer_type(size)
        #: The free list, without arrays in use.
        self.free: list[Buffer] = []

    @property
    def free_bytes(self) -> int:
        """Bytes in the free list, which has no buffers in use."""
        return len(self.free) * self.size

    def take(self, n_bytes: int) -> Buffer:
        """Return a writable array of ``n_bytes`` arbitrary bytes, pooled if near `size`."""
        if not self._max_free or not 0.99 * self.size < n_bytes <= self.size:
            return np.empty(n_bytes, np.uint8)
        try:
            memory = self.free.pop()
        except IndexError:
            memory = np.empty(self.size, np.uint8)
        buffer = self._buffer_type.from_buffer(memory)
        buffer.pool, buffer.memory = self, memory
        return np.frombuffer(buffer, np.uint8, n_bytes)

    def trim(self, max_bytes: int = 0) -> None:
        """Free memory until the free list has at most ``max_bytes`` bytes."""
        del self.free[max(0, max_bytes) // self.size :]

    def close(self) -> None:
        """Free the free list; arrays in use are freed when they are dropped."""
        self._max_free = 0
        self.trim()

    def _put_back(self, memory: Buffer) -> None:
        if len(self.free) < self._max_free:
            self.free.append(memory)


def _buffer_type(size: int) -> Any:
    """Return a type whose instances return their memory to their pool when they are dropped."""

    class Lent(ctypes.Array[ctypes.c_uint8]):
        _type_ = ctypes.c_uint8
        _length_ = size
        __slots__ = ("memory", "pool")
        pool: BufferPool
        memory: Buffer

        def __del__(self) -> None:
            self.pool._put_back(self.memory)

    return Lent
