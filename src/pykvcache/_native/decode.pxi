# Batches in, logits and embeddings out.

cdef class Context(Memory):
    """``llama_decode``, ``llama_encode`` and what they leave behind."""

    # Scratch for the C batch; n_seq_id and pointers for tokens of one sequence each.
    cdef vector[int32_t] pos
    cdef vector[int32_t] n_seq_id
    cdef vector[int32_t*] seq_ptr
    cdef vector[int8_t] flags
    cdef int32_t one_seq
    # Where the outputs of the last decode are: batch indices in order, the first of
    # the part that llama.cpp still holds, and the rows of earlier parts.
    cdef vector[int32_t] outputs
    cdef int32_t part_start
    cdef list kept_logits
    cdef list kept_embeddings
    cdef bint pooled
    # Encoder-decoder models: which sequences the encoder has seen.
    cdef bint encoded[MAX_SEQ]
    cdef readonly object tokens_evaluated
    # Next position and history of each sequence while a batch is checked.
    cdef int64_t expect[MAX_SEQ]
    cdef uint64_t history[MAX_SEQ]

    def __cinit__(self, Model model not None, dict params not None):
        self.tokens_evaluated = 0
        self.forget_outputs()

    cdef void forget_outputs(self):
        self.outputs.clear()
        self.kept_logits = None
        self.kept_embeddings = None
        self.pooled = False
        self.part_start = 0

    # Checks --------------------------------------------------------------------------

    cdef int check_seq_for_decode(self, int32_t seq) except -1:
        if self.poisoned[seq]:
            raise DecodeError(
                f"sequence {seq} holds the rest of an aborted decode: remove all of it first")
        if self.model.has_encoder and self.model.has_decoder and not self.encoded[seq]:
            raise DecodeError(f"encode() the input of sequence {seq} before decoding")
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
        if not self.causal or (self.embeddings and self.pooling_type != 0):
            if n > self.n_ubatch:
                raise InvalidBatch(
                    f"{n} tokens must be computed at once, and n_ubatch is {self.n_ubatch}: "
                    "create the context with a larger n_batch and n_ubatch")
            limit = self.n_ubatch
        return <int32_t>limit

    # Tokens of one sequence ----------------------------------------------------------

    def decode_tokens(self, const int32_t[::1] tokens not None, seq_id):
        """Append tokens to a sequence; logits for the last one."""
        cdef Py_ssize_t i, n = tokens.shape[0]
        cdef int32_t seq = _seq(seq_id, self.n_seq_max), part, limit, code = 0
        cdef int64_t first, done_so_far = 0
        cdef lib.llama_batch batch
        self.enter()
        try:
            self.usable()
            if n == 0:
                raise InvalidBatch("there is no token to decode")
            for i in range(n):
                if tokens[i] < 0 or tokens[i] >= self.n_vocab:
                    raise InvalidBatch(f"token {tokens[i]} (at {i}) is outside [0, {self.n_vocab})")
            self.check_seq_for_decode(seq)
            first = self.next_pos(seq)
            self.check_span(first, n)
            limit = self.part_limit(n)
            self.one_seq = seq
            part = <int32_t>min(n, <Py_ssize_t>limit)
            self.reserve_scratch(part)
            self.forget_outputs()
            while done_so_far < n:
                part = <int32_t>min(<int64_t>limit, n - done_so_far)
                for i in range(part):
                    self.pos[i] = <int32_t>(first + done_so_far + i)
                    self.flags[i] = self.embeddings
                if done_so_far + part == n:
                    self.flags[part - 1] = 1
                batch.n_tokens = part
                batch.token = <int32_t*>&tokens[done_so_far]
                batch.embd = NULL
                batch.pos = self.pos.data()
                batch.n_seq_id = self.n_seq_id.data()
                batch.seq_id = self.seq_ptr.data()
                batch.logits = self.flags.data()
                code = self.run_decode(batch)
                if code != 0:
                    self.decode_failed(code, batch, done_so_far)
                if self.embeddings:
                    self.note_outputs(batch, <int32_t>done_so_far, done_so_far + part < n)
                done_so_far += part
                if done_so_far < n:
                    PyErr_CheckSignals()
            if not self.embeddings:
                self.outputs.push_back(<int32_t>(n - 1))
                self.part_start = <int32_t>(n - part)
        finally:
            self.lock.leave()

    cdef int reserve_scratch(self, size_t n) except -1:
        cdef size_t i, old = self.n_seq_id.size()
        if n > old:
            self.pos.resize(n)
            self.flags.resize(n)
            self.n_seq_id.resize(n)
            self.seq_ptr.resize(n)
            for i in range(old, n):
                self.n_seq_id[i] = 1
                self.seq_ptr[i] = &self.one_seq
        return 0

    cdef int32_t run_decode(self, lib.llama_batch batch) except? -1:
        cdef int32_t code
        cdef bint fresh = self.kind == lib.MEMORY_RECURRENT
        if fresh:
            self.note_fresh(batch)
        self.abort_flag.begin()
        with nogil:
            lib.begin_notes()
            code = lib.decode(self.ctx, batch)
        self.abort_flag.end()
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
        self.forget_outputs()
        if code == lib.CAUGHT:
            raise self.fail("decode")
        notes = _notes()
        if code != -1 and code != 1 and self.is_recurrent_like():
            for i in range(batch.n_tokens):
                for j in range(batch.n_seq_id[i]):
                    damaged.add(batch.seq_id[i][j])
        if code == 1:
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

    # Batches -------------------------------------------------------------------------

    def decode_batch(
            self, const int32_t[::1] token not None, const int32_t[::1] pos not None,
            const int32_t[::1] n_seq_id not None, const int32_t[:, ::1] seq_id not None,
            const int8_t[::1] logits not None):
        """Decode tokens of several sequences, in parts where they are more than n_batch."""
        cdef Py_ssize_t i, n = token.shape[0], start = 0
        cdef int32_t limit, part, code
        cdef lib.llama_batch batch
        cdef vector[int32_t*] pointers
        cdef vector[int8_t] flags
        self.enter()
        try:
            self.usable()
            self.check_batch(token, pos, n_seq_id, seq_id, False)
            limit = self.part_limit(n)
            pointers.resize(n)
            flags.resize(n)
            for i in range(n):
                pointers[i] = <int32_t*>&seq_id[i, 0]
                flags[i] = 1 if self.embeddings or logits[i] else 0
            self.forget_outputs()
            while start < n:
                part = <int32_t>min(<Py_ssize_t>limit, n - start)
                batch.n_tokens = part
                batch.token = <int32_t*>&token[start]
                batch.embd = NULL
                batch.pos = <int32_t*>&pos[start]
                batch.n_seq_id = <int32_t*>&n_seq_id[start]
                batch.seq_id = pointers.data() + start
                batch.logits = flags.data() + start
                code = self.run_decode(batch)
                if code != 0:
                    self.decode_failed(code, batch, start)
                self.note_outputs(batch, <int32_t>start, start + part < n)
                start += part
                if start < n:
                    PyErr_CheckSignals()
        finally:
            self.lock.leave()

    cdef int check_batch(
            self, const int32_t[::1] token, const int32_t[::1] pos, const int32_t[::1] n_seq_id,
            const int32_t[:, ::1] seq_id, bint encoding) except -1:
        """Everything that llama.cpp would abort on, misread or get wrong."""
        cdef Py_ssize_t i, n = token.shape[0]
        cdef int32_t j, k, s, width = <int32_t>seq_id.shape[1]
        cdef int64_t first
        if n == 0:
            raise InvalidBatch("the batch holds no token")
        if pos.shape[0] != n or n_seq_id.shape[0] != n or seq_id.shape[0] != n:
            raise InvalidBatch("the arrays of the batch differ in length")
        for s in range(MAX_SEQ):
            self.expect[s] = -1
        for i in range(n):
            if token[i] < 0 or token[i] >= self.n_vocab:
                raise InvalidBatch(f"token {token[i]} (at {i}) is outside [0, {self.n_vocab})")
            if n_seq_id[i] < 1 or n_seq_id[i] > width:
                raise InvalidBatch(f"token at {i} belongs to {n_seq_id[i]} sequences: 1 to {width} are possible")
            for j in range(n_seq_id[i]):
                s = seq_id[i, j]
                if s < 0 or s >= <int32_t>self.n_seq_max:
                    raise SequenceIdError(s, self.n_seq_max)
                for k in range(j):
                    if seq_id[i, k] == s:
                        raise InvalidBatch(f"token at {i} names sequence {s} twice")
                if self.expect[s] < 0:
                    if not encoding:
                        self.check_seq_for_decode(s)
                    first = self.next_pos(s)
                    if encoding or first == 0:
                        # An empty sequence may begin anywhere.
                        first = pos[i]
                        if first < 0:
                            raise InvalidBatch(f"position {first} (at {i}) is negative")
                        if self.kind == lib.MEMORY_OTHER and first != 0:
                            raise InvalidBatch(f"sequence {s} is empty and must begin at 0, not {first}")
                    self.expect[s] = first
                    self.history[s] = 0
                if pos[i] != self.expect[s]:
                    raise InvalidBatch(
                        f"position {pos[i]} (at {i}) does not continue sequence {s}: {self.expect[s]} is next")
                self.expect[s] += 1
                self.check_span(pos[i], 1)
            if n_seq_id[i] > 1:
                self.check_coupled(seq_id, i, n_seq_id[i])
            for j in range(n_seq_id[i]):
                s = seq_id[i, j]
                self.history[s] = self.history[s] * 1000003 + <uint64_t>(i + 1)
        return 0

    cdef int check_coupled(self, const int32_t[:, ::1] seq_id, Py_ssize_t i, int32_t n) except -1:
        """A token of several sequences is computed once, over the cells of the first of them."""
        cdef int32_t j, s, a = seq_id[i, 0]
        if self.streams or self.is_recurrent_like() or self.kind == lib.MEMORY_OTHER:
            raise UnsupportedOperation(
                "decode", f"token at {i} belongs to several sequences, which needs kv_unified=True "
                "and a memory without recurrent state")
        for j in range(1, n):
            s = seq_id[i, j]
            if self.kind == lib.MEMORY_NONE:
                continue
            if self.history[s] != self.history[a] or not lib.same_cells(self.mem, a, s):
                raise InvalidBatch(
                    f"token at {i} belongs to sequences {a} and {s}, which have diverged")
        return 0

    cdef int note_outputs(self, lib.llama_batch batch, int32_t start, bint more) except -1:
        """Remember which tokens have outputs; rows that the next part overwrites are kept."""
        cdef int32_t i
        self.part_start = start
        for i in range(batch.n_tokens):
            if batch.logits[i]:
                self.outputs.push_back(start + i)
                if more:
                    self.keep_row(i)
        return 0

    cdef int keep_row(self, int32_t i) except -1:
        if self.kept_logits is None:
            self.kept_logits = []
            self.kept_embeddings = []
        row = self.copy_row(lib.logits_ith(self.ctx, i), self.n_vocab)
        self.kept_logits.append(row)
        self.kept_embeddings.append(
            self.copy_row(lib.embeddings_ith(self.ctx, i), self.n_embd_out) if self.embeddings else None)
        return 0

    # Encoder -------------------------------------------------------------------------

    def encode(
            self, const int32_t[::1] token not None, const int32_t[::1] pos not None,
            const int32_t[::1] n_seq_id not None, const int32_t[:, ::1] seq_id not None):
        """Run ``llama_encode`` over a whole batch at once."""
        cdef Py_ssize_t i, n = token.shape[0]
        cdef int32_t code, j
        cdef lib.llama_batch batch
        cdef vector[int32_t*] pointers
        cdef vector[int8_t] flags
        self.enter()
        try:
            self.usable()
            if not (self.model.has_encoder or self.kind == lib.MEMORY_NONE):
                raise UnsupportedOperation("encode", "the model has no encoder: use decode()")
            self.check_batch(token, pos, n_seq_id, seq_id, True)
            if n > self.n_ubatch:
                raise InvalidBatch(
                    f"{n} tokens must be encoded at once, and n_ubatch is {self.n_ubatch}: "
                    "create the context with a larger n_batch and n_ubatch")
            pointers.resize(n)
            flags.resize(n)
            for i in range(n):
                pointers[i] = <int32_t*>&seq_id[i, 0]
                flags[i] = 1
            self.forget_outputs()
            batch.n_tokens = <int32_t>n
            batch.token = <int32_t*>&token[0]
            batch.embd = NULL
            batch.pos = <int32_t*>&pos[0]
            batch.n_seq_id = <int32_t*>&n_seq_id[0]
            batch.seq_id = pointers.data()
            batch.logits = flags.data()
            self.abort_flag.begin()
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
                for j in range(n_seq_id[i]):
                    self.encoded[seq_id[i, j]] = True
        finally:
            self.lock.leave()

    cdef int encode_failed(self, int32_t code) except -1:
        if code == lib.CAUGHT:
            raise self.fail("encode")
        if code == 2:
            raise DecodeAborted("the encode was aborted; nothing was stored", 2)
        raise DecodeError(f"llama_encode failed with code {code}: {_notes()}", code)

    # Outputs -------------------------------------------------------------------------

    cdef object copy_row(self, const float* row, int32_t n):
        if row == NULL:
            return None
        result = np.empty(n, dtype=np.float32)
        cdef float[::1] view = result
        memcpy(&view[0], row, n * sizeof(float))
        return result

    cdef int find_output(self, object i, str what) except -1:
        """Place of batch index i (from the end of the outputs if negative) in the outputs."""
        cdef int overflow = 0
        cdef long long index = _index(i, "index", &overflow)
        cdef Py_ssize_t n = <Py_ssize_t>self.outputs.size(), a, b, middle
        if n == 0:
            raise IndexError(f"there are no {what}: nothing was decoded, or the last decode failed")
        if not overflow and index < 0 and index >= -n:
            return <int>(n + index)
        a = 0
        b = n
        while a < b:
            middle = (a + b) // 2
            if self.outputs[middle] < index:
                a = middle + 1
            else:
                b = middle
        if overflow or a == n or self.outputs[a] != index:
            raise IndexError(
                f"token {i} of the last decode has no {what}: {n} of its tokens asked for them")
        return <int>a

    cdef object row(self, int place, bint embeddings):
        cdef list kept = self.kept_embeddings if embeddings else self.kept_logits
        cdef int32_t i
        if kept is not None and place < len(kept):
            return None if kept[place] is None else kept[place].copy()
        i = self.outputs[place] - self.part_start
        if embeddings:
            return self.copy_row(lib.embeddings_ith(self.ctx, i), self.n_embd_out)
        return self.copy_row(lib.logits_ith(self.ctx, i), self.n_vocab)

    def logits(self, i):
        """Copy one row of logits."""
        self.enter()
        try:
            self.usable()
            if self.kind == lib.MEMORY_NONE and not self.model.has_decoder:
                raise UnsupportedOperation("logits", "this model gives embeddings only")
            result = self.row(self.find_output(i, "logits"), False)
            if result is None:
                raise IndexError(f"token {i} of the last decode has no logits")
            return result
        finally:
            self.lock.leave()

    def token_embeddings(self, i):
        """Copy one row of embeddings."""
        self.enter()
        try:
            self.usable()
            if not self.embeddings:
                raise UnsupportedOperation("embeddings", "create the context with embeddings=True")
            result = self.row(self.find_output(i, "embeddings"), True)
            if result is None:
                raise IndexError(
                    f"token {i} of the last decode has no embeddings of its own: "
                    "they were pooled, see seq_embeddings()")
            return result
        finally:
            self.lock.leave()

    def seq_embeddings(self, seq_id):
        """Copy the pooled embedding of a sequence."""
        cdef int32_t seq = _seq(seq_id, self.n_seq_max)
        cdef int32_t n = self.n_embd_out if self.pooling_type != 4 else self.model.facts.n_cls_out
        self.enter()
        try:
            self.usable()
            if not self.embeddings or self.pooling_type == 0:
                raise UnsupportedOperation(
                    "seq_embeddings", "create the context with embeddings=True and a pooling_type")
            self.find_output(-1, "embeddings")
            result = self.copy_row(lib.embeddings_seq(self.ctx, seq), n)
            if result is None:
                raise IndexError(f"sequence {seq} was not in the last decode")
            return result
        finally:
            self.lock.leave()
