// Roll a recurrent state back to one of the n_rs_seq earlier ones that llama.cpp keeps.
//
// A compute step over n tokens of a sequence writes the states after its last n tokens, at most n_rs_seq + 1, into
// planes of the state's cell; plane 0 is the newest. The remaining planes are stale, but llama.cpp would go back to
// them. It also defers a rollback to the next decode: copies miss it, sequences that share the cell are affected,
// and two pending rollbacks end the process. So the valid states are tracked here, and rollbacks happen at once.
#include <algorithm>
#include <array>
#include <vector>

#include "edit.h"
#include "probe_memory.h"
#include "transfers.h"

namespace pykv {

namespace {

// Copy a state from one row to another in every layer.
void copy_state(const edit_key & key, const llama_memory_recurrent & r, size_t from, size_t to) {
    std::vector<const ggml_tensor *> all;
    for (const auto & tensors : {r.r_l, r.s_l, r.p_l}) {
        std::copy_if(tensors.begin(), tensors.end(), std::back_inserter(all),
                     [](const ggml_tensor * t) { return t && ggml_nelements(t) > 0; });
    }
    size_t size = 0;
    for (const ggml_tensor * t : all) {
        size += t->nb[1];
    }
    std::vector<uint8_t> bytes(size);
    uint8_t * at = bytes.data();
    tensor_reads  reads;
    tensor_writes writes(key);
    for (const ggml_tensor * t : all) {
        reads.add(t, from * t->nb[1], t->nb[1], at);
        at += t->nb[1];
    }
    reads.run();
    at = bytes.data();
    for (const ggml_tensor * t : all) {
        writes.add(t, to * t->nb[1], t->nb[1], at);
        at += t->nb[1];
    }
    writes.run();
}

int32_t empty_cell(const llama_memory_recurrent & r) {
    const auto found = std::find_if(r.cells.begin(), r.cells.end(), [](const auto & cell) { return cell.is_empty(); });
    return found == r.cells.end() ? -1 : int32_t(found - r.cells.begin());
}

// Move a sequence from a shared cell to the empty cell `to`; does not allocate.
void leave(llama_memory_recurrent & r, llama_seq_id seq, int32_t cell, int32_t to) {
    r.cells[to].seq_id.insert(r.cells[cell].seq_id.extract(seq));
    r.cells[to].pos = r.cells[cell].pos;
    r.cells[to].src = to;
    r.cells[seq].tail = to;
    ++r.used;
}

// Number of tokens that the recurrent state of a sequence can be rolled back.
uint32_t n_back(const memory * m, llama_seq_id seq) {
    const auto & kept = m->earlier[size_t(seq)];
    return kept.n > 0 && kept.cell == state_cell(m, seq) ? kept.n : 0;
}

}  // namespace

bool can_step_back(const memory * m, llama_seq_id seq, llama_pos p0) {
    const auto [lo, hi, n] = extent_of(m, seq);
    if (n_back(m, seq) == 0 || p0 <= lo || p0 > hi) {
        return false;
    }
    const auto & cell = m->recurrent->cells[size_t(state_cell(m, seq))];
    return uint32_t(hi - p0) < n_back(m, seq) && cell.pos == hi && window_intact(m, seq, p0) &&
           (cell.seq_id.size() == 1 || empty_cell(*m->recurrent) >= 0);
}

void forget_earlier(edit_key, memory * m, llama_seq_id seq) noexcept {
    if (seq < 0) {
        std::fill(m->earlier.begin(), m->earlier.end(), earlier_states{});
    } else {
        m->earlier[size_t(seq)] = {};
    }
}

void share_earlier(edit_key, memory * m, llama_seq_id src, llama_seq_id dst) noexcept {
    m->earlier[size_t(dst)] = m->earlier[size_t(src)];
}

void note_earlier(edit_key, const llama_context * ctx, memory * m, const llama_batch & batch,
                  const int32_t * before) noexcept {
    const uint32_t most = m->recurrent ? m->recurrent->n_rs_seq : 0;
    if (most == 0) {
        return;
    }
    std::array<uint32_t, LLAMA_MAX_SEQ> n{};
    uint32_t     n_seqs = 0, longest = 0;
    llama_seq_id last = -1;
    bool         in_order = true;
    for (int32_t i = 0; i < batch.n_tokens; ++i) {
        const llama_seq_id seq = batch.seq_id[i][0];
        if (n[size_t(seq)]++ == 0) {
            in_order = in_order && (n_seqs == 0 || seq == last + 1);
            last = seq;
            ++n_seqs;
        }
        longest = std::max(longest, n[size_t(seq)]);
    }
    // A sequence's last tokens are in one step, but llama.cpp does not say in which, and a later step may have moved the
    // state. Steps of a single sequence move nothing, and a single step has no later one.
    const llama_cparams & c = ctx->get_cparams();
    const bool alone = n_seqs == 1;
    const bool one_step = in_order && longest * n_seqs == uint32_t(batch.n_tokens) && uint32_t(batch.n_tokens) <= c.n_ubatch;
    for (size_t seq = 0; seq < m->recurrent->cells.size(); ++seq) {
        auto &        kept = m->earlier[seq];
        const int32_t cell = state_cell(m, llama_seq_id(seq));
        if (n[seq] == 0) {
            if (cell != before[seq] || !(alone || one_step || c.embeddings)) {
                kept = {};
            }
        } else if (c.embeddings) {
            // If every token outputs, each step has one sequence, and the last step may be shorter.
            kept = {cell, 0, std::min(most, (n[seq] - 1) % c.n_ubatch)};
        } else {
            kept = {cell, 0, alone || one_step ? std::min(most, n[seq] - 1) : 0};
        }
    }
}

int32_t step_back(edit_key key, memory * m, llama_seq_id seq, llama_pos p0) noexcept {
    return guarded<int32_t>(CAUGHT, [&] {
        auto &        r = *m->recurrent;
        auto &        kept = m->earlier[size_t(seq)];
        const int32_t cell = kept.cell;
        const auto    n = uint32_t(r.cells[size_t(cell)].pos + 1 - p0);
        const bool    shared = r.cells[size_t(cell)].seq_id.size() > 1;
        const int32_t to = shared ? empty_cell(r) : cell;
        copy_state(key, r, size_t(kept.plane + n) * r.size + size_t(cell), size_t(to));
        kept = shared ? earlier_states{} : earlier_states{cell, kept.plane + n, kept.n - n};
        if (shared) {
            leave(r, seq, cell, to);
        }
        // llama.cpp updates the other parts; it would copy the state at the next decode.
        const bool done = m->mem->seq_rm(seq, p0, -1);
        r.rs_idx[size_t(seq)] = 0;
        return int32_t(done);
    });
}

}  // namespace pykv
