# Our own headers. With the declarations of llama.h in libllama.pxd, they are ``lib`` in the other files.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libcpp cimport bool
from libcpp.memory cimport shared_ptr
from libcpp.string cimport string
from libcpp.vector cimport vector

from pykvcache._native.libllama cimport *


cdef extern from "text.h" namespace "pykv" nogil:
    cppclass text_vocab:
        pass
    cppclass token_list:
        vector[llama_token] tokens
        string problem
    int32_t read_vocab(const llama_vocab*, text_vocab& out)
    int32_t tokenize(const text_vocab&, const char* text, size_t size, bool add_special,
                     bool parse_special, token_list& out)
    int32_t tokenize_whole(const llama_vocab*, const char* text, size_t size, bool add_special,
                           bool parse_special, vector[llama_token]& out)
    int32_t detokenize(const llama_vocab*, const vector[llama_token]& tokens, bool remove_special,
                       bool unparse_special, size_t limit, string& out)
    int32_t token_to_piece(const llama_vocab*, llama_token, char* out, int32_t room, bool special)
    vector[string] split_text(const string& text, const vector[string]& patterns, bool byte_encode,
                              bool with_std_regex) except +


cdef extern from "system.h" namespace "pykv" nogil:
    void trim_memory()
    int claim_blocks(int fd, int64_t size)


cdef extern from "guarded.h" namespace "pykv" nogil:
    const int32_t CAUGHT
    void install_hooks() except +
    cppclass failure:
        string text, endpoint
        bool no_memory
    const failure& caught()
    void begin_notes()
    string take_notes()
    void set_log_threshold(int level)
    bool has_log()
    bool take_log(int& level, string& text)
    void renew_log() except +

    gguf_context* gguf_open(const char* path)
    string header_problem(const char* path, bint vocab_only)
    const bool USES_AMX
    bint multiplies_single_matrices(const char* path)
    llama_model* model_load(const char* path, llama_model_params)
    llama_context* context_new(llama_model*, llama_context_params)
    int32_t context_free(llama_context*)
    const float* logits_ith(llama_context*, int32_t i)
    const float* embeddings_ith(llama_context*, int32_t i)
    const float* embeddings_seq(llama_context*, llama_seq_id)


cdef extern from "sync.h" namespace "pykv" nogil:
    cppclass device_link:
        string endpoint
        bool is_lost
        string why() except +
    cppclass device_links:
        pass
    bool is_remote(const device_links&)
    const device_link* lost_link(const device_links&)
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
    cppclass device_facts:
        string name
        string backend
        string description
        int kind
        uint64_t free
        uint64_t total
    int32_t device_list(vector[device_facts]& out)
    ggml_backend_dev_t device_named(const char* name)
    cppclass buffer_bytes:
        string name
        uint64_t model
        uint64_t context
        uint64_t compute
    int32_t memory_breakdown(const llama_context*, vector[buffer_bytes]& out)
    vector[string] devices_of(const llama_model*) except +


cdef extern from "rpc/servers.h" namespace "pykv" nogil:
    cppclass rpc_server:
        shared_ptr[device_link] link
        vector[ggml_backend_dev_t] devices
    const int32_t RPC_NO_BUILD
    const int32_t RPC_LOST
    const int32_t RPC_FORKED
    int32_t rpc_open(const char* endpoint, int64_t timeout_ms, shared_ptr[rpc_server]& out, string& why)
    void rpc_register(const rpc_server&)
    int32_t rpc_serve(const char* endpoint, int n_threads, const char* devices)
    shared_ptr[llama_model] own_model_on(llama_model*, const vector[shared_ptr[rpc_server]]&) except +
    device_links rpc_links_of(const llama_model*) except +


cdef extern from "cpu/cpu.h" namespace "pykv":
    string choose_cpu(const char* wanted) except +
    string cpu_name() except +
    vector[string] cpu_names() except +
    vector[string] cpu_features() except +


cdef extern from "transfers.h" namespace "pykv" nogil:
    ctypedef struct transfer_counts:
        uint64_t reads, writes, bytes_read, bytes_written
    transfer_counts transfers()
    void hide_host(bool hidden, bool even)


