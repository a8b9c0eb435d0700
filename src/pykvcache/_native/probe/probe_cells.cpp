// Queries about existing cells.
#include <algorithm>
#include <iterator>

#include "probe_memory.h"
#include "probe_state.h"

namespace pykv {

namespace {

const cell_set & cells_of(const llama_kv_cache * cache, llama_seq_id seq) {
    return held_cells(*cache, seq);
}

// The cell of a sequence's recurrent state, if any.
const llama_memory_recurrent::mem_cell * tail_of(const memory * m, llama_seq_id seq) {
    const auto & cells = m->recurrent->cells;
    if (size_t(seq) >= cells.size() || cells[seq].tail < 0) {
        return nullptr;
    }
    return &cells[cells[seq].tail];
}

bool same_positions(const memory * m, llama_seq_id seq, llama_pos p0, llama_pos p1) {
    const auto & held = cells_of(m->base, seq);
    const auto & kept = cells_of(m->swa, seq);
    auto a = from(held, p0);
    auto b = from(kept, p0);
    while (true) {
        const bool a_end = a == held.end() || a->first >= p1;
        const bool b_end = b == kept.end() || b->first >= p1;
        if (a_end || b_end) {
            return a_end && b_end;
        }
        if (a->first != b->first) {
            return false;
        }
        ++a;
        ++b;
    }
}

}  // namespace

llama_pos window_start(const memory * m, llama_pos next) noexcept {
    const int64_t n_swa = m->hparams->n_swa;
    int64_t start = 0;
    switch (m->hparams->swa_type) {
        case LLAMA_SWA_TYPE_NONE:      break;
        case LLAMA_SWA_TYPE_STANDARD:  start = next - n_swa + 1; break;
        case LLAMA_SWA_TYPE_CHUNKED:   start = (next / n_swa) * n_swa; break;
        case LLAMA_SWA_TYPE_SYMMETRIC: start = next - n_swa / 2; break;
    }
    return llama_pos(std::max<int64_t>(start, 0));
}

llama_pos least_cut(const memory * m, llama_pos first) noexcept {
    const int64_t n_swa = m->hparams->n_swa;
    int64_t cut = first;
    switch (m->swa && first > 0 ? m->hparams->swa_type : LLAMA_SWA_TYPE_NONE) {
        case LLAMA_SWA_TYPE_NONE:      cut = 0; break;
        case LLAMA_SWA_TYPE_STANDARD:  cut = first + n_swa - 1; break;
        case LLAMA_SWA_TYPE_CHUNKED:   cut = (first + n_swa - 1) / n_swa * n_swa; break;
        case LLAMA_SWA_TYPE_SYMMETRIC: cut = first + n_swa / 2; break;
    }
    return llama_pos(std::min<int64_t>(cut, POS_END));
}

llama_pos window_begin(const memory * m, llama_seq_id seq) {
    const extent all = extent_of(m, seq);
    if (all.n == 0 || !m->swa) {
        return all.lo;
    }
    const auto & held = cells_of(m->base, seq);
    const auto & kept = cells_of(m->swa, seq);
    auto a = held.rbegin();
    auto b = kept.rbegin();
    llama_pos begin = all.hi + 1;
    for (; a != held.rend() && b != kept.rend() && a->first == b->first; ++a, ++b) {
        begin = a->first;
    }
    // Some of several cells at one position may be missing.
    return a != held.rend() && a->first == begin ? begin + 1 : begin;
}

llama_pos spare_begin(const memory * m, llama_seq_id seq) {
    const extent all = extent_of(m, seq);
    if (!m->swa || m->recurrent || all.n == 0) {
        return POS_END;
    }
    return std::max(window_begin(m, seq), cut_begin(m, all.hi));
}

llama_pos cut_begin(const memory * m, llama_pos last) noexcept {
    return window_start(m, llama_pos(std::max<int64_t>(int64_t(last) + 1 - m->hparams->n_swa, 0)));
}

uint32_t n_used(const memory * m, memory_part part) {
    if (part == PART_RECURRENT) {
        return m->recurrent ? m->recurrent->used : 0;
    }
    const llama_kv_cache * cache = cache_of(m, part);
    uint32_t used = 0;
    // A stream is accessed through one of its sequences.
    for (uint32_t s = 0; cache && s < cache->get_n_stream(); ++s) {
        used += cache->get_cells(llama_seq_id(s)).get_used();
    }
    return used;
}

uint32_t n_spanned(const memory * m) {
    uint32_t most = 0;
    for (uint32_t s = 0; m->base && s < m->base->get_n_stream(); ++s) {
        most = std::max(most, m->base->get_cells(llama_seq_id(s)).used_max_p1());
    }
    return most;
}

int64_t n_free(const memory * m, llama_seq_id seq) {
    return m->base ? int64_t(m->base->get_size()) - int64_t(m->base->get_cells(seq).get_used()) : -1;
}

bool next_cell(const memory * m, memory_part part, uint32_t n_seq_max, uint32_t & stream, uint32_t & cell,
               llama_pos & pos, uint8_t * members) {
    if (part == PART_RECURRENT) {
        for (; m->recurrent && cell < m->recurrent->size; ++cell) {
            const auto & state = m->recurrent->cells[cell];
            if (state.is_empty()) {
                continue;
            }
            pos = state.pos;
            for (uint32_t s = 0; s < n_seq_max; ++s) {
                members[s] = state.has_seq_id(llama_seq_id(s));
            }
            return true;
        }
        return false;
    }
    const llama_kv_cache * cache = cache_of(m, part);
    for (; cache && stream < cache->get_n_stream(); ++stream, cell = 0) {
        const auto & cells = cache->get_cells(llama_seq_id(stream));
        for (; cell < cells.used_max_p1(); ++cell) {
            if (cells.is_empty(cell)) {
                continue;
            }
            pos = cells.pos_get(cell);
            for (uint32_t s = 0; s < n_seq_max; ++s) {
                members[s] = cells.seq_has(cell, llama_seq_id(s));
            }
            return true;
        }
    }
    return false;
}

extent extent_of(const memory * m, llama_seq_id seq) {
    if (m->base) {
        const auto & cells = cells_of(m->base, seq);
        return cells.empty() ? extent{} : extent{cells.begin()->first, cells.rbegin()->first, cells.size()};
    }
    const auto *    cell = m->recurrent ? tail_of(m, seq) : nullptr;
    const llama_pos hi = cell ? cell->pos : m->recurrent || !m->mem ? -1 : m->mem->seq_pos_max(seq);
    return hi < 0 ? extent{} : extent{cell ? m->first[seq] : 0, hi, 1};
}

removal removal_of(const memory * m, llama_seq_id seq, llama_pos p0, llama_pos p1, bool whole_only) {
    const auto [lo, hi, n] = extent_of(m, seq);
    if (n == 0) {
        if (p0 != 0 || p1 != POS_END) {
            return REMOVE_NOTHING;
        }
        // A sequence that exists only in the window or recurrent part is repaired by removing it.
        const bool cells_only = m->base && !m->recurrent && m->kind != MEMORY_OTHER;
        return cells_only && (!m->swa || cells_of(m->swa, seq).empty()) ? REMOVE_EMPTY : REMOVE_WHOLE;
    }
    if (p0 <= lo && p1 > hi) {
        return REMOVE_WHOLE;
    }
    if (!holds(m, seq, p0, p1)) {
        return REMOVE_NOTHING;
    }
    if (whole_only) {
        return REMOVE_REFUSED;
    }
    if (!m->swa) {
        return REMOVE_PART;
    }
    // The next token must find all window cells that it sees.
    const llama_pos keep = p1 <= hi ? hi + 1 : last_before(m, seq, p0) + 1;
    return window_intact(m, seq, keep) ? REMOVE_PART : REMOVE_REFUSED;
}

llama_pos first_kept(const memory * m, llama_seq_id seq) {
    const auto [lo, hi, n] = extent_of(m, seq);
    if (n == 0) {
        return -1;
    }
    if (m->recurrent) {
        return hi;  // a state can only be continued
    }
    if (m->swa) {
        const auto & kept = cells_of(m->swa, seq);
        return kept.empty() ? hi : std::max(lo, kept.begin()->first);
    }
    return m->base ? lo : m->mem->seq_pos_min(seq);
}

int32_t state_cell(const memory * m, llama_seq_id seq) {
    return m->recurrent && size_t(seq) < m->recurrent->cells.size() ? m->recurrent->cells[seq].tail : -1;
}

bool holds(const memory * m, llama_seq_id seq, llama_pos p0, llama_pos p1) {
    const llama_pos last = last_before(m, seq, p1);
    return last >= 0 && last >= p0;
}

llama_pos last_before(const memory * m, llama_seq_id seq, llama_pos p) {
    if (m->base) {
        const auto & cells = cells_of(m->base, seq);
        auto it = from(cells, p);
        return it == cells.begin() ? -1 : (--it)->first;
    }
    const extent all = extent_of(m, seq);
    return all.n == 0 || p <= all.lo ? -1 : std::min(all.hi, p - 1);
}

bool window_intact(const memory * m, llama_seq_id seq, llama_pos next) {
    return !m->swa || same_positions(m, seq, window_start(m, next), next);
}

llama_pos first_from(const memory * m, llama_seq_id seq, llama_pos p) {
    if (m->base) {
        const auto & cells = held_cells(*m->base, seq);
        const auto it = cells.lower_bound({p, 0});
        return it == cells.end() ? POS_END : it->first;
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
            room += cells.pos_get(i) < window_start(m, cells.seq_pos_max(other) + 1);
        }
    }
    return room >= n;
}

