# Decodes that keep the ledgers of sequences: what is held and by what name is noted in the same hold of
# the lock, so that no other thread can change the memory between a decode and what is known of it.

cdef class Context(Decoding):
    """What a context can do: this class and those that it is made of."""

    # What samplers of a step choose from; one after the other.
    cdef vector[lib.llama_token_data] choices
    cdef vector[lib.chooser*] choosers
    cdef vector[const float*] logit_rows
    cdef vector[int32_t] codes, chosen

    def decode_pending(self, Tokens ledger not None, seq_id, Py_ssize_t end, bint want_row):
        """Decode tokens that the memory lacks, up to `end`; return (done, logits or None).

        Not done, and nothing changed, where the sequence does not hold what is noted. After an
        exception what is noted is what it holds.
        """
        cdef int32_t seq = _seq(seq_id, self.n_seq_max)
        cdef Py_ssize_t i, begin = ledger.n_evaluated, n = end - begin
        if begin < 0 or n < 1 or end > ledger.n:
            raise ValueError(f"no tokens [{begin}, {end}) are pending of {ledger.n}")
        self.lock_write()
        try:
            if not self.is_as_noted(ledger, seq):
                return False, None
            try:
                self.make_room(n, 1)
                memcpy(self.token.data(), ledger.data + begin, n * sizeof(int32_t))
                for i in range(n):
                    self.put_row(i, <int32_t>(begin + i), seq, self.embeddings)
                self.flags[n - 1] = 1
                self.check_batch(n, 1, False)
                self.run_parts(n, 1)
                self.note_held(ledger, seq, end)
                return True, self.checked_row(-1, <int32_t>n) if want_row else None
            except BaseException:
                self.note_left(ledger, seq)
                raise
        finally:
            self.lock.leave()

    def decode_shares(self, Rows rows not None, list shares not None):
        """Decode a batch of several sequences; return rows of logits, or None as above.

        ``shares`` are tuples of tokens, sequence id, how many are held afterwards, and the index in
        the batch whose logits are wanted, or -1.
        """
        cdef Tokens ledger
        cdef int32_t width
        cdef list found = []
        self.lock_write()
        try:
            for ledger, seq_id, _, _ in shares:
                if not self.is_as_noted(ledger, _seq(seq_id, self.n_seq_max)):
                    return None
            try:
                self.load_rows(rows, False)
                width = <int32_t>rows.width
                self.check_batch(<Py_ssize_t>self.token.size(), width, False)
                self.run_parts(<int64_t>self.token.size(), width)
                for ledger, seq_id, end, row in shares:
                    self.note_held(ledger, seq_id, end)
                    found.append(self.any_row(row) if row >= 0 else None)
                return found
            except BaseException:
                for ledger, seq_id, _, _ in shares:
                    self.note_left(ledger, seq_id)
                raise
        finally:
            self.lock.leave()

    def step(self, Group group not None, list looks not None):
        """Decode, choose and append one token for each lane of a group.

        Returns (owner, token) for each token; None, and nothing done, where a sequence was changed or
        this takes more than one plain decode. Owners whose lanes are worth a look go to ``looks``.
        """
        cdef Py_ssize_t i, n = len(group.lanes)
        cdef Tokens ledger
        self.lock_write()
        try:
            if not self.is_ready(group, n):
                return None
            try:
                self.make_room(n, 1)
                for i in range(n):
                    ledger = (<Lane>group.lanes[i]).ledger
                    ledger.reserve(ledger.n + 1)
                    self.token[i] = ledger.data[ledger.n - 1]
                    self.put_row(i, <int32_t>(ledger.n - 1), group.ids[i], True)
                self.check_batch(n, 1, False)
                self.run_parts(n, 1)
                for i in range(n):
                    ledger = (<Lane>group.lanes[i]).ledger
                    self.note_held(ledger, group.ids[i], ledger.n)
                self.find_rows(group, n)
            except BaseException:
                for i in range(n):
                    self.note_left((<Lane>group.lanes[i]).ledger, group.ids[i])
                raise
            return self.choose_all(group, n, looks)
        finally:
            self.lock.leave()

    cdef void put_row(self, Py_ssize_t i, int32_t pos, int32_t seq, bint flag) noexcept:
        self.pos[i] = pos
        self.n_seq_id[i] = 1
        self.seq_ids[i] = seq
        self.flags[i] = flag

    cdef bint is_as_noted(self, Tokens ledger, int32_t seq) noexcept:
        """Whether a sequence holds what its tokens say, and nothing else."""
        return (self.seqs.next_pos(seq) == ledger.n_evaluated
                and (ledger.n_evaluated == 0 or self.seqs.is_version(seq, ledger.version)))

    cdef int note_held(self, Tokens ledger, int32_t seq, Py_ssize_t n) except -1:
        ledger.version = self.seqs.name_version(seq)
        ledger.n_evaluated = n
        return 0

    cdef int note_left(self, Tokens ledger, int32_t seq) except -1:
        """After a decode that failed: what the memory holds now."""
        return self.note_held(ledger, seq, 0 if self.broken else min(self.seqs.next_pos(seq), ledger.n))

    cdef bint is_ready(self, Group group, Py_ssize_t n) except -1:
        """Whether a step can be one call, over sequences that nobody changed."""
        cdef Tokens ledger
        cdef Py_ssize_t i
        if (self.embeddings or not self.causal or self.kind == lib.MEMORY_NONE
                or not self.effective.gives_logits):
            return False
        if n < 1 or n > (self.n_ubatch if lib.windowed(self.mem) else self.n_batch):
            return False
        for i in range(n):
            ledger = (<Lane>group.lanes[i]).ledger
            if ledger.n < 1 or ledger.n_evaluated != ledger.n - 1 or ledger.n > INT32_MAX:
                return False
            if group.ids[i] >= <int32_t>self.n_seq_max or not self.is_as_noted(ledger, group.ids[i]):
                return False
        return True

    cdef int find_rows(self, Group group, Py_ssize_t n) except -1:
        """Have everything ready that a choice needs, so that nothing can fail but the choice."""
        cdef Py_ssize_t i
        cdef Lane lane
        self.choosers.resize(n)
        self.logit_rows.resize(n)
        self.codes.resize(n)
        self.chosen.resize(n)
        for i in range(n):
            lane = <Lane>group.lanes[i]
            self.choosers[i] = &lane.sampler.it
            self.logit_rows[i] = lib.logits_ith(self.ctx, <int32_t>i)
            if self.logit_rows[i] == NULL:
                raise IndexError(f"token {i} of the last decode has no logits")
            lane.sampler.check_model(self.model, self.n_vocab)
            lane.row = self.copy_row(self.logit_rows[i], self.n_vocab) if lane.keeps_rows else None
        return 0

    cdef list choose_all(self, Group group, Py_ssize_t n, list looks):
        """Let each lane choose from its row; the interpreter's lock is free meanwhile."""
        cdef Py_ssize_t i, begin = 0, end
        cdef Lane lane
        cdef int32_t n_vocab = self.n_vocab
        cdef list made = []
        now, failure = _now(), None
        while begin < n:
            end = begin
            with nogil:
                while end < n:
                    self.codes[end] = self.choosers[end].choose(
                        self.logit_rows[end], n_vocab, self.choices, self.chosen[end])
                    end += 1
                    if self.codes[end - 1] == lib.CAUGHT:
                        break  # what was caught is known until the next is
            for i in range(begin, end):
                lane = <Lane>group.lanes[i]
                try:
                    if lane.chose(self, self.codes[i], self.chosen[i], lane.row, now):
                        made.append((group.owners[i], self.chosen[i]))
                    if lane.is_worth_a_look():
                        looks.append(group.owners[i])
                except BaseException as error:
                    failure = error  # the other tokens are chosen, too
            begin = end
        if failure is not None:
            raise failure
        return made
