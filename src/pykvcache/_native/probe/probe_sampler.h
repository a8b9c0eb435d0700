// Creates and copies samplers, and explains why a grammar cannot be parsed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "guarded.h"

namespace pykv {

// A grammar. It has already read `prefix`; with `triggers`, it begins where one of these regular expressions matches
// the text so far. Null on error; caught() or the logged notes say why.
llama_sampler * sampler_grammar(const llama_vocab * vocab, const char * grammar, const char * root, const char * prefix,
                                const std::vector<std::string> & triggers) noexcept;
// Copies a sampler with its history; null for null or on error.
llama_sampler * sampler_clone(const llama_sampler * sampler) noexcept;

struct grammar_fault {
    std::string why;  // "" if it can be parsed
    int64_t     at = -1;  // byte offset, -1 if unknown
    std::vector<std::string> rules;  // the text's name for each rule that the parser made
};

// Finds the error that llama.cpp only prints to stderr. CAUGHT on failure.
int32_t find_grammar_fault(const llama_vocab * vocab, const char * grammar, grammar_fault & fault) noexcept;

}  // namespace pykv
