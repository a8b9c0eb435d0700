#include "stages.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "own_sampler.h"

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
        float largest = -INFINITY;
        for (size_t t = 0; t < found.size; ++t) {
            largest = std::max(largest, found.data[t].logit);
        }
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
        float  largest = -INFINITY;
        double total = 0;
        for (size_t t = 0; t < found.size; ++t) {
            largest = std::max(largest, found.data[t].logit);
        }
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

    void *     self;
    stage_call call;
    stage_hold hold;
    std::vector<llama_token> ids;
    std::vector<float>       logits;

    call_stage(void * s, stage_call c, stage_hold h) : self(s), call(c), hold(h) { hold(self, true); }
    call_stage(const call_stage & other) : call_stage(other.self, other.call, other.hold) {}
    call_stage & operator=(const call_stage &) = delete;
    ~call_stage() { hold(self, false); }

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

llama_sampler * made_penalties(const sampler_settings & s) {
    return llama_sampler_init_penalties(ANY_VOCAB, s.penalty_last_n, s.repeat_penalty, s.frequency_penalty, s.presence_penalty);
}

llama_sampler * made_dry(const sampler_settings & s) {
    std::vector<const char *> texts;
    for (const auto & text : s.breakers) {
        texts.push_back(text.c_str());
    }
    return llama_sampler_init_dry(s.vocab, s.dry_multiplier, s.dry_base, s.dry_allowed_length, s.dry_last_n,
                                  texts.data(), texts.size());
}

}  // namespace

llama_sampler * sampler_chain() noexcept {
    return guarded<llama_sampler *>(nullptr, [] { return llama_sampler_chain_init(llama_sampler_chain_default_params()); });
}

llama_sampler * sampler_penalties(const sampler_settings & s) noexcept {
    return guarded<llama_sampler *>(nullptr, [&] { return made_penalties(s); });
}

llama_sampler * sampler_choice(const sampler_settings & s) noexcept {
    return guarded<llama_sampler *>(nullptr, [&] {
        if (s.greedy) {
            return llama_sampler_init_greedy();
        }
        switch (s.mirostat) {
            case 1: return llama_sampler_init_mirostat(s.n_vocab, s.seed, s.mirostat_tau, s.mirostat_eta, 100);
            case 2: return llama_sampler_init_mirostat_v2(s.seed, s.mirostat_tau, s.mirostat_eta);
            default: return llama_sampler_init_dist(s.seed);
        }
    });
}

int32_t sampler_add(llama_sampler * chain, stage_kind kind, const sampler_settings & s) noexcept {
    return guarded_void([&] {
        const auto add = [&](llama_sampler * one) { llama_sampler_chain_add(chain, one); };
        switch (kind) {
            case STAGE_PENALTIES: add(made_penalties(s)); break;
            case STAGE_DRY: add(made_dry(s)); break;
            case STAGE_TOP_N_SIGMA: add(llama_sampler_init_top_n_sigma(s.top_n_sigma)); break;
            case STAGE_TOP_K: add(llama_sampler_init_top_k(s.top_k)); break;
            case STAGE_TYPICAL_P:
                add(own_sampler<possible_stage>::make({}));
                add(llama_sampler_init_typical(s.typical_p, 1));
                break;
            case STAGE_TOP_P: add(llama_sampler_init_top_p(s.top_p, 1)); break;
            case STAGE_MIN_P: add(llama_sampler_init_min_p(s.min_p, 1)); break;
            case STAGE_XTC:
                add(own_sampler<possible_stage>::make({}));
                add(llama_sampler_init_xtc(s.xtc_probability, s.xtc_threshold, 1, s.seed));
                break;
            case STAGE_TEMPERATURE: add(llama_sampler_init_temp(s.temperature)); break;
            case STAGE_ADAPTIVE: add(own_sampler<adaptive_stage>::make({s.adaptive_target, s.adaptive_decay})); break;
        }
        if (s.mirostat && kind == STAGE_TEMPERATURE) {
            add(own_sampler<possible_stage>::make({}));
        }
    });
}

int32_t sampler_add_call(llama_sampler * chain, void * self, stage_call call, stage_hold hold) noexcept {
    return guarded_void([&] { llama_sampler_chain_add(chain, own_sampler<call_stage>::make({self, call, hold})); });
}

}  // namespace pykv
