# Run batches that batch.pxi has checked.

cdef class Decoding(Batch):
    """``llama_decode`` and ``llama_encode`` behind checks."""

    cdef readonly int64_t tokens_evaluated

    # Decode --------------------------------------------------------------------------

    def decode_tokens(self, tokens, seq_id, bint want_row=False):
        """Append tokens to a sequence; return True, or the last token's logits if wanted.

        False, with nothing done, if the tokens are not plain ints.
        """
        cdef vector[int32_t] values
        cdef Py_ssize_t n
        cdef int32_t seq
        if not _plain_ints(tokens, values):
            return False
        n = <Py_ssize_t>values.size()
        seq = _seq(seq_id, self.n_seq_max)
        cdef lib.scoped_lock locked
        self.lock_write(locked)
        if n == 0:
            raise InvalidBatch("there is no token to decode")
        self.load_tokens(values.data(), n, self.seqs.next_pos(seq), seq)
        self.run_parts()
        # Read under the same lock: another thread may decode right after.
        return self.logit_row(-1, True, <int32_t>n) if want_row else True

    def decode_batch(self, Rows rows not None):
        """Decode tokens of several sequences, split into parts of at most n_batch."""
        cdef lib.scoped_lock locked
        self.lock_write(locked)
        self.load_rows(rows, False)
        self.run_parts()

    cdef int run_parts(self, bint active=True) except -1:
        """Decode the checked arrays in as few calls as possible; `active`: with the activated adapter."""
        cdef int64_t n = self.n_tokens, limit = self.part_limit(), start = 0
        cdef int32_t size, code
        cdef bint is_first
        cdef lib.llama_batch batch
        self.check_room()
        self.forget_outputs("the last decode failed")
        self.begin_work()
        try:
            _handle_sigint()
            self.apply_pending()
            self.abort_flag.arm(True)
            while start < n:
                size = self.part_size(start, min(limit, n - start))
                batch = self.part(start, size)
                is_first = start == 0
                with nogil:
                    code = self.seqs.decode(batch, is_first, active)
                if code == lib.NOTHING_DONE:
                    raise _caught_error("decode")
                if code == 2:
                    _handle_sigint()
                if code != 0:
                    self.decode_failed(code, batch, start)
                self.tokens_evaluated += size
                self.note_outputs(batch, <int32_t>start, start + size < n)
                start += size
                if start < n:
                    _handle_sigint()
                    PyErr_CheckSignals()
                    if self.abort_flag.is_wanted():  # no work is half done here
                        raise DecodeAborted(
                            f"the decode was aborted; {start} tokens of this call were decoded before and "
                            "stay", 2, n_decoded=start)
        except BaseException:
            self.forget_outputs("the last decode failed")
            raise
        finally:
            self.end_work()
            # Last, because the user's log handler may raise.
            _drain_log()
        return 0

    cdef int begin_work(self) except -1:
        """Allow abort() and Ctrl-C to stop the following decode."""
        cdef bint stops = _stops_decodes()
        self.abort_flag.begin()
        _defer_sigint()
        if stops:
            lib.sigint.stops(&self.abort_flag)
        return 0

    cdef void end_work(self) noexcept:
        self.abort_flag.end()
        if _is_main_thread():
            lib.sigint.stops(NULL)
            lib.sigint.end()

    cdef int check_room(self) except -1:
        """Refuse a batch that cannot fit before computing any of it: each token takes a free cell.

        Windows may or may not reuse cells, so a decode there can still run out of room.
        """
        cdef int64_t counts[MAX_SEQ]
        cdef int64_t free_cells = lib.n_free(self.mem, 0)
        cdef int32_t s
        if free_cells < 0:
            return 0  # no cells
        if self.traits.n_stream == 1:
            return self.need_cells(self.n_tokens, free_cells, -1)
        self.count_tokens(counts)
        for s in range(<int32_t>self.n_seq_max):
            if counts[s]:
                self.need_cells(counts[s], lib.n_free(self.mem, s), s)
        return 0

    cdef int need_cells(self, int64_t n, int64_t free_cells, int32_t seq) except -1:
        cdef str where = "" if seq < 0 else f" of sequence {seq}"
        if n > free_cells:
            raise NoKvCacheSlot(
                f"no room in the cache for {n} more tokens{where}: {free_cells} of "
                f"{self.n_ctx_seq} cells are free; nothing was decoded", 1,
                n_tokens=n, n_free=free_cells, n_cells=self.n_ctx_seq)
        return 0

    cdef int decode_failed(self, int32_t code, lib.llama_batch batch, int64_t done_so_far) except -1:
        """Raise the exception of a non-zero code, with what is left in the sequences."""
        cdef int32_t s
        if code == lib.CAUGHT:
            raise self.fail("decode")
        notes = _notes()
        if code < -1:
            lib.distrust_scheduler(self.ctx)
        damaged = ()
        for s in range(self.n_seq_max):
            if self.seqs.was_damaged(s):
                damaged += (s,)
        left = f"; {done_so_far} tokens of this call were decoded before and stay" if done_so_far else ""
        if damaged:
            left += f"; sequences {list(damaged)} cannot go on: remove all of each"
        facts = {"n_decoded": done_so_far, "needs_removal": damaged}
        if code == 1:
            raise NoKvCacheSlot(
                f"no room in the cache for {batch.n_tokens} more tokens (n_ctx is {self.n_ctx}, "
                "always a multiple of 256)" + left, 1,
                n_tokens=batch.n_tokens, n_cells=self.n_ctx_seq, **facts)
        if code == 2:
            raise DecodeAborted("the decode was aborted" + (
                left or "; the positions of each sequence tell what is left"), 2, **facts)
        if code == -1:
            raise InvalidBatch(f"llama.cpp refused the batch: {notes}" + left, -1, **facts)
        raise DecodeError(f"llama_decode failed with code {code}: {notes}" + left, code, **facts)

    # Encoder -------------------------------------------------------------------------

    def encode(self, Rows rows not None):
        """Run ``llama_encode`` on a whole batch."""
        cdef Py_ssize_t i, n
        cdef int32_t code
        cdef lib.llama_batch batch
        cdef lib.scoped_lock locked
        self.lock_write(locked)
        if not (self.model.has_encoder or self.traits.kind == lib.MEMORY_NONE):
            raise UnsupportedOperation("encode", "the model has no encoder: use decode()")
        self.load_rows(rows, True)
        n = self.n_tokens
        self.need_one_step("encoded")
        self.forget_outputs("the last encode failed")
        batch = self.part(0, <int32_t>n)
        self.begin_work()
        try:
            _handle_sigint()
            self.abort_flag.arm(True)
            with nogil:
                code = self.seqs.encode(batch)
            if code == 2:
                _handle_sigint()
            if code != 0:
                self.encode_failed(code)
        finally:
            self.end_work()
            _drain_log()
        self.tokens_evaluated += n
        for i in range(n):
            self.outputs.push_back(<int32_t>i)
        self.from_encoder = self.model.has_decoder and self.model.has_encoder

    cdef int encode_failed(self, int32_t code) except -1:
        if code == lib.CAUGHT:
            raise self.fail("encode")
        if code == lib.NOTHING_DONE:
            raise _caught_error("encode")
        if code == 2:
            raise DecodeAborted("the encode was aborted; nothing was stored", 2)
        lib.distrust_scheduler(self.ctx)
        raise DecodeError(f"llama_encode failed with code {code}: {_notes()}", code)