bool window_dropped(const memory * m, llama_seq_id seq) {
    return m->swa && !same_positions(m, seq, 0, POS_END);
}

bool shared(const memory * m, llama_seq_id seq, llama_pos p0, llama_pos p1) {
    for (const llama_kv_cache * cache : {m->base, m->swa}) {
        if (!cache) {
            continue;
        }
        const auto & all = cache->get_cells(seq);
        const auto & cells = held_cells(all, seq);
        llama_kv_cells::seq_set_t own;
        own.set(seq);
        for (auto it = from(cells, p0); it != cells.end() && it->first < p1; ++it) {
            if (all.seq_get_all(it->second) != own) {
                return true;
            }
        }
    }
    if (m->recurrent) {
        const auto * cell = tail_of(m, seq);
        return cell && cell->seq_id.size() > 1;
    }
    return false;
}

bool same_cells(const memory * m, llama_seq_id a, llama_seq_id b) {
    for (const llama_kv_cache * cache : {m->base, m->swa}) {
        if (cache && (&cache->get_cells(a) != &cache->get_cells(b) || cells_of(cache, a) != cells_of(cache, b))) {
            return false;
        }
    }
    return !m->recurrent || tail_of(m, a) == tail_of(m, b);
}

uint32_t owned_alone(const memory * m, llama_seq_id seq) {
    const auto & cells = m->base->get_cells(seq);
    const auto & held = held_cells(cells, seq);
    return uint32_t(std::count_if(held.begin(), held.end(), [&](const auto & pair) {
        return cells.seq_count(pair.second) == 1;
    }));
}

