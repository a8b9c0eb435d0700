// How the model's own graph rotates the keys that it stores, which no table of llama.cpp's tells:
// several architectures leave out layers, or use other settings than those that shifts use.
#include <cmath>
#include <cstring>

#include "ggml-backend.h"
#include "probe_kv.h"
#include "probe_memory.h"

namespace pykv {

namespace {

// One way from the stored keys back to where they were computed.
struct path {
    bool scaled = false;  // values were multiplied one by one after the point that is looked at
    bool joined = false;  // a part of each head comes from elsewhere
};

bool is_hadamard(const ggml_tensor * t) {
    return t->op == GGML_OP_MUL_MAT && t->op_params[1] == GGML_HINT_SRC0_IS_HADAMARD;
}

key_rope read_op(const ggml_tensor * t) {
    key_rope found;
    auto & f = found.facts;
    const int32_t * p = t->op_params;
    f.n_rot = p[1];
    f.type = p[2];
    f.n_ctx_orig = p[4];
    f.offset = p[15];
    for (auto [at, to] : {std::pair<int, float *>{5, &f.freq_base}, {6, &f.freq_scale}, {7, &f.ext_factor},
                          {8, &f.attn_factor}, {9, &f.beta_fast}, {10, &f.beta_slow}}) {
        std::memcpy(to, p + at, sizeof(float));
    }
    found.factors = t->src[2];
    found.known = true;
    return found;
}

// The rotation behind a tensor; `turns` counts those that were found, `other` what is not understood.
void search(const ggml_tensor * t, path way, key_rope & found, int & turns, bool & other) {
    while (t) {
        switch (t->op) {
            case GGML_OP_ROPE:
                found = read_op(t);
                ++turns;
                other = other || way.scaled;
                found.joined = way.joined;
                return;
            case GGML_OP_CONCAT:
                way.joined = true;
                search(t->src[1], way, found, turns, other);
                t = t->src[0];
                break;
            case GGML_OP_MUL_MAT:
                if (!is_hadamard(t)) {
                    return;
                }
                t = t->src[1];
                break;
            case GGML_OP_MUL:
            case GGML_OP_ADD:
                way.scaled = true;
                t = t->src[0];
                break;
            case GGML_OP_VIEW:
            case GGML_OP_RESHAPE:
            case GGML_OP_PERMUTE:
            case GGML_OP_TRANSPOSE:
            case GGML_OP_CONT:
            case GGML_OP_CPY:
            case GGML_OP_DUP:
            case GGML_OP_SCALE:
            case GGML_OP_RMS_NORM:
            case GGML_OP_REPEAT:
                t = t->src[0];
                break;
            case GGML_OP_NONE:
                return;
            default:
                // A norm with a mean, an activation, a mixture: none of them stands behind a rotation.
                way.scaled = true;
                t = t->src[0];
        }
    }
}

bool same_rotation(const key_rope & graph, const rope_facts & shift, const ggml_tensor * factors) {
    const auto & f = graph.facts;
    const bool yarn = f.ext_factor != 0 || shift.ext_factor != 0;
    return f.type == shift.type && f.n_rot == shift.n_rot && f.freq_base == shift.freq_base &&
           f.freq_scale == shift.freq_scale && f.ext_factor == shift.ext_factor && graph.factors == factors &&
           (!yarn || (f.n_ctx_orig == shift.n_ctx_orig && f.beta_fast == shift.beta_fast && f.beta_slow == shift.beta_slow));
}

}  // namespace

bool turns_nothing(const llama_context * ctx) {
    const llm_graph_result * reserved = ctx->get_gf_res_reserve();
    ggml_cgraph * graph = reserved ? reserved->get_gf() : nullptr;
    for (int i = 0; graph && i < ggml_graph_n_nodes(graph); ++i) {
        const ggml_tensor * t = ggml_graph_node(graph, i);
        if (t->op == GGML_OP_ROPE && read_op(t).facts.n_rot == 0) {
            return true;
        }
    }
    return false;
}

void note_ropes(const llama_context * ctx, memory & m) {
    const llm_graph_result * reserved = ctx->get_gf_res_reserve();
    ggml_cgraph * graph = reserved ? reserved->get_gf() : nullptr;
    for (const llama_kv_cache * cache : {m.base, m.swa}) {
        for (const uint32_t il : cache ? cache->get_layer_ids() : std::vector<uint32_t>{}) {
            const ggml_tensor * k = cache->get_k_storage(int32_t(il));
            key_rope found;
            for (int i = 0; graph && i < ggml_graph_n_nodes(graph); ++i) {
                const ggml_tensor * t = ggml_graph_node(graph, i);
                if (t->op != GGML_OP_SET_ROWS || t->view_src != k) {
                    continue;
                }
                int  turns = 0;
                bool other = false;
                search(t->src[0], {}, found, turns, other);
                found.facts.type = turns == 0 ? -1 : found.facts.type;
                found.known = turns < 2 && !other;
                const auto & h = *m.hparams;
                if (turns == 1 && found.joined) {
                    // The rotated part stands behind the other one where llama.cpp knows of it.
                    found.known = found.known && h.n_lora_kv > 0;
                    found.facts.offset = int32_t(h.n_embd_head_k(il)) - found.facts.n_rot;
                }
                break;
            }
            m.ropes[il] = found;
        }
    }
}

bool shift_is_like_graph(const llama_context * ctx, const memory & m, uint32_t il) {
    const auto & c = ctx->get_cparams();
    const auto & model = ctx->get_model();
    const auto & h = *m.hparams;
    const key_rope & graph = m.ropes.at(il);
    if (!graph.known || !h.has_rope(il)) {
        return graph.known && graph.facts.type < 0;
    }
    rope_facts shift{};
    shift.type = int32_t(h.rope_type);
    shift.n_rot = int32_t(h.n_rot(il));
    shift.n_ctx_orig = int32_t(c.n_ctx_orig_yarn);
    shift.freq_base = model.get_rope_freq_base(c, int(il));
    shift.freq_scale = model.get_rope_freq_scale(c, int(il));
    shift.ext_factor = c.yarn_ext_factor;
    shift.beta_fast = c.yarn_beta_fast;
    shift.beta_slow = c.yarn_beta_slow;
    return graph.facts.type >= 0 && same_rotation(graph, shift, model.get_rope_factors(c, int(il)));
}

bool has_keys(const memory * m, uint32_t il) { return m->ropes.count(il) > 0; }

const key_rope & rope_at(const memory * m, uint32_t il) { return m->ropes.at(il); }

std::vector<float> rope_factors(const key_rope & rope) {
    std::vector<float> factors;
    if (rope.factors) {
        factors.resize(size_t(ggml_nelements(rope.factors)));
        ggml_backend_tensor_get(rope.factors, factors.data(), 0, factors.size() * sizeof(float));
    }
    return factors;
}

}  // namespace pykv
