// The one owner of what is true of a context's sequences, and the only way to change its memory.
//
// Each verb changes the cells and, with them, everything that is known of the sequences: which rows of
// the last decode are still held, which prefix versions are true, what waits for an update, what needs
// removal, where a recurrent sequence begins, what an encoder read, and whether views are stale.
#pragma once

#include <array>
#include <bitset>
#include <cstdint>
#include <vector>

#include "adapters.h"
#include "held_rows.h"
#include "llama.h"
#include "prefix_versions.h"
#include "probe.h"
#include "part_edit.h"
#include "probe_state.h"
#include "rollback.h"

namespace pykv {

constexpr int32_t NOTHING_DONE = INT32_MIN + 1;  // there was no memory to begin with; caught() says so
constexpr int32_t REFUSED = 1;

// The context's lock is held around every call, ids are valid and ranges checked. Where nothing else is
// said, a verb returns 0, or CAUGHT.
class sequence_facts {
  public:
    sequence_facts() noexcept = default;
    sequence_facts(const sequence_facts &) = delete;
    sequence_facts & operator=(const sequence_facts &) = delete;
    ~sequence_facts();

    // `adapters`: the model's, which outlives this. False: caught.
    bool open(llama_context * ctx, adapter_lock * adapters) noexcept;
    void close() noexcept;

    // Facts -----------------------------------------------------------------------------------------

    const memory * cells() const { return mem; }
    // Changes with every change of a cell: what was seen before one is stale after it.
    uint64_t epoch() const { return changes; }
    // Whether a shift or a stream copy waits for the next update.
    bool is_pending() const { return pending; }
    // Whether a sequence holds the rest of a decode that failed, from which nothing can go on.
    bool needs_removal(llama_seq_id seq) const { return damaged.test(size_t(seq)); }
    // Whether the decode that failed last is why it does.
    bool was_damaged(llama_seq_id seq) const { return last_damaged.test(size_t(seq)); }
    // Whether a part of a sequence can be neither removed, copied nor moved.
    bool whole_only() const { return whole; }
    // The position after the last held one. llama.cpp asks the window, which may hold none.
    llama_pos next_pos(llama_seq_id seq) const {
        llama_pos lo, hi;
        return kind(mem) != MEMORY_NONE && extent(mem, seq, lo, hi) ? hi + 1 : 0;
    }
    // Of an encoder-decoder model, a hash of the tokens that the encoder read for a sequence, 0 for none.
    // Sequences with the same one attend to the same input.
    uint64_t input_key(llama_seq_id seq) const { return input_keys[size_t(seq)]; }
    // Whether a recurrent state can step back to before a position.
    bool can_resume_at(llama_seq_id seq, llama_pos p0) const {
        return !needs_removal(seq) && can_step_back(mem, seq, p0);
    }
    removal removal_of(llama_seq_id seq, llama_pos p0, llama_pos p1) const {
        const removal what = pykv::removal_of(mem, seq, p0, p1, whole || needs_removal(seq));
        return what == REMOVE_REFUSED && can_resume_at(seq, p0) && p1 >= next_pos(seq) ? REMOVE_STEPS : what;
    }

    // A name for what a sequence holds now; is_version() tells while it still does. May throw.
    uint64_t name_version(llama_seq_id seq) { return versions.name(seq, next_pos(seq) - 1); }
    bool     is_version(llama_seq_id seq, uint64_t id) const { return versions.is_true(seq, id); }

    // Output rows of the last decode, in their order: whether some sequence still holds the token.
    bool      row_is_held(size_t row) const { return rows.is_held(row); }
    llama_pos row_pos(size_t row) const { return rows.pos(row); }
    // Whether a state was restored since the last decode.
    bool was_restored() const { return rows.is_restored(); }
    // Whether a sequence still holds all of its rows, as pooled embeddings need it.
    bool rows_are_whole(llama_seq_id seq) const { return rows.is_whole(seq); }
    void forget_rows() noexcept { rows.forget(); }

    // NaN came out of this memory: what held it is made zero once nobody holds it.
    void suspect() noexcept { suspected = true; }

