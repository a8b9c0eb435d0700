# A sequence's cells as bytes, in llama.cpp's own layout; what the bytes mean is kv.py's business.

cdef class State(Arrays):
    """``llama_state_seq_*`` with pending updates applied first and failures undone."""

    def layer_shapes(self):
        """Return (n_head_kv, key head_dim, value head_dim) per layer of the attention part."""
        cdef uint32_t i
        cdef lib.layer_shape shape
        self.look()
        try:
            result = []
            for i in range(lib.n_layers(self.mem)):
                shape = lib.layer_at(self.mem, i)
                result.append((shape.n_head_kv, shape.head_dim_k, shape.head_dim_v))
            return result
        finally:
            self.lock.leave()

    def seq_get_state(self, seq_id):
        """Copy a sequence's cells (``llama_state_seq_get_data``)."""
        cdef int32_t seq = _seq(seq_id, self.n_seq_max)
        self.look()
        try:
            self.need_memory("kv")
            self.usable()
            self.settle()
            return self.read_state(seq)
        finally:
            self.lock.leave()

    cdef object read_state(self, int32_t seq):
        cdef size_t size = lib.state_seq_get_size(self.ctx, seq), got
        cdef uint8_t[::1] view
        if size == 0:
            raise self.fail("state_seq_get_size")
        result = np.empty(size, np.uint8)
        view = result
        with nogil:
            got = lib.state_seq_get_data(self.ctx, &view[0], size, seq)
        if got != size:
            raise self.fail("state_seq_get_data")
        return result

    def seq_set_state(self, seq_id, const uint8_t[::1] state not None, Py_ssize_t n_cells):
        """Make a sequence hold the cells of a state; on failure it is as it was."""
        cdef int32_t seq = _seq(seq_id, self.n_seq_max)
        cdef size_t size = state.shape[0], got
        self.enter()
        try:
            self.need_memory("write_kv")
            self.usable()
            self.settle()
            room = self.n_ctx_seq if self.streams else self.n_ctx
            taken = lib.n_used(self.mem, lib.PART_ATTENTION) - self.owned_alone(seq)
            if not self.streams and taken + n_cells > room or n_cells > room:
                raise NoKvCacheSlot(
                    f"no room in the cache for {n_cells} cells: {taken} of {room} are taken", 1)
            if n_cells == 0:
                # llama.cpp leaves the destination alone; what is meant is to empty it.
                self.remove_from(seq, 1, 0, INT32_MAX)
                return
            before = self.read_state(seq)
            with nogil:
                got = lib.state_seq_set_data(self.ctx, &state[0], size, seq)
            self.outputs_are_gone()
            if got != size:
                self.put_back(seq, before)
                raise StateError(f"llama.cpp refused the state: {_notes() or 'no reason given'}")
            self.poisoned[seq] = False
        finally:
            self.lock.leave()

    cdef size_t owned_alone(self, int32_t seq) except? 0:
        """Cells that become free when this sequence is removed."""
        cdef uint32_t stream = 0, cell = 0
        cdef int32_t pos = 0, s
        cdef size_t alone = 0
        cdef uint8_t members[MAX_SEQ]
        while lib.next_cell(
                self.mem, lib.PART_ATTENTION, self.n_seq_max, stream, cell, pos, members):
            cell += 1
            if members[seq]:
                alone += 1
                for s in range(<int32_t>self.n_seq_max):
                    if s != seq and members[s]:
                        alone -= 1
                        break
        return alone

    cdef int put_back(self, int32_t seq, const uint8_t[::1] before) except -1:
        self.remove_from(seq, 1, 0, INT32_MAX)
        if lib.state_seq_set_data(self.ctx, &before[0], before.shape[0], seq) == 0:
            raise self.fail("state_seq_set_data")
        return 0

    cdef void outputs_are_gone(self):
        """Overridden where outputs are kept: a restored state has none."""
