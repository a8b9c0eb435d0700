// Restores a sequence's state without llama.cpp's reader, which clears the destination first. Here all steps that can
// fail come first, so that the old contents need no copy and are often overwritten in place.
#include <algorithm>
#include <cstring>
#include <memory>

#include "edit.h"
#include "fast/open_cells.h"
#include "guarded.h"
#include "probe_kv.h"
#include "probe_memory.h"
#include "probe_state.h"
#include "state_pieces.h"
#include "team.h"
#include "transfers.h"

namespace pykv {

namespace {

// llama.cpp computes over the cells up to the highest used one, rounded up to this.
constexpr uint32_t CELL_PADDING = 256;

uint32_t padded(uint32_t n) { return (n + CELL_PADDING - 1) / CELL_PADDING * CELL_PADDING; }

enum cell_use : uint8_t { KEPT, FREE, TARGET };

// Destination of a block's rows.
struct rows_target {
    state_block block;
    live_tensor tensor;
};

// Restores the cells of a state in one cache. Nothing is visible before commit().
class placing {
  public:
    placing(const edit_key & key, llama_kv_cache & cache, llama_seq_id seq) : key(key), open(key, cache, seq), seq(seq) {
        alone.set(seq);
    }
    placing(const placing &) = delete;
    placing & operator=(const placing &) = delete;
    ~placing() {
        for (size_t k = 0; k < n_added; ++k) {
            open.used().erase(added[k]);
        }
    }

    void read_cells(cursor & in, const state_block & block, const state_part & part) {
        records.resize(block.n_cells);
        in.skip(block.offset - in.tell());
        std::vector<uint8_t> joined;
        const uint8_t *      at = in.direct(block.size);
        if (!at) {
            joined.resize(block.size);
            in.read(joined.data(), block.size);
            at = joined.data();
        }
        for (auto & record : records) {
            const cell_head head = read_cell_head(at, part.extended);
            record.pos = head.pos;
            if (head.ext) {
                std::memcpy(&record.ext, head.ext, sizeof(record.ext));
            }
            at += cell_bytes(part);
            if (record.pos < 0 || record.pos == POS_END) {
                throw std::runtime_error("the state was changed while it was read");
            }
        }
    }

    // Choose target cells: free ones, and in host memory also those that only this sequence holds. A device copy may
    // fail midway, so there the old cells must survive.
    bool choose(bool host) {
        const uint32_t size = open.cells.size();
        const auto     n = uint32_t(records.size());
        use.resize(size);
        for (uint32_t i = 0; i < size; ++i) {
            use[i] = open.pos(i) == -1 ? FREE : KEPT;
        }
        const auto free_own = [&](uint32_t i) {
            if (use[i] == KEPT && open.members(i) == alone) {
                use[i] = FREE;
            }
        };
        if (!host) {
            // Keep the old cells until all data is copied.
        } else if (open.held(seq).size() > size / 4) {
            // For many cells, scanning the array is faster than walking the nodes.
            for (uint32_t i = 0; i < size; ++i) {
                free_own(i);
            }
        } else {
            for (const auto & pair : open.held(seq)) {
                free_own(pair.second);
            }
        }
        targets.reserve(n);
        for (uint32_t i = 0; i < size && targets.size() < n; ++i) {
            if (use[i] == FREE) {
                targets.push_back(i);
            }
        }
        if (targets.size() < n) {
            return false;
        }
        prefer_run();
        runs = runs_of(targets.data(), targets.size());
        for (const uint32_t i : targets) {
            use[i] = TARGET;
        }
        return true;
    }

    // Whether a target is one of the sequence's current cells.
    bool overwrites() {
        return std::any_of(targets.begin(), targets.end(), [&](uint32_t i) { return open.pos(i) != -1; });
    }

    // Whether the same cells were chosen: an index and its cache share cell numbers.
    bool is_beside(const placing & other) const { return targets == other.targets; }

    // Do all allocations.
    void prepare() {
        same = open.held(seq).size() == targets.size();
        for (size_t k = 0; same && k < targets.size(); ++k) {
            same = open.pos(targets[k]) == records[k].pos && open.members(targets[k]) == alone;
        }
        if (same) {
            return;
        }
        std::vector<cell_set::value_type> pairs;
        pairs.reserve(records.size());
        for (size_t k = 0; k < records.size(); ++k) {
            pairs.emplace_back(records[k].pos, targets[k]);
        }
        if (!std::is_sorted(pairs.begin(), pairs.end())) {
            std::sort(pairs.begin(), pairs.end());
        }
        for (const auto & pair : pairs) {
            held.emplace_hint(held.end(), pair);
        }
        for (const uint32_t i : targets) {
            if (open.pos(i) == -1) {
                added.push_back(i);
            }
        }
        auto & used = open.used();
        auto   hint = added.empty() ? used.end() : used.lower_bound(added.front());
        for (const uint32_t i : added) {
            while (hint != used.end() && *hint < i) {
                ++hint;
            }
            hint = std::next(used.emplace_hint(hint, i));
            ++n_added;
        }
    }

    void copy(cursor & in, const rows_target & rows) const {
        const live_tensor & t = rows.tensor;
        in.skip(rows.block.offset - in.tell());
        if (t.host) {
            auto * data = reinterpret_cast<uint8_t *>(const_cast<char *>(t.data));
            each_run(t, runs, [&](size_t at, size_t n) { in.read(data + at, n); });
            return;
        }
        tensor_writes writes(key);
        each_run(t, runs, [&](size_t at, size_t n) {
            in.take(n, [&](const uint8_t * from, uint64_t step) {
                writes.add(t.owner, t.offset + at, step, from);
                at += step;
            });
        });
        writes.run();
    }

