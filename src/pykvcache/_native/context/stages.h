// A sampler's stages between penalties and choice, in the caller's order.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "guarded.h"

namespace pykv {

enum stage_kind : int32_t {
    STAGE_PENALTIES,
    STAGE_DRY,
    STAGE_TOP_N_SIGMA,
    STAGE_TOP_K,
    STAGE_TYPICAL_P,
    STAGE_TOP_P,
    STAGE_MIN_P,
    STAGE_XTC,
    STAGE_TEMPERATURE,
    STAGE_ADAPTIVE,
};

struct sampler_settings {
    int32_t  penalty_last_n;
    float    repeat_penalty;
    float    frequency_penalty;
    float    presence_penalty;
    int32_t  top_k;
    float    top_p;
    float    min_p;
    float    temperature;
    bool     greedy;
    uint32_t seed;

    float    typical_p;
    float    top_n_sigma;
    float    xtc_probability;
    float    xtc_threshold;
    float    dry_multiplier;
    float    dry_base;
    int32_t  dry_allowed_length;
    int32_t  dry_last_n;
    int32_t  mirostat;  // its version; 0: none
    float    mirostat_tau;
    float    mirostat_eta;
    int32_t  n_vocab;   // mirostat 1
    float    adaptive_target;
    float    adaptive_decay;
    // DRY.
    const llama_vocab *      vocab;
    std::vector<std::string> breakers;
};

// A stage of the program: changes `logits` in place. False: it failed and keeps its own exception.
using stage_call = bool (*)(void * self, const llama_token * ids, float * logits, size_t n);
using stage_hold = void (*)(void * self, bool is_kept);  // add or drop a reference

// Null on error; see caught().
llama_sampler * sampler_chain() noexcept;
llama_sampler * sampler_penalties(const sampler_settings & s) noexcept;
llama_sampler * sampler_choice(const sampler_settings & s) noexcept;
// Add a stage to a chain; CAUGHT on error.
int32_t sampler_add(llama_sampler * chain, stage_kind kind, const sampler_settings & s) noexcept;
int32_t sampler_add_call(llama_sampler * chain, void * self, stage_call call, stage_hold hold) noexcept;

}  // namespace pykv
