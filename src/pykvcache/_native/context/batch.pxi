# Batches: refuse input that llama.cpp would abort on, misread or compute wrong.

cdef class Batch(Outputs):
    """The batch of the context: copied from the caller, then checked."""

    # The checked copy: another thread may change the caller's arrays during the call.
    cdef vector[int32_t] token
    cdef vector[int32_t] pos
    cdef vector[int32_t] n_seq_id
    cdef vector[int32_t] seq_ids
    cdef vector[int32_t*] seq_ptr
    cdef vector[int8_t] flags
    cdef Py_ssize_t n_tokens
    cdef int32_t width  # sequence ids per token, of which n_seq_id count
    # Next position and history of each sequence, while checking a batch.
    cdef int64_t expect[MAX_SEQ]
    cdef uint64_t history[MAX_SEQ]

    cdef int make_room(self, size_t n, size_t width) except -1:
        if n > INT32_MAX - 1:
            raise InvalidBatch(
                f"{n} tokens are too many for one batch", value=n, limit=INT32_MAX - 1)
        self.token.resize(n)
        self.pos.resize(n)
        self.n_seq_id.resize(n)
        self.seq_ids.resize(n * width)
        self.seq_ptr.resize(n)
        self.flags.resize(n)
        self.n_tokens = <Py_ssize_t>n
        self.width = <int32_t>width
        return 0

    cdef int load_rows(self, Rows rows, bint encoding) except -1:
        """Copy the caller's rows, and check them. Of an encode every token outputs."""
        cdef size_t n = rows.n, width = rows.width, i
        cdef bint every = encoding or self.embeddings
        if n == 0:
            raise InvalidBatch("the batch holds no token")
        self.make_room(n, width)
        memcpy(self.token.data(), rows.tokens, n * sizeof(int32_t))
        memcpy(self.pos.data(), rows.positions, n * sizeof(int32_t))
        memcpy(self.n_seq_id.data(), rows.counts, n * sizeof(int32_t))
        memcpy(self.seq_ids.data(), rows.seq_ids, n * width * sizeof(int32_t))
        for i in range(n):
            self.flags[i] = every or rows.flags[i] != 0
        return self.check_batch(encoding)

    cdef int load_tokens(self, const int32_t* tokens, Py_ssize_t n, int32_t first, int32_t seq) except -1:
        """Copy tokens of one sequence to positions from `first` on, and check them; the last one outputs."""
        cdef Py_ssize_t i
        self.make_room(n, 1)
        memcpy(self.token.data(), tokens, n * sizeof(int32_t))
        for i in range(n):
            self.put_row(i, <int32_t>(first + i), seq, self.embeddings)
        self.flags[n - 1] = 1
        return self.check_batch(False)

    cdef void put_row(self, Py_ssize_t i, int32_t pos, int32_t seq, bint flag) noexcept:
        self.pos[i] = pos
        self.n_seq_id[i] = 1
        self.seq_ids[i] = seq
        self.flags[i] = flag

    cdef lib.llama_batch part(self, size_t start, int32_t n) noexcept:
        """Return the checked arrays as a ``llama_batch``."""
        cdef lib.llama_batch batch
        cdef size_t i
        for i in range(start, start + n):
            self.seq_ptr[i] = self.seq_ids.data() + i * self.width
        batch.n_tokens = n
        batch.token = self.token.data() + start
        batch.embd = NULL
        batch.pos = self.pos.data() + start
        batch.n_seq_id = self.n_seq_id.data() + start
        batch.seq_id = self.seq_ptr.data() + start
        batch.logits = self.flags.data() + start
        return batch

    # Checks --------------------------------------------------------------------------

    cdef int check_seq_for_decode(self, int32_t seq) except -1:
        if self.seqs.needs_removal(seq):
            raise DecodeError(
                f"sequence {seq} holds the rest of an aborted decode: remove all of it first",
                needs_removal=(seq,))
        if self.model.has_encoder and self.model.has_decoder and self.seqs.input_key(seq) == 0:
            raise DecodeError(
                f"the last encode() was not for sequence {seq}: empty it and encode its input first")
        return 0

    cdef int check_position(self, int64_t pos) except -1:
        """Refuse a position that the model cannot tell from others, or that has no cell."""
        if pos > self.traits.max_position:
            raise self.too_far(pos, "the batch")
        if self.traits.bounded and pos >= self.n_ctx_seq:
            raise NoKvCacheSlot(
                f"no room in the cache: position {pos} is past its {self.n_ctx_seq} cells; "
                "nothing was decoded", 1, n_tokens=1, n_cells=self.n_ctx_seq)
        return 0

    cdef int32_t part_limit(self) except -1:
        """Return the maximum number of tokens of one call."""
        cdef int64_t n = self.n_tokens, limit = self.n_batch
        # A batch that turns out not to fit must not have cost a window its cells.
        if self.traits.windowed:
            limit = self.n_ubatch
        if (not self.causal or self.traits.kind == lib.MEMORY_NONE
                or (self.embeddings and self.pooling_type != 0)):
            self.need_one_step("computed")
            self.check_equal_lengths()
            if self.part_size(0, n) < n:
                raise InvalidBatch(
                    "sequences that must be computed at once (pooled embeddings, non-causal attention) "
                    "must be decoded one at a time on a sliding window")
            limit = self.n_ubatch
        return <int32_t>limit

    cdef int need_one_step(self, str what) except -1:
        if self.n_tokens > self.n_ubatch:
            raise InvalidBatch(
                f"{self.n_tokens} tokens must be {what} at once, and n_ubatch is {self.n_ubatch}: "
                "create the context with a larger n_batch and n_ubatch",
                value=self.n_tokens, limit=self.n_ubatch)
        return 0

    cdef int check_equal_lengths(self) except -1:
        """Refuse sequences of unequal length where llama.cpp would split them but must not."""
        cdef int64_t counts[MAX_SEQ]
        cdef int32_t s
        if self.traits.whole_only and self.traits.has_layout:  # recurrent
            if self.embeddings or self.traits.n_stream == 1 and self.causal:
                return 0  # split by sequence, each one whole
        elif self.traits.n_stream == 1:
            return 0
        self.count_tokens(counts)
        for s in range(MAX_SEQ):
            if counts[s] and counts[s] != counts[self.seq_ids[0]]:
                raise InvalidBatch(
                    "sequences that must be computed at once (pooled embeddings, non-causal attention) "
                    "need equal lengths here: decode one at a time, or use kv_unified=True")
        return 0

    cdef void count_tokens(self, int64_t* counts) noexcept:
        """Count the tokens by their first sequence."""
        cdef Py_ssize_t i
        memset(counts, 0, MAX_SEQ * sizeof(int64_t))
        for i in range(self.n_tokens):
            counts[self.seq_ids[i * self.width]] += 1

    cdef int32_t part_size(self, int64_t start, int64_t n) noexcept:
        """Return how many of the next n tokens may go into one call.

        llama.cpp splits sequences of unequal length into steps, and a later step may
        reuse window cells that an earlier one still needs. So on a window a call holds
        tokens of one set of sequences, or one token of each sequence.
        """
        cdef int64_t same = 1, single = 0
        cdef bint seen[MAX_SEQ]
        cdef int32_t s
        if not self.traits.windowed:
            return <int32_t>n
        while same < n and self.same_sequences(start, start + same):
            same += 1
        for s in range(MAX_SEQ):
            seen[s] = False
        while single < n and self.n_seq_id[start + single] == 1:
            s = self.seq_ids[(start + single) * self.width]
            if seen[s]:
                break
            seen[s] = True
            single += 1
        same = max(same, single)
        # In an empty memory no cells can be lost.
        if same < n and start == 0 and n <= self.n_ubatch and self.is_empty_window():
            return <int32_t>n
        return <int32_t>same

    cdef bint is_empty_window(self) noexcept:
        """Return whether this is an empty unified cache with a window."""
        cdef int32_t s
        if self.traits.kind != lib.MEMORY_SLIDING_WINDOW or self.traits.n_stream > 1:
            return False
        for s in range(<int32_t>self.n_seq_max):
            if self.seqs.next_pos(s) != 0:
                return False
        return True

    cdef bint same_sequences(self, int64_t a, int64_t b) noexcept:
        cdef int32_t j
        if self.n_seq_id[a] != self.n_seq_id[b]:
            return False
        for j in range(self.n_seq_id[a]):
            if self.seq_ids[a * self.width + j] != self.seq_ids[b * self.width + j]:
                return False
        return True

    # Checks of a batch ---------------------------------------------------------------

    cdef int check_batch(self, bint encoding) except -1:
        """Refuse a batch that llama.cpp would abort on, misread or compute wrong."""
        cdef Py_ssize_t i
        cdef int32_t j, k, s
        cdef const int32_t* seqs
        for s in range(<int32_t>self.n_seq_max):
            self.expect[s] = -1
        for i in range(self.n_tokens):
            if self.token[i] < 0 or self.token[i] >= self.n_vocab:
                raise InvalidBatch(
                    f"token {self.token[i]} (at {i}) is outside [0, {self.n_vocab})",
                    index=i, value=self.token[i], limit=self.n_vocab - 1)
            if self.n_seq_id[i] < 1 or self.n_seq_id[i] > self.width:
                raise InvalidBatch(
                    f"token at {i} belongs to {self.n_seq_id[i]} sequences: 1 to {self.width} are possible",
                    index=i, value=self.n_seq_id[i], limit=self.width)
            seqs = self.seq_ids.data() + i * self.width
            for j in range(self.n_seq_id[i]):
                s = seqs[j]
                if s < 0 or s >= <int32_t>self.n_seq_max:
                    raise SequenceIdError(s, self.n_seq_max)
                for k in range(j):
                    if seqs[k] == s:
                        raise InvalidBatch(f"token at {i} names sequence {s} twice", index=i, value=s)
                if self.expect[s] < 0:
                    self.expect[s] = self.first_of_batch(s, i, encoding)
                    self.history[s] = 0
                if self.pos[i] != self.expect[s]:
                    raise InvalidBatch(
                        f"position {self.pos[i]} (at {i}) does not continue sequence {s}: "
                        f"{self.expect[s]} is next",
                        index=i, value=self.pos[i], limit=self.expect[s])
                self.expect[s] += 1
            self.check_position(self.pos[i])
            if self.n_seq_id[i] > 1:
                self.check_coupled(seqs, i, self.n_seq_id[i])
            for j in range(self.n_seq_id[i]):
                s = seqs[j]
                self.history[s] = self.history[s] * 1000003 + <uint64_t>(i + 1)
        return 0

    cdef int64_t first_of_batch(self, int32_t s, Py_ssize_t i, bint encoding) except -1:
        """Return the position that a sequence's first token in the batch must have."""
        cdef int64_t first = self.seqs.next_pos(s)
        if encoding:
            if first > 0:
                raise InvalidBatch(
                    f"sequence {s} holds tokens that were decoded for another input: remove them first",
                    index=i)
        else:
            self.check_seq_for_decode(s)
        if first > 0:
            return first
        # An empty sequence may begin anywhere.
        if self.pos[i] < 0:
            raise InvalidBatch(
                f"position {self.pos[i]} (at {i}) is negative", index=i, value=self.pos[i], limit=0)
        if self.pos[i] != 0 and self.traits.bounded:
            raise InvalidBatch(
                f"sequence {s} is empty and must begin at 0, not {self.pos[i]}",
                index=i, value=self.pos[i], limit=0)
        return self.pos[i]

    cdef int check_coupled(self, const int32_t* seqs, Py_ssize_t i, int32_t n) except -1:
        """Refuse a token of several sequences unless they hold the same cells."""
        cdef int32_t j, s, a = seqs[0]
        if self.traits.n_stream > 1 or self.traits.whole_only or self.traits.bounded:
            raise UnsupportedOperation(
                "decode", f"token at {i} belongs to several sequences, which needs kv_unified=True "
                "and a memory without recurrent state", "context")
        if self.traits.kind == lib.MEMORY_NONE:
            return 0
        for j in range(1, n):
            s = seqs[j]
            if self.history[s] != self.history[a] or not lib.same_cells(self.mem, a, s):
                raise InvalidBatch(
                    f"token at {i} belongs to sequences {a} and {s}, which have diverged", index=i)
        return 0
