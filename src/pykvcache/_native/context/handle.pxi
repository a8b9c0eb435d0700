# The context's pointer, lock and lifetime.

@cython.no_gc_clear  # __dealloc__ frees the context before its model
cdef class Handle:
    """Own a ``llama_context``.

    Methods declare a ``scoped_lock`` and pass it to `lock_read` or `lock_write`. It unlocks when they
    return or raise.
    """

    cdef lib.llama_context* ctx
    # Owns the facts about sequences and changes them; `mem` only reads.
    cdef lib.sequence_facts seqs
    cdef const lib.memory* mem
    cdef shared_ptr[lib.llama_model] model_ref
    cdef shared_ptr[lib.adapter_lock] model_adapters
    cdef lib.device_links links
    cdef lib.owned_mutex lock
    cdef lib.abort_flag abort_flag
    cdef readonly Model model
    cdef int generation
    cdef bint closed
    cdef bint stopped
    # Number of exported buffers over the context's memory; close() frees it after the last one is released.
    cdef int exports
    cdef object __weakref__
    cdef bint broken
    cdef readonly uint32_t n_ctx, n_ctx_seq, n_batch, n_ubatch, n_seq_max
    cdef readonly bint embeddings, causal, swa_full, flash_attn, kv_unified
    cdef readonly int pooling_type, n_threads, n_threads_batch
    cdef int32_t n_vocab, n_embd_out
    cdef lib.memory_traits traits
    # Whether graphs use the index of sparse attention; None if no setting decides that.
    cdef readonly object index_use

    def __cinit__(self, Model model not None, dict params not None):
        cdef lib.llama_context_params p = lib.llama_context_default_params()
        cdef lib.llama_context* ctx
        cdef lib.context_facts facts
        cdef bint is_open
        self.generation = _generation
        self.model = model
        self.model_ref = model.share()
        self.model_adapters = model.adapters
        self.n_vocab = model.n_vocab
        self.n_embd_out = model.n_embd_out
        _fill_context_params(&p, params)
        p.abort_callback = lib.abort_flag.poll
        p.abort_callback_data = &self.abort_flag
        self.links = model.links
        _check_lost(self.links, "create")
        self.lock.watch(self.links)
        _sync_log()
        with nogil:
            lib.begin_notes()
            self.model_adapters.get().lock_shared()
            ctx = lib.context_new(self.model_ref.get(), p)
            self.model_adapters.get().unlock_shared()
        self.ctx = ctx
        why = _reason()
        _check_lost(self.links, "create")
        if ctx == NULL:
            raise ContextCreateError(f"cannot create a context: {why}")
        # Reads RoPE factors, which may be in device memory.
        with nogil:
            is_open = self.seqs.open(ctx, self.model_adapters.get())
        _check_lost(self.links, "create")
        if not is_open:
            raise _caught_error("create")
        if lib.is_remote(self.links):
            lib.build_each_graph(ctx)
        self.mem = self.seqs.cells()
        self.traits = lib.traits_of(self.mem)
        self.n_ctx = lib.llama_n_ctx(ctx)
        self.n_ctx_seq = lib.llama_n_ctx_seq(ctx)
        self.n_batch = lib.llama_n_batch(ctx)
        self.n_ubatch = lib.llama_n_ubatch(ctx)
        self.n_seq_max = lib.llama_n_seq_max(ctx)
        facts = lib.look_at_context(ctx)
        self.flash_attn = facts.flash_attn  # with "auto" resolved
        self.kv_unified = facts.kv_unified
        self.causal = facts.causal
        self.pooling_type = facts.pooling_type
        self.n_threads = facts.n_threads
        self.n_threads_batch = facts.n_threads_batch
        if self.traits.may_be_dense:  # as llama.cpp's graph of MiniMax M3 decides it
            self.index_use = self.flash_attn and (self.n_seq_max == 1 or not self.kv_unified)
        self.embeddings = p.embeddings
        self.swa_full = p.swa_full
        if self.traits.picks_blocks and self.n_seq_max > 1 and self.traits.n_stream == 1:
            raise ContextCreateError(
                "this memory attends to blocks of one sequence's cells, which sequences in one pool "
                "break up: use kv_unified=False, or n_seq_max=1", "kv_unified", True, False)
        if p.n_rs_seq > 0:
            self.check_kept_states(p.n_rs_seq)
        if self.traits.endless:
            raise ContextCreateError(
                "the model rotates 0 dimensions (rope.dimension_count), which never ends",
                "model", 0, 1)
        if model.has_encoder and model.has_decoder and self.pooling_type != 0:
            raise ContextCreateError(
                "an encoder-decoder model cannot pool: use pooling_type='none'",
                "pooling_type", self.pooling_type, "none")
        if self.pooling_type == 4 and not model.facts.has_classifier:
            raise ContextCreateError(
                "pooling_type='rank' needs a model with a classifier", "pooling_type", "rank")
        # Checked last: report errors that the caller can fix first.
        if not self.traits.fault.empty():
            raise ContextCreateError(_text(self.traits.fault), "model")
        _live.add(self)

    cdef int check_kept_states(self, uint32_t asked) except -1:
        """Refuse ``n_rs_seq`` where llama.cpp keeps no earlier states or its graph has no room for them."""
        cdef uint32_t most
        if (lib.look_at_memory(self.mem).max_rollback != asked or not self.causal
                or not lib.look_at_model(self.model_ref.get()).causal):
            raise ContextCreateError(
                f"n_rs_seq={asked}: llama.cpp keeps no earlier states in {_text(self.traits.name)} "
                "of this model (docs/concepts/kinds.md says of which it does)", "n_rs_seq", asked, 0)
        if self.n_ubatch < asked + 2:
            raise ContextCreateError(
                f"n_rs_seq={asked}: a compute step must be of more than n_rs_seq + 1 tokens, and n_ubatch "
                f"is {self.n_ubatch}", "n_rs_seq", asked, max(0, <int>self.n_ubatch - 2))
        most = lib.most_kept(self.ctx, asked)
        if most < asked:
            raise ContextCreateError(
                f"n_rs_seq={asked}: llama.cpp's graph of this model has room for {most}",
                "n_rs_seq", asked, most)
        return 0

    def __dealloc__(self):
        # After a fork, or while the process exits, freeing is not safe: leave it to the system.
        if self.generation == _generation and not self.stopped:
            self.free()

    cdef void free(self) noexcept:
        cdef lib.llama_context* ctx = self.ctx
        if ctx != NULL:
            self.ctx = NULL
            self.mem = NULL
            self.seqs.close()
            with nogil:
                lib.context_free(ctx)
        self.model_ref.reset()

    cdef void free_late(self) noexcept:
        """Free the context after close(), once no buffer is exported."""
        if self.closed and self.exports == 0 and self.generation == _generation and not self.stopped:
            self.free()

    cdef int lock_write(self, lib.scoped_lock& locked) except -1:
        """Take the lock for a call that changes cells; refuse a broken context."""
        self.lock_read(locked)
        self.check_usable()
        self.seqs.begin()
        return 0

    cdef int lock_read(self, lib.scoped_lock& locked) except -1:
        """Take the lock for a call that only reads."""
        self.check_process()
        self.wait_for_lock(locked)
        if self.closed or self.ctx == NULL:  # NULL before __cinit__ ends: the collector shows objects early
            raise ClosedError("the context is closed")
        return _check_lost(self.links, "use")

    cdef int wait_for_lock(self, lib.scoped_lock& locked) except -1:
        """Take the lock; the GIL is released only when another thread holds it."""
        if not self.lock.try_lock():
            if self.lock.is_mine():
                raise ReentryError("a callback of this context called the context itself")
            with nogil:
                self.lock.lock()
        locked.adopt(self.lock)
        return 0

    cdef int check_process(self) except -1:
        if self.generation != _generation:
            raise ClosedError("this context belongs to the process before fork(); open a new one")
        if self.stopped:
            raise ClosedError("the interpreter is shutting down")
        return 0

    cdef int check_open(self) except -1:
        """Raise if closed; for facts that need no lock."""
        self.check_process()
        if self.closed:
            raise ClosedError("the context is closed")
        return 0

    cdef int check_usable(self) except -1:
        """Refuse work after an error that left llama.cpp in an unknown state."""
        if self.broken:
            raise InternalError(
                "llama.cpp failed earlier in this context: call clear_kv_cache() or close it")
        return 0

    cdef object too_far(self, object position, str what, p0=None, p1=None):
        """Return the exception for a position above the maximum."""
        cdef int32_t last = self.traits.max_position
        if last >= INT32_MAX - 32 - self.model.n_swa:
            why = "the limit of positions"
        elif self.model.facts.learned_positions and last == self.model.n_ctx_train - 1:
            why = "the end of the model's table"
        else:
            why = "up to which this model's rotation (RoPE) is right in float32"
        return PositionError(
            f"{what}: position {shown(position)} is past {last}, {why}", p0, p1, value=position, limit=last)

    cdef object fail(self, str where):
        """Mark the context after a caught C++ exception and return what to raise."""
        self.broken = True
        lib.distrust_scheduler(self.ctx)
        return _caught_error(where)

    def close(self):
        """Free the context; wait for a running call of another thread."""
        cdef lib.scoped_lock locked
        if self.generation != _generation:
            self.closed = True
            return
        if self.closed or self.stopped:
            return
        self.wait_for_lock(locked)
        self.closed = True
        if self.exports == 0:
            self.free()

    def stop(self):
        """Stop for good, at interpreter exit: no thread may decode while libraries unload."""
        if self.generation != _generation or self.closed or self.stopped or self.lock.is_mine():
            return
        self.abort_flag.ask()
        with nogil:
            self.lock.lock_for_good()
        self.stopped = True

    def is_eog(self, int32_t token):
        """Call ``llama_vocab_is_eog``; False for numbers that are no tokens."""
        self.check_open()
        return 0 <= token < self.n_vocab and self.ends_text(token)

    cdef bint ends_text(self, int32_t token) noexcept:
        """Return whether a token ends a text. The GIL keeps the model of an open context from being freed."""
        return self.model.vocab_type != 0 and lib.llama_vocab_is_eog(self.model.vocab, token)

    @property
    def is_closed(self):
        return self.closed or self.generation != _generation

    @property
    def is_inherited(self):
        """Whether the context was made before a fork of this process."""
        return self.generation != _generation

    def abort(self):
        """Stop a running decode; return whether one was running."""
        if self.generation != _generation:
            return False
        return self.abort_flag.ask()

    def abort_at(self, step):
        """Abort at the given graph step, counted from now; 0 disables; for tests.

        Returns the remaining steps of the previous call: 0 if it aborted a decode.
        """
        return self.abort_flag.ask_at(_int(step, "step", 0, INT32_MAX))

    def set_n_threads(self, n_threads, n_threads_batch):
        cdef int n = _int(n_threads, "n_threads", 1, 512)
        cdef int nb = _int(n_threads_batch, "n_threads_batch", 1, 512)
        cdef lib.scoped_lock locked
        self.lock_read(locked)
        lib.llama_set_n_threads(self.ctx, n, nb)
        self.n_threads = n
        self.n_threads_batch = nb

    def perf(self):
        cdef lib.llama_perf_context_data d
        cdef lib.scoped_lock locked
        self.lock_read(locked)
        d = lib.llama_perf_context(self.ctx)
        return d.t_load_ms, d.t_p_eval_ms, d.t_eval_ms, d.n_p_eval, d.n_eval, d.n_reused

    def perf_reset(self):
        cdef lib.scoped_lock locked
        self.lock_read(locked)
        lib.llama_perf_context_reset(self.ctx)


