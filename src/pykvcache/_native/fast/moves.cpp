// Removal, copy, shift and division over a sequence's own cells.
//
// llama.cpp visits every cell of the context. Here the cost grows with the sequence.
#include <algorithm>

#include "edit.h"
#include "fast/open_cells.h"
#include "probe_memory.h"

namespace pykv {

bool is_plain() { return false; }

namespace {

// Memories of only these two caches; others have more parts to keep in step.
bool is_cells_only(const memory * m) { return m->kind == MEMORY_ATTENTION || m->kind == MEMORY_SLIDING_WINDOW; }

// Remove the sequence from its cells in [p0, p1); a cell without sequences becomes free.
void take_out(const edit_key & key, llama_kv_cache & cache, llama_seq_id seq, llama_pos p0, llama_pos p1) {
    open_cells   open(key, cache, seq);
    auto &       held = open.held(seq);
    const auto   first = from(held, p0);
    const auto   end = from(held, p1);
    cell_release release(open, seq);
    for (auto it = first; it != end; ++it) {
        release(it->second);
    }
    held.erase(first, end);
}

cell_set part_of(const cell_set & held, llama_pos p0, llama_pos p1) {
    const auto first = from(held, p0);
    const auto end = from(held, p1);
    if (first == held.begin() && end == held.end()) {
        return held;
    }
    cell_set part;
    for (auto it = first; it != end; ++it) {
        part.insert(part.end(), *it);
    }
    return part;
}

// Replace the cells of `dst` by these.
void assign(const edit_key & key, llama_kv_cache & cache, llama_seq_id dst, cell_set & cells) {
    take_out(key, cache, dst, 0, POS_END);
    open_cells open(key, cache, dst);
    for (const auto & held : cells) {
        open.members(held.second).set(dst);
    }
    open.held(dst).swap(cells);
}

// Move the sequence's unshared cells in [p0, p1) to `moved(position)`.
template <class F>
void move(const edit_key & key, llama_kv_cache & cache, llama_seq_id seq, llama_pos p0, llama_pos p1, F && moved) {
    open_cells open(key, cache, seq);
    auto &     held = open.held(seq);
    auto       first = from(held, p0);
    const auto end = from(held, p1);
    if (first == end) {
        return;
    }
    bool in_order = true;
    auto before = first == held.begin() ? cell_set::value_type(-1, 0) : *std::prev(first);
    for (auto it = first; it != end; ++it) {
        const llama_pos           next = moved(it->first);
        const cell_set::value_type now(next, it->second);
        in_order = in_order && before < now;
        before = now;
        open.pos(it->second) = next;
        open.shift(it->second) += next - it->first;
        open.has_shift() = open.has_shift() || next != it->first;
    }
    in_order = in_order && (end == held.end() || before < *end);
    if (in_order) {
        // Keys change in place: their order stays, and they were not created const.
        for (auto it = first; it != end; ++it) {
            const_cast<llama_pos &>(it->first) = moved(it->first);
        }
        return;
    }
    // Reuses nodes, so nothing is allocated and nothing can fail half-way.
    cell_set others;
    while (first != end) {
        auto node = held.extract(first++);
        node.value().first = moved(node.value().first);
        others.insert(std::move(node));
    }
    held.merge(others);
}

template <class F> void each_cache(memory * m, F && change) {
    for (llama_kv_cache * cache : {m->base, m->swa}) {
        if (cache) {
            change(*cache);
        }
    }
}

}  // namespace

int32_t remove_cells(edit_key key, memory * m, llama_seq_id seq, llama_pos p0, llama_pos p1) noexcept {
    return guarded<int32_t>(CAUGHT, [&] {
        if (!is_cells_only(m)) {
            return int32_t(m->mem->seq_rm(seq, begin_of(p0), end_of(p1)));
        }
        each_cache(m, [&](llama_kv_cache & cache) { take_out(key, cache, seq, p0, p1); });
        return 1;
    });
}

bool copies_replace(const memory * m) { return is_cells_only(m) && m->base->get_n_stream() == 1; }

int32_t copy_cells(edit_key key, memory * m, llama_seq_id src, llama_seq_id dst, llama_pos p0, llama_pos p1) noexcept {
    return guarded_void([&] {
        if (!copies_replace(m)) {
            m->mem->seq_cp(src, dst, begin_of(p0), end_of(p1));
            return;
        }
        // Allocate both before using either: running out of memory changes nothing.
        cell_set base = part_of(held_cells(*m->base, src), p0, p1), window;
        if (m->swa) {
            window = part_of(held_cells(*m->swa, src), p0, p1);
            assign(key, *m->swa, dst, window);
        }
        assign(key, *m->base, dst, base);
    });
}

int32_t add_cells(edit_key key, memory * m, llama_seq_id seq, llama_pos p0, llama_pos p1, llama_pos delta) noexcept {
    return guarded_void([&] {
        if (!is_cells_only(m)) {
            m->mem->seq_add(seq, begin_of(p0), end_of(p1), delta);
            return;
        }
        // llama.cpp would also reset the head to 0, and later decodes would overwrite cells
        // outside the window that a rewind still needs.
        each_cache(m, [&](llama_kv_cache & cache) {
            move(key, cache, seq, p0, p1, [&](llama_pos p) { return p + delta; });
        });
    });
}

int32_t divide_cells(edit_key key, memory * m, llama_seq_id seq, llama_pos p0, llama_pos p1, int d) noexcept {
    return guarded_void([&] {
        each_cache(m, [&](llama_kv_cache & cache) {
            move(key, cache, seq, p0, p1, [&](llama_pos p) { return p / d; });
        });
        if (m->recurrent) {
            m->recurrent->seq_div(seq, p0, p1, d);  // a label: there is no K to rotate
        }
    });
}

}  // namespace pykv
