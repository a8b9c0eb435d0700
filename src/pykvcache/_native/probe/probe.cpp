// Classifies a context's memory.
#include <algorithm>
#include <cmath>
#include <memory>
#include <set>

#include "ggml-cpp.h"
#include "guarded.h"
#include "probe_memory.h"

namespace pykv {

namespace opened {

// An index has other head sizes than the model.
PYKV_OPEN(dsa_index, llama_kv_cache_dsa, hparams_lid, llama_hparams llama_kv_cache_dsa::*)
PYKV_OPEN(msa_index, llama_kv_cache_msa, hparams_idx, llama_hparams llama_kv_cache_msa::*)
PYKV_OPEN(hybrid_index, llama_memory_hybrid_idx, hparams_idx, llama_hparams llama_memory_hybrid_idx::*)

}  // namespace opened

namespace {

bool rotates(const llama_kv_cache * cache, const llama_hparams & hparams) {
    for (const uint32_t il : cache->get_layer_ids()) {
        if (hparams.has_rope(il)) {
            return true;
        }
    }
    return false;
}

// Factor by which ggml's RoPE scales this layer's keys while rotating them.
float key_scale(const llama_context * ctx, uint32_t il) {
    const auto & c = ctx->get_cparams();
    const float  s = ctx->get_model().get_rope_freq_scale(c, int(il));
    return c.yarn_attn_factor * (c.yarn_ext_factor != 0 ? 1 + 0.1f * std::log(1 / s) : 1);
}

// Whether the shift graph undoes the Hadamard matrix over exactly the dimensions that it rotates.
no_shift quantized_shift(const memory & m, memory_part part) {
    const auto size = uint32_t(hadamard_said(&m, part).keys);
    if (size == 0) {  // the shift graph would read them without a Hadamard matrix
        return {"llama.cpp cannot rotate quantised keys whose head size is not a multiple of 64, or with "
                "LLAMA_ATTN_ROT_DISABLE; create the context with type_k='f16'", true};
    }
    for (const uint32_t il : cache_of(&m, part)->get_layer_ids()) {
        if (m.hparams->has_rope(il) && (m.hparams->n_rot(il) % size != 0 || m.hparams->n_lora_kv > 0)) {
            // The matrix mixes both parts.
            return {"llama.cpp cannot rotate quantised keys of which RoPE turns a part; create the context with type_k='f16'",
                    true};
        }
    }
    return {};
}

no_shift find_no_shift(const llama_context * ctx, memory & m) {
    const no_shift not_here{"llama.cpp cannot rotate the keys of this architecture again"};
    if (m.kind == MEMORY_NONE || m.kind == MEMORY_OTHER) {
        return not_here;
    }
    if (m.hparams->n_pos_per_embd() > 1) {
        return {"M-RoPE stores several positions per token, which llama.cpp cannot shift", false, true};
    }
    if (m.index) {
        return not_here;
    }
    if (ctx->get_model().pos_embd) {
        return {"the keys and values of this model were computed from positions in a learned table"};
    }
    bool first = true;
    for (const memory_part part : {PART_ATTENTION, PART_WINDOW}) {
        const llama_kv_cache * cache = cache_of(&m, part);
        if (!cache) {
            continue;
        }
        if (!cache->get_can_shift()) {
            return not_here;
        }
        // Without rotary embedding no K needs rotating, and llama.cpp skips the graph.
        if (m.hparams->rope_type == LLAMA_ROPE_TYPE_NONE) {
            continue;
        }
        if (!rotates(cache, *m.hparams)) {
            return {"a part of this cache has no rotary layer (NoPE), which llama.cpp cannot shift"};
        }
        if (cache->type_k() == GGML_TYPE_BF16) {
            return {"keys stored as bf16 cannot be rotated; create the context with type_k='f16'", true};
        }
        if (ggml_is_quantized(cache->type_k())) {
            const no_shift why = quantized_shift(m, part);
            if (!why.why.empty()) {
                return why;
            }
        }
        for (const uint32_t il : cache->get_layer_ids()) {
            if (!shift_is_like_graph(ctx, m, il)) {
                return {"llama.cpp would rotate keys of this model in another way than its graph does"};
            }
            if (!m.hparams->has_rope(il)) {
                continue;
            }
            const float scale = key_scale(ctx, il);
            if (!first && scale != m.key_scale) {
                return {"RoPE changes the length of this model's keys, in each part by another factor"};
            }
            m.key_scale = scale;
            first = false;
        }
    }
    return {};
}

// The cells that define a sequence; indexes and compressed copies follow them.
void find_caches(memory & m) {
    const auto find_dsa = [&m](llama_kv_cache_dsa * dsa) {
        m.base = dsa->get_mla();
        m.index = dsa->get_lid();
        m.index_hparams = &(dsa->*member(opened::dsa_index()));
    };
    if (auto * dsa = dynamic_cast<llama_kv_cache_dsa *>(m.mem)) {
        m.name = "llama_kv_cache_dsa";
        find_dsa(dsa);
    } else if (auto * dsa_iswa = dynamic_cast<llama_kv_cache_dsa_iswa *>(m.mem)) {
        m.name = "llama_kv_cache_dsa_iswa";
        find_dsa(dsa_iswa->get_dsa());
        m.swa = dsa_iswa->get_swa();
    } else if (auto * msa = dynamic_cast<llama_kv_cache_msa *>(m.mem)) {
        m.name = "llama_kv_cache_msa";
        m.base = msa->get_base();
        m.index = msa->get_idx();
        m.index_hparams = &(msa->*member(opened::msa_index()));
    } else if (auto * dsv4 = dynamic_cast<llama_kv_cache_dsv4 *>(m.mem)) {
        m.name = "llama_kv_cache_dsv4";
        m.keys_only = true;
        m.base = dsv4->get_raw()->get_base();
        m.swa = dsv4->get_raw()->get_swa();
        m.has_layout = false;
    } else {
        m.name = "an unknown class";
        m.has_layout = false;
    }
}

void classify(memory & m) {
    if (!m.mem) {
        return;
    }
    if (auto * kv = dynamic_cast<llama_kv_cache *>(m.mem)) {
        m.kind = MEMORY_ATTENTION;
        m.name = "llama_kv_cache";
        m.base = kv;
    } else if (auto * iswa = dynamic_cast<llama_kv_cache_iswa *>(m.mem)) {
        m.kind = MEMORY_SLIDING_WINDOW;
        m.name = "llama_kv_cache_iswa";
        m.base = iswa->get_base();
        m.swa = iswa->get_swa();
    } else if (auto * recurrent = dynamic_cast<llama_memory_recurrent *>(m.mem)) {
        m.kind = MEMORY_RECURRENT;
        m.name = "llama_memory_recurrent";
        m.recurrent = recurrent;
    } else if (auto * hybrid = dynamic_cast<llama_memory_hybrid *>(m.mem)) {
        // A derived class indexes its cells by position.
        m.bounded = dynamic_cast<llama_memory_hybrid_idx *>(m.mem) != nullptr;
        m.kind = MEMORY_HYBRID;
        m.name = m.bounded ? "llama_memory_hybrid_idx" : "llama_memory_hybrid";
        m.base = hybrid->get_mem_attn();
        m.recurrent = hybrid->get_mem_recr();
        if (auto * idx = dynamic_cast<llama_memory_hybrid_idx *>(m.mem)) {
            m.index = idx->get_mem_idx();
            m.index_hparams = &(idx->*member(opened::hybrid_index()));
        }
    } else if (auto * hybrid_iswa = dynamic_cast<llama_memory_hybrid_iswa *>(m.mem)) {
        m.kind = MEMORY_HYBRID_SLIDING_WINDOW;
        m.name = "llama_memory_hybrid_iswa";
        m.base = hybrid_iswa->get_mem_attn()->get_base();
        m.swa = hybrid_iswa->get_mem_attn()->get_swa();
        m.recurrent = hybrid_iswa->get_mem_recr();
    } else {
        m.kind = MEMORY_OTHER;
        m.bounded = true;
        find_caches(m);
    }
}

}  // namespace

model_facts look_at_model(const llama_model * model) {
    const auto & hparams = model->hparams;
    model_facts facts{};
    facts.learned_positions = model->pos_embd != nullptr;
    facts.causal = hparams.causal_attn;
    facts.has_classifier = model->cls != nullptr || model->cls_out != nullptr;
    facts.n_embd_out = int32_t(hparams.n_embd_out());
    facts.n_cls_out = int32_t(hparams.n_cls_out);
    const bool all = llm_arch_is_recurrent(model->arch);
    for (uint32_t il = 0; il < hparams.n_layer(); ++il) {
        if (all || (llm_arch_is_hybrid(model->arch) && hparams.is_recr(il))) {
            facts.state_values += hparams.n_embd_r() + hparams.n_embd_s() + hparams.ple_conv_state();
        }
        if (hparams.n_head_kv(il) == 0 || !hparams.has_kv(il)) {
            continue;
        }
        facts.k_per_cell += hparams.n_embd_k_gqa(il);
        facts.v_per_cell += hparams.n_embd_v_gqa(il);
    }
    return facts;
}

std::string description_of(const llama_model * model) { return model->desc(); }

std::vector<std::string> metadata_of(const llama_model * model) {
    std::vector<std::string> texts;
    for (const auto & [key, value] : model->gguf_kv) {
        texts.push_back(key);
        texts.push_back(value);
    }
    return texts;
}

bool heads_divisible(const llama_model * model, ggml_type type, bool keys) {
    const auto & hparams = model->hparams;
    const bool known = type >= 0 && type < GGML_TYPE_COUNT;
    const auto block = known ? uint32_t(ggml_blck_size(type)) : 0;
    if (block == 0) {
        return false;  // removed types have no block size
    }
    for (uint32_t il = 0; il < hparams.n_layer(); ++il) {
        if ((keys ? hparams.n_embd_head_k(il) : hparams.n_embd_head_v(il)) % block != 0) {
            return false;
        }
    }
    return true;
}

memory * memory_new(llama_context * ctx) noexcept {
    return guarded<memory *>(nullptr, [&] {
        auto m = std::make_unique<memory>();
        m->mem = llama_get_memory(ctx);
        m->hparams = &llama_get_model(ctx)->hparams;
        m->arch = llama_get_model(ctx)->arch;
        classify(*m);
        if (const ggml_tensor * table = llama_get_model(ctx)->pos_embd) {
            // Not n_ctx_train, which a context with YaRN changes for all contexts of the model.
            m->max_position = llama_pos(std::min<int64_t>(m->max_position, table->ne[1] - 1));
        }
        m->max_position = std::min(m->max_position, MOST_POSITIONS - llama_pos(m->hparams->n_swa));
        read_graph(ctx, *m);
        m->shift = find_no_shift(ctx, *m);
        m->picks_blocks = m->bounded && m->recurrent;
        m->may_be_dense = dynamic_cast<llama_kv_cache_msa *>(m->mem) != nullptr;
        m->whole_only = m->recurrent || (m->mem && !m->has_layout);
        m->windowed = m->swa != nullptr;
        m->has_rest = m->windowed || m->whole_only;
        m->n_stream = m->base ? m->base->get_n_stream() : 1;
        return m.release();
    });
}

void memory_delete(memory * m) noexcept { delete m; }

const memory_traits & traits_of(const memory * m) noexcept { return *m; }

context_facts look_at_context(const llama_context * ctx) {
    const auto & c = ctx->get_cparams();
    return {c.flash_attn, c.kv_unified, c.causal_attn, int(c.pooling_type), c.n_threads, c.n_threads_batch};
}

std::vector<std::string> buffer_types(const memory * m) {
    std::set<std::string> names;
    if (m->mem) {
        for (const auto & [type, bytes] : m->mem->memory_breakdown()) {
            if (bytes > 0) {
                names.insert(ggml_backend_buft_name(type));
            }
        }
    }
    return {names.begin(), names.end()};
}

memory_facts look_at_memory(const memory * m) {
    memory_facts facts{};
    if (!m->mem) {
        return facts;
    }
    for (const auto & [_, bytes] : m->mem->memory_breakdown()) {
        facts.bytes_total += bytes;
    }
    facts.n_swa = m->hparams->n_swa;
    if (m->recurrent) {
        facts.n_cells = m->recurrent->size;
        facts.max_rollback = m->recurrent->n_rs_seq;
    }
    for (const memory_part part : {PART_ATTENTION, PART_WINDOW, PART_INDEX}) {
        const llama_kv_cache * cache = cache_of(m, part);
        if (!cache) {
            continue;
        }
        for (const uint32_t il : cache->get_layer_ids()) {
            const auto & h = hparams_of(m, part);
            facts.bytes_per_token += ggml_row_size(cache->type_k(), h.n_embd_k_gqa(il));
            facts.bytes_per_token += h.is_mla() || m->keys_only ? 0 : ggml_row_size(cache->type_v(), h.n_embd_v_gqa(il));
        }
    }
    if (m->base) {
        facts.n_cells = m->base->get_size();
    }
    return facts;
}

void distrust_scheduler(llama_context * ctx) noexcept { ctx->*member(opened::sched_need_reserve()) = true; }

void build_each_graph(llama_context * ctx) noexcept { ctx->*member(opened::graph_reuse_disable()) = true; }

}  // namespace pykv