cdef extern from "probe.h" namespace "pykv" nogil:
    enum memory_kind:
        MEMORY_NONE
        MEMORY_ATTENTION
        MEMORY_SLIDING_WINDOW
        MEMORY_RECURRENT
        MEMORY_HYBRID
        MEMORY_HYBRID_SLIDING_WINDOW
        MEMORY_OTHER
    cppclass no_shift:
        string why
        bool of_type
        bool multi_pos
    enum shift_problem:
        SHIFT_FITS
        SHIFT_NEGATIVE
        SHIFT_OVERFLOW
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
        bool gives_logits
        bool endless
        string fault
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
    string description_of(const llama_model*) except +
    vector[string] metadata_of(const llama_model*) except +
    bool heads_divisible(const llama_model*, ggml_type, bool keys)
    const memory_traits& traits_of(const memory*)
    vector[string] buffer_types(const memory*) except +
    context_facts look_at_context(const llama_context*) except +
    memory_facts look_at_memory(const memory*) except +
    bool next_cell(const memory*, memory_part, uint32_t n_seq_max, uint32_t& stream, uint32_t& cell,
                   llama_pos& pos, uint8_t* members)
    uint32_t n_used(const memory*, memory_part)
    uint32_t n_spanned(const memory*)
    int64_t n_free(const memory*, llama_seq_id)
    ctypedef struct extent:
        llama_pos lo, hi
        size_t n
    extent extent_of(const memory*, llama_seq_id)
    llama_pos first_kept(const memory*, llama_seq_id)
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
    bool window_has_room(const memory*, llama_seq_id, uint32_t n)
    uint32_t most_kept(const llama_context*, uint32_t asked) except +
    void distrust_scheduler(llama_context*)
    void build_each_graph(llama_context*)


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


cdef extern from "values.h" namespace "pykv" nogil:
    int64_t first_not_finite(const float* row, size_t n, bool is_logits)
    float largest_value(uint64_t n, bool as_f16)


cdef extern from "sigint.h" namespace "pykv" nogil:
    cdef cppclass deferred_sigint:
        void begin() noexcept
        void end() noexcept
        bool deliver() noexcept
        void stops(abort_flag*) noexcept
        void forget() noexcept

    deferred_sigint sigint


cdef extern from "probe_state.h" namespace "pykv" nogil:
    enum block_kind:
        BLOCK_CELLS
    enum state_fault:
        STATE_FITS
        STATE_TRUNCATED
        STATE_TRAILING
        STATE_DAMAGED
        STATE_MISMATCH
        STATE_NO_ROOM
        STATE_POSITION
        STATE_VALUE
        STATE_UNKNOWN
    ctypedef struct state_part:
        memory_part part
        uint32_t n_stream
        uint32_t n_cells
        uint32_t n_layer
        bool extended
        bool v_trans
    ctypedef struct state_rows:
        block_kind kind
        uint32_t layer
        int32_t type
        uint32_t n_embd
        uint64_t row_bytes
        uint32_t n_head
        uint32_t head_dim
    ctypedef struct state_block:
        memory_part part
        block_kind kind
        uint32_t stream, layer, n_cells
        uint64_t offset, size
    ctypedef struct state_piece:
        const uint8_t* data
        size_t size

    ctypedef uint32_t part_set
    const part_set NO_PARTS
    const part_set RECURRENT_PARTS
    const part_set PARTIAL_PARTS
    const part_set CELL_PARTS
    const part_set ALL_PARTS
    vector[state_part] state_parts(const memory*, bool v_trans, part_set which) except +
    vector[state_rows] state_rows_of(const memory*, bool v_trans, memory_part) except +
    cdef cppclass fault:
        state_fault kind
        string why, what
        int64_t value, limit
        bool counted
    fault state_check(const memory*, bool v_trans, uint32_t n_seq_max, llama_seq_id, part_set which,
                      const vector[state_piece]&, vector[state_block]& blocks, part_set known)
    cdef cppclass seq_state:
        size_t size
    seq_state* seq_state_new(const memory*, bool v_trans, llama_seq_id, part_set which, llama_pos window_from)
    int32_t seq_state_write(const seq_state*, uint8_t* dst, bool two)
    uint32_t owned_alone(const memory*, llama_seq_id)


cdef extern from "state_layout.h" namespace "pykv" nogil:
    const uint32_t SEQ_MAGIC
    const size_t SEQ_HEAD_BYTES


cdef extern from "state_pieces.h" namespace "pykv" nogil:
    cdef cppclass joined_state:
        vector[state_piece] pieces
    cdef cppclass cell_arrays:
        uint32_t n
        const int32_t* positions
        const int32_t* ext
        const int32_t* offsets
        const llama_seq_id* ids
        vector[const uint8_t*] rows

    int32_t state_join(const memory*, bool v_trans, llama_seq_id, const vector[vector[cell_arrays]]&,
                       joined_state&)
    int32_t state_fit(const memory*, bool v_trans, llama_seq_id, uint32_t n_seq_max,
                      const vector[state_block]&, const vector[state_piece]&, joined_state&)
    size_t n_cell_ids(uint64_t size, uint32_t n, bool extended)
    void read_cells(const uint8_t* at, uint32_t n, bool extended, int32_t* positions, int32_t* ext,
                    int32_t* offsets, llama_seq_id* ids)

    cdef cppclass block_layout:
        size_t cell_bytes

    block_layout block_layout_of(const memory*, bool v_trans, memory_part) except +
    bool block_fits(const block_layout&, const uint8_t* data, uint32_t n)
    void block_copy(
        const block_layout&, const uint8_t* src, size_t n_src, size_t first, size_t count,
        uint8_t* dst, size_t n_dst, size_t at)
    int32_t BLOCKS_WRITTEN
    int32_t BLOCKS_VALUES
    int32_t blocks_write(const memory*, bool v_trans, memory_part, llama_seq_id, llama_pos first, uint32_t n,
                         uint32_t last, const vector[uint8_t*]& dst, bool two)
    ctypedef struct block_span:
        const uint8_t* data
        uint32_t n, used
    cdef cppclass block_run:
        llama_pos first
        vector[block_span] blocks
    size_t n_cells(const block_run&)
    int32_t block_join(const memory*, bool v_trans, part_set which, const block_run& attention,
                       const block_run& window, state_piece state, joined_state&)


