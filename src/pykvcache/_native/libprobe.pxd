# Our C++ around llama.cpp, in the order of its headers. Together with the declarations of llama.h
# it is ``lib``.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libcpp cimport bool
from libcpp.memory cimport shared_ptr
from libcpp.string cimport string
from libcpp.vector cimport vector

from pykvcache._native.libllama cimport *
from pykvcache._native.libsampler cimport *


cdef extern from "finite.h" namespace "pykv" nogil:
    int64_t first_not_finite(const float* row, size_t n, bool is_logits)

cdef extern from "text.h" namespace "pykv" nogil:
    cppclass text_vocab:
        pass
    cppclass token_list:
        vector[llama_token] tokens
        string problem


cdef extern from "heap.h" namespace "pykv" nogil:
    void trim_memory()

cdef extern from "guarded.h" namespace "pykv" nogil:
    const int32_t CAUGHT
    void install_hooks() except +
    const string& caught()
    bool caught_memory()
    const string& caught_endpoint()
    void begin_notes()
    string take_notes()
    void set_log_threshold(int level)
    bool has_log()
    bool take_log(int& level, string& text)
    void renew_log() except +

    gguf_context* gguf_open(const char* path)
    string header_problem(const char* path, bint vocab_only)
    bint uses_amx()
    bint multiplies_single_matrices(const char* path)
    llama_model* model_load(const char* path, llama_model_params)
    llama_context* context_new(llama_model*, llama_context_params)
    int32_t context_free(llama_context*)
    const float* logits_ith(llama_context*, int32_t i)
    const float* embeddings_ith(llama_context*, int32_t i)
    const float* embeddings_seq(llama_context*, llama_seq_id)
    int32_t read_vocab(const llama_vocab*, text_vocab& out)
    int32_t tokenize(const text_vocab&, const char* text, size_t size, bool add_special,
                     bool parse_special, token_list& out)
    int32_t tokenize_whole(const llama_vocab*, const char* text, size_t size, bool add_special,
                           bool parse_special, vector[llama_token]& out)
    int32_t detokenize(const llama_vocab*, const vector[llama_token]& tokens, bool remove_special,
                       bool unparse_special, size_t limit, string& out)
    int32_t token_to_piece(const llama_vocab*, llama_token, char* out, int32_t room, bool special)
    llama_sampler* sampler_grammar(const llama_vocab*, const char* grammar, const char* root)
    int32_t sampler_apply(llama_sampler*, llama_token_data_array*)
    int32_t sampler_accept(llama_sampler*, llama_token)


cdef extern from "adapters.h" namespace "pykv" nogil:
    cppclass llama_adapter_lora "llama_adapter_lora":
        pass
    cppclass adapter_lock:
        void lock_shared()
        void unlock_shared()
    shared_ptr[adapter_lock] new_adapter_lock() except +
    cppclass adapter_set:
        vector[llama_adapter_lora*] loras
        vector[float] scales
        vector[float] control
        int64_t activated
    llama_adapter_lora* adapter_load(llama_model*, const char* path, adapter_lock&, string& problem)
    void adapter_free(llama_adapter_lora*, adapter_lock&)
    int32_t adapter_metadata(const llama_adapter_lora*, vector[string]& out)
    vector[llama_token] adapter_invocation(const llama_adapter_lora*) except +
    int32_t control_load(
        const char* path, int32_t n_layer, int32_t n_embd, vector[float]& out, string& problem)


cdef extern from "devices.h" namespace "pykv" nogil:
    vector[string] device_names() except +
    cppclass device_facts:
        string name
        string backend
        string description
        int kind
        uint64_t free
        uint64_t total
    int32_t device_list(vector[device_facts]& out)
    ggml_backend_dev_t device_named(const char* name)


cdef extern from "device_link.h" namespace "pykv" nogil:
    cppclass device_link:
        string endpoint
        bool is_lost
        string why() except +
    cppclass device_links:
        pass
    bool is_remote(const device_links&)
    const device_link* lost_link(const device_links&)


