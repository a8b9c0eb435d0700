#include "bound.h"

#include <algorithm>
#include <queue>
#include <tuple>
#include <unordered_map>

namespace pykv::shadow {

int64_t most_hits(const uint32_t * ids, const int64_t * sizes, const int64_t * lengths, int64_t n_prompts, int64_t block_size,
                  int64_t n_blocks) {
    int64_t n = 0;
    for (int64_t i = 0; i < n_prompts; i++) {
        n += sizes[i];
    }
    // For each block of each prompt the prompt that uses it next.
    std::vector<int64_t> following(static_cast<size_t>(n), n_prompts);
    std::unordered_map<uint32_t, int64_t> next;
    for (int64_t at = n, prompt = n_prompts - 1; prompt >= 0; prompt--) {
        for (int64_t i = 0; i < sizes[prompt]; i++) {
            at--;
            auto [found, is_new] = next.try_emplace(ids[at], prompt);
            if (!is_new) {
                following[static_cast<size_t>(at)] = found->second;
                found->second = prompt;
            }
        }
    }
    std::unordered_map<uint32_t, int64_t> kept;  // block: the prompt that uses it next
    // Next use, depth, block; outdated entries are skipped when met.
    std::priority_queue<std::tuple<int64_t, int64_t, uint32_t>> farthest;
    int64_t hits = 0, at = 0;
    for (int64_t prompt = 0; prompt < n_prompts; prompt++) {
        const int64_t size = sizes[prompt];
        int64_t found = 0;
        while (found < size && kept.count(ids[at + found])) {
            found++;
        }
        hits += std::min(found * block_size, lengths[prompt]);
        for (int64_t depth = 0; depth < size; depth++, at++) {
            int64_t when = following[static_cast<size_t>(at)];
            if (when < n_prompts) {
                kept[ids[at]] = when;
                farthest.emplace(when, depth, ids[at]);
            } else {
                kept.erase(ids[at]);
            }
        }
        while (static_cast<int64_t>(kept.size()) > n_blocks) {
            auto [when, depth, block] = farthest.top();
            farthest.pop();
            auto known = kept.find(block);
            if (known != kept.end() && known->second == when) {
                kept.erase(known);
            }
        }
    }
    return hits;
}

}  // namespace pykv::shadow
