// Reads from the model's graph how it rotates stored keys, up to which position that is right, and what llama.cpp or ggml
// would compute or read wrong. llama.cpp has no table of rotations: several architectures skip layers, or use other
// settings than shifts do.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "ggml-backend.h"
#include "guarded.h"
#include "probe_kv.h"
#include "probe_memory.h"

namespace pykv {

namespace {

// The graph of a full batch. Not the context's reserved graph: its scheduler has replaced sources
// from other devices by copies, which do not refer to their origin.
class unsplit_graph {
  public:
    explicit unsplit_graph(const llama_context * ctx)
        : unsplit_graph(ctx, ctx->get_cparams().n_rs_seq, 1) {}

    // With this many earlier states and at least this many tokens per sequence.
    unsplit_graph(const llama_context * ctx, uint32_t n_kept, uint32_t least)
        : parts(ctx->get_memory() ? ctx->get_memory()->init_full() : nullptr),
          result(ctx->get_gf_res_reserve()->get_max_nodes()) {
        const llama_hparams & h = ctx->get_model().hparams;
        const llama_cparams & c = ctx->get_cparams();
        // The context's reserved size.
        const uint32_t     n_seqs = c.n_seq_max;
        const uint32_t     per_seq = std::max(least, (std::min(c.n_ctx, c.n_ubatch) + n_seqs - 1) / n_seqs);
        llama_batch_allocr batch(h.n_pos_per_embd());
        llama_ubatch       ubatch = batch.ubatch_reserve(per_seq, n_seqs);
        for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
            ubatch.n_seq_id[i] = 1;
            ubatch.seq_id[i] = &ubatch.seq_id_unq[i / per_seq];
        }
        llm_graph_params params =
            (ctx->*member(opened::graph_params()))(&result, ubatch, parts.get(), LLM_GRAPH_TYPE_DEFAULT);
        params.n_outputs = std::min(std::min(c.n_ctx, c.n_ubatch), c.n_outputs_max);
        // Both only assign devices to nodes through the scheduler.
        params.cb = nullptr;
        params.cparams.offload_kqv = true;
        params.cparams.n_rs_seq = n_kept;
        params.sched = nullptr;
        ctx->get_model().build_graph(params);
    }

    ggml_cgraph * nodes() const { return result.get_gf(); }
    const llm_graph_result & built() const { return result; }

