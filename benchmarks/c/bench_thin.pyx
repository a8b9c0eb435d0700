# cython: language_level=3
"""Lower bounds for a call: methods that do nothing, and methods that only call llama.h.

No checks, locks or exceptions: an invalid argument ends the process.
"""
from libc.stdint cimport int32_t, int8_t, uint32_t

cdef extern from *:
    """
    // The libraries are the package's, without its RPC sources.
    extern "C" void * ggml_backend_rpc_reg(void) { return nullptr; }
    """

cdef extern from "llama.h":
    ctypedef struct llama_model
    ctypedef struct llama_context
    ctypedef void* llama_memory_t
    ctypedef int ggml_type
    ctypedef int llama_flash_attn_type
    ctypedef struct llama_model_params:
        pass
    ctypedef struct llama_context_params:
        uint32_t n_ctx, n_batch, n_ubatch, n_seq_max
        int32_t n_threads, n_threads_batch
        bint kv_unified, swa_full
        llama_flash_attn_type flash_attn_type
        ggml_type type_k, type_v
    ctypedef struct llama_batch:
        int32_t n_tokens
        int32_t* token
        int32_t* pos
        int32_t* n_seq_id
        int32_t** seq_id
        int8_t* logits
    ctypedef int ggml_log_level
    ctypedef struct llama_vocab
    void llama_log_set(void (*)(ggml_log_level, const char*, void*) noexcept, void*)
    llama_model_params llama_model_default_params()
    llama_context_params llama_context_default_params()
    llama_model* llama_model_load_from_file(const char*, llama_model_params)
    llama_context* llama_init_from_model(llama_model*, llama_context_params)
    uint32_t llama_n_ctx(llama_context*)
    uint32_t llama_n_seq_max(llama_context*)
    uint32_t llama_n_batch(llama_context*)
    uint32_t llama_n_ubatch(llama_context*)
    int32_t llama_n_threads(llama_context*)
    const llama_vocab* llama_model_get_vocab(const llama_model*)
    int32_t llama_vocab_n_tokens(const llama_vocab*)
    const llama_model* llama_get_model(llama_context*)
    llama_memory_t llama_get_memory(llama_context*)
    llama_batch llama_batch_init(int32_t, int32_t, int32_t)
    int32_t llama_decode(llama_context*, llama_batch)
    void llama_synchronize(llama_context*)
    bint llama_memory_seq_rm(llama_memory_t, int32_t, int32_t, int32_t)
    void llama_memory_seq_cp(llama_memory_t, int32_t, int32_t, int32_t, int32_t)
    void llama_memory_seq_keep(llama_memory_t, int32_t)
    void llama_memory_seq_add(llama_memory_t, int32_t, int32_t, int32_t, int32_t)
    void llama_memory_seq_div(llama_memory_t, int32_t, int32_t, int32_t, int)
    int32_t llama_memory_seq_pos_min(llama_memory_t, int32_t)
    int32_t llama_memory_seq_pos_max(llama_memory_t, int32_t)
    bint llama_memory_can_shift(llama_memory_t)


cdef void quiet(ggml_log_level level, const char* text, void* unused) noexcept:
    pass


cdef class Empty:
    """Methods that do nothing, with as many arguments as the real ones."""

    def nothing(self):
        """Take no argument."""

    def one(self, a):
        """Take one argument."""

    def two(self, a, b):
        """Take two arguments."""

    def four(self, a, b, c, d):
        """Take four arguments."""


cdef class Thin:
    """A context; never freed, like its model."""

    cdef llama_context* ctx
    cdef llama_memory_t mem
    cdef llama_batch batch

    def __cinit__(self, bytes path, int n_ctx, int n_seq_max, int n_batch, int n_ubatch,
                  int threads, int flash_attn, int type_k, int type_v):
        cdef llama_context_params p = llama_context_default_params()
        llama_log_set(quiet, NULL)
        p.n_ctx, p.n_seq_max, p.n_batch, p.n_ubatch = n_ctx, n_seq_max, n_batch, n_ubatch
        p.n_threads = p.n_threads_batch = threads
        p.kv_unified = p.swa_full = True
        p.flash_attn_type = <llama_flash_attn_type> flash_attn
        p.type_k, p.type_v = <ggml_type> type_k, <ggml_type> type_v
        self.ctx = llama_init_from_model(
            llama_model_load_from_file(path, llama_model_default_params()), p)
        self.mem = llama_get_memory(self.ctx)
        self.batch = llama_batch_init(n_batch, 0, 1)

    def n_vocab(self):
        return llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(self.ctx)))

    def settings(self):
        """Return the context's settings."""
        return {
            "n_ctx": llama_n_ctx(self.ctx), "n_seq_max": llama_n_seq_max(self.ctx),
            "n_batch": llama_n_batch(self.ctx), "n_ubatch": llama_n_ubatch(self.ctx),
            "threads": llama_n_threads(self.ctx),
        }

    def decode(self, list rows):
        """Decode rows of (token, position, sequence, whether it has logits)."""
        cdef int i
        self.batch.n_tokens = len(rows)
        for i, (token, pos, seq, logits) in enumerate(rows):
            self.batch.token[i] = token
            self.batch.pos[i] = pos
            self.batch.n_seq_id[i] = 1
            self.batch.seq_id[i][0] = seq
            self.batch.logits[i] = logits
        llama_decode(self.ctx, self.batch)
        llama_synchronize(self.ctx)

    def pos_max(self, int s):
        return llama_memory_seq_pos_max(self.mem, s)

    def pos_min(self, int s):
        return llama_memory_seq_pos_min(self.mem, s)

    def can_shift(self):
        return llama_memory_can_shift(self.mem)

    def copy(self, int src, int dst, int p0, int p1):
        llama_memory_seq_cp(self.mem, src, dst, p0, p1)

    def remove(self, int s, int p0, int p1):
        return llama_memory_seq_rm(self.mem, s, p0, p1)

    def keep(self, int s):
        llama_memory_seq_keep(self.mem, s)

    def add(self, int s, int p0, int p1, int delta):
        llama_memory_seq_add(self.mem, s, p0, p1, delta)

    def div(self, int s, int p0, int p1, int d):
        llama_memory_seq_div(self.mem, s, p0, p1, d)
