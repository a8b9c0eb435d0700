# Our own C++ around llama.cpp's samplers; a part of ``lib``.

from libc.stdint cimport int32_t, int64_t, uint32_t
from libcpp cimport bool
from libcpp.string cimport string
from libcpp.vector cimport vector

from pykvcache._native.libllama cimport *


cdef extern from "probe_sampler.h" namespace "pykv" nogil:
    struct sampler_settings:
        int32_t penalty_last_n
        float repeat_penalty
        float frequency_penalty
        float presence_penalty
        int32_t top_k
        float top_p
        float min_p
        float temperature
        bool greedy
        uint32_t seed

    struct grammar_fault:
        string why
        int64_t at

    llama_sampler* sampler_penalties(const sampler_settings&)
    llama_sampler* sampler_cuts(const sampler_settings&)
    llama_sampler* sampler_choice(const sampler_settings&)
    llama_sampler* sampler_lazy_grammar(
        const llama_vocab*, const char* grammar, const char* root, const vector[string]& triggers)
    llama_sampler* sampler_clone(const llama_sampler*)
    int32_t sampler_reset(llama_sampler*)
    int32_t find_grammar_fault(const llama_vocab*, const char* grammar, grammar_fault& fault)
    int32_t grammar_rule_name(const llama_vocab*, const char* grammar, uint32_t index, string& name)


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