cdef int _fill_context_params(lib.llama_context_params* p, dict d) except -1:
    """Write validated values into the struct; every key is required."""
    p.n_ctx = d["n_ctx"]
    p.n_batch = d["n_batch"]
    p.n_ubatch = d["n_ubatch"]
    p.n_seq_max = d["n_seq_max"]
    p.n_rs_seq = d["n_rs_seq"]
    p.n_threads = d["n_threads"]
    p.n_threads_batch = d["n_threads_batch"]
    p.rope_scaling_type = <lib.llama_rope_scaling_type><int>d["rope_scaling_type"]
    p.pooling_type = <lib.llama_pooling_type_e><int>d["pooling_type"]
    p.attention_type = <lib.llama_attention_type><int>d["attention_type"]
    p.flash_attn_type = <lib.llama_flash_attn_type><int>d["flash_attn"]
    p.rope_freq_base = d["rope_freq_base"]
    p.rope_freq_scale = d["rope_freq_scale"]
    p.yarn_ext_factor = d["yarn_ext_factor"]
    p.yarn_attn_factor = d["yarn_attn_factor"]
    p.yarn_beta_fast = d["yarn_beta_fast"]
    p.yarn_beta_slow = d["yarn_beta_slow"]
    p.yarn_orig_ctx = d["yarn_orig_ctx"]
    p.type_k = <lib.ggml_type><int>d["type_k"]
    p.type_v = <lib.ggml_type><int>d["type_v"]
    p.embeddings = d["embeddings"]
    p.offload_kqv = d["offload_kqv"]
    p.op_offload = d["op_offload"]
    p.no_perf = d["no_perf"]
    p.swa_full = d["swa_full"]
    p.kv_unified = d["kv_unified"]
    return 0
