// Chooses tokens for many requests after one decode. Each request has its own sampler and row, so the compute
// threads choose in parallel.
#pragma once

#include <vector>

#include "choice.h"

namespace pykv {

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
        bool          no_memory = false;
        std::string   why;
    };
    void choose(one & each, int32_t n_vocab, chooser::candidate_list & list) noexcept;

    std::vector<one>                     all;
    std::vector<chooser::candidate_list> lists;  // one per thread
};

}  // namespace pykv