cdef extern from "transfers.h" namespace "pykv" nogil:
    ctypedef struct transfer_counts:
        uint64_t reads, writes, bytes_read, bytes_written
    transfer_counts transfers()
    void hide_host(bool hidden, bool even)


cdef extern from "probe_buffers.h" namespace "pykv" nogil:
    cppclass buffer_bytes:
        string name
        uint64_t model
        uint64_t context
        uint64_t compute
    int32_t memory_breakdown(const llama_context*, vector[buffer_bytes]& out)
    vector[string] devices_of(const llama_model*) except +


cdef extern from "words.h" namespace "pykv" nogil:
    vector[string] split_text(const string& text, const vector[string]& patterns, bool byte_encode,
                              bool with_std_regex) except +


cdef extern from "probe.h" namespace "pykv" nogil:
    enum memory_kind:
        MEMORY_NONE
        MEMORY_ATTENTION
        MEMORY_SLIDING_WINDOW
        MEMORY_RECURRENT
        MEMORY_HYBRID
        MEMORY_HYBRID_SLIDING_WINDOW
        MEMORY_OTHER
    enum no_shift:
        SHIFT_OK
        SHIFT_MULTI_POS
        SHIFT_ARCH
        SHIFT_NO_ROPE
        SHIFT_BF16
        SHIFT_QUANTIZED
        SHIFT_PARTIAL
        SHIFT_SCALED
        SHIFT_OTHERWISE
        SHIFT_TABLE
    enum shift_problem:
        SHIFT_FITS
        SHIFT_NEGATIVE
        SHIFT_OVERFLOW
        SHIFT_COLLIDES
    ctypedef struct model_facts:
        bool learned_positions
        bool causal
        bool has_classifier
        int32_t n_embd_out
        int32_t n_cls_out
        uint64_t k_per_cell
        uint64_t v_per_cell
        uint64_t state_values
    ctypedef struct context_facts:
        bool flash_attn
        bool kv_unified
        bool causal
        int pooling_type
        int32_t n_threads
        int32_t n_threads_batch
        bool gives_logits
        bool endless
        const char* fault
    cdef cppclass memory_traits:
        memory_kind kind
        string name
        no_shift shift
        llama_pos max_position
        bool bounded
        bool picks_blocks
        bool may_be_dense
        bool has_layout
        bool whole_only
        bool has_rest
        bool windowed
        uint32_t n_stream
    ctypedef struct memory_facts:
        uint32_t n_cells
        uint32_t n_swa
        uint32_t max_rollback
        uint64_t bytes_total
        uint64_t bytes_per_token
    enum memory_part:
        PART_ATTENTION
        PART_WINDOW
        PART_RECURRENT
        PART_INDEX
    cdef cppclass memory:
        pass

    model_facts look_at_model(const llama_model*) except +
    bool heads_divisible(const llama_model*, ggml_type, bool keys)
    const memory_traits& traits_of(const memory*)
    vector[string] buffer_types(const memory*) except +
    context_facts look_at_context(const llama_context*, const memory*) except +
    memory_facts look_at_memory(const memory*) except +
    bool next_cell(const memory*, memory_part, uint32_t n_seq_max, uint32_t& stream, uint32_t& cell,
                   llama_pos& pos, uint8_t* members)
    uint32_t n_used(const memory*, memory_part)
    uint32_t n_spanned(const memory*)
    int64_t n_free(const memory*, llama_seq_id)
    size_t n_held(const memory*, llama_seq_id)
    bool extent(const memory*, llama_seq_id, llama_pos& lo, llama_pos& hi)
    enum removal:
        REMOVE_NOTHING
        REMOVE_EMPTY
        REMOVE_WHOLE
        REMOVE_PART
        REMOVE_STEPS
        REMOVE_REFUSED
    llama_pos first_kept(const memory*, llama_seq_id)
    llama_pos first_of(const memory*, llama_seq_id)
    bool holds(const memory*, llama_seq_id, llama_pos p0, llama_pos p1)
    llama_pos last_before(const memory*, llama_seq_id, llama_pos p)
    llama_pos window_start(const memory*, llama_pos next)
    llama_pos least_cut(const memory*, llama_pos first) noexcept
    llama_pos window_begin(const memory*, llama_seq_id)
    llama_pos spare_begin(const memory*, llama_seq_id)
    bool window_intact(const memory*, llama_seq_id, llama_pos next)
    bool window_dropped(const memory*, llama_seq_id)
    bool shared(const memory*, llama_seq_id, llama_pos p0, llama_pos p1)
    bool same_cells(const memory*, llama_seq_id, llama_seq_id)
    bool is_plain()
    bool can_compact(const memory*)
    shift_problem add_check(const memory*, llama_seq_id, llama_pos p0, llama_pos p1, int64_t delta,
                            llama_pos& where)
    shift_problem div_check(const memory*, llama_seq_id, llama_pos p0, llama_pos p1, int d,
                            llama_pos& where)
    void distrust_scheduler(llama_context*)
    void build_each_graph(llama_context*)


