// Owns the facts about a context's sequences, and is the only way to change its memory.
//
// Each verb changes the cells and updates the facts with them: valid rows of the last decode, valid prefix versions,
// pending updates, sequences that need removal, first positions of recurrent sequences, encoder inputs, and the epoch
// that makes views stale.
#pragma once

#include <array>
#include <bitset>
#include <cstdint>
#include <vector>

#include "adapters.h"
#include "held.h"
#include "llama.h"
#include "probe.h"
#include "probe_state.h"

namespace pykv {

constexpr int32_t NOTHING_DONE = INT32_MIN + 1;  // out of memory before anything changed; see caught()
constexpr int32_t REFUSED = 1;     // the memory cannot do it; nothing changed
constexpr int32_t UNEXPECTED = 2;  // llama.cpp refused a removal that the memory can do

// The caller holds the context's lock and has checked ids and ranges. Unless stated otherwise, a verb returns 0 or
// CAUGHT.
class sequence_facts {
  public:
    sequence_facts() noexcept = default;
    sequence_facts(const sequence_facts &) = delete;
    sequence_facts & operator=(const sequence_facts &) = delete;
    ~sequence_facts();

    // `adapters` is the model's lock, which outlives this object. False: caught.
    bool open(llama_context * ctx, adapter_lock * adapters) noexcept;
    void close() noexcept;

    // Facts -----------------------------------------------------------------------------------------

    const memory * cells() const { return mem; }
    // Advances with every change of cells; views of an older epoch are stale.
    uint64_t epoch() const { return changes; }
    // Whether a shift or a stream copy waits for the next update.
    bool is_pending() const { return pending; }
    // Whether a failed decode left the sequence unusable until it is removed.
    bool needs_removal(llama_seq_id seq) const { return damaged.test(size_t(seq)); }
    // Whether the last failed decode did that.
    bool was_damaged(llama_seq_id seq) const { return last_damaged.test(size_t(seq)); }
    // Position after the last one. llama.cpp asks the window, which may be empty.
    llama_pos next_pos(llama_seq_id seq) const { return extent_of(mem, seq).hi + 1; }
    // Encoder-decoder models: hash of the encoder's input tokens for a sequence, 0 for none. Sequences with equal hashes
    // attend to the same input.
    uint64_t input_key(llama_seq_id seq) const { return input_keys[size_t(seq)]; }
    // Whether a recurrent state can be rolled back to before a position.
    bool can_resume_at(llama_seq_id seq, llama_pos p0) const {
        return !needs_removal(seq) && can_step_back(mem, seq, p0);
    }
    bool can_remove(llama_seq_id seq, llama_pos p0, llama_pos p1) const {
        return kind_of(seq, p0, p1) != REMOVE_REFUSED;
    }

    // Returns a prefix version of a sequence, valid while is_version() is true. May throw.
    uint64_t name_version(llama_seq_id seq) { return versions.name(seq, next_pos(seq) - 1); }
    bool     is_version(llama_seq_id seq, uint64_t id) const { return versions.is_true(seq, id); }

    // Whether an output row of the last decode is still valid (held.h).
    bool      row_is_held(size_t row) const { return rows.is_held(row); }
    llama_pos row_pos(size_t row) const { return rows.pos(row); }
    // Whether a state was restored since the last decode.
    bool was_restored() const { return rows.is_restored(); }
    // Whether a sequence still holds all its rows, as pooled embeddings need.
    bool rows_are_whole(llama_seq_id seq) const { return rows.is_whole(seq); }
    void forget_rows() noexcept { rows.forget(); }

    // NaN came out of this memory: zero its states once they are free.
    void suspect() noexcept { suspected = true; }

    // Changes ---------------------------------------------------------------------------------------