// Shifts: new positions must be valid and free ----------------------------------------------------------

namespace {

// Each position p of [p0, p1) moves to `moved(p)`, which must be monotonic.
template <class F>
shift_problem check_targets(const cell_set & cells, llama_pos limit, llama_pos p0, llama_pos p1, F && moved, llama_pos & where) {
    const auto first = from(cells, p0);
    const auto end = from(cells, p1);
    if (first == end) {
        return SHIFT_FITS;
    }
    const int64_t lowest = moved(first->first);
    const int64_t highest = moved(std::prev(end)->first);
    const bool    above = first == cells.begin() || std::prev(first)->first < lowest;
    const bool    below = end == cells.end() || highest < end->first;
    if (lowest >= 0 && highest <= limit && above && below) {
        return SHIFT_FITS;  // stays between its neighbours
    }
    for (auto it = first; it != end; ++it) {
        const int64_t target = moved(it->first);
        where = it->first;
        if (target < 0) {
            return SHIFT_NEGATIVE;
        }
        if (target > limit) {
            return SHIFT_OVERFLOW;
        }
        if (target < p0 || target >= p1) {
            const auto other = from(cells, llama_pos(target));
            if (other != cells.end() && other->first == target) {
                where = llama_pos(target);
                return SHIFT_COLLIDES;
            }
        }
    }
    return SHIFT_FITS;
}

template <class F>
shift_problem check_moves(const memory * m, llama_seq_id seq, llama_pos p0, llama_pos p1, F && moved, llama_pos & where) {
    if (m->base) {
        return check_targets(held_cells(*m->base, seq), m->max_position, p0, p1, moved, where);
    }
    const auto [lo, hi, n] = extent_of(m, seq);
    if (n == 0) {
        return SHIFT_FITS;
    }
    where = hi;
    return moved(lo) < 0 ? SHIFT_NEGATIVE : moved(hi) > m->max_position ? SHIFT_OVERFLOW : SHIFT_FITS;
}

}  // namespace

shift_problem add_check(const memory * m, llama_seq_id seq, llama_pos p0, llama_pos p1, int64_t delta, llama_pos & where) {
    return check_moves(m, seq, p0, p1, [&](llama_pos p) { return int64_t(p) + delta; }, where);
}

shift_problem div_check(const memory * m, llama_seq_id seq, llama_pos p0, llama_pos p1, int d, llama_pos & where) {
    return check_moves(m, seq, p0, p1, [&](llama_pos p) { return int64_t(p) / d; }, where);
}

}  // namespace pykv
