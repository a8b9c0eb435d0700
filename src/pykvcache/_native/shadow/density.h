// hit-density: the hits to be expected, computed from how lives of blocks ended. Python's policy uses it, too.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace pykv::shadow {

// Ages are counted in uses of the tree, in buckets of half an octave; the first is 0 to 3. A kind of run: how many prompts
// in a row went on from each other up to it, whether the last prompt that came by turned off before it, how often it was used.
constexpr int BUCKETS = 40, TURNS = 6, USES = 6, KINDS = TURNS * 2 * USES, ENDS = 3;
// How a life ends: as a leaf that is used, unused, or used while others follow.
constexpr int USED = 0, UNUSED = 1, USED_INSIDE = 2;
constexpr int TABLE = KINDS * BUCKETS;

// What is known where little was seen, and how fast the past fades.
constexpr double PRIOR = 0.06, PRIOR_LIVES = 10.0, KIND_LIVES = 2.0, DECAY = 0.93;

int bucket_of(int64_t age) noexcept;

// Hits per time for each kind and age, `out` of TABLE; `ended` of ENDS x TABLE.
void hit_density(const float * ended, double * out) noexcept;

}  // namespace pykv::shadow
