// Changing one part of a memory at a time.
#include <algorithm>
#include <vector>

#include "edit.h"
#include "probe_memory.h"
#include "transfers.h"

namespace pykv {

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

}  // namespace pykv
