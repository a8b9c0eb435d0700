# States: a sequence's cells, or a whole context's, as bytes in llama.cpp's own layout.

cdef dict _PART_NAMES = {
    lib.PART_ATTENTION: "attention",
    lib.PART_WINDOW: "window",
    lib.PART_RECURRENT: "recurrent",
    lib.PART_INDEX: "index",
}

# Names of lib.block_kind, in its order.
cdef tuple _BLOCKS = ("cells", "k", "v", "v_trans", "r", "ple", "s")

cdef dict _FAULTS = {
    lib.STATE_TRUNCATED: StateTruncated,
    lib.STATE_TRAILING: StateTrailingBytes,
    lib.STATE_DAMAGED: StateDamaged,
    lib.STATE_MISMATCH: StateLayoutMismatch,
    lib.STATE_VALUE: StateDamaged,
}


# What the raw state of a sequence begins with, which llama.cpp's own file of it leaves out.
sequence_state_head = (<uint32_t>lib.SEQ_MAGIC).to_bytes(4, "little") + bytes(4)
# Versions of llama.cpp's own files, of a sequence and of a context: `llama_state_seq_save_file`.
state_file_versions = (int(lib.LLAMA_STATE_SEQ_VERSION), int(lib.LLAMA_SESSION_VERSION))


def claim_blocks(int fd, int64_t size):
    """Claim the disk's blocks for a new file; OSError where there is no room."""
    cdef int code = 0
    if size > 0:
        with nogil:
            code = lib.claim_blocks(fd, size)
    if code != 0:
        raise OSError(code, os.strerror(code))


def trim_memory():
    """Let the allocator give back to the system what small blocks have left."""
    with nogil:
        lib.trim_memory()


@cython.internal
cdef class Pieces:
    """Buffers that together are one state; holds them while C reads them."""

    cdef list views
    cdef vector[lib.state_piece] pieces
    cdef size_t size

    def __cinit__(self, list buffers not None):
        cdef const uint8_t[::1] view
        cdef lib.state_piece piece
        self.views = []
        for buffer in buffers:
            view = buffer
            if view.shape[0] > 0:
                piece.data = &view[0]
                piece.size = view.shape[0]
                self.size += piece.size
                self.views.append(view)
                self.pieces.push_back(piece)


@cython.internal
cdef class Plan:
    """What a state that is about to be written has in it; made and used in one hold of the lock."""

    cdef lib.seq_state* one
    cdef size_t size

    def __dealloc__(self):
        lib.seq_state_delete(self.one)


