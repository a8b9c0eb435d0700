// Changes of a memory other than moves of cells (fast/, plain/), states (state_io.cpp) and rollbacks.
#include <algorithm>
#include <vector>

#include "edit.h"
#include "probe_memory.h"
#include "transfers.h"

namespace pykv {

void set_first(edit_key, memory * m, llama_seq_id seq, llama_pos first) { m->first[size_t(seq)] = first; }

int32_t clear_cells(edit_key, memory * m, bool data) noexcept {
    return guarded_void([&] { llama_memory_clear(m->mem, data); });
}

int32_t flush(edit_key, llama_context * ctx, const memory * m) noexcept {
    return guarded<int32_t>(CAUGHT, [&] {
        ctx->sched_reserve();  // only if the scheduler is not trusted
        // Only during the shift: a factor that keeps the keys' lengths.
        struct only_turning {
            float & factor;
            float   before;
            only_turning(float & f, float scale) : factor(f), before(f) { factor /= scale; }
            ~only_turning() { factor = before; }
        } guard(const_cast<llama_cparams &>(ctx->get_cparams()).yarn_attn_factor, m->key_scale);
        if (ctx->memory_update(false)) {
            llama_synchronize(ctx);  // devices may still compute, and later reads bypass their queue
        }
        // llama.cpp only logs a failed rotation, and would rotate the finished part again.
        return int32_t((m->base && m->base->get_has_shift()) || (m->swa && m->swa->get_has_shift()));
    });
}

int32_t drop_parts(edit_key, memory * m, llama_seq_id seq) noexcept {
    return guarded_void([&] {
        if (m->swa) {
            m->swa->seq_rm(seq, -1, -1);
        }
        if (m->recurrent) {
            m->recurrent->seq_rm(seq, -1, -1);
        }
    });
}

int32_t cut_attention(edit_key, memory * m, llama_seq_id seq, llama_pos from) noexcept {
    return guarded_void([&] {
        if (m->index) {
            m->mem->seq_rm(seq, from, -1);  // keeps cache and index in step; the other parts end before
        } else if (m->base) {
            m->base->seq_rm(seq, from, -1);
        }
    });
}

void forget_free_states(edit_key, memory * m) noexcept {
    for (size_t i = 0; m->recurrent && i < m->recurrent->cells.size(); ++i) {
        auto & cell = m->recurrent->cells[i];
        if (cell.is_empty()) {
            cell.src = -1;
        }
    }
}

void settle_searches(edit_key, memory * m) noexcept {
    for (llama_kv_cache * cache : {m->base, m->swa, m->index}) {
        // llama_kv_cache::prepare() may restore a stream's position from another stream.
        for (uint32_t stream = 0; cache && stream < cache->get_n_stream(); ++stream) {
            uint32_t & place = (cache->*member(opened::v_heads()))[stream];
            place = std::min(place, cache->get_cells(llama_seq_id(stream)).used_max_p1());
        }
    }
}

int32_t zero_free_states(edit_key key, memory * m) noexcept {
    return guarded_void([&] {
        const auto * part = m->recurrent;
        if (!part) {
            return;
        }
        std::vector<uint8_t> zeros;
        tensor_writes        writes(key);
        const auto           zero = [&](ggml_tensor * t) {
            const size_t row = t ? t->nb[1] : 0;
            for (uint32_t cell = 0, end; t && cell < part->cells.size(); cell = end + 1) {
                for (end = cell; end < part->cells.size() && part->cells[end].is_empty();) {
                    ++end;
                }
                if (zeros.size() < (end - cell) * row) {
                    writes.run();  // before resizing moves their source
                    zeros.resize((end - cell) * row);
                }
                if (end > cell) {
                    writes.add(t, cell * row, (end - cell) * row, zeros.data());
                }
            }
        };
        for (const auto & tensors : {part->r_l, part->s_l, part->p_l}) {
            std::for_each(tensors.begin(), tensors.end(), zero);
        }
        writes.run();
    });
}

int32_t use_adapters(edit_key, llama_context * ctx, adapter_set & set, adapter_map & base) noexcept {
    return guarded<int32_t>(CAUGHT, [&] {
        adapter_map others;
        if (set.activated >= 0) {
            others = std::make_unique<adapter_map::element_type>();
            for (size_t i = 0; i < set.loras.size(); ++i) {
                if (int64_t(i) != set.activated) {
                    others->emplace(set.loras[i], set.scales[i]);
                }
            }
        }
        llama_set_adapters_lora(ctx, set.loras.data(), set.loras.size(), set.scales.data());
        const int32_t n_layer = llama_model_n_layer(&ctx->get_model()), n_embd = llama_model_n_embd(&ctx->get_model());
        const bool    has_control = !set.control.empty();
        if (llama_set_adapter_cvec(ctx, has_control ? set.control.data() : nullptr, set.control.size(), n_embd, 1, n_layer - 1)) {
            return 1;
        }
        ctx->sched_reserve();
        base = std::move(others);
        return 0;
    });
}

// A graph is reused only for the same map, so a swap builds another one.
void swap_adapters(edit_key, llama_context * ctx, adapter_map & other) noexcept {
    std::swap(ctx->*member(opened::loras()), other);
}

}  // namespace pykv