    // Changes ---------------------------------------------------------------------------------------

    // A call that may change cells begins: what was seen of them is stale, whatever it does.
    void begin() noexcept { ++changes; }
    int32_t clear(bool data) noexcept;
    // `what` is removal_of() of the same range. REFUSED where llama.cpp says so after all.
    int32_t remove(llama_seq_id seq, removal what, llama_pos p0, llama_pos p1) noexcept;
    // Remove all of every other sequence, in every stream and part.
    int32_t keep(llama_seq_id seq) noexcept;
    // Remove what comes after `last`, of which nothing that the next token sees was dropped.
    int32_t rewind(llama_seq_id seq, llama_pos last) noexcept;
    // Make dst hold what src holds in [p0, p1), and nothing else.
    int32_t copy(llama_seq_id src, llama_seq_id dst, llama_pos p0, llama_pos p1) noexcept;
    int32_t shift(llama_seq_id seq, llama_pos p0, llama_pos p1, llama_pos delta) noexcept;
    int32_t divide(llama_seq_id seq, llama_pos p0, llama_pos p1, int d) noexcept;
    // Apply what is pending, where no abort() can stop it half-way. 1 if that failed.
    int32_t apply_pending() noexcept;
    // The number of cells that moved, or CAUGHT.
    int64_t compact() noexcept;
    // Compute with other adapters. Clears the memory and the encoder output: both were computed without them.
    // After CAUGHT and 1 nothing has gone, and `before` is in use again; NOTHING_DONE where even that failed.
    int32_t adapt(adapter_set & set, adapter_set & before) noexcept;

    // Make a sequence hold a state that was found to fit. `firsts`: where sequences begin, by sequence.
    // 1; or 0, and nothing changed, where only replace() can do it.
    int32_t place(bool v_trans, llama_seq_id seq, const std::vector<state_block> & blocks,
                  const std::vector<state_piece> & pieces, bool two, const llama_pos * firsts) noexcept;
    // The same by llama.cpp's own reader, or with -1 of a whole context; after CAUGHT the sequence is
    // gone, until put_back() is given a state of what it was.
    int32_t replace(llama_seq_id seq, const std::vector<state_piece> & pieces, const llama_pos * firsts) noexcept;
    int32_t put_back(llama_seq_id seq, const std::vector<state_piece> & before) noexcept;
    // Put a partial state back, beside the attention part that it was taken with: what that holds up to
    // `last` stays. `version` was named when the state was taken.
    int32_t put_part(llama_seq_id seq, const std::vector<state_piece> & pieces, llama_pos first, llama_pos last,
                     uint64_t version) noexcept;

    // llama_decode(), and what it leaves. The rows of a first part take the place of all that were
    // there. A code above NOTHING_DONE and other than 0 has marked what needs removal.
    int32_t decode(const llama_batch & batch, bool is_first) noexcept;
    int32_t encode(const llama_batch & batch) noexcept;

  private:
    // What each verb does to the facts.
    void changed(llama_seq_id seq, llama_pos from) noexcept;
    void removed(llama_seq_id seq, llama_pos from) noexcept;
    void moved(llama_seq_id seq, llama_pos from, llama_pos to) noexcept;
    void copied(llama_seq_id src, llama_seq_id dst, llama_pos end) noexcept;
    void restored(llama_seq_id seq, const llama_pos * firsts) noexcept;
    void cleared() noexcept;
    void decoded(const llama_batch & batch) noexcept;
    void failed(const llama_batch & batch, int32_t code, const int32_t * states_before) noexcept;

    int32_t read(llama_seq_id seq, const std::vector<state_piece> & pieces) noexcept;
    void    note_first_tokens(const llama_batch & batch) noexcept;
    void    roll_back_coupled(const llama_batch & batch) noexcept;

    static constexpr size_t N_SEQ = 256;  // LLAMA_MAX_SEQ

    llama_context *             ctx = nullptr;
    adapter_lock *              model_adapters = nullptr;
    memory *                    mem = nullptr;
    llama_seq_id                n_seq_max = 0;
    bool                        whole = false;
    bool                        streams = false;
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
