# Inspect cells, and operations built on that.

cdef dict _PARTS = {
    "attention": lib.PART_ATTENTION,
    "window": lib.PART_WINDOW,
    "recurrent": lib.PART_RECURRENT,
    "index": lib.PART_INDEX,
}


cdef lib.memory_part _part(part, tuple names=None) except *:
    """Return the part of this name; one of `names`, if given."""
    if names is None:
        names = tuple(_PARTS)
    if not isinstance(part, str) or part not in names:
        raise ArgumentError(
            f"part is {shown(part)}: it must be one of {', '.join(names)}",
            what="part", value=part, limit=names)
    return <lib.memory_part><int>_PARTS[part]


cdef class Cells(Memory):
    """Contents of cells; resume, copy a prefix, remove and close the gap."""

    def memory_breakdown(self):
        """Return (buffer type, model, context, compute) bytes by ``llama_get_memory_breakdown``."""
        cdef vector[lib.buffer_bytes] found
        cdef size_t i
        cdef lib.scoped_lock locked
        self.lock_read(locked)
        _check(lib.memory_breakdown(self.ctx, found), "memory_breakdown")
        parts = []
        for i in range(found.size()):
            parts.append((_text(found[i].name), found[i].model, found[i].context, found[i].compute))
        return parts

    def memory_info(self):
        cdef lib.memory_facts facts
        cdef lib.scoped_lock locked
        self.lock_read(locked)
        facts = lib.look_at_memory(self.mem)
        takes_parts = self.traits.kind != lib.MEMORY_NONE and not self.traits.whole_only
        return {
            "kind": self.memory_kind,
            "class_name": _text(self.traits.name),
            "kv_unified": self.kv_unified,
            "n_streams": self.traits.n_stream if self.traits.kind != lib.MEMORY_NONE else 0,
            "n_cells": facts.n_cells,
            "n_swa": facts.n_swa,
            "can_shift": self.traits.shift.why.empty(),
            "can_copy_partial": takes_parts and self.traits.n_stream == 1,
            "can_remove_partial": takes_parts,
            "max_rollback": facts.max_rollback,
            "bytes_total": facts.bytes_total,
            "bytes_per_token": facts.bytes_per_token,
            "buffer_types": tuple(_texts(lib.buffer_types(self.mem))),
        }

    cdef int default_part(self) noexcept:
        return lib.PART_RECURRENT if self.traits.kind == lib.MEMORY_RECURRENT else lib.PART_ATTENTION

    @property
    def n_cells_used(self):
        cdef lib.scoped_lock locked
        self.lock_read(locked)
        return lib.n_used(self.mem, <lib.memory_part>self.default_part())

    @property
    def n_cells_spanned(self):
        """Number of cells up to the highest used one: a decode attends to all of them."""
        cdef lib.scoped_lock locked
        self.lock_read(locked)
        return lib.n_spanned(self.mem)

    def cells(self, part):
        """Return (stream, cell, pos, members) of the used cells of one part."""
        cdef lib.memory_part which = <lib.memory_part>self.default_part() if part is None else _part(part)
        cdef uint32_t i = 0, n, stream = 0, cell = 0
        cdef int32_t pos = 0
        cdef int32_t[::1] streams, indices, positions
        cdef uint8_t[:, ::1] members
        cdef lib.scoped_lock locked
        self.lock_read(locked)
        n = lib.n_used(self.mem, which)
        streams = np.empty(n, np.int32)
        indices = np.empty(n, np.int32)
        positions = np.empty(n, np.int32)
        members = np.zeros((n, self.n_seq_max), np.uint8)
        while i < n and lib.next_cell(self.mem, which, self.n_seq_max, stream, cell, pos, &members[i, 0]):
            streams[i] = stream
            indices[i] = cell
            positions[i] = pos
            i += 1
            cell += 1
        return (np.asarray(streams)[:i], np.asarray(indices)[:i], np.asarray(positions)[:i],
                np.asarray(members)[:i].view(np.bool_))

    def sequences(self):
        """Return {seq_id: (lowest, highest, number of cells)} of non-empty sequences."""
        cdef int32_t s
        cdef lib.extent held
        cdef dict found = {}
        cdef lib.scoped_lock locked
        self.lock_read(locked)
        for s in range(self.n_seq_max):
            held = lib.extent_of(self.mem, s)
            if held.n:
                found[s] = (held.lo, held.hi, held.n)
        return found

    def compact(self):
        """Move used cells to the lowest places; return the number of moved cells."""
        cdef int64_t moved
        cdef lib.scoped_lock locked
        self.lock_write(locked)
        self.need_memory("kv_cache_compact")
        if not lib.can_compact(self.mem):
            raise UnsupportedOperation(
                "kv_cache_compact", f"the order of cells matters to {_text(self.traits.name)}")
        self.apply_pending()
        with nogil:
            moved = self.seqs.compact()
        self.raise_caught(lib.CAUGHT if moved == lib.CAUGHT else 0, "compact")
        return moved

    def prefix_version(self, seq_id):
        """Return a prefix version of the sequence, which is valid until one of its cells changes."""
        cdef int32_t seq = _seq(seq_id, self.n_seq_max)
        cdef lib.scoped_lock locked
        self.lock_read(locked)
        return self.seqs.name_version(seq)

    def holds_prefix(self, seq_id, uint64_t version):
        """Return whether the sequence is unchanged since this prefix version was taken."""
        cdef int32_t seq = _seq(seq_id, self.n_seq_max)
        cdef lib.scoped_lock locked
        self.lock_read(locked)
        return not self.broken and self.seqs.is_version(seq, version)

    def needs_removal(self, seq_id):
        """Return whether a failed decode left the sequence in a state that only removal cures."""
        cdef int32_t seq = _seq(seq_id, self.n_seq_max)
        cdef lib.scoped_lock locked
        self.lock_read(locked)
        return bool(self.seqs.needs_removal(seq))

    def can_resume(self, seq_id, pos):
        """Return whether removing from pos on and decoding at pos gives the right logits."""
        cdef int32_t seq = _seq(seq_id, self.n_seq_max), p
        if pos is None:
            raise TypeError("pos must be an integer, not None")
        p = _p0(pos, "pos")
        cdef lib.scoped_lock locked
        self.lock_read(locked)
        self.check_usable()
        if p == 0:
            return True
        if self.seqs.needs_removal(seq) or lib.last_before(self.mem, seq, p) != p - 1:
            return False
        if p < self.seqs.next_pos(seq) and self.traits.whole_only:
            return self.seqs.can_resume_at(seq, p)
        return bool(lib.window_intact(self.mem, seq, p))

    def copy_prefix(self, src, dst, n):
        """Replace dst by the positions below n of src."""
        cdef int32_t s = _seq(src, self.n_seq_max), d = _seq(dst, self.n_seq_max), end
        if n is None:
            raise TypeError("n must be an integer, not None: copy_kv_cache_seq copies all")
        end = _p1(n, "n")
        if s != d and end > 0:
            self.seq_cp(s, d, 0, end, "copy_prefix")
            return
        # src == dst keeps the prefix; an empty prefix removes everything.
        if not self.seq_rm(d, end, None):
            raise UnsupportedOperation(
                "copy_prefix", f"{self.memory_kind} memory cannot cut sequence {d} at {end}", "memory")

    def remove(self, seq_id, p0, p1):
        """Remove ``[p0, p1)`` and close the gap; all or nothing."""
        cdef int32_t seq = _seq(seq_id, self.n_seq_max), a = 0, b = 0
        cdef int32_t from_pos, to = INT32_MAX
        cdef bint follows
        _range(p0, p1, &a, &b)
        from_pos = b
        cdef lib.scoped_lock locked
        self.lock_write(locked)
        self.need_memory("remove")
        if a >= b:
            return
        follows = b != INT32_MAX and lib.holds(self.mem, seq, b, INT32_MAX)
        if not self.seqs.can_remove(seq, a, b):
            raise UnsupportedOperation(
                "remove", f"{self.memory_kind} memory cannot give up [{a}, {b}) of sequence {seq}: "
                "remove all of it and decode again", "memory")
        if follows:
            if self.traits.whole_only:
                raise UnsupportedOperation(
                    "remove", f"{self.memory_kind} memory moves whole sequences only", "memory")
            self.check_move("remove", seq, &from_pos, &to)
        self.raise_refused(self.seqs.remove(seq, a, b), seq, "seq_rm")
        if follows:
            self.raise_caught(self.seqs.shift(seq, b, INT32_MAX, a - b), "seq_add")
