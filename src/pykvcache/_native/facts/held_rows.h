// Which output rows of the last decode still say something true: a row belongs to a token of some
// sequences, and says what follows everything that they held up to that token.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "llama.h"

namespace pykv {

// Each sequence continues one of those that were decoded (its origin: itself, or what it was copied
// from since), and is as it was then below a limit. A row is held while one of its token's sequences
// is the origin of a sequence whose limit lies above the token. So every change costs a comparison,
// however many rows there are.
class held_rows {
  public:
    // There are no rows.
    void forget() {
        rows.clear();
        members.clear();
    }

    // A decode begins: each sequence holds what it is going to hold.
    void begin() {
        forget();
        was_restored = false;
        for (size_t s = 0; s < branches.size(); ++s) {
            branches[s] = {llama_seq_id(s), ALL};
            last[s] = -1;
        }
    }

    // Make room for the rows of a batch, so that noting them cannot fail.
    void reserve(const llama_batch & batch) {
        size_t n_rows = 0, n_members = 0;
        for (int32_t i = 0; i < batch.n_tokens; ++i) {
            n_rows += batch.logits[i] != 0;
            n_members += batch.logits[i] ? size_t(batch.n_seq_id[i]) : 0;
        }
        rows.reserve(rows.size() + n_rows);
        members.reserve(members.size() + n_members);
    }

    // The next row belongs to this token.
    void decoded(llama_pos pos, const llama_seq_id * seqs, int32_t n) {
        rows.push_back({pos, members.size(), n});
        members.insert(members.end(), seqs, seqs + n);
        for (int32_t i = 0; i < n; ++i) {
            last[size_t(seqs[i])] = std::max(last[size_t(seqs[i])], pos);
        }
    }

    // The next row belongs to no token of a memory: nothing can take it away.
    void encoded() { rows.push_back({0, members.size(), 0}); }

    // Cells at `from` or later were removed, or moved there: what comes after them saw something else.
    void removed(llama_seq_id seq, llama_pos from) {
        auto & limit = branches[size_t(seq)].limit;
        limit = std::min(limit, from);
    }

    // `dst` holds what `src` holds below `end`, and nothing else; 0 where that is not how src begins.
    void copied(llama_seq_id src, llama_seq_id dst, llama_pos end) {
        branches[size_t(dst)] = branches[size_t(src)];
        removed(dst, end);
    }

    // A sequence holds what a state held: none of it was in the last decode.
    void restored(llama_seq_id seq) {
        removed(seq, 0);
        was_restored = true;
    }
    // Whether that happened since the last decode: then rows may be gone whose tokens are there.
    bool is_restored() const { return was_restored; }

    void cleared() {
        for (auto & branch : branches) {
            branch.limit = 0;
        }
    }

    // Whether any sequence still holds the token of a row, after what came before it then.
    bool is_held(size_t row) const {
        const auto & r = rows[row];
        const auto   begin = members.begin() + std::ptrdiff_t(r.first), end = begin + r.n;
        return r.n == 0 || std::any_of(branches.begin(), branches.end(), [&](const branch & b) {
                   return r.pos < b.limit && std::find(begin, end, b.origin) != end;
               });
    }

    // Whether a sequence still holds all of its rows, as pooled embeddings need it.
    bool is_whole(llama_seq_id seq) const {
        const auto & b = branches[size_t(seq)];
        return b.origin == seq && last[size_t(seq)] < b.limit;
    }

    llama_pos pos(size_t row) const { return rows[row].pos; }

    struct branch {
        llama_seq_id origin = 0;
        llama_pos    limit = 0;
    };
    using branches_type = std::array<branch, 256>;  // LLAMA_MAX_SEQ

    // What changes between two decodes, to be put back after a change that failed.
    const branches_type & now() const { return branches; }
    void back_to(const branches_type & before) { branches = before; }

  private:
    static constexpr llama_pos ALL = std::numeric_limits<llama_pos>::max();

    struct row {
        llama_pos pos;
        size_t    first;  // of its members
        int32_t   n;
    };
    std::vector<row>          rows;
    std::vector<llama_seq_id> members;
    branches_type              branches{};
    std::array<llama_pos, 256> last{};      // highest position of a row, by sequence
    bool                       was_restored = false;
};

}  // namespace pykv
