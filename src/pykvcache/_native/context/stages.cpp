#include "stages.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "choice.h"

namespace pykv {

namespace {

// Only backend samplers' graphs use the vocabulary size.
constexpr int32_t ANY_VOCAB = INT32_MAX;
// A logit this far below the largest has a probability of nearly 0 in float32.
constexpr float NO_CHANCE = 80;

// Drops excluded tokens, which llama.cpp's XTC and typical sampling would count and could choose.
struct possible_stage {
    static constexpr const char * name = "possible";

    void apply(llama_token_data_array & found) {
        const float largest = largest_logit(found);
        llama_token_data * const end = std::remove_if(found.data, found.data + found.size, [&](const llama_token_data & one) {
            return !(one.logit >= largest - NO_CHANCE) || one.logit == -INFINITY;
        });
        found.size = size_t(end - found.data);
    }
    void accept(llama_token) {}
    void reset() {}
};

// llama.cpp's adaptive-p without the choice: it favours tokens near a target probability, so that chosen tokens have
// that probability on average. llama.cpp's own cannot be copied with its random numbers.
struct adaptive_stage {
    static constexpr const char * name = "adaptive";
    static constexpr float PEAK = 5, SHARPNESS = 10, WIDTH = 0.3f;

    float target, decay, sum, weight;
    std::vector<std::pair<llama_token, float>> before;  // probabilities of the last call, by token

    adaptive_stage(float t, float d) : target(t), decay(d) { reset(); }

    void reset() {
        sum = target / (1 - decay);
        weight = 1 / (1 - decay);
        before.clear();
    }

    void apply(llama_token_data_array & found) {
        const float largest = largest_logit(found);
        double      total = 0;
        for (size_t t = 0; t < found.size; ++t) {
            total += std::exp(found.data[t].logit - largest);
        }
        const float aim = std::clamp(2 * target - sum / weight, 0.0f, 1.0f);
        before.clear();
        for (size_t t = 0; t < found.size; ++t) {
            llama_token_data & one = found.data[t];
            if (one.logit == -INFINITY) {
                continue;
            }
            const float p = float(std::exp(one.logit - largest) / total);
            const float far = std::abs(p - aim) / WIDTH;
            before.emplace_back(one.id, p);
            one.logit = PEAK - SHARPNESS * far * far / (1 + far);
        }
        found.sorted = false;
    }

    void accept(llama_token token) {
        for (const auto & [id, p] : before) {
            if (id == token) {
                sum = p + decay * sum;
                weight = 1 + decay * weight;
                break;
            }
        }
        before.clear();
    }
};

struct call_stage {
    static constexpr const char * name = "call";

    void *                   self;
    stage_call               call;
    std::vector<llama_token> ids = {};
    std::vector<float>       logits = {};

