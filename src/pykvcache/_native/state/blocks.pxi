# Split and join states: as arrays of cells for files, and as blocks for a prefix cache.

cdef const int32_t* _ints(values, Py_ssize_t n, Pieces owner) except? NULL:
    """Return a pointer to n contiguous int32; ValueError for another length."""
    if values is None:
        raise ArgumentError(f"no integers given: {n} needed", value=0, limit=n)
    cdef const int32_t[::1] view = values
    if view.shape[0] != n:
        raise ArgumentError(
            f"{view.shape[0]} integers given: {n} needed", value=view.shape[0], limit=n)
    owner.views.append(view)
    return &view[0] if n else NULL


cdef list _one_stream(list streams):
    """Return the stream of a sequence; its state does not depend on it."""
    return [next((cells for cells in streams if len(cells[0])), streams[0])]


cdef tuple _CELL_PARTS = ("attention", "window")


@cython.final
cdef class StatePart:
    """State of a sequence after its first `end` tokens: the parts without cells per token.

    If the memory's layout is not known, it is the whole sequence and can be restored only in its own
    context.
    """

    cdef object context  # weak reference if only that context can restore it, else None
    cdef const uint8_t[::1] data
    cdef readonly int32_t end

    def __init__(self, *args, **kwargs):
        raise TypeError("StatePart is made by get_state_part() and make_state_part()")

    @property
    def nbytes(self):
        return self.data.shape[0]

    @property
    def content(self):
        """The bytes, without a copy, read-only."""
        content = np.asarray(self.data)
        content.flags.writeable = False
        return content


@cython.final
cdef class BlockLayout:
    """Layout of a context's blocks; usable without the context or its lock."""

    cdef lib.block_layout layout

    @property
    def cell_bytes(self):
        """Bytes of one cell; 0 if the memory has no such part."""
        return self.layout.cell_bytes

    def is_good(self, const uint8_t[::1] data not None, n):
        """Return whether bytes are a block of n cells whose values cannot overflow in attention.

        This is the expensive check of `Context.set_blocks`.
        """
        cdef uint32_t count = _int(n, "n", 0, INT32_MAX)
        cdef size_t size = data.shape[0]
        cdef const uint8_t* at = &data[0] if size else NULL
        cdef bint fits
        if size != self.layout.cell_bytes * count:
            return False
        with nogil:
            fits = lib.block_fits(self.layout, at, count)
        return fits

    def copy_cells(self, const uint8_t[::1] data not None, first, count, uint8_t[::1] out not None, at):
        """Copy `count` cells, starting at `first` of a block, to `at` in another one."""
        cdef size_t cell = self.layout.cell_bytes, n, n_out
        for name, size in (("data", data.shape[0]), ("out", out.shape[0])):
            if not cell or size % cell:
                raise ArgumentError(
                    f"{name} has {size} bytes: these are no cells of {cell} bytes", what=name, value=size)
        n, n_out = data.shape[0] // cell, out.shape[0] // cell
        cdef size_t n_copied = _int(count, "count", 0, min(n, n_out))
        cdef size_t begin = _int(first, "first", 0, n - n_copied), to = _int(at, "at", 0, n_out - n_copied)
        if n_copied:
            with nogil:
                lib.block_copy(self.layout, &data[0], n, begin, n_copied, &out[0], n_out, to)


