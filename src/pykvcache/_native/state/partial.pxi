# Partial states: the parts that cannot be rewound (window, recurrent state, or both). The attention part
# must be unchanged since the state was taken; the prefix version checks that.

@cython.final
cdef class Partial:
    """Bytes that can be restored to one sequence of one context."""

    cdef object __weakref__
    cdef object context
    cdef uint64_t version
    cdef uint8_t[::1] data
    cdef readonly int32_t seq_id, pos, first
    cdef readonly str memory_kind

    def __init__(self, *args, **kwargs):
        raise TypeError("Partial is made by get_partial_state()")

    @property
    def nbytes(self):
        return self.data.shape[0]

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
        return self.traits.has_layout

    @property
    def has_rest(self):
        """Whether states have parts outside blocks, which cannot be rewound."""
        self.check_open()
        return self.traits.has_rest

    cdef bint is_all(self) noexcept:
        """Whether partial states are the whole sequence."""
        return self.traits.kind == lib.MEMORY_RECURRENT or not self.traits.has_layout

    cdef int has_partial(self, str operation, bint inside=True) except -1:
        self.has_states(operation, inside)
        if not self.traits.has_rest:
            raise UnsupportedOperation(
                operation, "this memory needs none: clear_kv_cache_seq(seq_id, p0) rewinds it", "memory")
        return 0

    def get_partial_state(self, seq_id):
        cdef int32_t seq = _seq(seq_id, self.n_seq_max)
        cdef Partial state
        cdef unique_ptr[lib.seq_state] plan
        cdef lib.scoped_lock locked
        self.lock_read(locked)
        self.has_partial("get_partial_state")
        self.readable("get_partial_state", seq, True)
        self.plan(seq, plan, lib.PARTIAL_PARTS)
        state = Partial.__new__(Partial)
        state.context = weakref.ref(self)
        state.memory_kind = self.memory_kind
        state.data = self.read_state(plan)
        state.seq_id = seq
        state.pos = self.seqs.next_pos(seq) - 1
        state.first = lib.extent_of(self.mem, seq).lo
        state.version = self.seqs.name_version(seq)
        return state

    def set_partial_state(self, Partial state not None):
        """Restore a sequence to the time when the state was taken; all or nothing."""
        cdef int32_t seq = state.seq_id
        cdef lib.scoped_lock locked
        self.lock_write(locked)
        self.has_partial("set_partial_state")
        if state.context() is not self:
            raise PartialStateError(
                "the partial state was taken from another context: use get_state() and set_state()",
                seq, state.pos)
        if not self.still_holds(state):
            raise PartialStateError(
                f"sequence {seq} was changed at or below position {state.pos} since the partial "
                "state was taken: get_state() takes all that set_state() needs", seq, state.pos)
        if state.pos < 0:
            self.raise_refused(self.seqs.remove(seq, 0, INT32_MAX), seq, "seq_rm")
        elif (self.traits.kind == lib.MEMORY_SLIDING_WINDOW
                and lib.window_intact(self.mem, seq, state.pos + 1)):
            # All cells that the next token sees are still there: a rewind is cheaper than a copy.
            self.raise_refused(self.seqs.rewind(seq, state.pos), seq, "seq_rm")
        elif not self.traits.has_layout:
            self.put_known(seq, Pieces([state.data]))
        else:
            self.put_part(Pieces([state.data]), seq, state.first, state.pos, state.version)

    cdef int put_part(
            self, Pieces pieces, int32_t seq, int32_t first, int32_t last, uint64_t version) except -1:
        """Replace all parts but attention, which keeps its cells up to `last`."""
        cdef int32_t code
        cdef vector[lib.state_block] blocks
        cdef lib.joined_state shorter
        self.check(pieces, seq, lib.PARTIAL_PARTS, blocks)
        if self.traits.windowed:
            self.fit(seq, lib.PARTIAL_PARTS, blocks, pieces, shorter)
        self.need_room(seq, blocks)
        # A pending copy between streams would overwrite the restored cells.
        self.apply_pending()
        with nogil:
            code = self.seqs.put_part(seq, pieces.pieces, first, last, version)
        # Room and layout are checked; any other failure leaves the context unusable.
        return self.raise_caught(code, "set_partial_state")
