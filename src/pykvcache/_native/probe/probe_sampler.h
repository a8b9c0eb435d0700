// Samplers made and copied as a whole, and why a grammar cannot be parsed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "guarded.h"

namespace pykv {

// The grammar of a chat format: it has read `prefix` already, or begins where one of `triggers`, regular expressions,
// matches the text so far.
llama_sampler * sampler_chat_grammar(const llama_vocab * vocab, const char * grammar, const char * root, const char * prefix,
                                     const std::vector<std::string> & triggers) noexcept;
// With its history; null for null, and if something was caught.
llama_sampler * sampler_clone(const llama_sampler * sampler) noexcept;
int32_t sampler_reset(llama_sampler * sampler) noexcept;

struct grammar_fault {
    std::string why;  // empty: it can be parsed
    int64_t     at = -1;  // offset in bytes, where it is known
};

// llama.cpp prints the reason to stderr and keeps nothing. CAUGHT if even this failed.
int32_t find_grammar_fault(const llama_vocab * vocab, const char * grammar, grammar_fault & fault) noexcept;
// The rule of the text that a rule of the parser was made for; empty if there is none.
int32_t grammar_rule_name(const llama_vocab * vocab, const char * grammar, uint32_t index, std::string & name) noexcept;

}  // namespace pykv
