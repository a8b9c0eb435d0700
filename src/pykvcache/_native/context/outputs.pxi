# Logits and embeddings of a decode, returned as copies.

cdef str _RESTORED = "a state was restored since, and brings none: decode a token"


cdef class Outputs(Partials):
    """``llama_get_logits_ith`` and ``llama_get_embeddings_*``."""

    # Outputs of the last decode: batch indices in order, the first one of the part that
    # llama.cpp still holds, and copied rows of earlier parts.
    cdef vector[int32_t] outputs
    cdef int32_t part_start
    cdef list kept_logits
    cdef list kept_embeddings
    cdef bint from_encoder
    # Why there are no outputs.
    cdef str no_outputs

    def __cinit__(self, *args):
        self.kept_logits = []
        self.kept_embeddings = []

    cdef void forget_outputs(self, str why):
        self.no_outputs = why
        self.outputs.clear()
        self.seqs.forget_rows()
        if self.kept_logits:
            self.kept_logits = []
            self.kept_embeddings = []
        self.part_start = 0
        self.from_encoder = False

    cdef int note_outputs(self, lib.llama_batch batch, int32_t start, bint more) except -1:
        """Record which tokens have outputs; copy rows that the next part overwrites."""
        cdef int32_t i
        self.part_start = start
        self.no_outputs = "no token of the last decode asked for them (see LlamaBatch)"
        for i in range(batch.n_tokens):
            if batch.logits[i]:
                self.outputs.push_back(start + i)
                if more:
                    self.kept_logits.append(self.copy_row(lib.logits_ith(self.ctx, i), self.n_vocab))
                    self.kept_embeddings.append(
                        self.copy_row(lib.embeddings_ith(self.ctx, i), self.n_embd_out)
                        if self.embeddings else None)
        return 0

    cdef object copy_row(self, const float* row, int32_t n):
        if row == NULL:
            _check_lost(self.links, "logits")
            return None
        result = _empty(n, _FLOAT32)
        memcpy(_address(result), row, n * sizeof(float))
        return result

    cdef int check_finite(
            self, const float* row, int32_t n, bint is_logits, object i, int32_t n_decoded) except -1:
        cdef int64_t place = lib.first_not_finite(row, n, is_logits)
        if place < 0:
            return 0
        self.seqs.suspect()
        what = "logits" if is_logits else "embeddings"
        if is_logits or self.pooling_type == 0:
            i = self.outputs[self.find_output(i, what)]
            whose = f"token {i} of the last decode"
        else:
            whose = f"sequence {i}"
        stay = f"; what this call decoded stays, tokens: {n_decoded}" if n_decoded else ""
        raise OutputNotFinite(
            f"the {what} of {whose} are not finite: place {place} is {row[place]}. The model's arithmetic "
            f"overflowed: its weights, a state or written keys and values are too large{stay}",
            what, i, place, row[place], n_decoded=n_decoded)

    cdef int find_output(self, object i, str what) except -1:
        """Return the output number of batch index i; a negative i counts outputs from the end."""
        cdef int overflow = 0
        cdef long long index = _index(i, "index", &overflow)
        cdef Py_ssize_t n = <Py_ssize_t>self.outputs.size(), a, b, middle
        if n == 0:
            raise self.none_there(what)
        if not overflow and index < 0 and index >= -n:
            return self.check_held(<int>(n + index), i, what)
        a = 0
        b = n
        while a < b:
            middle = (a + b) // 2
            if self.outputs[middle] < index:
                a = middle + 1
            else:
                b = middle
        if overflow or a == n or self.outputs[a] != index:
            raise OutOfRangeError(
                f"token {shown(i)} of the last decode has no {what}: "
                f"{n} of its tokens asked for them",
                what=what, value=i, limit=n)
        return self.check_held(<int>a, i, what)

    cdef object none_there(self, str what):
        why = self.no_outputs
        if why is None:
            why = "this context has not decoded yet, and what is restored brings none: decode a token"
        elif self.seqs.was_restored():
            why = _RESTORED
        return OutOfRangeError(f"there are no {what}: {why}", what=what)

    cdef int check_held(self, int place, object i, str what) except -1:
        if not self.seqs.row_is_held(place):
            if self.seqs.was_restored():
                raise OutOfRangeError(
                    f"the {what} of the last decode are gone: {_RESTORED}", what=what, value=i)
            raise OutOfRangeError(
                f"the {what} of token {i} of the last decode are gone: no sequence holds it at position "
                f"{self.seqs.row_pos(place)} any more, after what it held before it then",
                what=what, value=i, limit=self.seqs.row_pos(place))
        return place

    cdef object row(self, int place, bint is_logits, bint check, object i, int32_t n_decoded):
        """Return a copy of a row of outputs, or None; with `check` raise if it is not finite."""
        cdef list kept = self.kept_logits if is_logits else self.kept_embeddings
        cdef int32_t n = self.n_vocab if is_logits else self.n_embd_out
        cdef const float[::1] view
        cdef const float* row
        if place < len(kept):
            if kept[place] is None:
                return None
            view = kept[place]
            row = &view[0]
        elif is_logits:
            row = lib.logits_ith(self.ctx, self.outputs[place] - self.part_start)
        else:
            row = lib.embeddings_ith(self.ctx, self.outputs[place] - self.part_start)
        if row != NULL and check:
            self.check_finite(row, n, is_logits, i, n_decoded)
        return self.copy_row(row, n)

    cdef object logit_row(self, object i, bint check, int32_t n_decoded=0):
        """Return a copy of the logits of batch index i; raise if there are none or they are not finite.

        A sampler passes `check` False, because it checks each logit itself.
        """
        if self.traits.kind == lib.MEMORY_NONE and not self.model.is_diffusion:
            raise UnsupportedOperation("logits", "this model gives embeddings only")
        if self.from_encoder:
            raise OutOfRangeError("there are no logits: encode() gives none, decode() does", what="logits")
        place = self.find_output(i, "logits")
        # llama.cpp's buffer exists anyway, with zeros or old embeddings in it.
        if not self.traits.gives_logits:
            raise UnsupportedOperation(
                "logits", "with embeddings=True this model computes no logits", "context")
        result = self.row(place, True, check, i, n_decoded)
        if result is None:
            raise OutOfRangeError(f"token {i} of the last decode has no logits", what="logits", value=i)
        return result

    def logits(self, i):
        i = _whole(i, "index")
        cdef lib.scoped_lock locked
        self.lock_read(locked)
        self.check_usable()
        return self.logit_row(i, True)

    def token_embeddings(self, i):
        i = _whole(i, "index")
        cdef lib.scoped_lock locked
        self.lock_read(locked)
        self.check_usable()
        if not self.embeddings:
            raise UnsupportedOperation(
                "embeddings", "create the context with embeddings=True", "context")
        if self.pooling_type != 0:
            raise UnsupportedOperation(
                "embeddings", "they are pooled: see seq_embeddings(), or use pooling_type='none'",
                "context")
        result = self.row(self.find_output(i, "embeddings"), False, True, i, 0)
        if result is None:
            raise OutOfRangeError(
                f"token {i} of the last decode has no embeddings", what="embeddings", value=i)
        return result

    def seq_embeddings(self, seq_id):
        cdef int32_t seq = _seq(seq_id, self.n_seq_max)
        cdef int32_t n = self.n_embd_out if self.pooling_type != 4 else self.model.facts.n_cls_out
        cdef const float* row
        cdef lib.scoped_lock locked
        self.lock_read(locked)
        self.check_usable()
        if not self.embeddings or self.pooling_type == 0:
            raise UnsupportedOperation(
                "seq_embeddings", "create the context with embeddings=True and a pooling_type", "context")
        if self.outputs.size() == 0:
            raise self.none_there("embeddings")
        row = lib.embeddings_seq(self.ctx, seq)
        if row == NULL:
            _check_lost(self.links, "logits")
            raise OutOfRangeError(
                f"sequence {seq} was not in the last decode", what="sequence", value=seq)
        if not self.seqs.rows_are_whole(seq):
            raise OutOfRangeError(
                f"the embeddings of sequence {seq} are gone: it no longer holds the decoded tokens",
                what="sequence", value=seq)
        self.check_finite(row, n, False, seq, 0)
        return self.copy_row(row, n)


def first_not_finite(const float[::1] row not None, bint is_logits):
    """Return the first index of a row that is not finite, or -1; for tests."""
    return lib.first_not_finite(&row[0] if row.shape[0] else NULL, row.shape[0], is_logits)
