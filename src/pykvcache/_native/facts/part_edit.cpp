// Changing one part of a memory at a time.
#include <limits>

#include <algorithm>
#include <vector>

#include "edit.h"
#include "probe_memory.h"
#include "part_edit.h"
#include "transfers.h"

namespace pykv {

namespace opened {
PYKV_OPEN(searches, llama_kv_cache, v_heads, std::vector<uint32_t> llama_kv_cache::*)
}

llama_pos first_from(const memory * m, llama_seq_id seq, llama_pos p) {
    if (m->base) {
        const auto & cells = held_cells(*m->base, seq);
        const auto it = cells.lower_bound({p, 0});
        return it == cells.end() ? std::numeric_limits<llama_pos>::max() : it->first;
    }
    return p;
}

uint32_t window_room(const memory * m, llama_seq_id seq, uint32_t n_seq_max) {
    const auto &   cells = m->swa->get_cells(seq);
    const uint32_t size = cells.size();
    std::vector<llama_pos> kept(n_seq_max, -1);  // first position whose cells another sequence keeps
    uint32_t       room = 0;
    for (uint32_t i = 0; i < size; ++i) {
        if (!cells.is_empty(i) && cells.seq_count(i) > 1) {
            continue;
        }
        const llama_seq_id other = cells.is_empty(i) ? seq : cells.seq_get(i);
        if (other != seq && kept[size_t(other)] < 0) {
            kept[size_t(other)] = cut_begin(m, cells.seq_pos_max(other));
        }
        room += other == seq || cells.pos_get(i) < kept[size_t(other)];
    }
    if (m->swa->get_n_stream() > 1 || size >= m->base->get_size()) {
        return room;
    }
    const uint64_t reserved = uint64_t(m->hparams->n_swa) * (n_seq_max - 1);
    return uint32_t(std::min<uint64_t>(room, size - std::min<uint64_t>(size, reserved)));
}

bool window_has_room(const memory * m, llama_seq_id seq, uint32_t n) {
    if (!m->swa) {
        return true;
    }
    // The cells that llama_kv_cache::find_slot() would take: free ones, those of this sequence, and those of one other
    // sequence that its next token does not see.
    const auto & cells = m->swa->get_cells(seq);
    uint32_t room = 0;
    for (uint32_t i = 0; i < cells.size() && room < n; ++i) {
        if (cells.is_empty(i)) {
            ++room;
            continue;
        }
        const bool mine = cells.seq_has(i, seq);
        const int others = cells.seq_count(i) - int(mine);
        if (others == 0) {
            ++room;
        } else if (others == 1) {
            llama_seq_id other = 0;
            while (other == seq || !cells.seq_has(i, other)) {
                ++other;
            }
            room += llama_hparams::is_masked_swa(m->hparams->n_swa, m->hparams->swa_type, cells.pos_get(i),
                                                 cells.seq_pos_max(other) + 1);
        }
    }
    return room >= n;
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
            uint32_t & place = (cache->*member(opened::searches()))[stream];
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