cdef extern from "rollback.h" namespace "pykv" nogil:
    uint32_t most_kept(const llama_context*, uint32_t asked) except +


cdef extern from "probe_kv.h" namespace "pykv" nogil:
    ctypedef struct live_tensor:
        const char* data
        int32_t type
        bool host
        bool transposed
        int64_t n_head, head_dim
        size_t cell_stride, head_stride, value_stride
    ctypedef struct live_cell:
        llama_pos pos
        uint32_t cell
    ctypedef struct rope_facts:
        int32_t type
        int32_t n_rot
        int32_t offset
        int32_t n_ctx_orig
        float freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow
    ctypedef struct key_rope:
        bool known
        bool joined
        rope_facts facts
    ctypedef struct hadamard_facts:
        int32_t keys
        int32_t values

    bool has_part(const memory*, memory_part)
    vector[uint32_t] part_layers(const memory*, memory_part) except +
    vector[live_cell] part_cells(const memory*, memory_part, llama_seq_id) except +
    bool in_window(const memory*, llama_pos pos, llama_pos next)
    hadamard_facts part_hadamard(const memory*, memory_part) except +
    live_tensor tensor_at(const memory*, memory_part, uint32_t il, int which, llama_seq_id) except +
    string buffer_of(const live_tensor&) except +
    int32_t read_rows(const memory*, memory_part, uint32_t il, int which, llama_seq_id,
                      const vector[live_cell]&, uint8_t* dst)
    bool has_extended(const memory*)
    void read_extended(const memory*, memory_part, llama_seq_id, const vector[live_cell]&,
                       int32_t* dst) except +
    bool has_keys(const memory*, uint32_t il)
    const key_rope& rope_at(const memory*, uint32_t il) except +
    vector[float] rope_factors(const key_rope&) except +
    bool dequantize(ggml_type, const void* src, float* dst, int64_t n)
    bool quantize(ggml_type, const float* src, void* dst, int64_t n)
    size_t bytes_of(int type, int64_t n)
    int64_t block_of(int type)


cdef extern from "disk.h" namespace "pykv" nogil:
    int claim_blocks(int fd, int64_t size)


cdef extern from "probe_values.h" namespace "pykv" nogil:
    float largest_value(uint64_t n, bool as_f16)


cdef extern from "sync.h" namespace "pykv" nogil:
    cdef cppclass owned_mutex:
        void watch(const device_links&)
        void lock_for_good()
        bool try_lock()
        void lock()
        bool is_mine()
    cdef cppclass scoped_lock:
        void adopt(owned_mutex&)
    cdef cppclass abort_flag:
        void begin()
        void arm(bool on)
        void end()
        bool is_wanted()
        bool ask()
        int64_t ask_at(int64_t poll)

        @staticmethod
        bool poll(void*) noexcept

    cdef cppclass load_gate:
        void begin()
        void end()
        bool is_exiting()
        void finish()

    load_gate loads


cdef extern from "sigint.h" namespace "pykv" nogil:
    cdef cppclass deferred_sigint:
        void begin() noexcept
        void end() noexcept
        bool deliver() noexcept
        void stops(abort_flag*) noexcept
        void forget() noexcept

    deferred_sigint sigint