cdef class Blocks(State):
    # Arrays --------------------------------------------------------------------------

    def split_state(self, buffer not None, bint whole):
        """Return the cells of a state, per part and stream; raise if it does not fit this memory.

        Cells are positions, extensions or None, members (offsets, ids) for a whole context or None, and
        (offset, size in bytes) of the rows of each kind.
        """
        cdef vector[lib.state_block] blocks
        cdef lib.state_part part
        cdef Pieces pieces = Pieces([buffer])
        cdef lib.scoped_lock locked
        self.lock_read(locked)
        self.has_states("split_state")
        self.check(pieces, -1 if whole else 0, lib.ALL_PARTS, blocks)
        result = []
        for part in lib.state_parts(self.mem, self.v_trans(), lib.ALL_PARTS):
            streams = []
            for s in range(part.n_stream):
                streams.append(self.split_stream(part, s, blocks, pieces, whole))
            result.append(streams if whole else _one_stream(streams))
        return result

    cdef tuple split_stream(
            self, lib.state_part part, uint32_t stream, vector[lib.state_block]& blocks, Pieces pieces,
            bint whole):
        cdef lib.state_block block
        cdef uint32_t n = 0
        cdef const uint8_t* at = NULL
        cdef int32_t[::1] positions, ext = None, offsets = None, ids = None
        rows = []
        for block in blocks:
            if block.part != part.part or block.stream != stream:
                continue
            if block.kind != lib.BLOCK_CELLS:
                rows.append((block.offset, block.size))
                continue
            n = block.n_cells
            at = pieces.pieces[0].data + block.offset
            if whole:
                ids = np.empty(lib.n_cell_ids(block.size, n, part.extended), np.int32)
        positions = np.empty(n, np.int32)
        if part.extended:
            ext = np.empty(3 * n, np.int32)
        if whole:
            offsets = np.zeros(n + 1, np.int32)
            if ids is None:
                ids = np.empty(0, np.int32)
        if n:
            lib.read_cells(
                at, n, part.extended, &positions[0], &ext[0] if part.extended else NULL,
                &offsets[0] if whole else NULL, &ids[0] if whole else NULL)
        return (
            np.asarray(positions), np.asarray(ext).reshape(-1, 3) if part.extended else None,
            (np.asarray(offsets), np.asarray(ids)) if whole else None, rows)

    def set_parts(self, seq_id, list parts not None, list firsts):
        """Restore a sequence, or with None the context, from arrays of cells.

        Per part and stream: positions, extensions or None, members or None, and the bytes of each kind of
        row. Otherwise like `set_state`.
        """
        cdef int32_t seq = -1 if seq_id is None else _seq(seq_id, self.n_seq_max)
        cdef Pieces pieces = Pieces([])
        cdef vector[lib.state_part] layout
        cdef vector[vector[lib.cell_arrays]] given
        cdef lib.joined_state joined
        cdef size_t i
        cdef lib.scoped_lock locked
        self.lock_write(locked)
        self.has_states("set_state")
        layout = lib.state_parts(self.mem, self.v_trans(), lib.ALL_PARTS)
        if <size_t>len(parts) != layout.size():
            raise StateLayoutMismatch(f"{len(parts)} parts given: this memory has {layout.size()}")
        given.resize(layout.size())
        for i in range(layout.size()):
            self.take_arrays(layout[i], parts[i], seq < 0, given[i], pieces)
        _check(lib.state_join(self.mem, self.v_trans(), seq, given, joined), "set_state")
        pieces.pieces.swap(joined.pieces)
        self.set_pieces(seq, pieces, firsts)

    cdef int take_arrays(
            self, lib.state_part part, list streams, bint whole, vector[lib.cell_arrays]& given,
            Pieces pieces) except -1:
        """Check the lengths of arrays and record their addresses."""
        cdef vector[lib.state_rows] kinds = lib.state_rows_of(self.mem, self.v_trans(), part.part)
        cdef lib.cell_arrays* cells
        cdef const uint8_t[::1] bytes_of_rows
        cdef size_t i, k, stream = 0
        if <size_t>len(streams) != (part.n_stream if whole else 1):
            raise StateLayoutMismatch(f"{len(streams)} streams given: this memory has {part.n_stream}")
        given.resize(len(streams))
        for positions, ext, members, rows in streams:
            cells = &given[stream]
            stream += 1
            cells.n = _int(len(positions), "cells", 0, INT32_MAX)
            cells.positions = _ints(positions, cells.n, pieces)
            if part.extended:
                cells.ext = _ints(ext, 3 * <Py_ssize_t>cells.n, pieces)
            if whole:
                offsets, ids = members
                cells.offsets = _ints(offsets, <Py_ssize_t>cells.n + 1, pieces)
                cells.ids = _ints(ids, len(ids), pieces)
                if cells.offsets[0] != 0 or cells.offsets[cells.n] != len(ids):
                    raise StateDamaged(
                        "the sequences of cells do not begin or end where they should",
                        what="sequences of cells")
                for i in range(cells.n):
                    if cells.offsets[i + 1] < cells.offsets[i]:
                        raise StateDamaged(
                            f"the sequences of cell {i} end before they begin",
                            what="sequences of cells", value=i)
            if <size_t>len(rows) != kinds.size():
                raise StateLayoutMismatch(f"{len(rows)} tensors given: this part has {kinds.size()}")
            for k in range(kinds.size()):
                if rows[k] is None:
                    raise ArgumentError(f"tensor {k} is not given", what="tensor", value=k)
                bytes_of_rows = rows[k]
                if <uint64_t>bytes_of_rows.shape[0] != kinds[k].row_bytes * cells.n:
                    raise StateLayoutMismatch(
                        f"tensor {k} has {bytes_of_rows.shape[0]} bytes: "
                        f"{kinds[k].row_bytes} for each of {cells.n} cells needed")
                pieces.views.append(bytes_of_rows)
                cells.rows.push_back(&bytes_of_rows[0] if bytes_of_rows.shape[0] else NULL)
        return 0

    # Blocks --------------------------------------------------------------------------

    @property
    def has_window(self):
        self.check_open()
        return self.traits.has_layout and self.traits.windowed

    @property
    def has_state_part(self):
        """Whether a sequence has state that is not in blocks."""
        self.check_open()
        return self.traits.whole_only

    def block_bytes(self, part="attention"):
        """Return the bytes of one cell in a block; 0 without such a part or with an unknown layout."""
        return self.block_layout(part).cell_bytes

    def block_layout(self, part="attention"):
        """Return the `BlockLayout`, which checks blocks without this context."""
        cdef BlockLayout made = BlockLayout.__new__(BlockLayout)
        cdef lib.memory_part which = _part(part, _CELL_PARTS)
        cdef lib.scoped_lock locked
        self.lock_read(locked)
        self.has_states("blocks", True)
        if self.traits.has_layout:
            made.layout = lib.block_layout_of(self.mem, self.v_trans(), which)
        return made

    def get_blocks(self, seq_id, first, n, list out not None, last=None, part="attention"):
        """Copy cells, starting at position `first`, n into each array of `out`.

        The last array gets `last` cells, if given.

        Returns False if some are missing. Raises `StateDamaged` for NaN, infinity, or values whose
        products overflow, so the copied blocks may be restored with `known_values`.
        """
        cdef int32_t seq = _seq(seq_id, self.n_seq_max), begin = _p0(first), code
        cdef uint32_t count = _int(n, "n", 1, INT32_MAX)
        cdef uint32_t rest = count if last is None else _int(last, "last", 1, INT32_MAX)
        cdef uint32_t fill
        cdef lib.memory_part which = _part(part, _CELL_PARTS)
        cdef size_t i
        cdef bint v_trans, two = self.two_threads()
        cdef size_t size
        cdef vector[uint8_t*] to
        cdef uint8_t[::1] view
        cdef list views = []
        cdef lib.scoped_lock locked
        self.lock_read(locked)
        self.readable("blocks", seq)
        v_trans = self.v_trans()
        size = lib.block_layout_of(self.mem, v_trans, which).cell_bytes
        for i in range(<size_t>len(out)):
            view = out[i]
            fill = rest if i + 1 == <size_t>len(out) else count
            if size * fill > <size_t>view.shape[0]:
                raise ArgumentError(
                    f"out has {view.shape[0]} bytes: {fill} cells need more",
                    what="out", value=view.shape[0], limit=fill)
            views.append(view)
            to.push_back(&view[0] if view.shape[0] else NULL)
        if not lib.has_part(self.mem, which):
            raise UnsupportedOperation("blocks", f"{self.memory_kind} memory has no {part} cells")
        with nogil:
            code = lib.blocks_write(
                self.mem, v_trans, which, seq, begin, count, rest, to, two)
        _check(code, "blocks")
        if code == lib.BLOCKS_VALUES:
            raise StateDamaged(
                f"the cells of sequence {seq} hold NaN, infinity, or values whose products overflow",
                what="cells")
        return code == lib.BLOCKS_WRITTEN

    def get_block(self, seq_id, first, n, uint8_t[::1] out not None, part="attention"):
        """Copy the cells at positions ``[first, first + n)`` as `get_blocks` does."""
        return self.get_blocks(seq_id, first, n, [out], None, part)

    def window_needed(self, n):
        """Return the first window position that the token at position n sees; n if it sees none."""
        cdef int32_t end = _int(n, "n", 0, INT32_MAX)
        self.check_open()
        return lib.window_start(self.mem, end) if self.traits.windowed else end

    def least_cut(self, first):
        """Return the fewest tokens that a truncation can leave if the window cells begin at `first`."""
        cdef int32_t begin = _int(first, "first", 0, INT32_MAX)
        self.check_open()
        return lib.least_cut(self.mem, begin)

    def window_range(self, seq_id):
        """Return (first, end): the positions up to the sequence's end that have all window cells.

        Without a window, all positions of the sequence.
        """
        cdef int32_t seq = _seq(seq_id, self.n_seq_max)
        cdef lib.scoped_lock locked
        self.lock_read(locked)
        self.check_usable()
        if self.traits.kind == lib.MEMORY_NONE:
            return 0, 0
        return lib.window_begin(self.mem, seq), self.seqs.next_pos(seq)

    def spare_begin(self, seq_id):
        """Return the first window position of a state taken now with spare cells."""
        cdef int32_t seq = _seq(seq_id, self.n_seq_max)
        cdef lib.scoped_lock locked
        self.lock_read(locked)
        self.check_usable()
        return lib.spare_begin(self.mem, seq)

    def get_state_part(self, seq_id):
        cdef int32_t seq = _seq(seq_id, self.n_seq_max)
        cdef StatePart state = StatePart.__new__(StatePart)
        cdef unique_ptr[lib.seq_state] plan
        cdef lib.scoped_lock locked
        self.lock_read(locked)
        self.readable("get_state_part", seq, True)
        if not self.has_state_part:
            raise UnsupportedOperation(
                "get_state_part", f"{self.memory_kind} memory has none: get_blocks takes all", "memory")
        self.plan(seq, plan, lib.RECURRENT_PARTS)
        state.data = self.read_state(plan)
        state.end = self.seqs.next_pos(seq)
        state.context = None if self.traits.has_layout else weakref.ref(self)
        return state

    def make_state_part(self, const uint8_t[::1] content not None):
        """Return a state made of another context's `StatePart.content`; raise if it does not fit.

        The bytes must not change afterwards.
        """
        cdef StatePart state = StatePart.__new__(StatePart)
        cdef vector[lib.state_block] found
        cdef lib.state_block block
        cdef int32_t pos = -1
        cdef Pieces pieces = Pieces([np.frombuffer(sequence_state_head, np.uint8), content])
        cdef lib.scoped_lock locked
        self.lock_read(locked)
        self.has_states("make_state_part")
        if not self.has_state_part:
            raise UnsupportedOperation(
                "make_state_part", f"{self.memory_kind} memory has none", "memory")
        self.check(pieces, 0, lib.RECURRENT_PARTS, found)
        for block in found:
            if block.kind == lib.BLOCK_CELLS:
                lib.read_cells(
                    &content[block.offset - lib.SEQ_HEAD_BYTES], block.n_cells, False, &pos, NULL,
                    NULL, NULL)
        state.data = content
        state.end = pos + 1
        state.context = None
        return state

    def set_blocks(
            self, seq_id, list attention not None, list window=None, window_first=0,
            StatePart state=None, *, bint known_values=False):
        """Restore a sequence: attention cells [0, n), window cells [window_first, n), and the state at n.

        Blocks are (bytes, number of cells, number of cells that count). The window cells must include those
        that the next token sees (`window_needed`); earlier ones are dropped if the window has no room. The
        caller guarantees that everything belongs together, and with `known_values` that the blocks are
        unchanged since `get_blocks` or `BlockLayout` checked their values. All or nothing, like `set_state`.
        """
        cdef Pieces pieces = Pieces([])
        cdef lib.joined_state joined
        cdef lib.block_run cells, kept
        cdef int32_t seq = _seq(seq_id, self.n_seq_max)
        cdef lib.scoped_lock locked
        self.lock_write(locked)
        if not self.traits.has_layout:
            self.set_whole(seq, bool(attention or window), state)
            return
        self.has_states("blocks")
        self.take_blocks(lib.PART_ATTENTION, attention, cells, pieces)
        self.take_blocks(lib.PART_WINDOW, window or [], kept, pieces)
        kept.first = _int(window_first, "window_first", 0, INT32_MAX)
        is_state = self.traits.kind == lib.MEMORY_RECURRENT and state is not None
        self.check_parts(state.end if is_state else lib.n_cells(cells), kept, state)
        self.join_parts(lib.ALL_PARTS, cells, kept, state, pieces, joined)
        self.set_pieces(seq, pieces, None, lib.CELL_PARTS if known_values else lib.NO_PARTS)

    cdef int take_blocks(self, int part, list blocks, lib.block_run& run, Pieces pieces) except -1:
        """Check the lengths of blocks and record their addresses."""
        cdef lib.block_span span
        cdef const uint8_t[::1] view
        cdef size_t cell = lib.block_layout_of(self.mem, self.v_trans(), <lib.memory_part>part).cell_bytes
        if blocks and not lib.has_part(self.mem, <lib.memory_part>part):
            raise ArgumentError(
                f"{len(blocks)} blocks given: {self.memory_kind} memory has no such part",
                what="blocks", value=len(blocks), limit=0)
        for data, n, used in blocks:
            view = data
            pieces.views.append(view)
            span.n = _int(n, "cells of a block", 0, INT32_MAX)
            if <size_t>view.shape[0] != cell * span.n:
                raise StateLayoutMismatch(
                    f"a block of {view.shape[0]} bytes is not one of {n} cells of {cell} bytes")
            span.data = &view[0] if view.shape[0] else NULL
            span.used = _int(used, "cells of a block that count", 0, span.n)
            run.blocks.push_back(span)
        return 0

    cdef int check_parts(self, int64_t n, lib.block_run& kept, StatePart state) except -1:
        """Refuse parts that do not make a sequence of n tokens."""
        cdef int64_t n_kept = lib.n_cells(kept), needed
        if n > INT32_MAX:
            raise NoKvCacheSlot(f"{n} cells are too many", n_tokens=n)
        if self.has_state_part and (state is not None or n):
            if state is None or state.end != n:
                given = "no state" if state is None else f"the state after {state.end} tokens"
                raise ArgumentError(
                    f"{given} given: {n} tokens need the state after them",
                    what="state", value=None if state is None else state.end, limit=n)
        elif state is not None and not self.has_state_part:
            raise ArgumentError(f"a state given: {self.memory_kind} memory has none", what="state")
        if not self.traits.windowed:
            return 0
        needed = n - lib.window_start(self.mem, <int32_t>n)
        if kept.first + n_kept != n:
            raise ArgumentError(
                f"the window's blocks end at {kept.first + n_kept}, those of attention at {n}",
                what="window", value=kept.first + n_kept, limit=n)
        if n_kept < needed:
            raise ArgumentError(
                f"the window's blocks begin at {kept.first}: the next token sees {needed} cells before {n}",
                what="window_first", value=kept.first, limit=n - needed)
        return 0

    cdef int join_parts(
            self, lib.part_set which, lib.block_run& cells, lib.block_run& kept, StatePart state,
            Pieces pieces, lib.joined_state& joined) except -1:
        """Join a state's bytes: `pieces` holds the blocks, `joined` the bytes around them."""
        cdef lib.state_piece after
        after.data = NULL
        after.size = 0
        if state is not None:
            pieces.views.append(state)
            after.data = &state.data[0]
            after.size = state.data.shape[0]
        _check(lib.block_join(self.mem, self.v_trans(), which, cells, kept, after, joined), "blocks")
        pieces.pieces.swap(joined.pieces)
        return 0

    cdef int set_whole(self, int32_t seq, bint has_blocks, StatePart state) except -1:
        """Restore a whole sequence of this context."""
        if has_blocks or state is None or state.context is None or state.context() is not self:
            raise UnsupportedOperation(
                "blocks", f"the layout of {_text(self.traits.name)} is not known here: it takes "
                "back the states of this context only")
        self.has_states("blocks", True)
        return self.put_known(seq, Pieces([state.data]))
