// What a cache could find that knew the future.
#pragma once

#include <cstdint>
#include <vector>

namespace pykv::shadow {

// Belady's rule, adapted to trees: after each prompt the blocks stay that are used soonest, of those there and the prompt's
// own; a block may be declined. A block is used whenever one after it is, so among equals the deeper ones leave first, and
// what stays is a tree. Returns the tokens found; `ids` of all prompts, `sizes` blocks and `lengths` tokens of each.
int64_t most_hits(const uint32_t * ids, const int64_t * sizes, const int64_t * lengths, int64_t n_prompts, int64_t block_size,
                  int64_t n_blocks);

}  // namespace pykv::shadow