cdef extern from "sequences.h" namespace "pykv" nogil:
    const int32_t NOTHING_DONE
    const int32_t REFUSED
    const int32_t UNEXPECTED
    cdef cppclass sequence_facts:
        bool open(llama_context*, adapter_lock*)
        int32_t adapt(adapter_set&, adapter_set& before)
        void close()
        const memory* cells()
        uint64_t epoch()
        bool is_pending()
        bool needs_removal(llama_seq_id)
        bool was_damaged(llama_seq_id)
        llama_pos next_pos(llama_seq_id)
        uint64_t input_key(llama_seq_id)
        bool can_resume_at(llama_seq_id, llama_pos p0)
        bool can_remove(llama_seq_id, llama_pos p0, llama_pos p1)
        uint64_t name_version(llama_seq_id) except +
        bool is_version(llama_seq_id, uint64_t id)
        bool row_is_held(size_t row)
        bool was_restored()
        void suspect()
        llama_pos row_pos(size_t row)
        bool rows_are_whole(llama_seq_id)
        void forget_rows()
        void begin()
        int32_t clear(bool data)
        int32_t remove(llama_seq_id, llama_pos p0, llama_pos p1)
        int32_t keep(llama_seq_id)
        int32_t rewind(llama_seq_id, llama_pos last)
        int32_t copy(llama_seq_id src, llama_seq_id dst, llama_pos p0, llama_pos p1)
        int32_t shift(llama_seq_id, llama_pos p0, llama_pos p1, llama_pos delta)
        int32_t divide(llama_seq_id, llama_pos p0, llama_pos p1, int d)
        int32_t apply_pending()
        int64_t compact()
        int32_t place(bool v_trans, llama_seq_id, const vector[state_block]& blocks,
                      const vector[state_piece]&, bool two, const llama_pos* firsts)
        int32_t replace(llama_seq_id, const vector[state_piece]&, const llama_pos* firsts)
        int32_t put_back(llama_seq_id, const vector[state_piece]& before)
        int32_t put_part(llama_seq_id, const vector[state_piece]&, llama_pos first, llama_pos last,
                         uint64_t version)
        int32_t decode(const llama_batch&, bool is_first, bool active)
        int32_t encode(const llama_batch&)


cdef extern from "stages.h" namespace "pykv" nogil:
    cppclass dry_words:
        const llama_vocab* vocab
        vector[string] breakers

    ctypedef bool (*stage_call)(void* self, const llama_token* ids, float* logits, size_t n) noexcept

    llama_sampler* sampler_chain()
    llama_sampler* sampler_made(const string& name, const vector[double]& settings, const dry_words&)
    llama_sampler* sampler_made_of_call(void* self, stage_call)
    bool sampler_is_plain(const string& name)
    llama_sampler* sampler_clone(const llama_sampler*)
    int32_t sampler_add(llama_sampler* chain, llama_sampler* stage)
    int32_t sampler_apply(llama_sampler*, llama_token_data_array*)
    int32_t sampler_accept(llama_sampler*, llama_token)

    struct grammar_fault:
        string why
        int64_t at
        vector[string] rules

    llama_sampler* sampler_grammar(
        const llama_vocab*, const char* grammar, const char* root, const char* prefix,
        const vector[string]& triggers)
    int32_t find_grammar_fault(const llama_vocab*, const char* grammar, grammar_fault& fault)


cdef extern from "choice.h" namespace "pykv" nogil:
    cdef enum choice_problem:
        CHOSEN
        CHOICE_NAN
        CHOICE_INFINITE
        CHOICE_TOO_LARGE
        CHOICE_NOTHING

    cdef enum choice_stage:
        STAGE_GRAMMAR
        STAGE_ACCEPT

    cdef cppclass chooser:
        llama_sampler* grammar
        llama_sampler* penalties
        llama_sampler* cuts
        llama_sampler* choice
        float temperature
        bool has_call
        bool is_narrowed_further
        vector[llama_logit_bias] bias
        llama_token where
        choice_stage stage
        llama_token_data_array found

        int32_t reset()
        int32_t narrow(const float* row, int32_t n, vector[llama_token_data]& list)
        int32_t choose(const float* row, int32_t n, vector[llama_token_data]& list, llama_token& token)

    cdef cppclass choices:
        void begin(size_t n, int n_threads) except +
        void set(size_t i, chooser* sampler, const float* row)
        void run(int32_t n_vocab)
        int32_t code(size_t i)
        llama_token token(size_t i)
        void recall(size_t i)
