// Removal, copy, shift and division over a sequence's own cells, and compaction.
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

// Compaction: choose cells, move their data, then their entries in llama.cpp's cell class -----------------

namespace {

struct cell_move {
    uint32_t from, to;
};

// With n used cells, those at n or above move, in order, into the holes below n.
std::vector<cell_move> moves_of(const llama_kv_cells & cells, const std::set<uint32_t> & used) {
    std::vector<cell_move> moves;
    const uint32_t n = cells.get_used();
    uint32_t hole = 0;
    for (auto it = used.lower_bound(n); it != used.end(); ++it, ++hole) {
        while (!cells.is_empty(hole)) {
            ++hole;
        }
        moves.push_back({*it, hole});
    }
    return moves;
}

// Copy cells' data within a stream; no target may be a source.
void move_rows(const edit_key & key, const live_tensor & t, const std::vector<cell_move> & moves) {
    std::vector<uint32_t> sources, targets;
    for (const auto & [from, to] : moves) {
        sources.push_back(from);
        targets.push_back(to);
    }
    std::vector<uint8_t> bytes(moves.size() * t.cell_stride * size_t(t.transposed ? t.n_head * t.head_dim : 1));
    tensor_reads         reads;
    add_rows(reads, t, runs_of(sources.data(), sources.size()), bytes.data());
    reads.run();
    tensor_writes writes(key);
    add_rows(writes, t, runs_of(targets.data(), targets.size()), static_cast<const uint8_t *>(bytes.data()));
    writes.run();
}

void move_data(const edit_key & key, const memory * m, memory_part part, llama_seq_id seq,
               const std::vector<cell_move> & moves) {
    for (const uint32_t il : part_layers(m, part)) {
        move_rows(key, tensor_at(m, part, il, 0, seq), moves);
        if (!m->hparams->is_mla()) {
            move_rows(key, tensor_at(m, part, il, 1, seq), moves);
        }
    }
}

// Reuses the sets' nodes, so that nothing is allocated.
void move_entries(open_cells & open, const std::vector<cell_move> & moves) noexcept {
    for (const auto & [from, to] : moves) {
        open.pos(to) = open.pos(from);
        open.ext(to) = open.ext(from);
        open.members(to) = open.members(from);
        for (llama_seq_id seq = 0; seq < LLAMA_MAX_SEQ; ++seq) {
            if (open.members(from).test(seq)) {
                auto & held = open.held(seq);
                auto   node = held.extract({open.pos(from), from});
                node.value().second = to;
                held.insert(std::move(node));
            }
        }
        open.pos(from) = -1;
        open.ext(from).reset();
        open.members(from).reset();
        auto node = open.used().extract(from);
        node.value() = to;
        open.used().insert(std::move(node));
    }
}

int64_t compact_part(const edit_key & key, const memory * m, memory_part part) {
    llama_kv_cache & cache = *cache_of(m, part);
    int64_t moved = 0;
    // A stream is accessed through one of its sequences.
    for (llama_seq_id stream = 0; stream < llama_seq_id(cache.get_n_stream()); ++stream) {
        open_cells open(key, cache, stream);
        const auto moves = moves_of(open.cells, open.used());
        if (moves.empty()) {
            continue;
        }
        // Data first: if a device refuses, all cells stay in place.
        move_data(key, m, part, stream, moves);
        move_entries(open, moves);
        open.head = open.cells.get_used() % open.cells.size();
        moved += int64_t(moves.size());
    }
    return moved;
}

}  // namespace

bool can_compact(const memory * m) {
    return m->kind != MEMORY_NONE && m->kind != MEMORY_OTHER && !m->picks_blocks;
}

int64_t move_cells_down(edit_key key, memory * m) noexcept {
    return guarded<int64_t>(CAUGHT, [&] {
        int64_t moved = 0;
        for (const auto part : {PART_ATTENTION, PART_WINDOW}) {
            moved += has_part(m, part) ? compact_part(key, m, part) : 0;
        }
        return moved;
    });
}

}  // namespace pykv
