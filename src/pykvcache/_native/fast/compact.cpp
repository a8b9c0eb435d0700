// Move cells down: choose them, move their data, then their entries in llama.cpp's cell class.
#include <vector>

#include "edit.h"
#include "fast/open_cells.h"
#include "probe_memory.h"

namespace pykv {

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
