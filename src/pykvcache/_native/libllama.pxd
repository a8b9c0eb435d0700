# The functions of llama.h in use, in header order, with only the struct fields that are read or written.
# Our own headers are declared in libpykv.pxd.

from libc.stdint cimport int8_t, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libcpp cimport bool


cdef extern from "llama.h" nogil:
    ctypedef int32_t llama_pos
    ctypedef int32_t llama_token
    ctypedef int32_t llama_seq_id

    cdef struct llama_vocab:
        pass
    cdef struct llama_model:
        pass
    cdef struct llama_context:
        pass
    cdef struct llama_sampler:
        pass

    ctypedef void* ggml_backend_dev_t
    ctypedef int ggml_type
    ctypedef int llama_split_mode
    ctypedef int llama_load_mode
    ctypedef int llama_rope_scaling_type
    ctypedef int llama_pooling_type_e "enum llama_pooling_type"
    ctypedef int llama_attention_type
    ctypedef int llama_flash_attn_type

    const uint32_t LLAMA_SESSION_VERSION
    const uint32_t LLAMA_STATE_SEQ_VERSION

    ctypedef struct llama_token_data:
        llama_token id
        float logit
        float p

    ctypedef struct llama_logit_bias:
        llama_token token
        float bias

    ctypedef struct llama_token_data_array:
        llama_token_data* data
        size_t size
        int64_t selected

    ctypedef bool (*llama_progress_callback)(float progress, void* user_data) noexcept

    ctypedef struct llama_batch:
        int32_t n_tokens
        llama_token* token
        float* embd
        llama_pos* pos
        int32_t* n_seq_id
        llama_seq_id** seq_id
        int8_t* logits

    ctypedef struct llama_model_params:
        ggml_backend_dev_t* devices
        int32_t n_gpu_layers
        llama_split_mode split_mode
        llama_load_mode load_mode
        int32_t main_gpu
        const float* tensor_split
        llama_progress_callback progress_callback
        void* progress_callback_user_data
        bool vocab_only
        bool check_tensors
        bool use_extra_bufts

    ctypedef struct llama_context_params:
        uint32_t n_ctx
        uint32_t n_batch
        uint32_t n_ubatch
        uint32_t n_seq_max
        uint32_t n_rs_seq
        int32_t n_threads
        int32_t n_threads_batch
        llama_rope_scaling_type rope_scaling_type
        llama_pooling_type_e pooling_type
        llama_attention_type attention_type
        llama_flash_attn_type flash_attn_type
        float rope_freq_base
        float rope_freq_scale
        float yarn_ext_factor
        float yarn_attn_factor
        float yarn_beta_fast
        float yarn_beta_slow
        uint32_t yarn_orig_ctx
        ggml_type type_k
        ggml_type type_v
        bool (*abort_callback)(void*) noexcept
        void* abort_callback_data
        bool embeddings
        bool offload_kqv
        bool no_perf
        bool op_offload
        bool swa_full
        bool kv_unified

    const char* llama_version()
    llama_model_params llama_model_default_params()
    llama_context_params llama_context_default_params()

    size_t llama_max_devices()
    size_t llama_max_parallel_sequences()
    bool llama_supports_gpu_offload() except +

    uint32_t llama_n_ctx(const llama_context*)
    uint32_t llama_n_ctx_seq(const llama_context*)
    uint32_t llama_n_batch(const llama_context*)
    uint32_t llama_n_ubatch(const llama_context*)
    uint32_t llama_n_seq_max(const llama_context*)

    const llama_vocab* llama_model_get_vocab(const llama_model*)
    int llama_model_rope_type(const llama_model*)
    int32_t llama_model_n_ctx_train(const llama_model*)
    int32_t llama_model_n_embd(const llama_model*)
    int32_t llama_model_n_layer(const llama_model*)
    int32_t llama_model_n_head(const llama_model*)
    int32_t llama_model_n_head_kv(const llama_model*)
    int32_t llama_model_n_swa(const llama_model*)
    int llama_vocab_type(const llama_vocab*)
    int32_t llama_vocab_n_tokens(const llama_vocab*)
    const char* llama_vocab_get_text(const llama_vocab*, llama_token)
    uint64_t llama_model_size(const llama_model*)
    const char* llama_model_chat_template(const llama_model*, const char* name) except +
    uint64_t llama_model_n_params(const llama_model*)
    bool llama_model_has_encoder(const llama_model*)
    bool llama_model_has_decoder(const llama_model*)
    llama_token llama_model_decoder_start_token(const llama_model*)
    bool llama_model_is_recurrent(const llama_model*)
    bool llama_model_is_hybrid(const llama_model*)
    bool llama_model_is_diffusion(const llama_model*)

    void llama_set_causal_attn(llama_context*, bool causal_attn)
    void llama_set_n_threads(llama_context*, int32_t n_threads, int32_t n_threads_batch)

    bool llama_vocab_is_eog(const llama_vocab*, llama_token)
    llama_token llama_vocab_bos(const llama_vocab*)
    llama_token llama_vocab_eos(const llama_vocab*)
    llama_token llama_vocab_eot(const llama_vocab*)
    llama_token llama_vocab_sep(const llama_vocab*)
    llama_token llama_vocab_nl(const llama_vocab*)
    llama_token llama_vocab_pad(const llama_vocab*)
    llama_token llama_vocab_mask(const llama_vocab*)
    bool llama_vocab_get_add_bos(const llama_vocab*)
    bool llama_vocab_get_add_eos(const llama_vocab*)

    void llama_sampler_free(llama_sampler*)

    ctypedef struct llama_perf_context_data:
        double t_load_ms
        double t_p_eval_ms
        double t_eval_ms
        int32_t n_p_eval
        int32_t n_eval
        int32_t n_reused
    llama_perf_context_data llama_perf_context(const llama_context*)
    void llama_perf_context_reset(llama_context*)


cdef extern from "gguf.h" nogil:
    cdef struct gguf_context:
        pass
    void gguf_free(gguf_context*)
    size_t gguf_get_data_offset(const gguf_context*)
    int64_t gguf_get_n_tensors(const gguf_context*)
    size_t gguf_get_tensor_offset(const gguf_context*, int64_t)
    size_t gguf_get_tensor_size(const gguf_context*, int64_t)
