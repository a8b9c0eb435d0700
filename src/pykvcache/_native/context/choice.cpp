#include "choice.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "team.h"

namespace pykv {

namespace {

constexpr float INF = std::numeric_limits<float>::infinity();
// Limit after division by the temperature; float32 ends at 3.4e38.
constexpr float LOGIT_MAX = 1e38f;
// Logits per block: the block's largest value is computed first, then located.
constexpr int32_t BLOCK = 512;
// Minimum work per thread (chooser::cost) that pays for another thread: about 10 us.
constexpr size_t COST_PER_THREAD = 32768;

struct block_facts {
    float largest;  // ignores NaN
    bool  is_finite;  // or -inf
};

block_facts look_at(const float * row, int32_t n) noexcept {
    block_facts found{-INF, true};
    int32_t     i = 0;
#if defined(__GNUC__)
    // Explicit vectors, because the compiler does not vectorise this. All x86-64 and arm64 have 16 bytes.
    using floats = float __attribute__((vector_size(16)));
    using ints = int32_t __attribute__((vector_size(16)));
    const floats inf = floats{} + INF;
    floats a = -inf, b = a, c = a, d = a;
    ints   wrong{};
    for (; i + 16 <= n; i += 16) {
        floats x[4];
        std::memcpy(x, row + i, sizeof x);
        wrong |= ~((x[0] < inf) & (x[1] < inf) & (x[2] < inf) & (x[3] < inf));
        a = x[0] > a ? x[0] : a;
        b = x[1] > b ? x[1] : b;
        c = x[2] > c ? x[2] : c;
        d = x[3] > d ? x[3] : d;
    }
    for (int32_t j = 0; j < 4; ++j) {
        found.largest = std::max({found.largest, a[j], b[j], c[j], d[j]});
        found.is_finite &= wrong[j] == 0;
    }
#endif
    for (; i < n; ++i) {
        found.is_finite &= row[i] < INF;
        found.largest = row[i] > found.largest ? row[i] : found.largest;
    }
    return found;
}

}  // namespace

// Four independent chains, so that no comparison waits for the previous one.
float largest_logit(const llama_token_data_array & found) noexcept {
    const llama_token_data * const data = found.data;
    float  a = -INF, b = -INF, c = -INF, d = -INF;
    size_t t = 0;
    for (; t + 4 <= found.size; t += 4) {
        a = std::max(a, data[t].logit);
        b = std::max(b, data[t + 1].logit);
        c = std::max(c, data[t + 2].logit);
        d = std::max(d, data[t + 3].logit);
    }
    for (; t < found.size; ++t) {
        a = std::max(a, data[t].logit);
    }
    return std::max({a, b, c, d});
}

chooser::~chooser() {
    // Each accepts NULL.
    llama_sampler_free(grammar);
    llama_sampler_free(penalties);
    llama_sampler_free(cuts);
    llama_sampler_free(choice);
}

// First index of the largest logit, as in llama.cpp's greedy sampler, without a candidate list.
int32_t chooser::largest_of(const float * row, int32_t n, llama_token & token) noexcept {
    float   most = -INF;
    int32_t at = 0;
    for (int32_t i = 0; i < n; i += BLOCK) {
        const block_facts block = look_at(row + i, std::min(BLOCK, n - i));
        if (!block.is_finite) {
            return not_finite(row, n);
        }
        if (block.largest > most) {
            most = block.largest;
            at = i;
        }
    }
    if (most == -INF) {
        return CHOICE_NONE_LEFT;
    }
    token = llama_token(std::find(row + at, row + n, most) - row);
    return CHOSEN;
}

// NaN and infinity: several infinite logits have no order.
int32_t chooser::not_finite(const float * row, int32_t n) noexcept {
    where = llama_token(std::find_if(row, row + n, [](float x) { return !(x < INF); }) - row);
    return row[where] != row[where] ? CHOICE_NAN : CHOICE_INFINITE;
}

int32_t chooser::narrowed(const float * row, int32_t n, candidate_list & list, bool has_grammar) {
    const block_facts facts = look_at(row, n);
    if (!facts.is_finite) {
        return not_finite(row, n);
    }
    list.resize(size_t(n));
    llama_token_data * const data = list.data();
    for (int32_t t = 0; t < n; ++t) {
        data[t] = {t, row[t], 0};
    }
    float largest = facts.largest;
    bool  is_known = !has_grammar && !penalties;
    for (const auto & one : bias) {
        is_known &= row[one.token] < facts.largest;
        data[one.token].logit += one.bias;
        largest = std::max(largest, data[one.token].logit);
    }
    found = {list.data(), list.size(), -1, false};
    stage = STAGE_GRAMMAR;
    if (has_grammar) {
        llama_sampler_apply(grammar, &found);
    }
    stage = STAGE_CHOICE;
    if (penalties) {
        llama_sampler_apply(penalties, &found);
    }
    if (!is_known) {
        largest = largest_logit(found);
    }
    if (largest == INF) {
        return CHOICE_TOO_LARGE;
    }
    if (largest == -INF) {
        return CHOICE_NONE_LEFT;
    }
    if (cuts) {
        // The largest must stay finite after division by the temperature: infinity minus itself is NaN.
        if (temperature > 0 && std::abs(largest) > LOGIT_MAX * temperature) {
            for (size_t t = 0; t < found.size; ++t) {
                found.data[t].logit -= largest;
            }
        }
        llama_sampler_apply(cuts, &found);
        if (is_narrowed_further) {
            largest = largest_logit(found);
            return largest == INF ? CHOICE_TOO_LARGE : largest == -INF ? CHOICE_NONE_LEFT : CHOSEN;
        }
    }
    return CHOSEN;
}

int32_t chooser::reset() noexcept {
    return guarded_void([&] {
        for (llama_sampler * stages : {grammar, penalties, cuts, choice}) {
            if (stages) {
                llama_sampler_reset(stages);
            }
        }
    });
}

int32_t chooser::narrow(const float * row, int32_t n, candidate_list & list) noexcept {
    int32_t problem = CHOSEN;
    const int32_t code = guarded_void([&] { problem = narrowed(row, n, list, grammar != nullptr); });
    return code == CAUGHT ? CAUGHT : problem;
}

int32_t chooser::chosen(const float * row, int32_t n, candidate_list & list, bool has_grammar, llama_token & token) {
    const int32_t problem = narrowed(row, n, list, has_grammar);
    if (problem != CHOSEN) {
        return problem;
    }
    llama_sampler_apply(choice, &found);
    if (found.selected < 0 || size_t(found.selected) >= found.size) {
        return CHOICE_NOTHING;
    }
    token = found.data[found.selected].id;
    return CHOSEN;
}

bool chooser::allows(llama_token token) {
    llama_token_data       one{token, 0, 0};
    llama_token_data_array alone{&one, 1, -1, false};
    stage = STAGE_GRAMMAR;
    llama_sampler_apply(grammar, &alone);
    stage = STAGE_CHOICE;
    return one.logit == 0;
}

int32_t chooser::choose(const float * row, int32_t n, candidate_list & list, llama_token & token) noexcept {
    if (is_greedy()) {
        return largest_of(row, n, token);
    }
    int32_t problem = CHOSEN;
    const int32_t code = guarded_void([&] {
        // Applying the grammar to the whole vocabulary is slow. First try the likeliest token alone.
        const bool is_tried = grammar && !cuts;
        problem = chosen(row, n, list, grammar && !is_tried, token);
        if (is_tried && (problem != CHOSEN || !allows(token))) {
            problem = chosen(row, n, list, true, token);
        }
        if (problem != CHOSEN) {
            return;
        }
        stage = STAGE_GRAMMAR;
        if (grammar) {
            llama_sampler_accept(grammar, token);
        }
        stage = STAGE_ACCEPT;
        if (penalties) {
            llama_sampler_accept(penalties, token);
        }
        if (is_narrowed_further) {
            llama_sampler_accept(cuts, token);
        }
    });
    return code == CAUGHT ? CAUGHT : problem;
}

// Many requests --------------------------------------------------------------------------------------

void choices::begin(size_t n, int n_threads) {
    all.resize(n);
    lists.resize(size_t(std::max(1, n_threads)));
}

void choices::choose(one & each, int32_t n_vocab, chooser::candidate_list & list) noexcept {
    each.code = each.sampler->choose(each.row, n_vocab, list, each.token);
    if (each.code == CAUGHT) {
        // caught() is thread-local and lasts until the next call.
        each.failed = caught();
    }
}

void choices::recall(size_t i) const noexcept {
    const device_link * lost = watched_links ? lost_link(*watched_links) : nullptr;
    note_caught(lost ? failure{lost->why(), lost->endpoint} : all[i].failed);
}

void choices::run(int32_t n_vocab) noexcept {
    size_t cost = 0;
    bool   has_call = false;
    for (const one & each : all) {
        cost += each.sampler->cost(n_vocab);
        has_call |= each.sampler->has_call;
    }
    const size_t most = std::min({lists.size(), all.size(), cost / COST_PER_THREAD});
    counter      jobs(all.size());
    share(jobs, most > 1 && !has_call ? int(most) : 1, [&](int index) {
        for (size_t i; jobs.take(i);) {
            choose(all[i], n_vocab, lists[size_t(index)]);
        }
    });
}

}  // namespace pykv
