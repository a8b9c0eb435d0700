// The choices of many requests after one decode: each has a sampler and a row of its own, so the threads
// that have computed the rows choose from them, too.
#pragma once

#include <vector>

#include "choice.h"

namespace pykv {

class choices {
  public:
    // Make room for `n` requests, by up to `n_threads` threads; may throw.
    void begin(size_t n, int n_threads);
    void set(size_t i, chooser * sampler, const float * row) { all[i] = {sampler, row}; }
    // Let all of them choose.
    void run(int32_t n_vocab) noexcept;

    int32_t     code(size_t i) const { return all[i].code; }
    llama_token token(size_t i) const { return all[i].token; }
    // Where the code is CAUGHT: let caught() answer for this request.
    void recall(size_t i) const noexcept;

  private:
    struct one {
        chooser *     sampler = nullptr;
        const float * row = nullptr;
        int32_t       code = 0;
        llama_token   token = 0;
        bool          no_memory = false;
        char          why[232] = {};
    };
    bool have_own_samplers() noexcept;
    void choose(one & each, int32_t n_vocab, chooser::candidate_list & list) noexcept;

    std::vector<one>                     all;
    std::vector<chooser::candidate_list> lists;  // one per thread
};

}  // namespace pykv
