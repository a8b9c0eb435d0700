// The highest position at which a model's graph rotates keys and queries correctly.
//
// The error of an angle in float32 grows with the position and with the number of rounding operations. Positions end
// where it reaches TOLERANCE; docs/positions.md derives the formula.
#include <algorithm>
#include <cmath>

#include "probe_memory.h"

namespace pykv {

namespace {

constexpr double ROUNDING = 0x1p-24;
constexpr double TOLERANCE = 0x1p-5;
constexpr double WHOLE_NUMBERS = 0x1p24;

// Quadratic mean over the pairs of radians per position times rounding operations.
double growth(const rope_facts & f, const std::vector<float> & factors) {
    const int    pairs = f.n_rot / 2;
    const double step = std::pow(double(f.freq_base), -2.0 / f.n_rot);
    const bool   yarn = f.ext_factor != 0;
    float        ramp[2] = {0, 0};
    if (yarn) {
        ggml_rope_yarn_corr_dims(f.n_rot, f.n_ctx_orig, f.freq_base, f.beta_fast, f.beta_slow, ramp);
    }
    const int more = (factors.empty() ? 0 : 1) + (f.freq_scale == 1 ? 0 : 1) + (yarn ? 3 : 0);
    double    turn = 1, sum = 0;
    for (int i = 0; i < pairs; ++i, turn *= step) {
        double scale = std::fabs(double(f.freq_scale));
        if (yarn) {
            const double place = (i - ramp[0]) / std::max(0.001f, ramp[1] - ramp[0]);
            const double mix = (1 - std::min(1.0, std::max(0.0, place))) * f.ext_factor;
            scale = std::fabs(f.freq_scale * (1 - mix)) + std::fabs(mix);
        }
        const double factor = size_t(i) < factors.size() ? std::fabs(double(factors[size_t(i)])) : 1;
        const double error = turn / factor * scale * (i + more);
        sum += error * error;
    }
    return std::sqrt(sum / std::max(1, pairs));
}

}  // namespace

llama_pos last_position(const key_rope & rope) {
    const bool   readable = rope.factors && rope.factors->buffer;
    const double g = growth(rope.facts, readable ? rope_factors(rope) : std::vector<float>{});
    const double last = TOLERANCE / (ROUNDING * g);  // g is 0 for a single pair, which is never rounded
    // Settings without a valid angle leave position 0.
    return std::isnan(last) ? 0 : llama_pos(std::min(last, WHOLE_NUMBERS));
}

}  // namespace pykv
