// Changes a memory with llama.cpp's own functions only. A build with PYKVCACHE_PLAIN has this file in
// place of fast/: slower, but easier to move to another llama.cpp.
#include <set>

#include "edit.h"
#include "probe_memory.h"

namespace pykv {

namespace {

// llama.cpp's division rotates K the wrong way. Instead each position is shifted separately, lowest
// first, so that none is shifted twice.
void divide(const edit_key &, llama_kv_cache & cache, llama_seq_id seq, llama_pos p0, llama_pos p1, int d) {
    std::set<llama_pos> positions;
    const auto & held = held_cells(cache, seq);
    for (auto it = from(held, p0); it != held.end() && it->first < p1; ++it) {
        positions.insert(it->first);
    }
    for (const llama_pos p : positions) {
        if (p / d != p) {
            cache.seq_add(seq, p, p + 1, p / d - p);
        }
    }
}

}  // namespace

bool is_plain() { return true; }

int32_t remove_cells(edit_key, memory * m, llama_seq_id seq, llama_pos p0, llama_pos p1) noexcept {
    return guarded<int32_t>(CAUGHT, [&] { return int32_t(m->mem->seq_rm(seq, begin_of(p0), end_of(p1))); });
}

bool copies_replace(const memory *) { return false; }

int32_t copy_cells(edit_key, memory * m, llama_seq_id src, llama_seq_id dst, llama_pos p0, llama_pos p1) noexcept {
    return guarded_void([&] { m->mem->seq_cp(src, dst, begin_of(p0), end_of(p1)); });
}

int32_t add_cells(edit_key, memory * m, llama_seq_id seq, llama_pos p0, llama_pos p1, llama_pos delta) noexcept {
    return guarded_void([&] { m->mem->seq_add(seq, begin_of(p0), end_of(p1), delta); });
}

int32_t divide_cells(edit_key key, memory * m, llama_seq_id seq, llama_pos p0, llama_pos p1, int d) noexcept {
    return guarded_void([&] {
        for (llama_kv_cache * cache : {m->base, m->swa}) {
            if (cache) {
                divide(key, *cache, seq, p0, p1, d);
            }
        }
        if (m->recurrent) {
            m->recurrent->seq_div(seq, p0, p1, d);  // a label: there is no K to rotate
        }
    });
}

// llama.cpp has no function that moves cells.
bool    can_compact(const memory *) { return false; }
int64_t move_cells_down(edit_key, memory *) noexcept { return 0; }

// llama.cpp's reader clears the sequence first, so replace() copies the old contents.
int32_t state_place(edit_key, memory *, bool, llama_seq_id, const std::vector<state_block> &,
                    const std::vector<state_piece> &, bool) noexcept {
    return 0;
}

}  // namespace pykv
