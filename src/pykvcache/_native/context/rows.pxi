# Rows of a batch, filled by the caller. For values that `_plain_ints` does not read the methods return False;
# Python then converts them.

# llama.cpp's arrays, and one flag.
cdef enum:
    ROW_BYTES = 3 * sizeof(int32_t) + 1


@cython.final
cdef class Rows:
    """The columns of a batch in one block of memory."""

    cdef Py_ssize_t n, room, width
    cdef object block  # an array, the memory of the columns
    cdef int32_t* tokens
    cdef int32_t* positions
    cdef int32_t* counts
    cdef int32_t* seq_ids
    cdef int8_t* flags

    def __cinit__(self, Py_ssize_t room, Py_ssize_t width):
        if room < 0 or room > INT32_MAX or width < 1 or width > MAX_SEQ:
            raise ArgumentError("no batch has this shape")
        self.move(room, width)

    def __len__(self):
        return self.n

    def __reduce__(self):
        cdef Py_ssize_t n = self.n
        parts = [(<char*>self.tokens)[:4 * n], (<char*>self.positions)[:4 * n],
                 (<char*>self.counts)[:4 * n], (<char*>self.seq_ids)[:4 * n * self.width],
                 (<char*>self.flags)[:n]]
        return _rows_of, (n, self.width, b"".join(parts))

    cdef int move(self, Py_ssize_t room, Py_ssize_t width) except -1:
        """Move the rows to a new block; views keep the old one."""
        block = _empty(room * (ROW_BYTES + <Py_ssize_t>sizeof(int32_t) * width), _UINT8)
        cdef Py_ssize_t i, old = self.width
        cdef int32_t* tokens = <int32_t*>_address(block)
        cdef int32_t* seq_ids = tokens + 3 * room
        if self.n:
            memcpy(tokens, self.tokens, self.n * sizeof(int32_t))
            memcpy(tokens + room, self.positions, self.n * sizeof(int32_t))
            memcpy(tokens + 2 * room, self.counts, self.n * sizeof(int32_t))
            memcpy(seq_ids + room * width, self.flags, self.n)
            for i in range(self.n):
                memcpy(seq_ids + i * width, self.seq_ids + i * old, old * sizeof(int32_t))
                memset(seq_ids + i * width + old, 0, (width - old) * sizeof(int32_t))
        self.tokens = tokens
        self.positions = tokens + room
        self.counts = self.positions + room
        self.seq_ids = seq_ids
        self.flags = <int8_t*>(seq_ids + room * width)
        self.block = block
        self.room = room
        self.width = width
        return 0

    cdef int reserve(self, Py_ssize_t more, Py_ssize_t width) except -1:
        cdef Py_ssize_t wanted = self.n + more
        if wanted > self.room or width > self.width:
            self.move(self.room if wanted <= self.room else max(wanted, 2 * self.room),
                      max(width, self.width))
        return 0

    def clear(self):
        self.n = 0

    def add(self, token, pos, seq_ids, logits):
        """Append one token; return False if the values are not plain ints."""
        cdef int32_t t, p, s
        cdef vector[int32_t] several
        cdef Py_ssize_t i = self.n, j, width = 1
        if not (logits is True or logits is False):
            return False
        if not _plain_int(token, &t) or not _plain_int(pos, &p):
            return False
        if not _plain_int(seq_ids, &s):
            if not _plain_ints(seq_ids, several):
                return False
            width = <Py_ssize_t>several.size()
            if width < 1 or width > MAX_SEQ:
                return False
            for s in several:
                if s < 0:
                    return False
        self.reserve(1, width)
        self.tokens[i] = t
        self.positions[i] = p
        self.counts[i] = <int32_t>width
        self.flags[i] = logits is True
        for j in range(self.width):
            self.seq_ids[i * self.width + j] = 0 if j >= width else several[j] if several.size() else s
        self.n += 1
        return True

    def append(self, tokens, seq_id, logits_all, start):
        """Append tokens of one sequence; return False if the values are not plain ints."""
        cdef vector[int32_t] token
        cdef int32_t s, first
        cdef int32_t* positions
        cdef Py_ssize_t i, n, begin = self.n
        if not (logits_all is True or logits_all is False):
            return False
        if not (_plain_int(seq_id, &s) and _plain_int(start, &first)
                and _plain_ints(tokens, token)):
            return False
        n = <Py_ssize_t>token.size()
        if n > INT32_MAX - first:
            return False
        if n == 0:
            return True
        self.reserve(n, 1)
        memcpy(self.tokens + begin, token.data(), n * sizeof(int32_t))
        positions = self.positions + begin
        for i in range(n):
            positions[i] = first + <int32_t>i
        self.in_one_sequence(begin, n, s)
        memset(self.flags + begin, logits_all is True, n)
        self.flags[begin + n - 1] = 1
        self.n = begin + n
        return True

    cdef void in_one_sequence(self, Py_ssize_t begin, Py_ssize_t n, int32_t seq) noexcept:
        cdef Py_ssize_t i, width = self.width
        cdef int32_t* counts = self.counts + begin
        cdef int32_t* seq_ids = self.seq_ids + begin * width
        for i in range(n):
            counts[i] = 1
        if width == 1:
            for i in range(n):
                seq_ids[i] = seq
            return
        memset(seq_ids, 0, n * width * sizeof(int32_t))
        for i in range(n):
            seq_ids[i * width] = seq

    def fill(self, tokens, pos, seq_ids, logits):
        """Replace all rows by columns; return False if they are not plain or do not fit."""
        cdef vector[int32_t] token, position, column
        cdef Py_buffer seqs, flags
        cdef int32_t s = 0, flag = 0
        cdef bint one = _plain_int(seq_ids, &s), have_seqs = False, have_flags = False
        cdef Py_ssize_t i, n, width = 1
        if not (_plain_ints(tokens, token) and _plain_ints(pos, position)):
            return False
        n = <Py_ssize_t>token.size()
        if <Py_ssize_t>position.size() != n:
            return False
        try:
            if not one:
                have_seqs = _borrow(seq_ids, &seqs)
                if not (have_seqs and _holds_int32(&seqs) and 1 <= seqs.ndim <= 2 and seqs.shape[0] == n):
                    return False
                width = seqs.shape[1] if seqs.ndim == 2 else 1
                if width < 1 or width > MAX_SEQ:
                    return False
            if not (logits is True or logits is False):
                have_flags = _borrow(logits, &flags)
                if not (have_flags and flags.ndim == 1 and flags.shape[0] == n
                        and (flags.itemsize == 1 and flags.format[0] in b"?bB" or _holds_int32(&flags))):
                    return False
            # Views of the old rows may be in use.
            self.n = 0
            self.move(n, width)
            if n == 0:
                return True  # empty columns may have no address
            memcpy(self.tokens, token.data(), n * sizeof(int32_t))
            memcpy(self.positions, position.data(), n * sizeof(int32_t))
            if one:
                self.in_one_sequence(0, n, s)
            else:
                memcpy(self.seq_ids, seqs.buf, n * width * sizeof(int32_t))
                for i in range(n):
                    self.counts[i] = <int32_t>width
            memset(self.flags, logits is True, n)
            if have_flags:
                for i in range(n):
                    memcpy(&flag, <char*>flags.buf + i * flags.itemsize, flags.itemsize)
                    self.flags[i] = flag != 0
            self.n = n
        finally:
            if have_seqs:
                PyBuffer_Release(&seqs)
            if have_flags:
                PyBuffer_Release(&flags)
        return True

    # Views -----------------------------------------------------------------------------

    cdef object view(self, const void* data, object dtype, Py_ssize_t n):
        if n == 0:
            nothing = np.empty(0, dtype)
            nothing.flags.writeable = False
            return nothing
        block = memoryview(self.block).toreadonly()
        return np.frombuffer(block, dtype, n, <const char*>data - <const char*>self.tokens)

    @property
    def token(self):
        return self.view(self.tokens, _INT32, self.n)

    @property
    def pos(self):
        return self.view(self.positions, _INT32, self.n)

    @property
    def n_seq_id(self):
        return self.view(self.counts, _INT32, self.n)

    @property
    def seq_id(self):
        return self.view(self.seq_ids, _INT32, self.n * self.width).reshape(self.n, self.width)

    @property
    def logits(self):
        return self.view(self.flags, _INT8, self.n)


def _rows_of(Py_ssize_t n, Py_ssize_t width, bytes data not None):
    cdef Rows rows = Rows(n, width)
    cdef const char* at = data
    if len(data) != n * (ROW_BYTES + <Py_ssize_t>sizeof(int32_t) * width):
        raise ArgumentError("these are not the rows of a batch")
    # Without spare room the columns are contiguous, as pickled.
    memcpy(rows.tokens, at, len(data))
    rows.n = n
    return rows