  private:
    llama_memory_context_ptr parts;
    llm_graph_result         result;
};

// One path from the stored keys back to their computation.
struct path {
    bool scaled = false;  // later nodes multiply values elementwise
    bool joined = false;  // concatenated from parts of each head
};

// How a node's stored keys were computed.
struct origin {
    key_rope rope;
    int      turns = 0;      // number of rotations
    bool     other = false;  // an unknown operation, which may also rotate
};

bool is_hadamard(const ggml_tensor * t) {
    return t->op == GGML_OP_MUL_MAT && t->op_params[1] == GGML_HINT_SRC0_IS_HADAMARD;
}

// Whether this is a tensor of the model: neither computed nor a copy.
bool is_weight(const ggml_tensor * t) {
    while (t->op == GGML_OP_VIEW || t->op == GGML_OP_RESHAPE || t->op == GGML_OP_PERMUTE || t->op == GGML_OP_TRANSPOSE) {
        t = t->src[0];
    }
    return t->op == GGML_OP_NONE && t->buffer &&
           ggml_backend_buffer_get_usage(t->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
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
    return found;
}

// Every path back from stored keys ends at a rotation or at a product with the model's weights. Any
// other end, or any unknown node on the way, may have rotated them.
void search(const ggml_tensor * t, path way, origin & found) {
    while (true) {
        switch (t->op) {
            case GGML_OP_ROPE:
                found.rope = read_op(t);
                ++found.turns;
                found.other = found.other || way.scaled || (t->src[2] && !is_weight(t->src[2]));
                found.rope.joined = way.joined;
                return;
            case GGML_OP_CONCAT:
                way.joined = true;
                search(t->src[1], way, found);
                t = t->src[0];
                break;
            case GGML_OP_MUL_MAT_ID:
            case GGML_OP_MUL_MAT:
                if (!is_hadamard(t)) {
                    found.other = found.other || !is_weight(t->src[0]);
                    return;
                }
                t = t->src[1];
                break;
            case GGML_OP_MUL:
            case GGML_OP_ADD:
                way.scaled = true;
                if (!is_weight(t->src[1])) {
                    search(t->src[1], way, found);
                }
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
            case GGML_OP_NORM:
            case GGML_OP_L2_NORM:
            case GGML_OP_UNARY:
            case GGML_OP_CLAMP:
                way.scaled = true;
                t = t->src[0];
                break;
            default:
                found.other = true;
                return;
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

// The settings of model and context, which shifts use.
key_rope configured_rope(const llama_context * ctx, uint32_t il) {
    const auto & c = ctx->get_cparams();
    const auto & model = ctx->get_model();
    const auto & h = model.hparams;
    key_rope rope;
    auto & f = rope.facts;
    f.type = int32_t(h.rope_type);
    f.n_rot = int32_t(h.n_rot(il));
    f.n_ctx_orig = int32_t(c.n_ctx_orig_yarn);
    f.freq_base = model.get_rope_freq_base(c, int(il));
    f.freq_scale = model.get_rope_freq_scale(c, int(il));
    f.ext_factor = c.yarn_ext_factor;
    f.attn_factor = c.yarn_attn_factor;
    f.beta_fast = c.yarn_beta_fast;
    f.beta_slow = c.yarn_beta_slow;
    rope.factors = model.get_rope_factors(c, int(il));
    return rope;
}

// The rotation according to the nodes that store a layer's keys.
key_rope rope_of(ggml_cgraph * nodes, const llama_context * ctx, const ggml_tensor * k, uint32_t il) {
    const llama_hparams & h = ctx->get_model().hparams;
    origin found;
    int    stores = 0;
    for (int i = 0; i < ggml_graph_n_nodes(nodes); ++i) {
        const ggml_tensor * t = ggml_graph_node(nodes, i);
        if (t->op == GGML_OP_SET_ROWS && t->view_src == k) {
            search(t->src[0], {}, found);
            ++stores;
        }
    }
    key_rope & rope = found.rope;
    const bool known = stores == 1 && found.turns < 2 && !found.other;
    if (!known && found.turns == 0) {
        return configured_rope(ctx, il);  // equal models with equal settings rotate alike
    }
    rope.known = known;
    if (found.turns == 1 && rope.joined) {
        // If llama.cpp knows the offset, the rotated part comes last.
        rope.known = rope.known && h.n_lora_kv > 0;
        rope.facts.offset = int32_t(h.n_embd_head_k(il)) - rope.facts.n_rot;
    }
    return rope;
}

void read_ropes(ggml_cgraph * nodes, const llama_context * ctx, memory & m) {
    for (const llama_kv_cache * cache : {m.base, m.swa}) {
        for (const uint32_t il : cache ? cache->get_layer_ids() : std::vector<uint32_t>{}) {
            m.ropes[il] = rope_of(nodes, ctx, cache->get_k_storage(int32_t(il)), il);
        }
    }
}

// Size of the Hadamard matrix applied last before storing to a tensor; 0 for none.
int32_t edge_of(ggml_cgraph * nodes, const ggml_tensor * stored) {
    for (int i = 0; i < ggml_graph_n_nodes(nodes); ++i) {
        const ggml_tensor * t = ggml_graph_node(nodes, i);
        if (t->op != GGML_OP_SET_ROWS || t->view_src != stored) {
            continue;
        }
        do {
            t = t->src[0];
        } while (t->op == GGML_OP_VIEW || t->op == GGML_OP_RESHAPE || t->op == GGML_OP_PERMUTE ||
                 t->op == GGML_OP_TRANSPOSE || t->op == GGML_OP_CONT);
        // Some graphs omit the hint; no other input is a matrix.
        return t->op == GGML_OP_MUL_MAT && (t->src[0]->flags & GGML_TENSOR_FLAG_INPUT) ? int32_t(t->src[0]->ne[0]) : 0;
    }
    return 0;
}

void read_turned(ggml_cgraph * nodes, memory & m) {
    for (const memory_part part : {PART_ATTENTION, PART_WINDOW, PART_INDEX}) {
        for (const uint32_t il : cache_of(&m, part) ? cache_of(&m, part)->get_layer_ids() : std::vector<uint32_t>{}) {
            const auto edge = [&](int which) {
                return m.keys_only && which == 1 ? 0 : edge_of(nodes, tensor_at(&m, part, il, which, 0).owner);
            };
            hadamard_facts & edges = m.turned[part];
            edges = {std::max(edges.keys, edge(0)), std::max(edges.values, edge(1))};
        }
    }
}

// Positions ------------------------------------------------------------------------------------------
//
// The error of an angle in float32 grows with the position and with the number of rounding operations. Positions end
// where it reaches TOLERANCE; docs/positions.md derives the formula.

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

// Highest position with correct angles.
llama_pos last_position(const key_rope & rope) {
    const bool   readable = rope.factors && rope.factors->buffer;
    const double g = growth(rope.facts, readable ? rope_factors(rope) : std::vector<float>{});
    const double last = TOLERANCE / (ROUNDING * g);  // g is 0 for a single pair, which is never rounded
    // Settings without a valid angle leave position 0.
    return std::isnan(last) ? 0 : llama_pos(std::min(last, WHOLE_NUMBERS));
}

// Faults ---------------------------------------------------------------------------------------------

// llama.cpp copies the first n_outputs rows of the logits, so the graph must select the output rows.
bool picks_outputs(const llm_graph_result & result) {
    return !result.get_logits() || std::any_of(result.inputs.begin(), result.inputs.end(), [](const auto & input) {
        return dynamic_cast<const llm_graph_input_out_ids *>(input.get()) != nullptr;
    });
}

// ggml's AMX code supports one matrix of weights and one contiguous matrix of activations.
bool suits_amx(const ggml_tensor * t) {
    if (t->op != GGML_OP_MUL_MAT || !t->src[0]->buffer ||
        std::strcmp(ggml_backend_buffer_name(t->src[0]->buffer), "AMX") != 0) {
        return true;
    }
    return ggml_is_matrix(t->src[0]) && ggml_is_matrix(t->src[1]) && ggml_is_contiguous(t->src[1]);
}

// Why llama.cpp would misread the results, or "".
std::string graph_fault(const llm_graph_result & result, const llama_context * ctx) {
    for (int i = 0; i < ggml_graph_n_nodes(result.get_gf()); ++i) {
        if (!suits_amx(ggml_graph_node(result.get_gf(), i))) {
            return "ggml's AMX code would compute this architecture's products wrong: load the model with use_extra_bufts=False";
        }
    }
    if (!picks_outputs(result)) {
        return "the graph of this architecture gives logits of all tokens: llama.cpp would return those of others";
    }
    // llama.cpp copies rows of the model's width, whatever the graph's width is.
    const auto &        params = ctx->get_cparams();
    const auto &        hparams = ctx->get_model().hparams;
    const ggml_tensor * given = result.get_embd_pooled() ? result.get_embd_pooled() : result.get_embd();
    const int64_t       width = params.pooling_type == LLAMA_POOLING_TYPE_RANK ? hparams.n_cls_out : hparams.n_embd_out();
    if (params.embeddings && given && given->ne[0] != width) {
        return "embeddings=True: the graph of this architecture gives embeddings of " + std::to_string(given->ne[0]) +
               " values, and llama.cpp reads " + std::to_string(width);
    }
    return {};
}

}  // namespace

void read_graph(const llama_context * ctx, memory & m) {
    const unsplit_graph graph(ctx);
    m.gives_logits = graph.built().get_logits() != nullptr;
    m.fault = graph_fault(graph.built(), ctx);
    for (int i = 0; i < ggml_graph_n_nodes(graph.nodes()); ++i) {
        const ggml_tensor * t = ggml_graph_node(graph.nodes(), i);
        // Endless loop in ggml's kernel.
        m.endless = m.endless || (t->op == GGML_OP_ROPE && read_op(t).facts.n_rot == 0);
        if (t->op == GGML_OP_ROPE && !m.endless) {
            m.max_position = std::min(m.max_position, last_position(read_op(t)));
        }
    }
    read_ropes(graph.nodes(), ctx, m);
    read_turned(graph.nodes(), m);
}

uint32_t most_kept(const llama_context * ctx, uint32_t asked) {
    // A step of one sequence has more tokens of it than the reserved graph, and writes more states.
    const auto fits = [&](uint32_t n) {
        const assertions_throw scope;
        try {
            const unsplit_graph graph(ctx, n, n + 1);
            return true;
        } catch (...) {
            return false;
        }
    };
    if (fits(asked)) {
        return asked;
    }
    uint32_t most = 0;
    for (uint32_t end = asked; end - most > 1;) {
        const uint32_t n = most + (end - most) / 2;
        (fits(n) ? most : end) = n;
    }
    return most;
}

bool shift_is_like_graph(const llama_context * ctx, const memory & m, uint32_t il) {
    const key_rope & graph = m.ropes.at(il);
    if (!graph.known || !m.hparams->has_rope(il)) {
        return graph.known && graph.facts.type < 0;
    }
    const key_rope shift = configured_rope(ctx, il);
    return graph.facts.type >= 0 && same_rotation(graph, shift.facts, shift.factors);
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