    // A call that may change cells begins: all views become stale.
    void begin() noexcept { ++changes; }
    int32_t clear(bool data) noexcept;
    // Remove the positions [p0, p1). REFUSED if the memory cannot.
    int32_t remove(llama_seq_id seq, llama_pos p0, llama_pos p1) noexcept;
    // Remove every other sequence, in every stream and part.
    int32_t keep(llama_seq_id seq) noexcept;
    // Remove the positions after `last`. The window must still hold what the next token sees.
    int32_t rewind(llama_seq_id seq, llama_pos last) noexcept;
    // Replace dst by the positions [p0, p1) of src.
    int32_t copy(llama_seq_id src, llama_seq_id dst, llama_pos p0, llama_pos p1) noexcept;
    int32_t shift(llama_seq_id seq, llama_pos p0, llama_pos p1, llama_pos delta) noexcept;
    int32_t divide(llama_seq_id seq, llama_pos p0, llama_pos p1, int d) noexcept;
    // Apply pending updates while abort() is disabled. 1 on failure.
    int32_t apply_pending() noexcept;
    // Returns the number of moved cells, or CAUGHT.
    int64_t compact() noexcept;
    // Switch adapters. Clears the memory and the encoder output, which were computed without them. After CAUGHT or 1
    // nothing is cleared and `before` is in use again; NOTHING_DONE if even that failed.
    int32_t adapt(adapter_set & set, adapter_set & before) noexcept;

    // Restore a checked state. `firsts`: first positions per sequence. 1 on success; 0 with nothing changed if only
    // replace() can do it.
    int32_t place(bool v_trans, llama_seq_id seq, const std::vector<state_block> & blocks,
                  const std::vector<state_piece> & pieces, bool two, const llama_pos * firsts) noexcept;
    // The same with llama.cpp's reader; -1 for a whole context. After CAUGHT the sequence is lost; put_back() restores
    // it from a state taken before.
    int32_t replace(llama_seq_id seq, const std::vector<state_piece> & pieces, const llama_pos * firsts) noexcept;
    int32_t put_back(llama_seq_id seq, const std::vector<state_piece> & before) noexcept;
    // Restore a partial state; the attention part keeps its cells up to `last`. `version` was taken with the state.
    int32_t put_part(llama_seq_id seq, const std::vector<state_piece> & pieces, llama_pos first, llama_pos last,
                     uint64_t version) noexcept;

    // Run llama_decode() and update the facts. The rows of a first part replace all previous ones. After a non-zero code
    // above NOTHING_DONE, needs_removal() tells which sequences are unusable. Only an `active` decode uses the activated
    // adapter.
    int32_t decode(const llama_batch & batch, bool is_first, bool active) noexcept;
    int32_t encode(const llama_batch & batch) noexcept;

  private:
    // Effects of the verbs on the facts.
    void changed(llama_seq_id seq, llama_pos from) noexcept;
    void removed(llama_seq_id seq, llama_pos from) noexcept;
    void moved(llama_seq_id seq, llama_pos from, llama_pos to) noexcept;
    void copied(llama_seq_id src, llama_seq_id dst, llama_pos end) noexcept;
    void restored(llama_seq_id seq, const llama_pos * firsts) noexcept;
    void cleared() noexcept;
    void decoded(const llama_batch & batch) noexcept;
    void failed(const llama_batch & batch, int32_t code, const int32_t * states_before) noexcept;

    removal kind_of(llama_seq_id seq, llama_pos p0, llama_pos p1) const {
        const removal what = removal_of(mem, seq, p0, p1, traits.whole_only || needs_removal(seq));
        return what == REMOVE_REFUSED && can_resume_at(seq, p0) && p1 >= next_pos(seq) ? REMOVE_STEPS : what;
    }
    int32_t remove_as(removal what, llama_seq_id seq, llama_pos p0, llama_pos p1) noexcept;
    int32_t read(llama_seq_id seq, const std::vector<state_piece> & pieces) noexcept;
    void    note_first_tokens(const llama_batch & batch) noexcept;
    void    roll_back_coupled(const llama_batch & batch) noexcept;

    static constexpr size_t N_SEQ = 256;  // LLAMA_MAX_SEQ

    llama_context *             ctx = nullptr;
    adapter_lock *              model_adapters = nullptr;
    adapter_map                 base;  // the adapters without the activated one; null if there is none
    memory *                    mem = nullptr;
    llama_seq_id                n_seq_max = 0;
    memory_traits               traits;
    bool                        pending = false;
    bool                        suspected = false, freed = false;
    uint64_t                    changes = 0;
    std::bitset<N_SEQ>          damaged, last_damaged;
    std::array<uint64_t, N_SEQ> input_keys{};
    prefix_versions             versions;
    held_rows                   rows;
    held_rows::branches_type    rows_before{};  // replace(), for put_back()
};

}  // namespace pykv
