// What is still true of a sequence that was true of it before.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "llama.h"

namespace pykv {

// A moment is "the sequence ends at this position, and holds what it holds". It stays true while
// no cell up to that position is removed, moved or replaced; what is appended does not matter.
// Moments that are true end at rising positions, so each change takes the last few of them.
class lineage {
  public:
    // Name what the sequence holds now, up to its last position.
    uint64_t name(llama_seq_id seq, llama_pos last) {
        changed(seq, last + 1);
        auto & held = moments[seq];
        if (held.empty() || held.back().last != last) {
            held.push_back({last, ++count});
        }
        return held.back().id;
    }

    // Something at `from` or later is not what it was.
    void changed(llama_seq_id seq, llama_pos from) {
        auto & held = moments[seq];
        while (!held.empty() && held.back().last >= from) {
            held.pop_back();
        }
    }

    void all_changed() {
        for (auto & held : moments) {
            held.clear();
        }
    }

    bool is_true(llama_seq_id seq, uint64_t id) const {
        const auto & held = moments[seq];
        const auto it = std::lower_bound(held.begin(), held.end(), id,
                                         [](const moment & m, uint64_t wanted) { return m.id < wanted; });
        return it != held.end() && it->id == id;
    }

  private:
    struct moment {
        llama_pos last;
        uint64_t  id;
    };

    // LLAMA_MAX_SEQ. No vector: nothing may throw where Python makes the object around this one.
    std::array<std::vector<moment>, 256> moments;
    uint64_t count = 0;
};

}  // namespace pykv
