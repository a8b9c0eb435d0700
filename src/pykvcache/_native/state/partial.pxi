# States of the part that cannot be rewound: the window, the recurrent state, or both.
#
# The attention part is not in them: it must still hold what it held when
# such a state was taken. its prefix version tells.

@cython.final
cdef class Partial:
    """Bytes that go back into one sequence of one context."""

    cdef object __weakref__
    cdef object context
    cdef uint64_t version
    cdef uint8_t[::1] data
    cdef readonly int32_t seq_id, pos, first
    cdef readonly str memory_kind
    #: Whether a window has all that the last token saw: others take what the next does not see.
    cdef readonly bint has_last_window

    def __init__(self, *args, **kwargs):
        raise TypeError("Partial is made by get_partial_state()")

    @property
    def nbytes(self):
        """Size of the bytes that are kept."""
        return self.data.shape[0]

    @property
    def content(self):
        """The bytes, without a copy; nobody may change them."""
        return _array(self.data, np.uint8)

    @property
    def is_valid(self):
        """Whether the sequence still holds, up to `pos`, what it held."""
        cdef Partials ctx = self.context()
        return ctx is not None and not ctx.is_closed and not ctx.broken and ctx.still_holds(self)


cdef class Partials(Blocks):
    """``llama_state_seq_*_ext`` with ``LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY``, where they fit only."""

    cdef bint still_holds(self, Partial state) noexcept:
        # A state that is all of its memory, or that of an empty sequence, needs nothing else.
        return (self.is_all() or state.pos < 0
                or self.seqs.is_version(state.seq_id, state.version))

    @property
    def has_layout(self):
        """Whether how states are laid out is known here, so that others' can be checked."""
        self.check_open()
        return lib.has_layout(self.mem)

    @property
    def has_rest(self):
        """Whether states have parts that no block holds, which cannot be rewound."""
        self.check_open()
        return lib.has_rest(self.mem)

    cdef bint is_all(self) noexcept:
        """Whether such states are all that a sequence holds."""
        return self.kind == lib.MEMORY_RECURRENT or not lib.has_layout(self.mem)

    cdef int has_partial(self, str operation, bint inside=True) except -1:
        self.has_states(operation, inside)
        if not lib.has_rest(self.mem):
            raise UnsupportedOperation(
                operation, "this memory needs none: clear_kv_cache_seq(seq_id, p0) rewinds it", "memory")
        return 0

    def get_partial_state(self, seq_id):
        """Copy the part of a sequence that cannot be rewound."""
        cdef int32_t seq = _seq(seq_id, self.n_seq_max)
        cdef Partial state
        cdef Plan plan
        cdef uint8_t[::1] data
        self.lock_read()
        try:
            self.has_partial("get_partial_state")
            self.readable("get_partial_state", seq, True)
            plan = self.plan(seq, True)
            data = self.read_state(plan, np.empty(plan.size, np.uint8))
            state = Partial.__new__(Partial)
            state.context = weakref.ref(self)
            state.memory_kind = self.memory_kind
            state.data = data
            state.seq_id = seq
            state.pos = self.seqs.next_pos(seq) - 1
            state.first = lib.first_of(self.mem, seq)
            state.version = self.seqs.name_version(seq)
            state.has_last_window = state.pos <= 0 or lib.window_intact(self.mem, seq, state.pos)
            return state
        finally:
            self.lock.unlock()

    def make_partial_state(self, uint8_t[::1] content not None, first, pos):
        """Return a state from the bytes of one that another context of this layout took.

        It goes back by `set_blocks`, and by `set_partial_state` with an id.
        """
        cdef Partial state
        cdef vector[lib.state_block] blocks
        cdef Pieces pieces = Pieces([content])
        self.lock_read()
        try:
            self.has_partial("make_partial_state", False)
            self.check(pieces, 0, lib.PARTIAL_PARTS, blocks)
            state = Partial.__new__(Partial)
            state.context = weakref.ref(self)
            state.memory_kind = self.memory_kind
            state.data = content
            state.seq_id = 0
            state.pos = _int(pos, "pos", 0, INT32_MAX - 1)
            state.first = _int(first, "first", 0, state.pos)
            state.version = 0  # the name of nothing: it goes with no sequence by itself
            state.has_last_window = self.window_is_in(pieces, blocks, state.pos)
            return state
        finally:
            self.lock.unlock()

    cdef bint window_is_in(self, Pieces pieces, vector[lib.state_block]& blocks, int32_t pos) except -1:
        """Whether a state has every cell of a window that the token at a position sees before it."""
        cdef int32_t begin = lib.window_start(self.mem, pos)
        cdef int32_t[::1] positions, ext
        cdef lib.state_part part
        cdef lib.state_block block
        for part in lib.state_parts(self.mem, self.v_trans(), lib.PARTIAL_PARTS):
            if part.part != lib.PART_WINDOW:
                continue
            found = set()
            for block in blocks:
                if block.part == part.part and block.kind == lib.BLOCK_CELLS and block.n_cells:
                    positions = np.empty(block.n_cells, np.int32)
                    ext = np.empty(3 * block.n_cells, np.int32)
                    lib.read_cells(
                        pieces.pieces[0].data + block.offset, block.n_cells, part.extended,
                        &positions[0], &ext[0], NULL, NULL)
                    found.update(_array(positions, np.int32).tolist())
            return found.issuperset(range(begin, pos))
        return True

    def set_partial_state(self, Partial state not None, seq_id=None):
        """Make a sequence hold what it held when the state was taken, or change nothing.

        With `seq_id` another sequence; the caller guarantees that its tokens up to the state's
        position are the very same, computed in the same way.
        """
        cdef int32_t seq = state.seq_id if seq_id is None else _seq(seq_id, self.n_seq_max)
        self.lock_write()
        try:
            self.has_partial("set_partial_state")
            if state.context() is not self:
                raise PartialStateError(
                    "the partial state was taken from another context: use get_state() and set_state()",
                    seq, state.pos)
            if seq_id is not None:
                self.check_prefix_is_there(state.first, state.pos, seq)
            elif not self.still_holds(state):
                raise PartialStateError(
                    f"sequence {seq} was changed at or below position {state.pos} since the partial "
                    "state was taken: get_state() takes all that set_state() needs", seq, state.pos)
            if state.pos < 0:
                self.remove_from(seq, lib.REMOVE_WHOLE, 0, INT32_MAX)
            elif (self.kind == lib.MEMORY_SLIDING_WINDOW
                    and lib.window_intact(self.mem, seq, state.pos + 1)):
                # Nothing that the next token sees has been dropped: less to lose than to copy.
                self.raise_refused(self.seqs.rewind(seq, state.pos), seq, "seq_rm")
            elif not lib.has_layout(self.mem):
                self.put_known(seq, Pieces([state.data]))
            else:
                self.put_part(Pieces([state.data]), seq, state.first, state.pos, state.version)
        finally:
            self.lock.unlock()

    def put_parts(
            self, seq_id, n, list window=None, window_first=0, StatePart state=None, *,
            bint known_values=False):
        """Make a sequence that holds its first n tokens go back to them; its attention cells stay.

        Window and state are as for `set_blocks`, and the caller guarantees that they belong to these tokens.
        `PartialStateError` where attention cells are missing; all or nothing.
        """
        cdef int32_t seq = _seq(seq_id, self.n_seq_max), end = _int(n, "n", 1, INT32_MAX)
        cdef Pieces pieces = Pieces([])
        cdef lib.joined_state joined
        cdef lib.block_run none, kept
        self.lock_write()
        try:
            self.has_partial("put_parts")
            if not lib.has_layout(self.mem):
                if state is not None and state.end != end:
                    raise ArgumentError(
                        f"the state after {state.end} tokens given: {n} tokens need the state after them",
                        what="state", value=state.end, limit=end)
                self.set_whole(seq, bool(window), state)
                return
            self.take_blocks(lib.PART_WINDOW, window or [], kept, pieces)
            kept.first = _int(window_first, "window_first", 0, INT32_MAX)
            self.check_parts(end, kept, state)
            self.check_prefix_is_there(0, end - 1, seq)
            self.join_parts(lib.PARTIAL_PARTS, none, kept, state, pieces, joined)
            self.put_part(pieces, seq, 0, end - 1, 0, lib.WINDOW_PARTS if known_values else lib.NO_PARTS)
        finally:
            self.lock.unlock()

    cdef int check_prefix_is_there(self, int32_t first, int32_t last, int32_t seq) except -1:
        """Refuse a sequence whose attention part lacks a cell of these positions."""
        cdef int32_t lo = 0, hi = 0
        if self.is_all() or last < 0:
            return 0
        if (not lib.extent(self.mem, seq, lo, hi) or lo != first
                or lib.last_before(self.mem, seq, last + 1) != last
                # Without a hole, also after the last position: cells there would count for one before it.
                or lib.n_held(self.mem, seq) < <size_t>(hi - lo + 1)):
            raise PartialStateError(
                f"sequence {seq} does not hold the positions {first} to {last} "
                "that the partial state goes with", seq, last)
        return 0

    cdef int put_part(
            self, Pieces pieces, int32_t seq, int32_t first, int32_t last, uint64_t version,
            lib.part_set known=lib.NO_PARTS) except -1:
        """Replace the parts beside the attention cells, of which those up to `last` stay."""
        cdef int32_t code
        cdef vector[lib.state_block] blocks
        cdef lib.joined_state shorter
        self.check(pieces, seq, lib.PARTIAL_PARTS, blocks, known)
        if lib.windowed(self.mem):
            self.fit(seq, lib.PARTIAL_PARTS, blocks, pieces, shorter)
        self.need_room(seq, blocks)
        # A copy between streams that waits would overwrite what is put back.
        self.apply_pending()
        with nogil:
            code = self.seqs.put_part(seq, pieces.pieces, first, last, version)
        # Room and layout were checked: what is left to fail leaves the context unusable.
        return self.raise_caught(code, "set_partial_state")
