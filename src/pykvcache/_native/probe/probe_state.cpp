// Checks a state's bytes against this memory.
#include <algorithm>
#include <cstring>

#include "guarded.h"
#include "llama-arch.h"
#include "probe_kv.h"
#include "probe_memory.h"
#include "probe_state.h"
#include "values.h"
#include "state_pieces.h"

namespace pykv {

namespace {

constexpr size_t MAX_ARCH_NAME = 64;

[[noreturn]] void mismatch(const std::string & what, int64_t found, int64_t expected) {
    throw fault{STATE_MISMATCH, what + " is " + std::to_string(found) + ", not " + std::to_string(expected), found, expected, what,
                true};
}

const char * what_of(block_kind kind) {
    return kind == BLOCK_K ? "keys" : kind == BLOCK_V || kind == BLOCK_V_TRANS ? "values" : "recurrent state";
}

// Visitor that compares a state with this memory.
struct walk {
    const memory *  m;
    bool            v_trans;
    uint32_t        n_seq_max;
    llama_seq_id    seq;
    cursor          in;
    std::vector<state_block> & blocks;
    // Last position of each sequence in the parts so far; all parts must agree.
    std::vector<llama_pos> ends = {}, last = {};
    std::vector<uint32_t>  counts = {};  // cells of each sequence in this part
    // With a window: positions of each sequence in the attention part, and in this part.
    std::vector<std::vector<llama_pos>> whole = {}, held = {};
    uint32_t n_filled = 0;  // non-empty streams of this part
    part_set known = NO_PARTS;

    void magic(uint32_t expected) {
        if (in.get<uint32_t>() != expected) {
            throw fault{STATE_DAMAGED, "does not begin as a sequence's state does"};
        }
    }

    void id(llama_seq_id) { in.get<llama_seq_id>(); }  // ignored, as in llama.cpp

    void name(const char * expected) {
        const auto size = in.get<uint32_t>();
        if (size > MAX_ARCH_NAME) {
            throw fault{STATE_DAMAGED, "does not begin as a context's state does"};
        }
        std::string arch(size, '\0');
        in.read(arch.data(), size);
        if (arch != expected) {
            throw fault{STATE_MISMATCH, "the architecture is another than " + std::string(expected)};
        }
    }

    template <class T> void field(T expected, const char * what, const state_rows * rows) {
        const T found = in.get<T>();
        if (found != expected) {
            const std::string where = rows ? " of layer " + std::to_string(rows->layer) : "";
            mismatch(what + where, int64_t(found), int64_t(expected));
        }
    }

    void ids(uint32_t n, llama_pos pos, bool recurrent, std::vector<bool> & tails) {
        if (seq >= 0) {
            in.skip(n * sizeof(llama_seq_id));
            note(0, pos);
            return;
        }
        std::vector<bool> seen(n_seq_max, false);
        for (uint32_t i = 0; i < n; ++i) {
            const auto id = in.get<llama_seq_id>();
            if (id < 0 || uint32_t(id) >= n_seq_max) {
                throw fault{STATE_MISMATCH, "holds sequence " + std::to_string(id) + "; this context has " +
                                                std::to_string(n_seq_max)};
            }
            if (seen[id] || (recurrent && tails[id])) {
                throw fault{STATE_DAMAGED, "names sequence " + std::to_string(id) + " twice"};
            }
            seen[id] = tails[id] = true;
            note(size_t(id), pos);
        }
    }

    void note(size_t s, llama_pos pos) {
        last[s] = std::max(last[s], pos);
        ++counts[s];
        if (m->swa) {
            held[s].push_back(pos);
        }
    }

    // Window positions must be a subset of the attention part's.
    void compare_window(const state_part & part) {
        for (auto & positions : held) {
            if (!std::is_sorted(positions.begin(), positions.end())) {
                std::sort(positions.begin(), positions.end());
            }
        }
        if (part.part == PART_ATTENTION) {
            whole.swap(held);
        }
        for (size_t s = 0; part.part == PART_WINDOW && s < whole.size(); ++s) {
            if (!std::includes(whole[s].begin(), whole[s].end(), held[s].begin(), held[s].end())) {
                throw fault{STATE_DAMAGED, "has a window that holds positions which its attention part does not"};
            }
        }
    }

