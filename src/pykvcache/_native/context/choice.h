// Chooses a token from a row of logits by applying a sampler's stages in order.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "guarded.h"

namespace pykv {

// Why no token was chosen; CAUGHT if something threw.
enum choice_problem : int32_t {
    CHOSEN = 0,
    CHOICE_NAN,       // at chooser::where
    CHOICE_INFINITE,  // at chooser::where
    CHOICE_TOO_LARGE,  // bias and penalties made a logit infinite
    CHOICE_NONE_LEFT,  // all tokens are excluded
    CHOICE_NOTHING,    // the chain selected nothing
};

// Stage that threw.
enum choice_stage : int32_t { STAGE_CHOICE, STAGE_GRAMMAR, STAGE_ACCEPT };

// Largest logit of candidates; minus infinity if there are none.
float largest_logit(const llama_token_data_array & found) noexcept;

// A sampler's stages; each but the choice may be NULL. Not locked: one thread at a time.
class chooser {
  public:
    using candidate_list = std::vector<llama_token_data>;

    llama_sampler * grammar = nullptr;
    llama_sampler * penalties = nullptr;
    llama_sampler * cuts = nullptr;
    llama_sampler * choice = nullptr;
    float           temperature = 1;
    bool            has_call = false;             // has a Python stage, which runs on the calling thread only
    bool            is_narrowed_further = false;  // stages of `cuts` have state, or may exclude every token
    // Tokens of the bias are below the number of logits.
    std::vector<llama_logit_bias> bias;

    // Results of the last call.
    llama_token            where = 0;
    choice_stage           stage = STAGE_CHOICE;
    llama_token_data_array found{};  // in the caller's list

    chooser() noexcept = default;
    chooser(const chooser &) = delete;
    chooser & operator=(const chooser &) = delete;
    ~chooser();

    // Returns the candidates after all stages but the choice; accepts nothing.
    int32_t narrow(const float * row, int32_t n, candidate_list & list) noexcept;
    // Choose a token, and let grammar and penalties accept it.
    int32_t choose(const float * row, int32_t n, candidate_list & list, llama_token & token) noexcept;
    // Forget accepted tokens, and restart random numbers.
    int32_t reset() noexcept;
    // Estimated cost, in logits that a greedy choice reads in the same time (0.3 to 0.6 ns each).
    size_t cost(int32_t n) const noexcept { return is_greedy() ? size_t(n) : 16384 + 4 * size_t(n); }

  private:
    // First index of the largest, without a candidate list.
    bool    is_greedy() const noexcept { return !grammar && !penalties && !cuts && bias.empty(); }
    int32_t narrowed(const float * row, int32_t n, candidate_list & list, bool has_grammar);
    int32_t chosen(const float * row, int32_t n, candidate_list & list, bool has_grammar, llama_token & token);
    bool    allows(llama_token token);
    int32_t largest_of(const float * row, int32_t n, llama_token & token) noexcept;
    int32_t not_finite(const float * row, int32_t n) noexcept;
};

// Chooses for many requests after one decode. Each has its own sampler and row, so the compute threads choose in
// parallel.
class choices {
  public:
    // Reserve memory for `n` requests and up to `n_threads` threads; may throw.
    void begin(size_t n, int n_threads);
    void set(size_t i, chooser * sampler, const float * row) { all[i] = {sampler, row}; }
    // Choose for all of them.
    void run(int32_t n_vocab) noexcept;

    int32_t     code(size_t i) const { return all[i].code; }
    llama_token token(size_t i) const { return all[i].token; }
    // After CAUGHT: make caught() return this request's exception.
    void recall(size_t i) const noexcept;

  private:
    struct one {
        chooser *     sampler = nullptr;
        const float * row = nullptr;
        int32_t       code = 0;
        llama_token   token = 0;
        failure       failed;
    };
    void choose(one & each, int32_t n_vocab, chooser::candidate_list & list) noexcept;

    std::vector<one>                     all;
    std::vector<chooser::candidate_list> lists;  // one per thread
};

}  // namespace pykv
