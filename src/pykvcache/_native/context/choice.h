// One token out of a row of logits: the stages of a sampler, applied in their order.
#pragma once

#include <cstdint>
#include <vector>

#include "guarded.h"

namespace pykv {

// Why there is no token. CAUGHT beside these: something threw.
enum choice_problem : int32_t {
    CHOSEN = 0,
    CHOICE_NAN,       // at chooser::where
    CHOICE_INFINITE,  // at chooser::where
    CHOICE_TOO_LARGE,  // bias and penalties made a logit infinite
    CHOICE_NONE_LEFT,  // everything is excluded
    CHOICE_NOTHING,    // the chain selected nothing
};

// What was going on when something was caught.
enum choice_stage : int32_t { STAGE_CHOICE, STAGE_GRAMMAR, STAGE_ACCEPT };

// What a sampler is made of; each stage may be NULL except the choice. Not locked: one thread at a time.
class chooser {
  public:
    using candidate_list = std::vector<llama_token_data>;

    llama_sampler * grammar = nullptr;
    llama_sampler * penalties = nullptr;
    llama_sampler * cuts = nullptr;
    llama_sampler * choice = nullptr;
    float           temperature = 1;
    bool            has_call = false;             // a stage that is a call of the program's: on its own thread alone
    bool            is_narrowed_further = false;  // stages of `cuts` have state, or may exclude every token
    bool            is_listed = false;  // while choices looks whether it has one twice
    // Tokens of the bias lie below the number of logits.
    std::vector<llama_logit_bias> bias;

    // Of the last call.
    llama_token            where = 0;
    choice_stage           stage = STAGE_CHOICE;
    llama_token_data_array found{};  // in the caller's list

    chooser() noexcept = default;
    chooser(const chooser &) = delete;
    chooser & operator=(const chooser &) = delete;
    ~chooser();

    // The candidates after all stages but the choice; nothing is accepted.
    int32_t narrow(const float * row, int32_t n, candidate_list & list) noexcept;
    // Choose, and let grammar and penalties take note of it.
    int32_t choose(const float * row, int32_t n, candidate_list & list, llama_token & token) noexcept;
    // What a choice takes, in logits that a greedy one looks at in that time (0.3 to 0.6 ns each).
    size_t cost(int32_t n) const noexcept { return is_greedy() ? size_t(n) : 16384 + 4 * size_t(n); }

  private:
    // The first of the largest, without a list of candidates.
    bool    is_greedy() const noexcept { return !grammar && !penalties && !cuts && bias.empty(); }
    int32_t narrowed(const float * row, int32_t n, candidate_list & list, bool has_grammar);
    int32_t chosen(const float * row, int32_t n, candidate_list & list, bool has_grammar, llama_token & token);
    bool    allows(llama_token token);
    int32_t largest_of(const float * row, int32_t n, llama_token & token) noexcept;
    int32_t not_finite(const float * row, int32_t n) noexcept;
};

}  // namespace pykv
