# Sequence operations. Each is refused before llama.cpp is called if the next logits would not be those of
# attention over exactly the sequence's cells.

cdef dict _KIND_NAMES = {
    lib.MEMORY_NONE: "none",
    lib.MEMORY_ATTENTION: "attention",
    lib.MEMORY_SLIDING_WINDOW: "sliding-window",
    lib.MEMORY_RECURRENT: "recurrent",
    lib.MEMORY_HYBRID: "hybrid",
    lib.MEMORY_HYBRID_SLIDING_WINDOW: "hybrid-sliding-window",
    lib.MEMORY_OTHER: "other",
}


cdef class Memory(Handle):
    """``llama_memory_*`` behind checks."""

    # Facts ---------------------------------------------------------------------------

    @property
    def memory_kind(self):
        return _KIND_NAMES[self.traits.kind]

    @property
    def max_position(self):
        return self.traits.max_position

    @property
    def n_streams(self):
        self.check_open()
        return self.traits.n_stream

    def can_shift(self):
        """Return whether this memory can shift; needs no lock because it never changes."""
        self.check_open()
        return self.traits.shift.why.empty()

    cdef int need_memory(self, str operation) except -1:
        if self.traits.kind == lib.MEMORY_NONE:
            raise UnsupportedOperation(operation, "this model keeps no memory")
        return 0

    cdef int need_whole(self, str operation, int32_t seq) except -1:
        if self.seqs.needs_removal(seq):
            raise UnsupportedOperation(
                operation, f"sequence {seq} holds the rest of an aborted decode: remove all of it",
                "sequence")
        return 0

    cdef int raise_caught(self, int32_t code, str where) except -1:
        if code == lib.CAUGHT:
            raise self.fail(where)
        return _drain_log()

    # Positions -----------------------------------------------------------------------

    def seq_pos(self, seq_id, bint want_max):
        """Return the lowest or highest position; -1 if empty, unused or out of range."""
        cdef int overflow = 0
        cdef long long n = _index(seq_id, "sequence id", &overflow)
        cdef lib.scoped_lock locked
        self.lock_read(locked)
        self.check_usable()
        if overflow or n < 0 or n >= self.n_seq_max:
            return -1
        return lib.extent_of(self.mem, <int32_t>n).hi if want_max else lib.first_kept(self.mem, <int32_t>n)

    # Removal -------------------------------------------------------------------------

    def clear(self, bint data):
        """Call ``llama_memory_clear``; also repairs sequences that need removal and a broken context."""
        cdef int32_t code
        cdef lib.scoped_lock locked
        self.lock_read(locked)  # not lock_write(), which refuses a broken context
        with nogil:
            code = self.seqs.clear(data)
        if self.broken:
            # An encode that threw leaves this flag switched.
            lib.llama_set_causal_attn(self.ctx, self.causal)
            self.broken = False
        self.raise_caught(code, "clear")

    cdef int raise_refused(self, int32_t code, int32_t seq, str where) except -1:
        if code == lib.UNEXPECTED:
            raise InternalError(f"llama.cpp refused a removal in {where} of sequence {seq}")
        return self.raise_caught(code, where)

    def seq_rm(self, seq_id, p0, p1):
        """Remove ``[p0, p1)``; return False and change nothing if the memory cannot."""
        cdef int32_t s, seq = -1 if seq_id is None else _seq(seq_id, self.n_seq_max)
        cdef int32_t a = 0, b = 0, code
        _range(p0, p1, &a, &b)
        if a == 0 and b == INT32_MAX and not self.closed and lib.lost_link(self.links) != NULL:
            return True  # its cells are lost with the server, and closing a sequence must not raise
        cdef lib.scoped_lock locked
        self.lock_write(locked)
        self.need_memory("clear_kv_cache_seq")
        if a >= b:
            return True
        if seq >= 0:
            code = self.seqs.remove(seq, a, b)
            self.raise_refused(code, seq, "seq_rm")
            return code != lib.REFUSED
        for s in range(self.n_seq_max):
            if not self.seqs.can_remove(s, a, b):
                return False
        for s in range(self.n_seq_max):
            self.raise_refused(self.seqs.remove(s, a, b), s, "seq_rm")
        return True

    def seq_keep(self, seq_id):
        """Remove every other sequence, in every stream and part."""
        cdef int32_t seq = _seq(seq_id, self.n_seq_max)
        cdef lib.scoped_lock locked
        self.lock_write(locked)
        self.need_memory("kv_cache_seq_keep")
        self.raise_refused(self.seqs.keep(seq), seq, "seq_keep")

    # Copy ----------------------------------------------------------------------------

    def seq_cp(self, src, dst, p0, p1, str operation):
        """Replace dst by the positions ``[p0, p1)`` of src."""
        cdef int32_t s = _seq(src, self.n_seq_max), d = _seq(dst, self.n_seq_max)
        cdef int32_t a = 0, b = 0
        cdef lib.extent held
        cdef bint whole
        _range(p0, p1, &a, &b)
        cdef lib.scoped_lock locked
        self.lock_write(locked)
        self.need_memory(operation)
        if s == d:
            return
        held = lib.extent_of(self.mem, s)
        if a >= b or not self.selects(s, a, b, held):
            self.raise_refused(self.seqs.remove(d, 0, INT32_MAX), d, "seq_rm")
            return
        whole = a <= held.lo and b > held.hi
        if not whole:
            self.check_partial_copy(operation, s, a, b)
        self.need_whole(operation, s)
        if whole:
            a, b = 0, INT32_MAX
        self.raise_refused(self.seqs.copy(s, d, a, b), d, "seq_cp")
        if self.traits.kind == lib.MEMORY_OTHER:
            # A removal would clear the source's compressed rows before a pending copy reads them.
            self.apply_pending()

    def copy_cache(self, src, dst, size):
        """Replace dst by the positions below `size` of src."""
        if size is None:
            raise TypeError("size must be an integer, not None: copy_kv_cache_seq copies all")
        self.seq_cp(src, dst, 0, _p1(size, "size"), "copy_cache")

    cdef bint selects(self, int32_t seq, int32_t a, int32_t b, lib.extent held) noexcept:
        """Return whether a sequence has any position in ``[a, b)``."""
        if b <= held.lo or a > held.hi:
            return False
        # A recurrent state has a cell for its last position only.
        return (a <= held.lo and b > held.hi) or self.traits.whole_only or lib.holds(self.mem, seq, a, b)

    cdef int check_partial_copy(self, str operation, int32_t s, int32_t a, int32_t b) except -1:
        cdef int32_t next_pos
        if self.traits.whole_only:
            raise UnsupportedOperation(
                operation, f"{self.memory_kind} memory copies whole sequences only: leave out p0 and p1",
                "memory")
        if self.traits.n_stream > 1:
            raise UnsupportedOperation(
                operation, "with kv_unified=False a copy goes to another stream and must be whole: "
                "copy all, then remove what is not wanted", "context")
        if self.traits.kind == lib.MEMORY_ATTENTION:
            return 0  # no window
        next_pos = lib.last_before(self.mem, s, b) + 1
        if next_pos > a and not lib.window_intact(self.mem, s, next_pos):
            raise UnsupportedOperation(
                operation, f"the sliding window has dropped cells that position {next_pos} would see: "
                "copy the whole sequence, or decode the prefix again", "sequence")
        return 0

    # Shift ---------------------------------------------------------------------------

    def seq_add(self, seq_id, p0, p1, delta):
        cdef int32_t seq = _seq(seq_id, self.n_seq_max), a = 0, b = 0, where = 0
        cdef int overflow = 0
        cdef long long by
        cdef lib.shift_problem problem
        delta = _whole(delta, "delta")
        by = _index(delta, "delta", &overflow)
        _range(p0, p1, &a, &b)
        cdef lib.scoped_lock locked
        self.lock_write(locked)
        if not self.begin_move("kv_cache_seq_add", seq, a, b):
            return
        if by == 0 and not overflow:
            return
        self.check_move("kv_cache_seq_add", seq, &a, &b)
        if overflow or by > INT32_MAX or by < -INT32_MAX - 1:
            problem = lib.SHIFT_OVERFLOW
            where = lib.extent_of(self.mem, seq).hi
        else:
            problem = lib.add_check(self.mem, seq, a, b, by, where)
        if problem != lib.SHIFT_FITS:
            to = delta + <object>where
            self.raise_problem(problem, f"adding {shown(delta)}", where, to, p0, p1)
        self.raise_caught(self.seqs.shift(seq, a, b, <int32_t>by), "seq_add")

    def seq_div(self, seq_id, p0, p1, d):
        """Divide the positions in ``[p0, p1)`` by d, rotating K the right way."""
        cdef int32_t seq = _seq(seq_id, self.n_seq_max), a = 0, b = 0, where = 0
        cdef int by = _int(d, "d", 1, 255)
        cdef lib.shift_problem problem
        _range(p0, p1, &a, &b)
        cdef lib.scoped_lock locked
        self.lock_write(locked)
        if not self.begin_move("kv_cache_seq_div", seq, a, b):
            return
        if by == 1:
            return
        self.check_move("kv_cache_seq_div", seq, &a, &b)
        problem = lib.div_check(self.mem, seq, a, b, by, where)
        if problem != lib.SHIFT_FITS:
            self.raise_problem(problem, f"dividing by {by}", where, where // by, p0, p1)
        self.raise_caught(self.seqs.divide(seq, a, b, by), "seq_div")

    cdef int begin_move(self, str operation, int32_t seq, int32_t a, int32_t b) except -1:
        """Return 0 if there is nothing to move; raise if this memory or sequence cannot be shifted at all."""
        self.need_memory(operation)
        self.check_usable()
        if self.traits.shift.multi_pos:
            raise UnsupportedOperation(operation, _text(self.traits.shift.why))
        return a < b and lib.holds(self.mem, seq, a, b)

    cdef int check_move(self, str operation, int32_t seq, int32_t* a, int32_t* b) except -1:
        cdef lib.extent held
        if not self.traits.shift.why.empty():
            raise UnsupportedOperation(
                operation, _text(self.traits.shift.why), "context" if self.traits.shift.of_type else "model")
        if self.traits.whole_only:
            held = lib.extent_of(self.mem, seq)
            if a[0] > held.lo or b[0] <= held.hi:
                raise UnsupportedOperation(
                    operation, f"{self.memory_kind} memory moves whole sequences only", "memory")
            a[0] = 0
            b[0] = INT32_MAX
        self.need_whole(operation, seq)
        if lib.shared(self.mem, seq, a[0], b[0]):
            raise UnsupportedOperation(
                operation, f"sequence {seq} shares cells with another sequence, which would move too: "
                "remove the other, or decode into a separate sequence", "sequence")
        if lib.window_dropped(self.mem, seq):
            raise UnsupportedOperation(
                operation, "the sliding window has dropped cells of this sequence: "
                + ("a state, a fork or another sequence took their place; decode again, or, of a "
                   "LlamaSequence, discard(..., reevaluate=True)" if self.swa_full else
                   "create the context with swa_full=True, or decode again"), "sequence")
        return 0

    cdef int raise_problem(
            self, int problem, str what, int32_t where, object to, object p0, object p1) except -1:
        """Raise for moving `where` to `to`; for a collision, `where` is the target."""
        if problem == lib.SHIFT_NEGATIVE or to < 0:
            raise PositionError(
                f"{what} would move position {where} below 0", p0=p0, p1=p1, value=to, limit=0)
        if problem == lib.SHIFT_OVERFLOW:
            raise self.too_far(to, f"{what} to position {where}", p0, p1)
        raise PositionError(
            f"{what} would land on position {where}, which is held already", p0=p0, p1=p1, value=where)

    # Pending updates -----------------------------------------------------------------

    def update(self):
        """Apply pending shifts and stream copies now (``llama_context::memory_update``)."""
        cdef lib.scoped_lock locked
        self.lock_read(locked)
        self.check_usable()
        self.apply_pending()

    cdef int apply_pending(self) except -1:
        """Apply pending updates while abort() is disabled."""
        cdef int32_t code
        if not self.seqs.is_pending():
            return 0
        with nogil:
            code = self.seqs.apply_pending()
        if code == 1:
            self.broken = True
            raise InternalError("llama.cpp could not apply a pending shift")
        self.raise_caught(code, "update")
        return 0