    void commit() noexcept {
        n_added = 0;
        if (!same) {
            release_old();
        }
        for (size_t k = 0; k < targets.size(); ++k) {
            const uint32_t i = targets[k];
            open.ext(i) = records[k].ext;
            if (!same) {
                open.pos(i) = records[k].pos;
                open.shift(i) = 0;
                open.members(i) = alone;
            }
        }
        if (!same) {
            open.held(seq).swap(held);
        }
        if (!targets.empty()) {
            open.head = targets.back() + 1;
        }
    }

  private:
    struct cell_record {
        llama_pos         pos;
        llama_kv_cell_ext ext;
    };

    // Prefer the lowest contiguous run, if llama.cpp then computes over no more cells.
    void prefer_run() {
        const auto n = uint32_t(targets.size());
        if (n == 0 || targets.back() - targets.front() + 1 == n) {
            return;
        }
        uint32_t kept = open.cells.size();
        while (kept > 0 && use[kept - 1] != KEPT) {
            --kept;
        }
        const uint32_t limit = padded(std::max(kept, targets.back() + 1));
        const uint32_t end = std::min<uint32_t>(limit, open.cells.size());
        for (uint32_t i = 0, length = 0; i < end; ++i) {
            length = use[i] == FREE ? length + 1 : 0;
            if (length == n) {
                for (uint32_t k = 0; k < n; ++k) {
                    targets[k] = i + 1 - n + k;
                }
                return;
            }
        }
    }

    // Remove the sequence from its old cells.
    void release_old() noexcept {
        cell_release release(open, seq);
        for (const auto & held_cell : open.held(seq)) {
            release(held_cell.second, use[held_cell.second] == TARGET);
        }
    }

    edit_key                  key;
    open_cells                open;
    llama_seq_id              seq;
    llama_kv_cells::seq_set_t alone;  // the set of only this sequence
    std::vector<cell_record>  records;
    std::vector<cell_use>     use;
    std::vector<cell_run>     runs;            // of the targets
    std::vector<uint32_t>     targets, added;  // cells of the records, and those of them that were empty; ascending
    // How many of `added` are already in llama.cpp's set of used cells; the destructor removes them.
    size_t                    n_added = 0;
    cell_set                  held;
    bool                      same = false;  // same cells at the same positions as before
};

// Whether rows match a tensor's type and shape.
bool fits(const state_block & block, const live_tensor & t) {
    const uint64_t row = block.size / block.n_cells;
    if (!t.data || t.transposed != (block.kind == BLOCK_V_TRANS)) {
        return false;
    }
    return t.transposed ? uint64_t(t.n_head * t.head_dim) * t.cell_stride == row : t.cell_stride == row;
}

bool place(const edit_key & key, memory * m, bool v_trans, llama_seq_id seq, const std::vector<state_block> & blocks,
           const std::vector<state_piece> & pieces, bool two) {
    if (m->whole_only) {
        return false;
    }
    std::vector<std::unique_ptr<placing>>             caches;
    std::vector<std::pair<placing *, rows_target>>    rows;
    cursor                                            cells_in(pieces);
    uint64_t                                          n_bytes = 0;
    bool                                              early = true;
    bool                                              all_host = true;
    for (const state_part & part : state_parts(m, v_trans, ALL_PARTS)) {
        auto & cache = *cache_of(m, part.part);
        caches.push_back(std::make_unique<placing>(key, cache, seq));
        placing & to = *caches.back();
        bool      host = true;
        for (const state_block & block : blocks) {
            if (block.part != part.part) {
                continue;
            }
            if (block.kind == BLOCK_CELLS) {
                to.read_cells(cells_in, block, part);
                continue;
            }
            rows.push_back({&to, {block, tensor_at(m, block.part, block.layer, which_of(block.kind), seq)}});
            if (!fits(block, rows.back().second.tensor)) {
                return false;
            }
            host = host && rows.back().second.tensor.host;
            n_bytes += block.size;
        }
        if (!to.choose(host)) {
            return false;
        }
        if (part.part == PART_INDEX && !to.is_beside(*caches.front())) {
            throw std::logic_error("the index of a memory has other cells than what it is an index of");
        }
        all_host = all_host && host;
        early = early && !to.overwrites();
    }
    const auto prepare = [&] {
        for (const auto & to : caches) {
            to->prepare();
        }
    };
    // Free cells may be written to before success is certain.
    if (!early) {
        prepare();
    }
    counter jobs(rows.size());
    share(jobs, two && all_host && n_bytes >= WORTH_A_THREAD ? 2 : 1, [&](int index) {
        if (early && index == 0) {
            prepare();
        }
        cursor in(pieces);
        for (size_t k; jobs.take(k);) {
            rows[k].first->copy(in, rows[k].second);
        }
    });
    for (const auto & to : caches) {
        to->commit();
    }
    return true;
}

}  // namespace

int32_t state_place(edit_key key, memory * m, bool v_trans, llama_seq_id seq, const std::vector<state_block> & blocks,
                    const std::vector<state_piece> & pieces, bool two) noexcept {
    return guarded<int32_t>(CAUGHT, [&] {
        try {
            return int32_t(place(key, m, v_trans, seq, blocks, pieces, two));
        } catch (const fault & found) {
            throw std::runtime_error(found.why);
        }
    });
}

}  // namespace pykv
