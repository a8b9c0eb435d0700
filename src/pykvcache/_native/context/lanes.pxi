# Tokens of sequences, and the writers that choose a token and append it in one call.

cdef object _now = time.perf_counter
cdef uint64_t _n_writers = 0


cdef class Tokens:
    """Growing array of tokens, with the number that the memory holds and their prefix version.

    `seq_id` is the sequence that holds them, -1 for none. `writer` is the last `Writer` that appended.

    With an activated adapter, tokens from `invoked_at` on are evaluated with it: there the last
    occurrence of its invocation tokens began when the caller last changed the tokens. Those of
    writers activate nothing. From `activated_at` on the memory was computed with it. -1: nowhere.
    """

    cdef object array
    cdef int32_t* data
    cdef Py_ssize_t n, room
    cdef object frozen
    cdef readonly uint64_t edits
    cdef uint64_t writer
    cdef vector[int32_t] invocation
    cdef public Py_ssize_t invoked_at
    cdef public Py_ssize_t activated_at
    cdef public Py_ssize_t n_evaluated
    cdef public uint64_t version
    cdef public int32_t seq_id

    def __cinit__(self, *args):
        self.seq_id = self.invoked_at = self.activated_at = -1

    def __init__(self, values=(), Py_ssize_t n_evaluated=0):
        self.append(values)
        self.n_evaluated = n_evaluated

    def __len__(self):
        return self.n

    @property
    def tokens(self):
        """All tokens, read-only; later edits do not change a returned array."""
        cdef uint64_t edits = self.edits
        frozen = self.frozen
        if frozen is None:
            frozen = self.part(0, self.n).copy()
            frozen.flags.writeable = False
            # Another thread may have appended while NumPy copied.
            if edits == self.edits:
                self.frozen = frozen
        return frozen

    @property
    def n_base(self):
        return self.n if self.invoked_at < 0 else self.invoked_at

    @property
    def is_active(self):
        return self.next_is_active()

    cdef bint next_is_active(self) noexcept:
        return 0 <= self.invoked_at <= self.n_evaluated

    def same_until(self, Py_ssize_t end):
        """Return how far, up to `end`, tokens are evaluated with the same adapters as the next one."""
        return self.invoked_at if self.n_evaluated < self.invoked_at < end else end

    def set_invocation(self, tuple tokens not None):
        self.invocation = tokens
        self.find_invocation()

    cdef void find_invocation(self) noexcept:
        cdef size_t n = self.invocation.size()
        cdef Py_ssize_t i
        self.invoked_at = -1
        if n == 0:
            return
        for i in range(self.n - <Py_ssize_t>n, -1, -1):
            if memcmp(self.data + i, self.invocation.data(), n * sizeof(int32_t)) == 0:
                self.invoked_at = i
                return

    def token_at(self, Py_ssize_t i):
        if i < 0 or i >= self.n:
            raise OutOfRangeError(
                f"there is no token {i}: there are {self.n}", what="token", value=i, limit=self.n - 1)
        return self.data[i]

    def part(self, Py_ssize_t begin, Py_ssize_t end):
        """Return a view of some tokens; valid until the next edit."""
        if self.room == 0:
            return _empty(0, _INT32)
        return self.array[begin:min(end, self.n)]

    def append(self, values):
        self.replace(self.n, values)

    def replace(self, Py_ssize_t begin, values):
        cdef vector[int32_t] more
        if not _plain_ints(values, more):
            _plain_ints(np.ascontiguousarray(values, _INT32), more)
        self.put_all(max(0, min(begin, self.n)), more)

    def append_plain(self, values, int32_t n_vocab):
        """Append token ids; return False and do nothing unless all are plain ints of the vocabulary."""
        cdef vector[int32_t] more
        cdef int32_t token
        if not _plain_ints(values, more):
            return False
        for token in more:
            if not 0 <= token < n_vocab:
                return False
        self.put_all(self.n, more)
        return True

    cdef int put_all(self, Py_ssize_t begin, vector[int32_t]& more) except -1:
        """Replace the tokens from `begin` on."""
        cdef Py_ssize_t count = <Py_ssize_t>more.size()
        self.reserve(begin + count)
        if count:
            memcpy(self.data + begin, more.data(), count * sizeof(int32_t))
        if count or begin < self.n:
            self.n = begin + count
            self.edited()
        return 0

    cdef void put(self, int32_t token) noexcept:
        self.data[self.n] = token
        self.n += 1
        self.changed()

    cdef void edited(self) noexcept:
        self.changed()
        self.find_invocation()

    cdef void changed(self) noexcept:
        self.edits += 1
        self.frozen = None

    cdef int reserve(self, Py_ssize_t n) except -1:
        cdef int32_t* data
        if n <= self.room:
            return 0
        n = max(16, n, 2 * self.room)
        grown = _empty(n, _INT32)
        data = <int32_t*>_address(grown)
        if self.n:
            memcpy(data, self.data, self.n * sizeof(int32_t))
        self.data = data
        self.array = grown  # views keep the old one
        self.room = n
        return 0


