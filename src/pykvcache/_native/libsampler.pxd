# Our C++ around llama.cpp's samplers; a part of ``lib``.

from libc.stdint cimport int32_t, int64_t
from libcpp cimport bool
from libcpp.string cimport string
from libcpp.vector cimport vector

from pykvcache._native.libllama cimport *


cdef extern from "probe_sampler.h" namespace "pykv" nogil:
    struct grammar_fault:
        string why
        int64_t at
        vector[string] rules

    llama_sampler* sampler_chat_grammar(
        const llama_vocab*, const char* grammar, const char* root, const char* prefix,
        const vector[string]& triggers)
    llama_sampler* sampler_clone(const llama_sampler*)
    int32_t sampler_reset(llama_sampler*)
    int32_t find_grammar_fault(const llama_vocab*, const char* grammar, grammar_fault& fault)


cdef extern from "stages.h" namespace "pykv" nogil:
    cppclass dry_words:
        const llama_vocab* vocab
        vector[string] breakers

    ctypedef bool (*stage_call)(void* self, const llama_token* ids, float* logits, size_t n) noexcept

    llama_sampler* sampler_chain()
    llama_sampler* sampler_made(const string& name, const vector[double]& settings, const dry_words&)
    llama_sampler* sampler_made_of_call(void* self, stage_call)
    bool sampler_is_plain(const string& name)
    int32_t sampler_add(llama_sampler* chain, llama_sampler* stage)


cdef extern from "choice.h" namespace "pykv" nogil:
    cdef enum choice_problem:
        CHOSEN
        CHOICE_NAN
        CHOICE_INFINITE
        CHOICE_TOO_LARGE
        CHOICE_NONE_LEFT
        CHOICE_NOTHING

    cdef enum choice_stage:
        STAGE_CHOICE
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

        int32_t narrow(const float* row, int32_t n, vector[llama_token_data]& list)
        int32_t choose(const float* row, int32_t n, vector[llama_token_data]& list, llama_token& token)

cdef extern from "choices.h" namespace "pykv" nogil:
    cdef cppclass choices:
        void begin(size_t n, int n_threads) except +
        void set(size_t i, chooser* sampler, const float* row)
        void run(int32_t n_vocab)
        int32_t code(size_t i)
        llama_token token(size_t i)
        void recall(size_t i)
