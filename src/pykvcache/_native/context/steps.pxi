# Decodes that update the ledgers of sequences under the same lock, so that no other thread can change
# the memory between a decode and its record.

cdef class Context(Adapted):
    """All operations of a context: this class and its bases."""

    cdef lib.choices choices

    def decode_pending(self, Tokens ledger not None, seq_id, Py_ssize_t end, bint want_row):
        """Decode pending tokens up to `end`; return (done, logits or None).

        Does nothing if the memory differs from the ledger. After an exception the ledger is
        updated to what the memory holds. The tokens are all before an activation, or all after it.
        """
        cdef int32_t seq = _seq(seq_id, self.n_seq_max)
        cdef Py_ssize_t begin = ledger.n_evaluated, n = end - begin
        if begin < 0 or n < 1 or end > ledger.n:
            raise ArgumentError(
                f"no tokens [{begin}, {end}) are pending of {ledger.n}",
                what="tokens", value=(begin, end), limit=ledger.n)
        cdef lib.scoped_lock locked
        self.lock_write(locked)
        if not self.is_as_noted(ledger, seq):
            return False, None
        try:
            self.load_tokens(ledger.data + begin, n, <int32_t>begin, seq)
            self.run_parts(ledger.next_is_active())
            self.note_held(ledger, seq, end)
            return True, self.logit_row(-1, True, <int32_t>n) if want_row else None
        except BaseException:
            self.note_left(ledger, seq)
            raise

    def decode_shares(self, Rows rows not None, list shares not None):
        """Decode a batch of several sequences; return rows of logits, or None if a ledger differs.

        None also if an activated adapter is for some of them only.
        ``shares`` are tuples: tokens, sequence id, number of tokens held afterwards, and the batch
        index whose logits are wanted, or -1.
        """
        cdef int active = _are_active((), shares)
        cdef lib.scoped_lock locked
        self.lock_write(locked)
        if active < 0 or not self.are_as_noted(shares):
            return None
        try:
            self.load_rows(rows, False)
            self.run_parts(active != 0)
            return self.note_shares(shares, 0)
        except BaseException:
            self.note_shares_left(shares)
            raise

    def not_ready(self, lanes not None, owners not None):
        """Return the owners of lanes that cannot take part in a `step`."""
        cdef Lane lane
        cdef tuple own = tuple(zip(lanes, owners))
        cdef lib.scoped_lock locked
        self.lock_read(locked)
        found = []
        for lane, owner in own:
            if not self.is_ready(lane):
                found.append(owner)
        return found

    def step(self, lanes not None, owners not None, list looks not None, Rows rows=None, list shares=None):
        """Decode, choose and append one token for each lane; decode parts of prompts in the same call.

        Returns (owner, token) for each token, and rows of logits as `decode_shares` does. Returns
        None and does nothing if a ledger differs, one plain decode is not enough, or an activated
        adapter is for some of them only. Owners of lanes that may have ended go to ``looks``.
        """
        cdef Py_ssize_t i, n, total
        cdef Tokens ledger
        cdef list found
        # Own tuples: other threads may change the caller's lists during the decode.
        cdef tuple own_lanes = tuple(lanes), own_owners = tuple(owners)
        shares = [] if shares is None else list(shares)
        cdef int active = _are_active(own_lanes, shares)
        n = total = len(own_lanes)
        if rows is not None:
            total += rows.n
        cdef lib.scoped_lock locked
        self.lock_write(locked)
        if active < 0 or not self.is_plain(total, rows) or not self.are_as_noted(shares):
            return None
        for i in range(n):
            if not self.is_ready(<Lane>own_lanes[i]):
                return None
        try:
            self.make_room(total, 1)
            for i in range(n):
                ledger = (<Lane>own_lanes[i]).ledger
                ledger.reserve(ledger.n + 1)
                self.token[i] = ledger.data[ledger.n - 1]
                self.put_row(i, <int32_t>(ledger.n - 1), ledger.seq_id, True)
            for i in range(n, total):
                self.token[i] = rows.tokens[i - n]
                self.put_row(i, rows.positions[i - n], rows.seq_ids[i - n], rows.flags[i - n] != 0)
            self.check_batch(False)
            self.run_parts(active != 0)
            for i in range(n):
                ledger = (<Lane>own_lanes[i]).ledger
                self.note_held(ledger, ledger.seq_id, ledger.n)
            found = self.note_shares(shares, n)
            self.find_rows(own_lanes, n)
        except BaseException:
            for i in range(n):
                ledger = (<Lane>own_lanes[i]).ledger
                self.note_left(ledger, ledger.seq_id)
            self.note_shares_left(shares)
            raise
        return self.choose_all(own_lanes, own_owners, n, looks), found

    cdef bint are_as_noted(self, list shares) except -1:
        cdef Tokens ledger
        for ledger, seq_id, _, _ in shares:
            if not self.is_as_noted(ledger, _seq(seq_id, self.n_seq_max)):
                return False
        return True

    cdef list note_shares(self, list shares, Py_ssize_t before):
        """Record what the shares of a batch hold now; return the wanted logits."""
        cdef Tokens ledger
        cdef list found = []
        for ledger, seq_id, end, row in shares:
            self.note_held(ledger, seq_id, end)
            found.append(self.logit_row(before + row, False) if row >= 0 else None)
        return found

    cdef int note_shares_left(self, list shares) except -1:
        cdef Tokens ledger
        for ledger, seq_id, _, _ in shares:
            self.note_left(ledger, seq_id)
        return 0

    cdef bint is_as_noted(self, Tokens ledger, int32_t seq) noexcept:
        """Return whether a sequence holds exactly its noted tokens and can continue."""
        return (self.seqs.next_pos(seq) == ledger.n_evaluated and not self.seqs.needs_removal(seq)
                and (ledger.n_evaluated == 0 or self.seqs.is_version(seq, ledger.version)))

    cdef int note_held(self, Tokens ledger, int32_t seq, Py_ssize_t n) except -1:
        ledger.version = self.seqs.name_version(seq)
        ledger.n_evaluated = n
        ledger.activated_at = ledger.invoked_at if ledger.invoked_at < n else -1
        return 0

    cdef int note_left(self, Tokens ledger, int32_t seq) except -1:
        """Record what the memory holds after a failed decode."""
        return self.note_held(ledger, seq, 0 if self.broken else min(self.seqs.next_pos(seq), ledger.n))

    cdef bint is_plain(self, Py_ssize_t n, Rows rows) noexcept:
        """Return whether a batch fits one call and its rows are logits."""
        if (n < 1 or self.embeddings or not self.causal or self.traits.kind == lib.MEMORY_NONE
                or not self.traits.gives_logits):
            return False
        # A window takes one token of each sequence, or many of one.
        if self.traits.windowed:
            return n <= self.n_ubatch and (rows is None or rows.n == 0)
        return n <= self.n_batch and (rows is None or rows.width == 1)

    cdef bint is_ready(self, Lane lane) noexcept:
        """Return whether a sequence lacks exactly one token and is unchanged."""
        cdef Tokens ledger = lane.ledger
        return (not lane.was_overtaken() and 0 <= ledger.seq_id < <int32_t>self.n_seq_max
                and 1 <= ledger.n < INT32_MAX and ledger.n_evaluated == ledger.n - 1
                and (ledger.n <= self.n_ctx_seq or self.traits.kind == lib.MEMORY_RECURRENT)
                and ledger.n - 1 <= self.traits.max_position
                and self.is_as_noted(ledger, ledger.seq_id))

    cdef int find_rows(self, tuple lanes, Py_ssize_t n) except -1:
        """Prepare everything for the choices, so that only a choice itself can fail."""
        cdef Py_ssize_t i
        cdef Lane lane
        cdef const float* row
        self.choices.begin(n, self.n_threads_batch)
        for i in range(n):
            lane = <Lane>lanes[i]
            row = lib.logits_ith(self.ctx, <int32_t>i)
            if row == NULL:
                _check_lost(self.links, "logits")
                raise OutOfRangeError(f"token {i} of the last decode has no logits", what="logits", value=i)
            self.choices.set(i, &lane.sampler.it, row)
            lane.sampler.check_model(self.model, self.n_vocab)
            lane.row = self.copy_row(row, self.n_vocab) if lane.keeps_rows else None
        return 0

    cdef list choose_all(self, tuple lanes, tuple owners, Py_ssize_t n, list looks):
        """Let each lane choose from its row, without the GIL."""
        cdef Py_ssize_t i
        cdef Lane lane
        cdef int32_t n_vocab = self.n_vocab
        cdef list made = []
        now, failure = _now(), None
        with nogil:
            self.choices.run(n_vocab)
        for i in range(n):
            lane = <Lane>lanes[i]
            if self.choices.code(i) == lib.CAUGHT:
                self.choices.recall(i)
            try:
                if lane.chose(self, self.choices.code(i), self.choices.token(i), lane.row, now):
                    made.append((owners[i], self.choices.token(i)))
                if lane.is_worth_a_look():
                    looks.append(owners[i])
            except BaseException as error:
                failure = error  # continue: the other tokens are chosen too
        if failure is not None:
            raise failure
        return made


cdef int _are_active(tuple lanes, list shares) except -2:
    """Return whether the next tokens are evaluated with the activated adapter; -1 if some are."""
    cdef Tokens ledger
    cdef Lane lane
    cdef int found = -1
    for lane in lanes:
        if found == 1 - lane.ledger.next_is_active():
            return -1
        found = lane.ledger.next_is_active()
    for ledger, _, _, _ in shares:
        if found == 1 - ledger.next_is_active():
            return -1
        found = ledger.next_is_active()
    return max(found, 0)
