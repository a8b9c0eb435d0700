#include "density.h"

#include <algorithm>
#include <cmath>

namespace pykv::shadow {

namespace {

struct Buckets {
    std::array<int8_t, 4096> of;
    std::array<double, BUCKETS> widths;

    Buckets() {
        for (int age = 0; age < 4096; age++) {
            of[static_cast<size_t>(age)] = static_cast<int8_t>(2 * std::log2(age / 8.0 + 1));
        }
        for (int i = 0; i < BUCKETS; i++) {
            widths[static_cast<size_t>(i)] = 8 * (std::pow(2.0, (i + 1) / 2.0) - std::pow(2.0, i / 2.0));
        }
    }
};

const Buckets & buckets() {
    static const Buckets made;
    return made;
}

// How many lives reached an age: those that ended later, and half of those that ended in its bucket.
template <typename F>
void reached(F && ended, std::array<double, BUCKETS> & out) {
    double later = 0;
    for (int age = BUCKETS - 1; age >= 0; age--) {
        later += ended(age);
        out[static_cast<size_t>(age)] = later - ended(age) / 2;
    }
}

}  // namespace

int bucket_of(int64_t age) noexcept {
    if (age < 4096) {
        return buckets().of[static_cast<size_t>(std::max<int64_t>(age, 0))];
    }
    return std::min(static_cast<int>(2 * std::log2(static_cast<double>(age) / 8 + 1)), BUCKETS - 1);
}

// The chance of a use at some age is learned from the leaves of all kinds together, and for each kind, what others follow
// included, by how much it is higher or lower (proportional hazards): few lives are enough for that.
void hit_density(const float * ended, double * out) noexcept {
    const float *uses = ended, *unused = ended + TABLE, *inside = ended + 2 * TABLE;
    const auto & widths = buckets().widths;
    std::array<double, BUCKETS> used_by_age{}, reached_by_age{}, chance, one;
    for (int kind = 0; kind < KINDS; kind++) {
        const int row = kind * BUCKETS;
        reached([&](int age) { return static_cast<double>(uses[row + age]) + unused[row + age]; }, one);
        for (size_t age = 0; age < BUCKETS; age++) {
            used_by_age[age] += uses[row + static_cast<int>(age)];
            reached_by_age[age] += one[age];
        }
    }
    for (size_t age = 0; age < BUCKETS; age++) {
        // Where nothing is known, the chance falls with age, which makes it LRU.
        double guess = PRIOR * std::exp(-static_cast<double>(age) / 14);
        chance[age] = std::min((used_by_age[age] + PRIOR_LIVES * guess) / (reached_by_age[age] + PRIOR_LIVES), 0.9);
    }
    for (int kind = 0; kind < KINDS; kind++) {
        const int row = kind * BUCKETS;
        reached([&](int age) { return static_cast<double>(uses[row + age]) + unused[row + age] + inside[row + age]; }, one);
        double expected = 0, seen = 0;
        for (size_t age = 0; age < BUCKETS; age++) {
            expected += one[age] * chance[age];
            seen += static_cast<double>(uses[row + static_cast<int>(age)]) + inside[row + static_cast<int>(age)];
        }
        double factor = (seen + KIND_LIVES) / (expected + KIND_LIVES);
        std::array<double, BUCKETS> used;
        for (size_t age = 0; age < BUCKETS; age++) {
            used[age] = 1 - std::pow(1 - chance[age], factor);
        }
        for (size_t age = 0; age < BUCKETS; age++) {
            double left = 1, time = 0, best = 0;
            for (size_t later = age; later < BUCKETS; later++) {
                time += left * (1 - used[later] / 2) * widths[later];
                left *= 1 - used[later];
                best = std::max(best, (1 - left) / time);
            }
            out[row + static_cast<int>(age)] = best;
        }
    }
}

}  // namespace pykv::shadow
