// Versions of what a sequence holds, and which are still valid. Used by sequences.h only.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "llama.h"

namespace pykv {

// A prefix version stands for a sequence's cells up to a position, until one of them is removed, moved or replaced.
// Valid versions are sorted by position, so each change drops the last few.
class prefix_versions {
  public:
    // Return a version of the sequence as it is now.
    uint64_t name(llama_seq_id seq, llama_pos last) {
        changed(seq, last + 1);
        auto & held = versions[size_t(seq)];
        if (held.empty() || held.back().last != last) {
            held.push_back({last, ++count});
        }
        return held.back().id;
    }

    // Cells at `from` or later changed.
    void changed(llama_seq_id seq, llama_pos from) {
        auto & held = versions[size_t(seq)];
        while (!held.empty() && held.back().last >= from) {
            held.pop_back();
        }
    }

    void all_changed() {
        for (auto & held : versions) {
            held.clear();
        }
    }

    bool is_true(llama_seq_id seq, uint64_t id) const {
        const auto & held = versions[size_t(seq)];
        const auto it = std::lower_bound(held.begin(), held.end(), id,
                                         [](const version & v, uint64_t wanted) { return v.id < wanted; });
        return it != held.end() && it->id == id;
    }

  private:
    struct version {
        llama_pos last;
        uint64_t  id;
    };

    // LLAMA_MAX_SEQ. Not a vector: constructing the Python object around this one must not throw.
    std::array<std::vector<version>, 256> versions;
    uint64_t count = 0;
};

}  // namespace pykv
