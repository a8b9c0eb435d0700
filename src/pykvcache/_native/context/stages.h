// The stages of a sampler: llama.cpp's and our own, by name, and its grammar.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
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
// Copies a sampler with its history.
llama_sampler * sampler_clone(const llama_sampler * sampler) noexcept;
// CAUGHT on error. The chain owns the stage.
int32_t sampler_add(llama_sampler * chain, llama_sampler * stage) noexcept;
int32_t sampler_apply(llama_sampler * sampler, llama_token_data_array * candidates) noexcept;
int32_t sampler_accept(llama_sampler * sampler, llama_token token) noexcept;

// A grammar. It has already read `prefix`; with `triggers`, it begins where one of these regular expressions matches
// the text so far. Null on error; caught() or the logged notes say why.
llama_sampler * sampler_grammar(const llama_vocab * vocab, const char * grammar, const char * root, const char * prefix,
                                const std::vector<std::string> & triggers) noexcept;

struct grammar_fault {
    std::string why;  // "" if it can be parsed
    int64_t     at = -1;  // byte offset, -1 if unknown
    std::vector<std::string> rules;  // the text's name for each rule that the parser made
};

// Finds the error that llama.cpp only prints to stderr. CAUGHT on failure.
int32_t find_grammar_fault(const llama_vocab * vocab, const char * grammar, grammar_fault & fault) noexcept;

// Makes a llama_sampler of a copyable object with `name`, `apply(candidates)`, `accept(token)` and `reset()`.
template <class Stage> struct own_sampler {
    static Stage & of(const llama_sampler * self) { return *static_cast<Stage *>(self->ctx); }

    static llama_sampler * make(Stage stage) {
        static llama_sampler_i calls = [] {
            llama_sampler_i i{};
            i.name = [](const llama_sampler *) { return Stage::name; };
            i.accept = [](llama_sampler * self, llama_token token) { of(self).accept(token); };
            i.apply = [](llama_sampler * self, llama_token_data_array * found) { of(self).apply(*found); };
            i.reset = [](llama_sampler * self) { of(self).reset(); };
            i.clone = [](const llama_sampler * self) { return make(of(self)); };
            i.free = [](llama_sampler * self) { delete &of(self); };
            return i;
        }();
        auto                  owned = std::make_unique<Stage>(std::move(stage));
        llama_sampler * const made = llama_sampler_init(&calls, owned.get());
        owned.release();  // the sampler frees it
        return made;
    }
};

}  // namespace pykv
