# States taken apart and put together: as arrays of cells, which files keep, and as blocks, which a
# prefix cache keeps.

cdef const int32_t* _ints(values, Py_ssize_t n, Pieces owner) except? NULL:
    """Pointer to n contiguous int32; ValueError for another number of them."""
    if values is None:
        raise ArgumentError(f"no integers given: {n} needed", value=0, limit=n)
    cdef const int32_t[::1] view = values
    if view.shape[0] != n:
        raise ArgumentError(
            f"{view.shape[0]} integers given: {n} needed", value=view.shape[0], limit=n)
    owner.views.append(view)
    return &view[0] if n else NULL


cdef list _one_stream(list streams):
    """The stream that holds a sequence's cells: the state does not depend on which one it is."""
    return [next((cells for cells in streams if len(cells[0])), streams[0])]


@cython.final
cdef class BlockLayout:
    """What the bytes of a context's blocks are. Needs the context no more: no lock is taken."""

    cdef lib.block_layout layout

    def is_good(self, const uint8_t[::1] data not None, n):
        """Whether bytes are a block of n cells, whose values attention can multiply.

        What `Context.check_blocks` looks at besides them is small.
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
        """Copy `count` cells from `first` on out of a block to `at` in another one."""
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
    """States out of arrays and blocks, and those out of states."""

    # Arrays --------------------------------------------------------------------------

    def split_state(self, buffer not None, bint whole):
        """Return the cells of a state that fits this memory, per part and stream; raise where it does not.

        Of cells: positions, extensions or None, members (offsets, ids) of a whole context's or None, and
        where the rows of each kind lie: (offset, size in bytes).
        """
        cdef vector[lib.state_block] blocks
        cdef lib.state_part part
        cdef Pieces pieces = Pieces([buffer])
        self.lock_read()
        try:
            self.has_states("split_state")
            self.check(pieces, -1 if whole else 0, False, blocks)
            result = []
            for part in lib.state_parts(self.mem, self.v_trans(), False):
                streams = []
                for s in range(part.n_stream):
                    streams.append(self.split_stream(part, s, blocks, pieces, whole))
                result.append(streams if whole else _one_stream(streams))
            return result
        finally:
            self.lock.unlock()

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
            _array(positions, np.int32), _array(ext, np.int32).reshape(-1, 3) if part.extended else None,
            (_array(offsets, np.int32), _array(ids, np.int32)) if whole else None, rows)

    def set_parts(self, seq_id, list parts not None, list firsts):
        """Make a sequence, or with None the context, hold cells that are given as arrays.

        Per part and stream: positions, extensions or None, members or None, and the bytes of each kind of
        row. `firsts` and the rest as in `set_state`.
        """
        cdef int32_t seq = -1 if seq_id is None else _seq(seq_id, self.n_seq_max)
        cdef Pieces pieces = Pieces([])
        cdef vector[lib.state_part] layout
        cdef vector[vector[lib.cell_arrays]] given
        cdef lib.joined_state joined
        cdef size_t i
        self.lock_write()
        try:
            self.has_states("set_state")
            layout = lib.state_parts(self.mem, self.v_trans(), False)
            if <size_t>len(parts) != layout.size():
                raise StateLayoutMismatch(f"{len(parts)} parts given: this memory has {layout.size()}")
            given.resize(layout.size())
            for i in range(layout.size()):
                self.take_arrays(layout[i], parts[i], seq < 0, given[i], pieces)
            if lib.state_join(self.mem, self.v_trans(), seq, given, joined) == lib.CAUGHT:
                raise _caught_error("set_state")
            pieces.pieces.swap(joined.pieces)
            self.set_pieces(seq, pieces, firsts)
        finally:
            self.lock.unlock()

    cdef int take_arrays(
            self, lib.state_part part, list streams, bint whole, vector[lib.cell_arrays]& given,
            Pieces pieces) except -1:
        """Check that arrays are as long as they say, and remember where they lie."""
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

    def block_bytes(self):
        """Bytes of one cell in a block; 0 where no layer keeps all of its cells, or how is not known."""
        self.lock_read()
        try:
            self.has_states("blocks", True)
            return 0 if not lib.has_layout(self.mem) else lib.block_cell_bytes(self.mem, self.v_trans())
        finally:
            self.lock.unlock()

    def block_layout(self):
        """Return what checks blocks without this context."""
        cdef BlockLayout made = BlockLayout.__new__(BlockLayout)
        self.lock_read()
        try:
            self.has_states("blocks", True)
            if lib.has_layout(self.mem):
                made.layout = lib.block_layout_of(self.mem, self.v_trans())
            return made
        finally:
            self.lock.unlock()

    def get_blocks(self, seq_id, first, n, list out not None, last=None):
        """Copy the cells at positions from `first` on, n into each array of `out`.

        The last array gets `last` of them, where that is given.

        False if they are not all there. `StateDamaged` where they hold NaN, infinity, or values whose
        products overflow: what comes out may go back with `known_values`.
        """
        cdef int32_t seq = _seq(seq_id, self.n_seq_max), begin = _p0(first), code
        cdef uint32_t count = _int(n, "n", 1, INT32_MAX)
        cdef uint32_t rest = count if last is None else _int(last, "last", 1, INT32_MAX)
        cdef uint32_t fill
        cdef size_t i
        cdef bint v_trans, two = self.two_threads()
        cdef size_t size
        cdef vector[uint8_t*] to
        cdef uint8_t[::1] view
        cdef list views = []
        self.lock_read()
        try:
            self.readable("blocks", seq)
            v_trans = self.v_trans()
            size = lib.block_cell_bytes(self.mem, v_trans)
            for i in range(<size_t>len(out)):
                view = out[i]
                fill = rest if i + 1 == <size_t>len(out) else count
                if size * fill > <size_t>view.shape[0]:
                    raise ArgumentError(
                        f"out has {view.shape[0]} bytes: {fill} cells need more",
                        what="out", value=view.shape[0], limit=fill)
                views.append(view)
                to.push_back(&view[0] if view.shape[0] else NULL)
            if self.kind == lib.MEMORY_RECURRENT:
                raise UnsupportedOperation("blocks", "recurrent memory has no cells per token")
            with nogil:
                code = lib.blocks_write(self.mem, v_trans, seq, begin, count, rest, to, two)
            if code == lib.CAUGHT:
                raise _caught_error("blocks")
            if code == lib.BLOCKS_VALUES:
                raise StateDamaged(
                    f"the cells of sequence {seq} hold NaN, infinity, or values whose products overflow",
                    what="cells")
            return code == lib.BLOCKS_WRITTEN
        finally:
            self.lock.unlock()

    def get_block(self, seq_id, first, n, uint8_t[::1] out not None):
        """Copy the cells at positions ``[first, first + n)`` as `get_blocks` does."""
        return self.get_blocks(seq_id, first, n, [out])

    def set_blocks(
            self, seq_id, list blocks not None, Partial rest=None, *, bint known_values=False):
        """Make a sequence hold the cells of (block, its cells, how many count), from position 0 on.

        `rest` is the state of the other parts after the last of these cells. The caller guarantees
        that all belong together, and with `known_values` that nobody changed the blocks since
        `get_blocks`, `check_blocks` or `BlockLayout` looked at their values; all or nothing as `set_state`.
        """
        cdef Pieces pieces = Pieces([])
        cdef lib.joined_state joined
        cdef int32_t seq = _seq(seq_id, self.n_seq_max)
        self.lock_write()
        try:
            if not lib.has_layout(self.mem):
                if rest is None or rest.context() is not self or any(len(data) for data, _, _ in blocks):
                    self.has_states("blocks")
                self.put_known(seq, Pieces([rest.data]))
                return
            self.join_blocks(blocks, rest, pieces, joined)
            self.set_pieces(seq, pieces, None, known_values)
        finally:
            self.lock.unlock()

    def check_blocks(self, list blocks not None, Partial rest=None, *, bint known_values=False):
        """Raise what `set_blocks` would because of the bytes; changes nothing.

        With `known_values` the caller guarantees what `BlockLayout.is_good` finds out.
        """
        cdef Pieces pieces = Pieces([])
        cdef lib.joined_state joined
        cdef vector[lib.state_block] found
        self.lock_read()
        try:
            self.join_blocks(blocks, rest, pieces, joined)
            self.check(pieces, 0, False, found, known_values)
        finally:
            self.lock.unlock()

    cdef int join_blocks(
            self, list blocks, Partial rest, Pieces pieces, lib.joined_state& joined) except -1:
        """Put a state's bytes together: `pieces` holds the blocks, `joined` what is around them."""
        cdef vector[lib.block_part] parts
        cdef lib.block_part part
        cdef lib.state_piece after
        cdef const uint8_t[::1] view
        cdef size_t cell
        self.has_states("blocks")
        cell = lib.block_cell_bytes(self.mem, self.v_trans())
        for data, n, used in blocks:
            view = data
            pieces.views.append(view)
            part.n = _int(n, "cells of a block", 0, INT32_MAX)
            if <size_t>view.shape[0] != cell * part.n:
                raise StateLayoutMismatch(
                    f"a block of {view.shape[0]} bytes is not one of {n} cells of {cell} bytes")
            part.data = &view[0] if view.shape[0] else NULL
            part.used = _int(used, "cells of a block that count", 0, part.n)
            parts.push_back(part)
        after.data = NULL
        after.size = 0
        if rest is not None:
            after.data = &rest.data[0]
            after.size = rest.data.shape[0]
        if lib.block_join(self.mem, self.v_trans(), parts, after, joined) == lib.CAUGHT:
            raise _caught_error("blocks")
        pieces.pieces.swap(joined.pieces)
        return 0
