# Partial states: the parts that cannot be rewound (window, recurrent state, or both).
#
# They exclude the attention part, which must be unchanged since the state was taken; the prefix
# version checks that.

@cython.final
cdef class Partial:
    """Bytes that can be restored to one sequence of one context."""

    cdef object __weakref__
    cdef object context
    cdef uint64_t version
    cdef uint8_t[::1] data
    cdef readonly int32_t seq_id, pos, first
    cdef readonly str memory_kind
    #: Whether the window has all cells that the last token saw.
    cdef readonly bint has_last_window

    def __init__(self, *args, **kwargs):
        raise TypeError("Partial is made by get_partial_state()")

    @property
    def nbytes(self):
        """Size of the bytes that are kept."""
        return self.data.shape[0]

    @property
    def content(self):
        """The bytes, without a copy; they must not be changed."""
        return _array(self.data, np.uint8)

    @property
    def is_valid(self):
        """Whether the sequence is unchanged up to `pos`."""
        cdef Partials ctx = self.context()
        return ctx is not None and not ctx.is_closed and not ctx.broken and ctx.still_holds(self)


cdef class Partials(Blocks):
    """``llama_state_seq_*_ext`` with ``LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY``, behind checks."""

    cdef bint still_holds(self, Partial state) noexcept:
        # Complete already: the whole memory, or an empty sequence.
        return (self.is_all() or state.pos < 0
                or self.seqs.is_version(state.seq_id, state.version))

    @property
    def has_layout(self):
        """Whether the layout of states is known, so that foreign ones can be checked."""
        self.check_open()
        return lib.has_layout(self.mem)

    @property
    def has_rest(self):
        """Whether states have parts outside blocks, which cannot be rewound."""
        self.check_open()
        return lib.has_rest(self.mem)

    cdef bint is_all(self) noexcept:
        """Whether partial states are the whole sequence."""
        return self.kind == lib.MEMORY_RECURRENT or not lib.has_layout(self.mem)

    cdef int has_partial(self, str operation, bint inside=True) except -1:
        self.has_states(operation, inside)
        if not lib.has_rest(self.mem):
            raise UnsupportedOperation(
                operation, "this memory needs none: clear_kv_cache_seq(seq_id, p0) rewinds it", "memory")
        return 0

    def get_partial_state(self, seq_id):
        """Copy the parts of a sequence that cannot be rewound."""
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
        """Return a state from the bytes that another context of this layout took.

        Restore it with `set_blocks`, or with `set_partial_state` and an id.
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
            state.version = 0  # no version: it belongs to no sequence by itself
            state.has_last_window = self.window_is_in(pieces, blocks, state.pos)
            return state
        finally:
            self.lock.unlock()

    cdef bint window_is_in(self, Pieces pieces, vector[lib.state_block]& blocks, int32_t pos) except -1:
        """Return whether a state has every window cell that the token at a position sees."""
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
        """Restore a sequence to the time when the state was taken; all or nothing.

        With `seq_id`, another sequence. The caller guarantees that its tokens up to the state's
        position are equal and were computed in the same way.
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
                # All cells that the next token sees are still there: a rewind is cheaper than a copy.
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
        """Rewind a sequence to its first n tokens; its attention cells stay.

        Window and state are as in `set_blocks`; the caller guarantees that they belong to these tokens.
        `PartialStateError` if attention cells are missing; all or nothing.
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
        """Refuse a sequence whose attention part lacks one of these positions."""
        cdef int32_t lo = 0, hi = 0
        if self.is_all() or last < 0:
            return 0
        if (not lib.extent(self.mem, seq, lo, hi) or lo != first
                or lib.last_before(self.mem, seq, last + 1) != last
                # No holes, even after the last position: a cell there could make up for a hole before it.
                or lib.n_held(self.mem, seq) < <size_t>(hi - lo + 1)):
            raise PartialStateError(
                f"sequence {seq} does not hold the positions {first} to {last} "
                "that the partial state goes with", seq, last)
        return 0

    cdef int put_part(
            self, Pieces pieces, int32_t seq, int32_t first, int32_t last, uint64_t version,
            lib.part_set known=lib.NO_PARTS) except -1:
        """Replace all parts but attention, which keeps its cells up to `last`."""
        cdef int32_t code
        cdef vector[lib.state_block] blocks
        cdef lib.joined_state shorter
        self.check(pieces, seq, lib.PARTIAL_PARTS, blocks, known)
        if lib.windowed(self.mem):
            self.fit(seq, lib.PARTIAL_PARTS, blocks, pieces, shorter)
        self.need_room(seq, blocks)
        # A pending copy between streams would overwrite the restored cells.
        self.apply_pending()
        with nogil:
            code = self.seqs.put_part(seq, pieces.pieces, first, last, version)
        # Room and layout are checked; any other failure leaves the context unusable.
        return self.raise_caught(code, "set_partial_state")
