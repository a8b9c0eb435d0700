// The stages of a sampler by name: llama.cpp's and our own.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "guarded.h"

namespace pykv {

// A stage's settings in the order of `STAGES` in sampling.py. Exact for int32, uint32 and float.
using stage_settings = std::vector<double>;

// Of DRY: the texts that end a repetition, and their vocabulary.
struct dry_words {
    const llama_vocab *      vocab = nullptr;
    std::vector<std::string> breakers;
};

// A stage of the program: changes `logits` in place. False: it failed and keeps its own exception.
using stage_call = bool (*)(void * self, const llama_token * ids, float * logits, size_t n);

// Each returns null on error; see caught().
llama_sampler * sampler_chain() noexcept;
llama_sampler * sampler_made(const std::string & name, const stage_settings & settings, const dry_words & words) noexcept;
llama_sampler * sampler_made_of_call(void * self, stage_call call) noexcept;
// Whether a stage has no state and never excludes every token.
bool sampler_is_plain(const std::string & name) noexcept;
// The chain owns the stage; CAUGHT on error.
int32_t sampler_add(llama_sampler * chain, llama_sampler * stage) noexcept;

}  // namespace pykv
