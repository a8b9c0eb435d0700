# Runs of attention cells as single pieces of bytes: what a prefix cache keeps and puts together.

cdef class Blocks(State):
    """Blocks out of a sequence, and sequences out of blocks."""

    def block_bytes(self):
        """Bytes of one cell in a block; 0 where no layer keeps all of its cells."""
        self.lock_read()
        try:
            self.has_states("blocks")
            return lib.block_cell_bytes(self.mem, self.v_trans())
        finally:
            self.lock.leave()

    def get_block(self, seq_id, first, n, uint8_t[::1] out not None):
        """Copy the cells at positions ``[first, first + n)``; False if they are not all there."""
        cdef int32_t seq = _seq(seq_id, self.n_seq_max), begin = _p0(first), code
        cdef uint32_t count = _int(n, "n", 1, INT32_MAX)
        cdef bint v_trans
        self.lock_read()
        try:
            self.readable("blocks", seq)
            v_trans = self.v_trans()
            if lib.block_cell_bytes(self.mem, v_trans) * count > <size_t>out.shape[0]:
                raise ValueError(f"out has {out.shape[0]} bytes: {n} cells need more")
            if self.kind == lib.MEMORY_RECURRENT:
                raise UnsupportedOperation("blocks", "recurrent memory has no cells per token")
            with nogil:
                code = lib.block_write(
                    self.mem, v_trans, seq, begin, count, &out[0] if out.shape[0] else NULL)
            if code == lib.CAUGHT:
                raise _caught_error("blocks")
            return code == 1
        finally:
            self.lock.leave()

    def set_blocks(self, seq_id, list blocks not None, Partial rest=None):
        """Make a sequence hold the cells of (block, its cells, how many count), from position 0 on.

        `rest` is the state of the other parts after the last of these cells. Whoever calls vouches
        that all belong together; all or nothing as `set_state`.
        """
        cdef Pieces pieces = Pieces([])
        cdef vector[lib.block_part] parts
        cdef lib.block_part part
        cdef lib.joined_state joined
        cdef lib.state_piece after
        cdef const uint8_t[::1] view
        cdef size_t cell
        cdef int32_t seq = _seq(seq_id, self.n_seq_max)
        self.lock_write()
        try:
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
            self.set_pieces(seq, pieces, None)
        finally:
            self.lock.leave()