    // The index has exactly the attention part's cells, but may have no extensions.
    void compare_index(const state_part & part, bool extended) {
        for (uint32_t stream = 0; stream < part.n_stream; ++stream) {
            const state_block *theirs = cells_of(PART_ATTENTION, stream), *own = cells_of(part.part, stream);
            bool same = !theirs == !own && (!own || theirs->n_cells == own->n_cells);
            if (same && own) {
                cursor a = in.from(theirs->offset), b = in.from(own->offset);
                for (uint32_t i = 0; same && i < own->n_cells; ++i) {
                    same = members(a, extended) == members(b, part.extended);
                }
            }
            if (!same) {
                throw fault{STATE_DAMAGED, "has an index of other cells than its attention part holds"};
            }
        }
    }

    // Position and sequences of the next cell.
    static std::vector<int32_t> members(cursor & from, bool extended) {
        uint8_t record[cell_head_bytes(true)];
        from.read(record, cell_head_bytes(extended));
        const cell_head      head = read_cell_head(record, extended);
        std::vector<int32_t> all(size_t(head.n_ids) + 1, head.pos);
        from.read(all.data() + 1, head.n_ids * sizeof(llama_seq_id));
        return all;
    }

    const state_block * cells_of(memory_part part, uint32_t stream) const {
        const auto found = std::find_if(blocks.begin(), blocks.end(), [&](const state_block & block) {
            return block.part == part && block.kind == BLOCK_CELLS && block.stream == stream;
        });
        return found == blocks.end() ? nullptr : &*found;
    }

    void check_position(llama_pos pos) const {
        if (m->bounded && m->base && uint32_t(pos) >= m->base->get_size()) {
            const int64_t end = m->base->get_size();
            throw fault{STATE_NO_ROOM, "holds position " + std::to_string(pos) + ": this memory ends before " +
                                           std::to_string(end), pos, end, "position", true};
        }
        if (pos > m->max_position) {
            throw fault{STATE_POSITION, "holds position " + std::to_string(pos), pos};
        }
    }

    // M-RoPE's other axes must be valid positions too.
    void check_extended(const cell_head & head) const {
        if (head.ext) {
            int32_t xy[2];
            std::memcpy(xy, head.ext, sizeof(xy));
            check_position(std::max(xy[0], xy[1]));
        }
    }

    // Fast path: contiguous, correct cells of one sequence. The walk over each cell reports errors.
    bool plain_cells(const state_part & part, uint32_t n) {
        const size_t    size = cell_bytes(part);
        const uint8_t * at = n > 0 ? in.direct(n * size) : nullptr;
        llama_pos       highest = -1;
        bool            valid = at != nullptr;
        auto            plain = std::vector<llama_pos>(m->swa && valid ? n : 0);
        for (uint32_t i = 0; valid && i < n; ++i, at += size) {
            const cell_head head = read_cell_head(at, part.extended);
            valid = head.pos >= 0 && head.pos <= m->max_position && head.n_ids == 1;
            if (valid) {
                check_position(head.pos);
                check_extended(head);
            }
            highest = std::max(highest, head.pos);
            if (m->swa) {
                plain[i] = head.pos;
            }
        }
        if (valid) {
            in.skip(n * size);
            if (m->swa) {
                held[0].swap(plain);
            }
            last[0] = std::max(last[0], highest);
            counts[0] += n;
        }
        return valid;
    }

    uint32_t cells(const state_part & part, uint32_t stream) {
        const uint32_t n = records(part, stream);
        if (n > 0 && seq >= 0 && ++n_filled > 1) {
            throw fault{STATE_DAMAGED, "holds one sequence in two streams"};
        }
        return n;
    }