cdef class Writer:
    """Appends a sampler's tokens to a sequence; of several writers only the newest may continue."""

    cdef readonly Tokens ledger
    cdef Sampler sampler
    cdef uint64_t name
    cdef readonly Py_ssize_t n_written
    cdef readonly int32_t last

    def __cinit__(self, Tokens ledger not None, Sampler sampler not None, *args):
        global _n_writers
        _n_writers += 1
        self.name = _n_writers
        self.ledger = ledger
        self.sampler = sampler

    @property
    def is_overtaken(self):
        """Whether another writer has appended since this one did."""
        return self.was_overtaken()

    cdef bint was_overtaken(self) noexcept:
        return self.n_written > 0 and self.ledger.writer != self.name

    def write(self, Decoding ctx not None, const float[::1] row not None):
        """Choose a token from logits and append it; return False for an end token, which is not appended."""
        cdef int32_t code, token = 0, n = self.sampler.check_row(ctx, row)
        self.ledger.reserve(self.ledger.n + 1)
        code = self.sampler.choose(row, &token)
        if code != lib.CHOSEN:
            raise self.sampler.problem(code, False)
        self.sampler.n_vocab = n
        ctx.check_open()  # it may have been closed since the logits were taken
        if ctx.ends_text(token):
            return False
        self.put(token)
        return True

    cdef void put(self, int32_t token) noexcept:
        self.ledger.put(token)
        self.ledger.writer = self.name
        self.n_written += 1
        self.last = token


@cython.final
cdef class Lane(Writer):
    """One request: its tokens, its sampler and its results."""

    cdef frozenset stops
    cdef Py_ssize_t most
    cdef bint watched, keeps_rows
    cdef object row
    cdef readonly list tokens
    cdef readonly list times
    cdef readonly list rows
    cdef readonly bint is_over
    cdef readonly object error

    def __cinit__(self, Tokens ledger not None, Sampler sampler not None, Py_ssize_t most,
                  frozenset stops not None, bint watched, bint keeps_rows):
        self.most = most
        self.stops = stops
        self.watched = watched
        self.keeps_rows = keeps_rows
        self.tokens = []
        self.times = []
        self.rows = []

    @property
    def is_full(self):
        return len(self.tokens) >= self.most

    cdef bint is_worth_a_look(self) except -1:
        """Whether Python must look at it: it is over, failed, full or at a possible stop token."""
        cdef Py_ssize_t n = len(self.tokens)
        if self.watched or self.is_over or self.error is not None or n >= self.most:
            return True
        return n and len(self.stops) and self.tokens[n - 1] in self.stops

    def take(self, Decoding ctx not None, row not None):
        """Choose a token from logits and append it; None if that ends the request, see `error`."""
        cdef const float[::1] logits = row
        cdef int32_t code, token = 0
        try:
            self.sampler.check_row(ctx, logits)
        except (ValueError, IndexError) as error:
            self.error = error
            return None
        self.ledger.reserve(self.ledger.n + 1)
        code = self.sampler.it.choose(&logits[0], <int32_t>logits.shape[0], self.sampler.candidates, token)
        return token if self.chose(ctx, code, token, row if self.keeps_rows else None, _now()) else None

    cdef bint chose(self, Decoding ctx, int32_t code, int32_t token, object row, object now) except -1:
        """Record the result of a choice; return whether it is a token, which is then appended."""
        if code != lib.CHOSEN:
            if code == lib.CHOICE_NAN or code == lib.CHOICE_INFINITE:
                ctx.seqs.suspect()
            self.error = self.sampler.problem(code, False)
            return False
        try:
            ctx.check_open()
            if ctx.ends_text(token):
                self.is_over = True
                return False
            self.ledger.reserve(self.ledger.n + 1)  # the room reserved before the decode may be used up
            # Its row and time come first, so that an appended token is always complete.
            if row is not None:
                self.rows.append(row)
            self.times.append(now)
            self.tokens.append(token)
        except ClosedError as error:
            # The sampler has accepted the token, which is lost.
            self.error = error
            return False
        self.put(token)
        return True
