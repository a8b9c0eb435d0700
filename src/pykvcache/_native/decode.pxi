# Batches: what llama.cpp would abort on, misread or get wrong is refused before the call.

cdef class Context(Outputs):
    """``llama_decode`` and ``llama_encode`` behind checks."""

    # The batch as it was checked: another thread may change the caller's arrays meanwhile.
    cdef vector[int32_t] token
    cdef vector[int32_t] pos
    cdef vector[int32_t] n_seq_id
    cdef vector[int32_t] seq_ids
    cdef vector[int32_t*] seq_ptr
    cdef vector[int8_t] flags
    # Encoder-decoder models: which sequences the encoder has seen.
    cdef bint encoded[MAX_SEQ]
    cdef readonly object tokens_evaluated
    # Next position and history of each sequence while a batch is checked.
    cdef int64_t expect[MAX_SEQ]
    cdef uint64_t history[MAX_SEQ]

    def __cinit__(self, Model model not None, dict params not None):
        self.tokens_evaluated = 0

    # Checks --------------------------------------------------------------------------

    cdef int check_seq_for_decode(self, int32_t seq) except -1:
        if self.poisoned[seq]:
            raise DecodeError(
                f"sequence {seq} holds the rest of an aborted decode: remove all of it first")
        if self.model.has_encoder and self.model.has_decoder and not self.encoded[seq]:
            raise DecodeError(
                f"the last encode() was not for sequence {seq}: empty it and encode its input first")
        return 0

    cdef int check_span(self, int64_t first, int64_t n) except -1:
        """Positions ``[first, first + n)`` must exist for the model and fit an int32."""
        if first + n > INT32_MAX - 1:
            raise InvalidBatch(f"position {first + n - 1} is past the limit {INT32_MAX - 2}")
        if self.model.facts.learned_positions and first + n > self.model.n_ctx_train:
            raise InvalidBatch(
                f"position {first + n - 1} is past the model's table of {self.model.n_ctx_train} positions")
        if self.kind == lib.MEMORY_OTHER and first + n > self.n_ctx_seq:
            raise InvalidBatch(f"position {first + n - 1} is outside the context of {self.n_ctx_seq}")
        return 0

    cdef int32_t part_limit(self, int64_t n) except -1:
        """How many tokens one call may take."""
        cdef int64_t limit = self.n_batch
        # A cache with a window may not lose cells in a batch that then does not fit.
        if self.kind == lib.MEMORY_SLIDING_WINDOW or self.kind == lib.MEMORY_HYBRID_SLIDING_WINDOW:
            limit = self.n_ubatch
        if (not self.causal or self.kind == lib.MEMORY_NONE
                or (self.embeddings and self.pooling_type != 0)):
            if n > self.n_ubatch:
                raise InvalidBatch(
                    f"{n} tokens must be computed at once, and n_ubatch is {self.n_ubatch}: "
                    "create the context with a larger n_batch and n_ubatch")
            limit = self.n_ubatch
        return <int32_t>limit

    # Decode --------------------------------------------------------------------------

    def decode_tokens(self, const int32_t[::1] tokens not None, seq_id, bint want_row):
        """Append tokens to a sequence; returns the logits of the last one if they are wanted."""
        cdef Py_ssize_t i, n = tokens.shape[0]
        cdef int32_t seq = _seq(seq_id, self.n_seq_max)
        cdef int64_t first
        self.enter()
        try:
            self.usable()
            if n == 0:
                raise InvalidBatch("there is no token to decode")
            self.make_room(n, 1)
            self.check_seq_for_decode(seq)
            first = self.next_pos(seq)
            self.check_span(first, n)
            for i in range(n):
                self.token[i] = tokens[i]
                if self.token[i] < 0 or self.token[i] >= self.n_vocab:
                    raise InvalidBatch(f"token {self.token[i]} (at {i}) is outside [0, {self.n_vocab})")
                self.pos[i] = <int32_t>(first + i)
                self.n_seq_id[i] = 1
                self.seq_ids[i] = seq
                self.flags[i] = self.embeddings
            self.flags[n - 1] = 1
            self.run_parts(n, 1)
            # In the same hold of the lock: another thread may decode right after it.
            return self.checked_row(-1) if want_row else None
        finally:
            self.lock.leave()

    def decode_batch(
            self, const int32_t[::1] token not None, const int32_t[::1] pos not None,
            const int32_t[::1] n_seq_id not None, const int32_t[:, ::1] seq_id not None,
            const int8_t[::1] logits not None):
        """Decode tokens of several sequences, in parts where they are more than n_batch."""
        self.enter()
        try:
            self.usable()
            self.load_batch(token, pos, n_seq_id, seq_id, logits)
            self.check_batch(token.shape[0], <int32_t>seq_id.shape[1], False)
            self.run_parts(token.shape[0], <int32_t>seq_id.shape[1])
        finally:
            self.lock.leave()

    cdef int make_room(self, size_t n, size_t width) except -1:
        if n > INT32_MAX - 1:
            raise InvalidBatch(f"{n} tokens are too many for one batch")
        self.token.resize(n)
        self.pos.resize(n)
        self.n_seq_id.resize(n)
        self.seq_ids.resize(n * width)
        self.seq_ptr.resize(n)
        self.flags.resize(n)
        return 0

    cdef int load_batch(
            self, const int32_t[::1] token, const int32_t[::1] pos, const int32_t[::1] n_seq_id,
            const int32_t[:, ::1] seq_id, const int8_t[::1] logits) except -1:
        """Copy the caller's arrays; ``logits`` is None where every token gives an output."""
        cdef size_t n = token.shape[0], width = seq_id.shape[1], i
        cdef bint every = self.embeddings or logits is None
        if n == 0 or width == 0:
            raise InvalidBatch("the batch holds no token")
        if (<size_t>pos.shape[0] != n or <size_t>n_seq_id.shape[0] != n
                or <size_t>seq_id.shape[0] != n
                or (logits is not None and <size_t>logits.shape[0] != n)):
            raise InvalidBatch("the arrays of the batch differ in length")
        self.make_room(n, width)
        memcpy(self.token.data(), &token[0], n * sizeof(int32_t))
        memcpy(self.pos.data(), &pos[0], n * sizeof(int32_t))
        memcpy(self.n_seq_id.data(), &n_seq_id[0], n * sizeof(int32_t))
        memcpy(self.seq_ids.data(), &seq_id[0, 0], n * width * sizeof(int32_t))
        for i in range(n):
            self.flags[i] = every or logits[i] != 0
        return 0

    cdef lib.llama_batch part(self, size_t start, int32_t n, size_t width) noexcept:
        """A view of the checked arrays as C wants it."""
        cdef lib.llama_batch batch
        cdef size_t i
        for i in range(start, start + n):
            self.seq_ptr[i] = self.seq_ids.data() + i * width
        batch.n_tokens = n
        batch.token = self.token.data() + start
        batch.embd = NULL
        batch.pos = self.pos.data() + start
        batch.n_seq_id = self.n_seq_id.data() + start
        batch.seq_id = self.seq_ptr.data() + start
        batch.logits = self.flags.data() + start
        return batch

    cdef int run_parts(self, int64_t n, int32_t width) except -1:
        """Decode the checked arrays in as few calls as the context allows."""
        cdef int64_t limit = self.part_limit(n), start = 0
        cdef int32_t size, code
        cdef lib.llama_batch batch
        self.forget_outputs()
        self.abort_flag.begin()
        try:
            self.settle()
            self.abort_flag.arm(True)
            while start < n:
                size = <int32_t>min(limit, n - start)
                batch = self.part(start, size, width)
                code = self.run_decode(batch)
                if code != 0:
                    self.decode_failed(code, batch, start)
                self.note_outputs(batch, <int32_t>start, start + size < n)
                start += size
                if start < n:
                    PyErr_CheckSignals()
                    self.check_wanted(start)
        except BaseException:
            self.forget_outputs()
            raise
        finally:
            self.abort_flag.end()
        return 0

    cdef int check_wanted(self, int64_t start) except -1:
        """Stop between two parts, where nothing is half done."""
        if self.abort_flag.is_wanted():
            raise DecodeAborted(
                f"the decode was aborted; {start} tokens of this call were decoded before and stay", 2)
        return 0

    cdef int32_t run_decode(self, lib.llama_batch batch) except? -1:
        cdef int32_t code
        if self.kind == lib.MEMORY_RECURRENT:
            self.note_fresh(batch)
        with nogil:
            lib.begin_notes()
            code = lib.decode(self.ctx, batch)
        if lib.has_log():
            _drain_log()
        if code == 0:
            self.tokens_evaluated += batch.n_tokens
        return code

    cdef void note_fresh(self, lib.llama_batch batch) noexcept:
        """Remember where sequences begin whose memory cannot tell later."""
        cdef int32_t i, lo = 0, hi = 0
        for i in range(batch.n_tokens - 1, -1, -1):
            if not lib.extent(self.mem, batch.seq_id[i][0], lo, hi):
                lib.note_first(self.mem, batch.seq_id[i][0], batch.pos[i])

    cdef int decode_failed(self, int32_t code, lib.llama_batch batch, int64_t done_so_far) except -1:
        """Raise what a non-zero code means; what is left in the sequences is said."""
        cdef int32_t i, j, s
        cdef set damaged = set()
        if code == lib.CAUGHT:
            raise self.fail("decode")
        notes = _notes()
        if code != -1 and code != 1 and self.is_recurrent_like():
            for i in range(batch.n_tokens):
                for j in range(batch.n_seq_id[i]):
                    damaged.add(batch.seq_id[i][j])
        if code != -1 and self.kind != lib.MEMORY_NONE:
            # Finding room for a batch in vain may have cost a window its cells.
            for s in range(self.n_seq_max):
                if not lib.window_intact(self.mem, s, self.next_pos(s)):
                    damaged.add(s)
        for s in damaged:
            self.poisoned[s] = True
        left = f"; {done_so_far} tokens of this call were decoded before and stay" if done_so_far else ""
        if damaged:
            left += f"; sequences {sorted(damaged)} cannot go on: remove all of each"
        if code == 1:
            raise NoKvCacheSlot(
                f"no room in the cache for {batch.n_tokens} more tokens (n_ctx is {self.n_ctx})" + left, 1)
        if code == 2:
            raise DecodeAborted("the decode was aborted" + (
                left or "; the positions of each sequence tell what is left"), 2)
        if code == -1:
            raise InvalidBatch(f"llama.cpp refused the batch: {notes}" + left, -1)
        raise DecodeError(f"llama_decode failed with code {code}: {notes}" + left, code)

    # Checks of a batch ---------------------------------------------------------------

    cdef int check_batch(self, Py_ssize_t n, int32_t width, bint encoding) except -1:
        """Everything that llama.cpp would abort on, misread or get wrong."""
        cdef Py_ssize_t i
        cdef int32_t j, k, s
        cdef const int32_t* seqs
        for s in range(MAX_SEQ):
            self.expect[s] = -1
        for i in range(n):
            if self.token[i] < 0 or self.token[i] >= self.n_vocab:
                raise InvalidBatch(f"token {self.token[i]} (at {i}) is outside [0, {self.n_vocab})")
            if self.n_seq_id[i] < 1 or self.n_seq_id[i] > width:
                raise InvalidBatch(
                    f"token at {i} belongs to {self.n_seq_id[i]} sequences: 1 to {width} are possible")
            seqs = self.seq_ids.data() + i * width
            for j in range(self.n_seq_id[i]):
                s = seqs[j]
                if s < 0 or s >= <int32_t>self.n_seq_max:
                    raise SequenceIdError(s, self.n_seq_max)
                for k in range(j):
                    if seqs[k] == s:
                        raise InvalidBatch(f"token at {i} names sequence {s} twice")
                if self.expect[s] < 0:
                    self.expect[s] = self.first_of_batch(s, i, encoding)
                    self.history[s] = 0
                if self.pos[i] != self.expect[s]:
                    raise InvalidBatch(
                        f"position {self.pos[i]} (at {i}) does not continue sequence {s}: "
                        f"{self.expect[s]} is next")
                self.expect[s] += 1
            self.check_span(self.pos[i], 1)
            if self.n_seq_id[i] > 1:
                self.check_coupled(seqs, i, self.n_seq_id[i])
            for j in range(self.n_seq_id[i]):
                s = seqs[j]
                self.history[s] = self.history[s] * 1000003 + <uint64_t>(i + 1)
        return 0

    cdef int64_t first_of_batch(self, int32_t s, Py_ssize_t i, bint encoding) except -1:
        """The position that the first token of a sequence in the batch must have."""
        cdef int64_t first = self.next_pos(s)
        if encoding:
            if first > 0:
                raise InvalidBatch(
                    f"sequence {s} holds tokens that were decoded for another input: remove them first")
        else:
            self.check_seq_for_decode(s)
        if first > 0:
            return first
        # An empty sequence may begin anywhere.
        if self.pos[i] < 0:
            raise InvalidBatch(f"position {self.pos[i]} (at {i}) is negative")
        if self.kind == lib.MEMORY_OTHER and self.pos[i] != 0:
            raise InvalidBatch(f"sequence {s} is empty and must begin at 0, not {self.pos[i]}")
        return self.pos[i]

    cdef int check_coupled(self, const int32_t* seqs, Py_ssize_t i, int32_t n) except -1:
        """A token of several sequences is computed once, over the cells of the first of them."""
        cdef int32_t j, s, a = seqs[0]
        if self.streams or self.is_recurrent_like() or self.kind == lib.MEMORY_OTHER:
            raise UnsupportedOperation(
                "decode", f"token at {i} belongs to several sequences, which needs kv_unified=True "
                "and a memory without recurrent state")
        if self.kind == lib.MEMORY_NONE:
            return 0
        for j in range(1, n):
            s = seqs[j]
            if self.history[s] != self.history[a] or not lib.same_cells(self.mem, a, s):
                raise InvalidBatch(
                    f"token at {i} belongs to sequences {a} and {s}, which have diverged")
        return 0

    # Encoder -------------------------------------------------------------------------

    def encode(
            self, const int32_t[::1] token not None, const int32_t[::1] pos not None,
            const int32_t[::1] n_seq_id not None, const int32_t[:, ::1] seq_id not None):
        """Run ``llama_encode`` over a whole batch at once."""
        cdef Py_ssize_t i, n = token.shape[0]
        cdef int32_t code, j, width = <int32_t>seq_id.shape[1]
        cdef lib.llama_batch batch
        self.enter()
        try:
            self.usable()
            if not (self.model.has_encoder or self.kind == lib.MEMORY_NONE):
                raise UnsupportedOperation("encode", "the model has no encoder: use decode()")
            self.load_batch(token, pos, n_seq_id, seq_id, None)
            self.check_batch(n, width, True)
            if n > self.n_ubatch:
                raise InvalidBatch(
                    f"{n} tokens must be encoded at once, and n_ubatch is {self.n_ubatch}: "
                    "create the context with a larger n_batch and n_ubatch")
            self.forget_outputs()
            batch = self.part(0, <int32_t>n, width)
            self.abort_flag.begin()
            self.abort_flag.arm(True)
            with nogil:
                lib.begin_notes()
                code = lib.encode(self.ctx, batch)
            self.abort_flag.end()
            if lib.has_log():
                _drain_log()
            if code != 0:
                self.encode_failed(code)
            self.tokens_evaluated += n
            for j in range(MAX_SEQ):
                self.encoded[j] = False
            for i in range(n):
                self.outputs.push_back(<int32_t>i)
                for j in range(self.n_seq_id[i]):
                    self.encoded[self.seq_ids[i * width + j]] = True
        finally:
            self.lock.leave()

    cdef int encode_failed(self, int32_t code) except -1:
        if code == lib.CAUGHT:
            raise self.fail("encode")
        if code == 2:
            raise DecodeAborted("the encode was aborted; nothing was stored", 2)
        raise DecodeError(f"llama_encode failed with code {code}: {_notes()}", code)
