// Checks a shift or division: new positions must be valid and free.
#include <iterator>

#include "probe_memory.h"

namespace pykv {

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
    llama_pos lo, hi;
    if (!extent(m, seq, lo, hi)) {
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