    uint32_t records(const state_part & part, uint32_t stream) {
        const bool     recurrent = part.part == PART_RECURRENT;
        const auto     n = in.get<uint32_t>();
        const uint64_t start = in.tell();
        // For a single sequence, window cells that the next token does not see may be dropped (state_fit).
        const uint32_t n_cells = seq >= 0 && part.part == PART_WINDOW ? m->base->get_size() : part.n_cells;
        if (n > (recurrent && seq >= 0 ? 1 : n_cells)) {
            throw fault{STATE_NO_ROOM, "holds " + std::to_string(n) + " cells; this memory has " + std::to_string(n_cells), n,
                        n_cells, "cells", true};
        }
        if (!recurrent && seq >= 0 && plain_cells(part, n)) {
            blocks.push_back({part.part, BLOCK_CELLS, stream, 0, n, start, in.tell() - start});
            return n;
        }
        std::vector<bool> tails(n_seq_max, false);
        for (uint32_t i = 0; i < n; ++i) {
            uint8_t record[cell_head_bytes(true)];
            in.read(record, cell_head_bytes(part.extended));
            const cell_head head = read_cell_head(record, part.extended);
            const llama_pos pos = head.pos;
            const uint32_t  n_ids = head.n_ids;
            if (pos < 0 || pos == std::numeric_limits<llama_pos>::max()) {
                throw fault{STATE_DAMAGED, "holds position " + std::to_string(pos)};
            }
            check_position(pos);
            const bool valid = seq < 0 ? n_ids >= 1 && n_ids <= LLAMA_MAX_SEQ : n_ids == n_ids_of_one(part);
            if (valid && seq < 0 && n_ids > n_seq_max) {
                throw fault{STATE_MISMATCH, "a cell belongs to " + std::to_string(n_ids) +
                                                " sequences, n_seq_max is " + std::to_string(n_seq_max)};
            }
            if (!valid) {
                throw fault{STATE_DAMAGED, "holds a cell of " + std::to_string(n_ids) + " sequences"};
            }
            check_extended(head);
            ids(n_ids, pos, recurrent, tails);
        }
        if (n > 0) {
            blocks.push_back({part.part, BLOCK_CELLS, stream, 0, n, start, in.tell() - start});
        }
        return n;
    }

    void rows(const state_part & part, uint32_t stream, const state_rows & row, uint32_t n) {
        if (n > 0) {
            const uint64_t size = row.row_bytes * n;
            blocks.push_back({part.part, row.kind, stream, row.layer, n, in.tell(), size});
            if (known & only(part.part)) {
                in.skip(size);
                return;
            }
            // Untransposed values mean flash attention.
            value_check values(ggml_type(row.type), row.n_embd, !v_trans && row.kind != BLOCK_R && row.kind != BLOCK_S);
            in.take(size, [&](const uint8_t * from, uint64_t step) { values.take(from, step); });
            if (!values.fits()) {
                const std::string which = std::string(what_of(row.kind)) + " of layer " + std::to_string(row.layer);
                throw fault{STATE_VALUE, "holds NaN, infinity, or values whose products overflow, in the " + which, 0, 0, which};
            }
        }
    }

