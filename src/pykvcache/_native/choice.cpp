#include "choice.h"

#include <algorithm>
#include <limits>

namespace pykv {

namespace {

constexpr float INF = std::numeric_limits<float>::infinity();
// What a division by a temperature may reach before infinity; float32 ends at 3.4e38.
constexpr float LOGIT_MAX = 1e38f;
constexpr int32_t LANES = 16;

}  // namespace

chooser::~chooser() {
    // Each takes NULL.
    llama_sampler_free(grammar);
    llama_sampler_free(penalties);
    llama_sampler_free(cuts);
    llama_sampler_free(choice);
}

// The first of the largest logits, as llama.cpp's greedy sampler finds it, without a list of candidates.
int32_t chooser::largest_of(const float * row, int32_t n, llama_token & token) noexcept {
    // Side by side, so that the compiler can take several at once.
    float   largest[LANES];
    int32_t wrong[LANES];
    std::fill_n(largest, LANES, -INF);
    std::fill_n(wrong, LANES, 0);
    int32_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (int32_t j = 0; j < LANES; ++j) {
            const float x = row[i + j];
            wrong[j] |= !(x < INF);
            largest[j] = x > largest[j] ? x : largest[j];
        }
    }
    for (; i < n; ++i) {
        wrong[0] |= !(row[i] < INF);
        largest[0] = row[i] > largest[0] ? row[i] : largest[0];
    }
    if (std::any_of(wrong, wrong + LANES, [](int32_t is) { return is != 0; })) {
        where = llama_token(std::find_if(row, row + n, [](float x) { return !(x < INF); }) - row);
        return row[where] != row[where] ? CHOICE_NAN : CHOICE_INFINITE;
    }
    const float most = *std::max_element(largest, largest + LANES);
    if (most == -INF) {
        return CHOICE_NONE_LEFT;
    }
    token = llama_token(std::find(row, row + n, most) - row);
    return CHOSEN;
}

int32_t chooser::narrowed(const float * row, int32_t n, candidate_list & list) {
    list.resize(size_t(n));
    for (int32_t t = 0; t < n; ++t) {
        // NaN, and infinity: among several of it nothing is likelier than the rest.
        if (!(row[t] < INF)) {
            where = t;
            return row[t] != row[t] ? CHOICE_NAN : CHOICE_INFINITE;
        }
        list[size_t(t)] = {t, row[t], 0};
    }
    for (const auto & one : bias) {
        list[size_t(one.token)].logit += one.bias;
    }
    found = {list.data(), list.size(), -1, false};
    stage = STAGE_GRAMMAR;
    if (grammar) {
        llama_sampler_apply(grammar, &found);
    }
    stage = STAGE_CHOICE;
    if (penalties) {
        llama_sampler_apply(penalties, &found);
    }
    float largest = -INF;
    for (size_t t = 0; t < found.size; ++t) {
        largest = std::max(largest, found.data[t].logit);
    }
    if (largest == INF) {
        return CHOICE_TOO_LARGE;
    }
    if (largest == -INF) {
        return CHOICE_NONE_LEFT;
    }
    if (cuts) {
        // Divided by the temperature the largest must stay finite: infinity less itself is NaN.
        if (largest > LOGIT_MAX * temperature || -largest > LOGIT_MAX * temperature) {
            for (size_t t = 0; t < found.size; ++t) {
                found.data[t].logit -= largest;
            }
        }
        llama_sampler_apply(cuts, &found);
    }
    return CHOSEN;
}

int32_t chooser::narrow(const float * row, int32_t n, candidate_list & list) noexcept {
    int32_t problem = CHOSEN;
    const int32_t code = guarded_void([&] { problem = narrowed(row, n, list); });
    return code == CAUGHT ? CAUGHT : problem;
}

int32_t chooser::choose(const float * row, int32_t n, candidate_list & list, llama_token & token) noexcept {
    if (!grammar && !penalties && !cuts && bias.empty()) {
        return largest_of(row, n, token);
    }
    int32_t problem = CHOSEN;
    const int32_t code = guarded_void([&] {
        problem = narrowed(row, n, list);
        if (problem != CHOSEN) {
            return;
        }
        llama_sampler_apply(choice, &found);
        if (found.selected < 0 || size_t(found.selected) >= found.size) {
            problem = CHOICE_NOTHING;
            return;
        }
        token = found.data[found.selected].id;
        stage = STAGE_GRAMMAR;
        if (grammar) {
            llama_sampler_accept(grammar, token);
        }
        stage = STAGE_ACCEPT;
        if (penalties) {
            llama_sampler_accept(penalties, token);
        }
    });
    return code == CAUGHT ? CAUGHT : problem;
}

}  // namespace pykv
