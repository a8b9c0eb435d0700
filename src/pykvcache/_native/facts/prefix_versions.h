// Names for what a sequence holds, and which of them are still true. Used by sequences.h alone.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "llama.h"

namespace pykv {

// A prefix version is "the sequence ends at this position, and holds what it holds". It stays true while
// no cell up to that position is removed, moved or replaced; what is appended does not matter.
// Versions that are true end at rising positions, so each change takes the last few of them.
class prefix_versions {
  public:
    // Name what the sequence holds now, up to its last position.
    uint64_t name(llama_seq_id seq, llama_pos last) {
        changed(seq, last + 1);
        auto & held = versions[size_t(seq)];
        if (held.empty() || held.back().last != last) {
            held.push_back({last, ++count});
        }
        return held.back().id;
    }

    // Something at `from` or later is not what it was.
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

    // LLAMA_MAX_SEQ. No vector: nothing may throw where Python makes the object around this one.
    std::array<std::vector<version>, 256> versions;
    uint64_t count = 0;
};

}  // namespace pykv
