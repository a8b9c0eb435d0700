# The sequence operations, each behind its preconditions.
#
# A sequence holds (token, position) pairs. After every operation that succeeds the
# next logits are those of attention over exactly these cells; what this memory
# cannot do that way is refused before llama.cpp is called, with nothing changed.

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

    # Sequences whose recurrent state is ahead of what was computed (an aborted decode).
    cdef bint poisoned[MAX_SEQ]
    # Whether a shift or a stream copy waits for the next update.
    cdef bint pending
    # What is still as it was when a partial state was taken.
    cdef lib.lineage lineage
    # Which rows of logits and embeddings belong to what some sequence holds.
    cdef lib.held_rows held

    # Facts ---------------------------------------------------------------------------

    @property
    def memory_kind(self):
        """What kind of memory this is, as a word."""
        return _KIND_NAMES[self.kind]

    @property
    def n_streams(self):
        """Number of separate streams of cells."""
        self.look()
        try:
            return lib.n_stream(self.mem)
        finally:
            self.lock.leave()

    def can_shift(self):
        """Tell whether seq_add can be right on this memory; no lock, since it never changes."""
        self.alive()
        return self.shiftable

    cdef lib.llama_memory_t memory(self) noexcept nogil:
        return lib.llama_get_memory(self.ctx)

    cdef bint is_recurrent_like(self) noexcept:
        return (self.kind == lib.MEMORY_RECURRENT or self.kind == lib.MEMORY_HYBRID
                or self.kind == lib.MEMORY_HYBRID_SLIDING_WINDOW)

    cdef bint whole_only(self) noexcept:
        """Whether a part of a sequence can be neither removed, copied nor moved."""
        return self.is_recurrent_like() or self.kind == lib.MEMORY_OTHER

    cdef int need_memory(self, str operation) except -1:
        if self.kind == lib.MEMORY_NONE:
            raise UnsupportedOperation(operation, "this model keeps no memory")
        return 0

    cdef int done(self, int32_t code, str where) except -1:
        """Turn what a guarded call returned into an exception where it was caught."""
        if code == lib.CAUGHT:
            raise self.fail(where)
        if lib.has_log():
            _drain_log()
        return 0

    # Positions -----------------------------------------------------------------------

    def seq_pos(self, seq_id, bint want_max):
        """Return the lowest or highest position; -1 for empty, unused or out of range."""
        cdef int overflow = 0
        cdef long long n = _index(seq_id, "sequence id", &overflow)
        cdef int32_t lo = 0, hi = 0
        self.look()
        try:
            self.usable()
            if overflow or n < 0 or n >= self.n_seq_max or self.kind == lib.MEMORY_NONE:
                return -1
            if not want_max:
                return lib.first_kept(self.mem, <int32_t>n)
            return hi if lib.extent(self.mem, <int32_t>n, lo, hi) else -1
        finally:
            self.lock.leave()

    cdef int32_t next_pos(self, int32_t seq) noexcept:
        """The position after the last held one. llama.cpp asks the window, which may hold none."""
        cdef int32_t lo = 0, hi = 0
        if self.kind == lib.MEMORY_NONE or not lib.extent(self.mem, seq, lo, hi):
            return 0
        return hi + 1

    # What changes ---------------------------------------------------------------------

    cdef void changed(self, int32_t seq, int32_t first) noexcept:
        """A sequence is no longer what it was at this position and after it."""
        self.lineage.changed(seq, first)
        self.held.removed(seq, first)

    cdef void all_changed(self) noexcept:
        self.lineage.all_changed()
        self.held.cleared()

    # Removal -------------------------------------------------------------------------

    def clear(self, bint data):
        """Call ``llama_memory_clear``; cures poisoned sequences and a broken context."""
        cdef int32_t code = 0
        self.enter()
        try:
            if self.kind != lib.MEMORY_NONE:
                with nogil:
                    code = lib.memory_clear(self.memory(), data)
            for s in range(MAX_SEQ):
                self.poisoned[s] = False
            self.all_changed()
            self.pending = self.pending and self.streams
            if self.broken:
                # An encode that threw has left this switched.
                lib.llama_set_causal_attn(self.ctx, self.causal)
                self.broken = False
            self.done(code, "clear")
        finally:
            self.lock.leave()

    cdef lib.removal removable(self, int32_t seq, int32_t p0, int32_t p1) noexcept:
        return lib.removal_of(self.mem, seq, p0, p1, self.whole_only() or self.poisoned[seq])

    cdef int remove_from(self, int32_t seq, lib.removal what, int32_t p0, int32_t p1) except -1:
        cdef int32_t code
        if what == lib.REMOVE_NOTHING:
            return 0
        if what == lib.REMOVE_EMPTY:
            # llama.cpp would look at every cell of the cache to find that out.
            self.poisoned[seq] = False
            return 0
        if what == lib.REMOVE_WHOLE:
            p0, p1 = 0, INT32_MAX
        self.changed(seq, p0)
        code = lib.remove_cells(self.mem, seq, p0, p1)
        if code == 0:
            raise InternalError(f"llama_memory_seq_rm refused a removal from sequence {seq}")
        if what == lib.REMOVE_WHOLE and code != lib.CAUGHT:
            self.poisoned[seq] = False
        self.done(code, "seq_rm")
        return 0

    def seq_rm(self, seq_id, p0, p1):
        """Remove ``[p0, p1)``; False, and nothing changed, where the memory cannot."""
        cdef int32_t s, seq = -1 if seq_id is None else _seq(seq_id, self.n_seq_max)
        cdef int32_t a = 0, b = 0
        cdef lib.removal what
        _range(p0, p1, &a, &b)
        self.enter()
        try:
            self.need_memory("clear_kv_cache_seq")
            self.usable()
            if a >= b:
                return True
            if seq >= 0:
                what = self.removable(seq, a, b)
                if what == lib.REMOVE_REFUSED:
                    return False
                self.remove_from(seq, what, a, b)
                return True
            for s in range(self.n_seq_max):
                if self.removable(s, a, b) == lib.REMOVE_REFUSED:
                    return False
            for s in range(self.n_seq_max):
                self.remove_from(s, self.removable(s, a, b), a, b)
            return True
        finally:
            self.lock.leave()

    def seq_keep(self, seq_id):
        """Remove every other sequence, in every stream and half."""
        cdef int32_t s, seq = _seq(seq_id, self.n_seq_max)
        self.enter()
        try:
            self.need_memory("kv_cache_seq_keep")
            self.usable()
            # llama_memory_seq_keep looks at one stream only.
            for s in range(self.n_seq_max):
                if s != seq:
                    self.remove_from(s, self.removable(s, 0, INT32_MAX), 0, INT32_MAX)
        finally:
            self.lock.leave()

    # Copy ----------------------------------------------------------------------------

    def seq_cp(self, src, dst, p0, p1, str operation):
        """Make dst hold what src holds in ``[p0, p1)``, and nothing else."""
        cdef int32_t s = _seq(src, self.n_seq_max), d = _seq(dst, self.n_seq_max)
        cdef int32_t a = 0, b = 0, lo = 0, hi = 0
        cdef bint whole
        if operation == "copy_cache":
            if p1 is None:
                raise TypeError("size must be an integer, not None: copy_kv_cache_seq copies all")
            _p1(p1, "size")
        _range(p0, p1, &a, &b)
        self.enter()
        try:
            self.need_memory(operation)
            self.usable()
            if s == d:
                return
            if not self.selects(s, a, b):
                self.remove_from(d, self.removable(d, 0, INT32_MAX), 0, INT32_MAX)
                return
            lib.extent(self.mem, s, lo, hi)
            whole = a <= lo and b > hi
            if not whole:
                self.check_partial_copy(operation, s, a, b)
            if self.poisoned[s]:
                raise UnsupportedOperation(
                    operation, f"sequence {s} holds the rest of an aborted decode: remove all of it",
                    "sequence")
            if whole:
                a, b = 0, INT32_MAX
            # llama_memory_seq_cp merges into a unified destination; a copy replaces.
            if not lib.copies_replace(self.mem):
                self.remove_from(d, self.removable(d, 0, INT32_MAX), 0, INT32_MAX)
            self.changed(d, 0)
            self.held.copied(s, d, b if a <= lo else 0)
            self.pending = self.pending or self.streams
            self.copied(s, d)
            lib.note_first(self.mem, d, lib.first_of(self.mem, s))
            self.done(lib.copy_cells(self.mem, s, d, a, b), "seq_cp")
            if self.kind == lib.MEMORY_OTHER:
                # A removal clears the source's compressed rows at once, before a pending copy.
                self.settle()
        finally:
            self.lock.leave()

    cdef bint selects(self, int32_t seq, int32_t a, int32_t b) noexcept:
        """Whether the sequence holds anything in ``[a, b)``."""
        cdef int32_t lo = 0, hi = 0
        if a >= b or not lib.extent(self.mem, seq, lo, hi) or b <= lo or a > hi:
            return False
        # Of a recurrent state only the last position has a cell.
        return self.whole_only() or (a <= lo and b > hi) or lib.holds(self.mem, seq, a, b)

    cdef void copied(self, int32_t src, int32_t dst) noexcept:
        """Overridden where a sequence is more than its cells."""

    cdef int check_partial_copy(self, str operation, int32_t s, int32_t a, int32_t b) except -1:
        cdef int32_t next_pos
        if self.whole_only():
            raise UnsupportedOperation(
                operation, f"{self.memory_kind} memory copies whole sequences only: leave out p0 and p1",
                "memory")
        if self.streams:
            raise UnsupportedOperation(
                operation, "with kv_unified=False a copy goes to another stream and must be whole: "
                "copy all, then remove what is not wanted", "context")
        if self.kind == lib.MEMORY_ATTENTION:
            return 0  # no window
        next_pos = lib.last_before(self.mem, s, b) + 1
        if next_pos > a and not lib.window_intact(self.mem, s, next_pos):
            raise UnsupportedOperation(
                operation, f"the sliding window has dropped cells that position {next_pos} would see: "
                "copy the whole sequence, or decode the prefix again", "sequence")
        return 0

    # Shift ---------------------------------------------------------------------------

    def seq_add(self, seq_id, p0, p1, delta):
        """Add delta to the positions in ``[p0, p1)``."""
        cdef int32_t seq = _seq(seq_id, self.n_seq_max), a = 0, b = 0, where = 0, first
        cdef int overflow = 0
        cdef long long by = _index(delta, "delta", &overflow)
        cdef lib.shift_problem problem
        _range(p0, p1, &a, &b)
        self.enter()
        try:
            if not self.begin_move("kv_cache_seq_add", seq, a, b):
                return
            if by == 0 and not overflow:
                return
            self.check_move("kv_cache_seq_add", seq, &a, &b)
            if overflow or by > INT32_MAX or by < -INT32_MAX - 1:
                problem = lib.SHIFT_OVERFLOW
                lib.extent(self.mem, seq, first, where)
            else:
                problem = lib.add_check(self.mem, seq, a, b, by, where)
            if problem != lib.SHIFT_FITS:
                to = delta.__index__() + <object>where
                self.raise_problem(problem, f"adding {delta}", where, to, p0, p1)
            self.pending = True
            lib.note_first(self.mem, seq, lib.first_of(self.mem, seq) + <int32_t>by)
            first = lib.first_from(self.mem, seq, a)
            self.changed(seq, min(first, first + <int32_t>by))
            self.done(lib.add_cells(self.mem, seq, a, b, <int32_t>by), "seq_add")
        finally:
            self.lock.leave()

    def seq_div(self, seq_id, p0, p1, d):
        """Divide the positions in ``[p0, p1)`` by d, rotating K the right way."""
        cdef int32_t seq = _seq(seq_id, self.n_seq_max), a = 0, b = 0, where = 0
        cdef int by = _int(d, "d", 1, 255)
        cdef lib.shift_problem problem
        _range(p0, p1, &a, &b)
        self.enter()
        try:
            if not self.begin_move("kv_cache_seq_div", seq, a, b):
                return
            if by == 1:
                return
            self.check_move("kv_cache_seq_div", seq, &a, &b)
            problem = lib.div_check(self.mem, seq, a, b, by, where)
            if problem != lib.SHIFT_FITS:
                self.raise_problem(problem, f"dividing by {by}", where, where // by, p0, p1)
            self.pending = True
            lib.note_first(self.mem, seq, lib.first_of(self.mem, seq) // by)
            self.changed(seq, lib.first_from(self.mem, seq, a) // by)
            self.done(lib.divide_cells(self.mem, seq, a, b, by), "seq_div")
        finally:
            self.lock.leave()

    cdef int begin_move(self, str operation, int32_t seq, int32_t a, int32_t b) except -1:
        """0 when there is nothing to move; refusals that hold for any delta come first."""
        self.need_memory(operation)
        self.usable()
        if lib.why_no_shift(self.mem) == lib.SHIFT_MULTI_POS:
            raise UnsupportedOperation(operation, _NO_SHIFT[lib.SHIFT_MULTI_POS])
        return a < b and lib.holds(self.mem, seq, a, b)

    cdef int check_move(self, str operation, int32_t seq, int32_t* a, int32_t* b) except -1:
        cdef int32_t lo = 0, hi = 0
        cdef int why = lib.why_no_shift(self.mem)
        if why != lib.SHIFT_OK:
            raise UnsupportedOperation(
                operation, _NO_SHIFT[why], "context" if why in _NO_SHIFT_OF_TYPE else "model")
        lib.extent(self.mem, seq, lo, hi)
        if self.whole_only():
            if a[0] > lo or b[0] <= hi:
                raise UnsupportedOperation(
                    operation, f"{self.memory_kind} memory moves whole sequences only", "memory")
            a[0] = 0
            b[0] = INT32_MAX
        if self.poisoned[seq]:
            raise UnsupportedOperation(
                operation, f"sequence {seq} holds the rest of an aborted decode: remove all of it",
                "sequence")
        if lib.shared(self.mem, seq, a[0], b[0]):
            raise UnsupportedOperation(
                operation, f"sequence {seq} shares cells with another sequence, which would move too: "
                "remove the other, or decode into a sequence of its own", "sequence")
        if lib.window_dropped(self.mem, seq):
            raise UnsupportedOperation(
                operation, "the sliding window has dropped cells of this sequence: "
                "create the context with swa_full=True, or decode again", "sequence")
        return 0

    cdef int raise_problem(
            self, int problem, str what, int32_t where, object to, object p0, object p1) except -1:
        """Say what is wrong with moving `where` to `to`; of a collision `where` is the target."""
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
        self.look()
        try:
            self.usable()
            self.settle()
        finally:
            self.lock.leave()

    cdef int settle(self) except -1:
        """Apply what is pending, where no abort() can stop it half-way."""
        cdef int32_t code
        if not self.pending:
            return 0
        self.epoch += 1
        with nogil:
            code = lib.flush(self.ctx, self.mem)
        self.pending = code != 0
        if code == 1:
            self.broken = True
            raise InternalError("llama.cpp could not apply a pending shift")
        self.done(code, "update")
        return 0
