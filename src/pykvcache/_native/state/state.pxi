# States: cells of a sequence or context as bytes in llama.cpp's layout.

cdef dict _PART_NAMES = {part: name for name, part in _PARTS.items()}

# Names of lib.block_kind, in its order.
cdef tuple _BLOCKS = ("cells", "k", "v", "v_trans", "r", "ple", "s")

cdef dict _FAULTS = {
    lib.STATE_TRUNCATED: StateTruncated,
    lib.STATE_TRAILING: StateTrailingBytes,
    lib.STATE_DAMAGED: StateDamaged,
    lib.STATE_MISMATCH: StateLayoutMismatch,
    lib.STATE_VALUE: StateDamaged,
}


# Head of a sequence's raw state, which llama.cpp's own files omit.
sequence_state_head = (<uint32_t>lib.SEQ_MAGIC).to_bytes(4, "little") + bytes(4)
# Versions of llama.cpp's own files of a sequence and of a context.
state_file_versions = (int(lib.LLAMA_STATE_SEQ_VERSION), int(lib.LLAMA_SESSION_VERSION))


def claim_blocks(int fd, int64_t size):
    """Reserve disk blocks for a new file; OSError if the disk is full."""
    cdef int code = 0
    if size > 0:
        with nogil:
            code = lib.claim_blocks(fd, size)
    if code != 0:
        raise OSError(code, os.strerror(code))


def trim_memory():
    """Return the allocator's free memory to the system."""
    with nogil:
        lib.trim_memory()


@cython.internal
cdef class Pieces:
    """Buffers that form one state, held while C reads them."""

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