    void apply(llama_token_data_array & found) {
        ids.resize(found.size);
        logits.resize(found.size);
        for (size_t t = 0; t < found.size; ++t) {
            ids[t] = found.data[t].id;
            logits[t] = found.data[t].logit;
        }
        if (!call(self, ids.data(), logits.data(), found.size)) {
            throw std::runtime_error("a stage of the sampler failed");
        }
        for (size_t t = 0; t < found.size; ++t) {
            found.data[t].logit = logits[t];
        }
        found.sorted = false;
    }
    void accept(llama_token) {}
    void reset() {}
};

using args = const stage_settings &;
using words = const dry_words &;

struct factory {
    const char * name;
    bool         is_plain;
    llama_sampler * (*make)(args, words);
};

// Settings that are missing throw.
int32_t  whole(args a, size_t i) { return int32_t(a.at(i)); }
uint32_t seed(args a, size_t i) { return uint32_t(a.at(i)); }
float    real(args a, size_t i) { return float(a.at(i)); }

llama_sampler * made_penalties(args a, words) {
    return llama_sampler_init_penalties(ANY_VOCAB, whole(a, 0), real(a, 1), real(a, 2), real(a, 3));
}

llama_sampler * made_dry(args a, words w) {
    std::vector<const char *> texts;
    for (const auto & text : w.breakers) {
        texts.push_back(text.c_str());
    }
    return llama_sampler_init_dry(w.vocab, real(a, 0), real(a, 1), whole(a, 2), whole(a, 3), texts.data(), texts.size());
}

llama_sampler * made_mirostat(args a, words) {
    return llama_sampler_init_mirostat(whole(a, 0), seed(a, 1), real(a, 2), real(a, 3), 100);
}

constexpr factory FACTORIES[] = {
    {"penalties", false, made_penalties},
    {"dry", false, made_dry},
    {"top_n_sigma", true, [](args a, words) { return llama_sampler_init_top_n_sigma(real(a, 0)); }},
    {"top_k", true, [](args a, words) { return llama_sampler_init_top_k(whole(a, 0)); }},
    {"typical_p", false, [](args a, words) { return llama_sampler_init_typical(real(a, 0), 1); }},
    {"top_p", true, [](args a, words) { return llama_sampler_init_top_p(real(a, 0), 1); }},
    {"min_p", true, [](args a, words) { return llama_sampler_init_min_p(real(a, 0), 1); }},
    {"xtc", false, [](args a, words) { return llama_sampler_init_xtc(real(a, 0), real(a, 1), 1, seed(a, 2)); }},
    {"temperature", true, [](args a, words) { return llama_sampler_init_temp(real(a, 0)); }},
    {"possible", true, [](args, words) { return own_sampler<possible_stage>::make({}); }},
    {"adaptive", false, [](args a, words) { return own_sampler<adaptive_stage>::make({real(a, 0), real(a, 1)}); }},
    // These choose.
    {"greedy", true, [](args, words) { return llama_sampler_init_greedy(); }},
    {"mirostat_1", false, made_mirostat},
    {"mirostat_2", false,
     [](args a, words) { return llama_sampler_init_mirostat_v2(seed(a, 0), real(a, 1), real(a, 2)); }},
    {"dist", false, [](args a, words) { return llama_sampler_init_dist(seed(a, 0)); }},
};

const factory * factory_of(const std::string & name) {
    const auto found =
        std::find_if(std::begin(FACTORIES), std::end(FACTORIES), [&](const factory & one) { return name == one.name; });
    return found == std::end(FACTORIES) ? nullptr : found;
}

}  // namespace

llama_sampler * sampler_chain() noexcept {
    return guarded<llama_sampler *>(nullptr, [] { return llama_sampler_chain_init(llama_sampler_chain_default_params()); });
}

llama_sampler * sampler_made(const std::string & name, args settings, words w) noexcept {
    return guarded<llama_sampler *>(nullptr, [&] {
        const factory * const found = factory_of(name);
        if (!found) {
            throw std::invalid_argument("there is no stage " + name);
        }
        return found->make(settings, w);
    });
}

llama_sampler * sampler_made_of_call(void * self, stage_call call) noexcept {
    return guarded<llama_sampler *>(nullptr, [&] { return own_sampler<call_stage>::make({self, call}); });
}

bool sampler_is_plain(const std::string & name) noexcept {
    const factory * const found = factory_of(name);
    return found && found->is_plain;
}

llama_sampler * sampler_clone(const llama_sampler * sampler) noexcept {
    return guarded<llama_sampler *>(nullptr, [&] { return llama_sampler_clone(sampler); });
}

int32_t sampler_add(llama_sampler * chain, llama_sampler * stage) noexcept {
    return guarded_void([&] { llama_sampler_chain_add(chain, stage); });
}

int32_t sampler_apply(llama_sampler * sampler, llama_token_data_array * candidates) noexcept {
    return guarded_void([&] { llama_sampler_apply(sampler, candidates); });
}

int32_t sampler_accept(llama_sampler * sampler, llama_token token) noexcept {
    return guarded_void([&] { llama_sampler_accept(sampler, token); });
}

}  // namespace pykv