cdef class State(Arrays):
    """``llama_state_*`` with pending updates applied first and failures undone."""

    def state_layout(self, str operation not None="get_state"):
        """Return what states of this memory are made of, a dict per part, in their order."""
        cdef lib.state_part part
        cdef lib.state_rows rows
        self.lock_read()
        try:
            self.has_states(operation)
            result = []
            for part in lib.state_parts(self.mem, self.v_trans(), lib.ALL_PARTS):
                layout = {
                    "part": _PART_NAMES[part.part],
                    "n_stream": part.n_stream,
                    "n_cells": part.n_cells,
                    "n_layer": part.n_layer,
                    "extended": bool(part.extended),
                    "v_trans": bool(part.v_trans),
                    "rows": [],
                }
                for rows in lib.state_rows_of(self.mem, self.v_trans(), part.part):
                    layout["rows"].append((
                        _BLOCKS[<int>rows.kind], rows.layer, rows.type, rows.n_embd, rows.row_bytes,
                        rows.n_head, rows.head_dim))
                result.append(layout)
            return result
        finally:
            self.lock.unlock()

    cdef bint v_trans(self) noexcept:
        return not self.effective.flash_attn

    cdef bint two_threads(self) noexcept:
        """Whether large states may be copied by two threads: no more than the context was given."""
        return self.effective.n_threads_batch > 1

    # Out -----------------------------------------------------------------------------

    def state_size(self, seq_id):
        """Bytes of a state that is taken now (``llama_state_get_size``)."""
        cdef int32_t seq = -1 if seq_id is None else _seq(seq_id, self.n_seq_max)
        self.lock_read()
        try:
            self.readable("state_size", seq)
            return self.plan(seq).size
        finally:
            self.lock.unlock()

    def get_state(self, seq_id, uint8_t[::1] out, bint spare=False):
        """Copy a sequence's cells, or with None all (``llama_state_get_data``).

        `spare`: also window cells that llama.cpp leaves out, with which it can be cut by up to a window.
        """
        cdef int32_t seq = -1 if seq_id is None else _seq(seq_id, self.n_seq_max)
        cdef Plan plan
        self.lock_read()
        try:
            self.readable("get_state", seq)
            plan = self.plan(seq, False, lib.spare_begin(self.mem, seq) if spare and seq >= 0 else INT32_MAX)
            if out is None:
                return self.read_state(plan, np.empty(plan.size, np.uint8))
            if <size_t>out.shape[0] < plan.size:
                raise ArgumentError(
                    f"out has {out.shape[0]} bytes: the state has {plan.size}",
                    what="out", value=out.shape[0], limit=plan.size)
            return self.read_state(plan, _array(out, np.uint8)[:plan.size])
        finally:
            self.lock.unlock()

    def take_state(self, seq_id, bint spare=False):
        """Return a state, and (sequence, first position) of what is in it, both from one hold of the lock.

        `spare` as for `get_state`.
        """
        cdef int32_t s, seq = -1 if seq_id is None else _seq(seq_id, self.n_seq_max)
        cdef int32_t lo = 0, hi = 0
        cdef Plan plan
        self.lock_read()
        try:
            self.readable("save", seq)
            plan = self.plan(seq, False, lib.spare_begin(self.mem, seq) if spare and seq >= 0 else INT32_MAX)
            state = self.read_state(plan, np.empty(plan.size, np.uint8))
            firsts = []
            for s in range(<int32_t>self.n_seq_max) if seq < 0 else (seq,):
                if lib.extent(self.mem, s, lo, hi):
                    firsts.append((s, lo))
            return state, firsts
        finally:
            self.lock.unlock()

    cdef int readable(self, str operation, int32_t seq, bint inside=False) except -1:
        """Refuse where bytes could not say what the memory holds; then apply what is pending."""
        cdef int32_t s
        self.has_states(operation, inside)
        self.check_usable()
        for s in range(<int32_t>self.n_seq_max) if seq < 0 else (seq,):
            if self.seqs.needs_removal(s):
                raise UnsupportedOperation(
                    operation,
                    f"sequence {s} holds the rest of an aborted decode: remove all of it", "sequence")
        self.apply_pending()
        return 0

    cdef int has_states(self, str operation, bint inside=False) except -1:
        """Refuse where there are none; `inside`: they stay with this context, and need no check."""
        self.need_memory(operation)
        if not inside and not lib.has_layout(self.mem):
            raise UnsupportedOperation(
                operation, f"the layout of {lib.class_name(self.mem).decode()} is not known here")
        if self.model.has_encoder:
            raise UnsupportedOperation(operation, "the cells depend on the encoder's input")
        return 0

    cdef Plan plan(self, int32_t seq, bint partial=False, int32_t window_from=INT32_MAX):
        """What of a sequence, or with -1 of the context; `partial`: what of it cannot be rewound.

        `window_from`: with the window cells from there on that llama.cpp leaves out.
        """
        cdef Plan plan = Plan.__new__(Plan)
        if not lib.has_layout(self.mem):
            plan.one = lib.written_state_new(self.mem, seq, False)
        elif seq < 0 or partial:
            plan.one = lib.written_state_new(self.mem, seq, partial)
        else:
            plan.one = lib.seq_state_new(self.mem, self.v_trans(), seq, window_from)
        if plan.one == NULL:
            raise self.fail_to_read("state_get_size")
        plan.size = plan.one.size
        return plan

    cdef object read_state(self, Plan plan, uint8_t[::1] out):
        cdef bint two = self.two_threads()
        cdef int32_t code
        with nogil:
            code = lib.seq_state_write(plan.one, &out[0], two)
        if code == lib.CAUGHT:
            raise self.fail_to_read("state_get_data")
        return _array(out, np.uint8)

    # In ------------------------------------------------------------------------------

    cdef int check(
            self, Pieces pieces, int32_t seq, lib.part_set which, vector[lib.state_block]& blocks,
            lib.part_set known=lib.NO_PARTS) except -1:
        cdef lib.state_fault fault
        cdef lib.fault found
        cdef bint v_trans = self.v_trans()
        with nogil:
            fault = lib.state_check(
                self.mem, v_trans, self.n_seq_max, seq, which, pieces.pieces, blocks, found, known)
        if fault == lib.STATE_UNKNOWN:
            raise _caught_error("check_state")
        if fault == lib.STATE_POSITION:
            raise self.too_far(found.value, "the state")
        if fault == lib.STATE_FITS:
            return 0
        why = _text(found.why)
        if fault == lib.STATE_NO_ROOM and _text(found.what) == "position":
            raise NoKvCacheSlot(
                f"the state {why}", 1, n_cells=found.limit)
        if fault == lib.STATE_NO_ROOM:
            raise NoKvCacheSlot(f"the state {why}", n_tokens=found.value, n_cells=found.limit)
        if fault == lib.STATE_TRUNCATED:
            found.value = pieces.size
        raise _FAULTS[fault](
            f"the state {why}" if fault != lib.STATE_MISMATCH else f"the state is of another memory: {why}",
            what=_text(found.what) or None,
            value=found.value if found.counted else None,
            limit=found.limit if found.counted else None)

    def set_state(self, seq_id, list buffers not None, list firsts):
        """Make a sequence, or with None the context, hold what a state holds; or change nothing.

        `firsts` has (sequence, first position) of recurrent states, which the bytes do not tell.
        """
        cdef int32_t seq = -1 if seq_id is None else _seq(seq_id, self.n_seq_max)
        pieces = Pieces(buffers)
        self.lock_write()
        try:
            self.set_pieces(seq, pieces, firsts)
        finally:
            self.lock.unlock()

    cdef int set_pieces(
            self, int32_t seq, Pieces pieces, list firsts, lib.part_set known=lib.NO_PARTS) except -1:
        cdef int32_t begin[MAX_SEQ]
        cdef vector[lib.state_block] blocks
        cdef lib.joined_state shorter
        memset(begin, 0, sizeof(begin))
        self.has_states("set_state")
        self.check(pieces, seq, lib.ALL_PARTS, blocks, known)
        if seq >= 0 and lib.windowed(self.mem):
            self.fit(seq, lib.ALL_PARTS, blocks, pieces, shorter)
        for pair in firsts or ():
            if not 0 <= pair[1] < INT32_MAX:
                raise StateDamaged(
                    f"a sequence is said to begin at {pair[1]}", what="first position", value=pair[1])
            if 0 <= pair[0] < <int32_t>self.n_seq_max:
                begin[<int32_t>pair[0]] = pair[1]
        self.apply_pending()
        if seq < 0 or not self.place(seq, blocks, pieces, begin):
            if seq >= 0:
                self.need_room(seq, blocks)
            self.put(seq, pieces, begin)
        return 0

    cdef int fit(
            self, int32_t seq, lib.part_set which, vector[lib.state_block]& blocks, Pieces pieces,
            lib.joined_state& shorter) except -1:
        """Leave out the oldest window cells, where a window's cache has no room for more than is seen."""
        cdef int32_t code = lib.state_fit(
            self.mem, self.v_trans(), seq, self.n_seq_max, blocks, pieces.pieces, shorter)
        if code == lib.CAUGHT:
            raise _caught_error("set_state")
        if code:
            pieces.pieces.swap(shorter.pieces)
            blocks.clear()
            self.check(pieces, seq, which, blocks, lib.ALL_PARTS)
        return 0

    cdef bint place(
            self, int32_t seq, vector[lib.state_block]& blocks, Pieces pieces,
            const int32_t* begin) except -1:
        """Replace what is there without a copy of it, where nothing can fail; else False."""
        cdef bint v_trans = self.v_trans(), two = self.two_threads()
        cdef int32_t code
        with nogil:
            code = self.seqs.place(v_trans, seq, blocks, pieces.pieces, two, begin)
        if code == lib.CAUGHT:
            raise _caught_error("set_state")
        return code

    cdef int put(self, int32_t seq, Pieces pieces, const int32_t* begin) except -1:
        """Replace what is there; what llama.cpp refuses leaves it as it was."""
        cdef int32_t code
        cdef Plan plan = self.plan(seq, False, 0 if lib.windowed(self.mem) else INT32_MAX)
        before = Pieces([self.read_state(plan, np.empty(plan.size, np.uint8))])
        with nogil:
            code = self.seqs.replace(seq, pieces.pieces, begin)
        if code == lib.CAUGHT:
            error = _caught_error("set_state")
            why = _notes() or str(error)
            with nogil:
                code = self.seqs.put_back(seq, before.pieces)
            if code == lib.CAUGHT:
                raise self.fail("set_state")
            if isinstance(error, MemoryError):
                raise error
            raise NoKvCacheSlot(f"llama.cpp could not place the state's cells: {why}", 1)
        return 0

    cdef int put_known(self, int32_t seq, Pieces pieces) except -1:
        """Put all of a sequence back, as this context gave it out: nobody else knows its layout."""
        cdef int32_t begin[MAX_SEQ]
        memset(begin, 0, sizeof(begin))
        self.apply_pending()
        return self.put(seq, pieces, begin)

    cdef int need_room(self, int32_t seq, vector[lib.state_block]& blocks) except -1:
        """Refuse what cannot fit: llama.cpp would find out with the sequence already gone."""
        cdef lib.state_block block
        cdef size_t room, taken
        for block in blocks:
            if (block.part == lib.PART_WINDOW and block.kind == lib.BLOCK_CELLS
                    and not lib.window_has_room(self.mem, seq, block.n_cells)):
                raise NoKvCacheSlot(
                    f"no room in the window's cache for {block.n_cells} cells: other sequences hold "
                    "the rest; remove one, or create the context with swa_full=True", 1,
                    n_tokens=block.n_cells)
        for block in blocks:
            if block.part != lib.PART_ATTENTION or block.kind != lib.BLOCK_CELLS:
                continue
            if self.streams:
                return 0  # a stream belongs to the sequence; the check has compared the sizes
            room = self.n_ctx
            taken = lib.n_used(self.mem, lib.PART_ATTENTION)
            if taken + block.n_cells > room:
                taken -= lib.owned_alone(self.mem, seq)
            if taken + block.n_cells > room:
                raise NoKvCacheSlot(
                    f"no room in the cache for {block.n_cells} cells: {taken} of {room} are taken", 1,
                    n_tokens=block.n_cells, n_free=room - taken, n_cells=room)
        return 0