cdef class State(Arrays):
    """``llama_state_*`` that applies pending updates first and undoes failures."""

    def state_layout(self, str operation not None="get_state"):
        """Return the layout of this memory's states, a dict per part, in order."""
        cdef lib.state_part part
        cdef lib.state_rows rows
        cdef lib.scoped_lock locked
        self.lock_read(locked)
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

    cdef bint v_trans(self) noexcept:
        return not self.flash_attn

    cdef bint two_threads(self) noexcept:
        """Whether large states may be copied by two threads, as the context's thread count allows."""
        return self.n_threads_batch > 1

    # Out -----------------------------------------------------------------------------

    def state_size(self, seq_id):
        """Return the size of a state taken now (``llama_state_get_size``)."""
        cdef unique_ptr[lib.seq_state] plan
        cdef int32_t seq = -1 if seq_id is None else _seq(seq_id, self.n_seq_max)
        cdef lib.scoped_lock locked
        self.lock_read(locked)
        self.readable("state_size", seq)
        self.plan(seq, plan)
        return plan.get().size

    def get_state(self, seq_id, uint8_t[::1] out, bint spare=False):
        """Copy a sequence's cells, or with None the context's (``llama_state_get_data``).

        `spare` adds window cells that llama.cpp omits, for truncating the sequence by up to a window.
        """
        cdef int32_t seq = -1 if seq_id is None else _seq(seq_id, self.n_seq_max)
        cdef unique_ptr[lib.seq_state] plan
        cdef lib.scoped_lock locked
        self.lock_read(locked)
        self.readable("get_state", seq)
        self.plan(seq, plan, lib.ALL_PARTS, self.spare_from(seq, spare))
        if out is None:
            return self.read_state(plan)
        if <size_t>out.shape[0] < plan.get().size:
            raise ArgumentError(
                f"out has {out.shape[0]} bytes: the state has {plan.get().size}",
                what="out", value=out.shape[0], limit=plan.get().size)
        return self.read_state(plan, out)

    def take_state(self, seq_id, bint spare=False):
        """Return a state and its (sequence, first position) pairs, from one hold of the lock.

        `spare` as in `get_state`.
        """
        cdef int32_t s, seq = -1 if seq_id is None else _seq(seq_id, self.n_seq_max)
        cdef lib.extent held
        cdef unique_ptr[lib.seq_state] plan
        cdef lib.scoped_lock locked
        self.lock_read(locked)
        self.readable("save", seq)
        self.plan(seq, plan, lib.ALL_PARTS, self.spare_from(seq, spare))
        state = self.read_state(plan)
        firsts = []
        for s in range(<int32_t>self.n_seq_max) if seq < 0 else (seq,):
            held = lib.extent_of(self.mem, s)
            if held.n:
                firsts.append((s, held.lo))
        return state, firsts

    cdef int readable(self, str operation, int32_t seq, bint inside=False) except -1:
        """Refuse if bytes could not describe the memory; then apply pending updates."""
        cdef int32_t s
        self.has_states(operation, inside)
        self.check_usable()
        for s in range(<int32_t>self.n_seq_max) if seq < 0 else (seq,):
            self.need_whole(operation, s)
        return self.apply_pending()

    cdef int has_states(self, str operation, bint inside=False) except -1:
        """Refuse if there are no states; `inside`: they stay in this context and need no check."""
        self.need_memory(operation)
        if not inside and not self.traits.has_layout:
            raise UnsupportedOperation(
                operation, f"the layout of {_text(self.traits.name)} is not known here")
        if self.model.has_encoder:
            raise UnsupportedOperation(operation, "the cells depend on the encoder's input")
        return 0

    cdef int32_t spare_from(self, int32_t seq, bint spare) noexcept:
        return lib.spare_begin(self.mem, seq) if spare and seq >= 0 else INT32_MAX

    cdef int plan(
            self, int32_t seq, unique_ptr[lib.seq_state]& plan, lib.part_set which=lib.ALL_PARTS,
            int32_t window_from=INT32_MAX) except -1:
        """Plan the state of a sequence, or with -1 of the context; see ``seq_state_new``."""
        plan.reset(lib.seq_state_new(self.mem, self.v_trans(), seq, which, window_from))
        if plan.get() == NULL:
            raise _caught_error("state_get_size")
        return 0

    cdef object read_state(self, unique_ptr[lib.seq_state]& plan, uint8_t[::1] out=None):
        cdef bint two = self.two_threads()
        cdef int32_t code
        if out is None:
            out = np.empty(plan.get().size, np.uint8)
        with nogil:
            code = lib.seq_state_write(plan.get(), &out[0], two)
        _check(code, "state_get_data")
        return np.asarray(out)[:plan.get().size]

    # In ------------------------------------------------------------------------------

    cdef int check(
            self, Pieces pieces, int32_t seq, lib.part_set which, vector[lib.state_block]& blocks,
            lib.part_set known=lib.NO_PARTS) except -1:
        cdef lib.fault found
        cdef bint v_trans = self.v_trans()
        with nogil:
            found = lib.state_check(
                self.mem, v_trans, self.n_seq_max, seq, which, pieces.pieces, blocks, known)
        if found.kind == lib.STATE_FITS:
            return 0
        if found.kind == lib.STATE_UNKNOWN:
            raise _caught_error("check_state")
        if found.kind == lib.STATE_POSITION:
            raise self.too_far(found.value, "the state")
        why = _text(found.why)
        if found.kind == lib.STATE_NO_ROOM and _text(found.what) == "position":
            raise NoKvCacheSlot(f"the state {why}", 1, n_cells=found.limit)
        if found.kind == lib.STATE_NO_ROOM:
            raise NoKvCacheSlot(f"the state {why}", n_tokens=found.value, n_cells=found.limit)
        if found.kind == lib.STATE_TRUNCATED:
            found.value = pieces.size
        how = " does not fit this context:" if found.kind == lib.STATE_MISMATCH else ""
        raise _FAULTS[found.kind](
            f"the state{how} {why}",
            what=_text(found.what) or None,
            value=found.value if found.counted else None,
            limit=found.limit if found.counted else None)

    def set_state(self, seq_id, list buffers not None, list firsts):
        """Restore a sequence, or with None the context, from a state; all or nothing.

        `firsts` has (sequence, first position) pairs of recurrent states, which the bytes do not contain.
        """
        cdef int32_t seq = -1 if seq_id is None else _seq(seq_id, self.n_seq_max)
        pieces = Pieces(buffers)
        cdef lib.scoped_lock locked
        self.lock_write(locked)
        self.set_pieces(seq, pieces, firsts)

    cdef int set_pieces(
            self, int32_t seq, Pieces pieces, list firsts, lib.part_set known=lib.NO_PARTS) except -1:
        cdef int32_t begin[MAX_SEQ]
        cdef int32_t code
        cdef bint v_trans = self.v_trans(), two = self.two_threads()
        cdef vector[lib.state_block] blocks
        cdef lib.joined_state shorter
        memset(begin, 0, sizeof(begin))
        self.has_states("set_state")
        self.check(pieces, seq, lib.ALL_PARTS, blocks, known)
        if seq >= 0 and self.traits.windowed:
            self.fit(seq, lib.ALL_PARTS, blocks, pieces, shorter)
        for pair in firsts or ():
            if not 0 <= pair[1] < INT32_MAX:
                raise StateDamaged(
                    f"a sequence is said to begin at {pair[1]}", what="first position", value=pair[1])
            if 0 <= pair[0] < <int32_t>self.n_seq_max:
                begin[<int32_t>pair[0]] = pair[1]
        self.apply_pending()
        if seq >= 0:
            with nogil:
                code = self.seqs.place(v_trans, seq, blocks, pieces.pieces, two, begin)
            _check(code, "set_state")
            if code != 0:
                return 0  # replaced in place, since nothing could fail
            self.need_room(seq, blocks)
        return self.put(seq, pieces, begin)

    cdef int fit(
            self, int32_t seq, lib.part_set which, vector[lib.state_block]& blocks, Pieces pieces,
            lib.joined_state& shorter) except -1:
        """Drop the oldest window cells if the window has no room for more than the visible ones."""
        cdef int32_t code = lib.state_fit(
            self.mem, self.v_trans(), seq, self.n_seq_max, blocks, pieces.pieces, shorter)
        _check(code, "set_state")
        if code:
            pieces.pieces.swap(shorter.pieces)
            blocks.clear()
            self.check(pieces, seq, which, blocks, lib.ALL_PARTS)
        return 0

    cdef int put(self, int32_t seq, Pieces pieces, const int32_t* begin) except -1:
        """Replace the contents; restore them if llama.cpp refuses."""
        cdef int32_t code
        cdef unique_ptr[lib.seq_state] plan
        self.plan(seq, plan, lib.ALL_PARTS, 0 if self.traits.windowed else INT32_MAX)
        before = Pieces([self.read_state(plan)])
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
        """Restore a whole sequence from bytes that this context made, of unknown layout."""
        cdef int32_t begin[MAX_SEQ]
        memset(begin, 0, sizeof(begin))
        self.apply_pending()
        return self.put(seq, pieces, begin)

    cdef int need_room(self, int32_t seq, vector[lib.state_block]& blocks) except -1:
        """Refuse a state that cannot fit: llama.cpp would notice only after clearing the sequence."""
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
            if self.traits.n_stream > 1:
                return 0  # the stream belongs to the sequence, and the check has compared sizes
            room = self.n_ctx
            taken = lib.n_used(self.mem, lib.PART_ATTENTION)
            if taken + block.n_cells > room:
                taken -= lib.owned_alone(self.mem, seq)
            if taken + block.n_cells > room:
                raise NoKvCacheSlot(
                    f"no room in the cache for {block.n_cells} cells: {taken} of {room} are taken", 1,
                    n_tokens=block.n_cells, n_free=room - taken, n_cells=room)
        return 0