    void all(part_set which) {
        visit_head(*this, seq, llm_arch_name(m->arch));
        for (const state_part & part : state_parts(m, v_trans, which)) {
            last.assign(n_seq_max, -1);
            counts.assign(n_seq_max, 0);
            held.assign(m->swa ? n_seq_max : 0, {});
            n_filled = 0;
            visit_part(*this, part, state_rows_of(m, v_trans, part.part));
            if (part.part == PART_INDEX) {
                compare_index(part, has_extended(m));
            } else if (part.part != PART_RECURRENT) {
                compare_window(part);
            }
            if (ends.empty()) {
                ends = last;
            }
            for (size_t s = 0; s < ends.size(); ++s) {
                // Block search assumes contiguous positions; no decode leaves gaps.
                if (part.part == PART_ATTENTION && m->picks_blocks && last[s] >= int64_t(counts[s])) {
                    throw fault{STATE_DAMAGED, "has gaps: position " + std::to_string(last[s]) + " in " +
                                                   std::to_string(counts[s]) + " cells"};
                }
                // A window may lack the end too, if the next token does not see it.
                const bool left = part.part == PART_WINDOW && last[s] < ends[s] && ends[s] < window_start(m, ends[s] + 1);
                if (last[s] != ends[s] && !left) {
                    throw fault{STATE_DAMAGED, "has parts that do not end at the same position"};
                }
            }
        }
        if (in.left() > 0) {
            throw fault{STATE_TRAILING, "has " + std::to_string(in.left()) + " bytes too many", int64_t(in.tell() + in.left()),
                        int64_t(in.tell()), "bytes", true};
        }
    }
};

}  // namespace

std::vector<state_part> state_parts(const memory * m, bool v_trans, part_set which) {
    std::vector<state_part> parts;
    const auto add = [&](memory_part part, const llama_kv_cache * cache) {
        if (cache && (which & only(part))) {
            parts.push_back({part, cache->get_n_stream(), cache->get_size(),
                             uint32_t(cache->get_layer_ids().size()), cache->has_cell_ext(), v_trans,
                             STATES_SAY_ROTATIONS ? hadamard_said(m, part) : hadamard_facts{}});
        }
    };
    // llama.cpp's order: with a recurrent part, the index comes last.
    add(PART_ATTENTION, m->base);
    if (!m->recurrent) {
        add(PART_INDEX, m->index);
    }
    add(PART_WINDOW, m->swa);
    if (m->recurrent) {
        if (which & RECURRENT_PARTS) {
            parts.push_back({PART_RECURRENT, 1, m->recurrent->size, m->hparams->n_layer(), false, false, {}});
        }
        add(PART_INDEX, m->index);
    }
    return parts;
}

std::vector<state_rows> state_rows_of(const memory * m, bool v_trans, memory_part part) {
    std::vector<state_rows> result;
    if (part == PART_RECURRENT) {
        const llama_hparams & h = *m->hparams;
        const auto add = [&](block_kind kind, uint32_t il, const ggml_tensor * t, uint32_t n) {
            if (t) {
                result.push_back({part, kind, il, int32_t(t->type), n, ggml_row_size(t->type, n), 0, 0});
            }
        };
        const auto * r = m->recurrent;
        for (uint32_t il = 0; r && il < h.n_layer(); ++il) {
            add(BLOCK_R, il, r->r_l[il], h.n_embd_r());
            if (r->r_l[il]) {
                add(BLOCK_PLE, il, r->p_l[il], h.ple_conv_state());
            }
        }
        for (uint32_t il = 0; r && il < h.n_layer(); ++il) {
            add(BLOCK_S, il, r->s_l[il], h.n_embd_s());
        }
        return result;
    }
    const llama_kv_cache * cache = cache_of(m, part);
    // A part without layers has no types.
    const auto layers = cache ? cache->get_layer_ids() : std::vector<uint32_t>{};
    if (layers.empty()) {
        return result;
    }
    const llama_hparams & h = hparams_of(m, part);
    // MLA keeps no values.
    const ggml_type types[] = {cache->type_k(), h.is_mla() ? cache->type_k() : cache->type_v()};
    for (const uint32_t il : layers) {
        const uint32_t n = h.n_embd_k_gqa(il);
        result.push_back({part, BLOCK_K, il, types[0], n, ggml_row_size(types[0], n), h.n_head_kv(il), h.n_embd_head_k(il)});
    }
    for (const uint32_t il : layers) {
        const uint32_t n = h.n_embd_v_gqa(il);
        if (!h.is_mla()) {
            result.push_back({part, v_trans ? BLOCK_V_TRANS : BLOCK_V, il, types[1], n, ggml_row_size(types[1], n),
                              h.n_head_kv(il), h.n_embd_head_v(il)});
        }
    }
    return result;
}

fault state_check(const memory * m, bool v_trans, uint32_t n_seq_max, llama_seq_id seq, part_set which,
                  const std::vector<state_piece> & pieces, std::vector<state_block> & blocks, part_set known) noexcept {
    return guarded<fault>({STATE_UNKNOWN}, [&]() -> fault {
        try {
            walk one{m, v_trans, n_seq_max, seq, cursor(pieces), blocks};
            one.known = known;
            one.all(which);
        } catch (const fault & found) {
            return found;
        }
        return {};
    });
}

}  // namespace pykv
