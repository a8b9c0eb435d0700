// What is still valid of what sequences held earlier: prefix versions, and output rows of the last decode. Used by
// sequences.h only.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "llama.h"

namespace pykv {

// A prefix version stands for a sequence's cells up to a position, until one of them is removed, moved or replaced.
// Valid versions are sorted by position, so each change drops the last few.
class prefix_versions {
  public:
    // Return a version of the sequence as it is now.
    uint64_t name(llama_seq_id seq, llama_pos last) {
        changed(seq, last + 1);
        auto & held = versions[size_t(seq)];
        if (held.empty() || held.back().last != last) {
            held.push_back({last, ++count});
        }
        return held.back().id;
    }

    // Cells at `from` or later changed.
    void changed(llama_seq_id seq, llama_pos from) {
        auto & held = versions[size_t(seq)];
        while (!held.empty() && held.back().last >= from) {
            held.pop_back();
        }
    }

    void all_changed() {
        for (auto & held : versions) {
            held.clear();
        }
    }

    bool is_true(llama_seq_id seq, uint64_t id) const {
        const auto & held = versions[size_t(seq)];
        const auto it = std::lower_bound(held.begin(), held.end(), id,
                                         [](const version & v, uint64_t wanted) { return v.id < wanted; });
        return it != held.end() && it->id == id;
    }

  private:
    struct version {
        llama_pos last;
        uint64_t  id;
    };

    // LLAMA_MAX_SEQ. Not a vector: constructing the Python object around this one must not throw.
    std::array<std::vector<version>, 256> versions;
    uint64_t count = 0;
};

// A row belongs to a token of one or more sequences, and is valid while a sequence holds that token and everything before
// it unchanged. Each sequence has an origin among the decoded sequences (itself, or the source of a later copy) and a limit below
// which it is unchanged. A row is held while one of its sequences is the origin of a sequence whose limit is above
// the row's token. So a change costs one comparison, whatever the number of rows.
class held_rows {
  public:
    // Drop all rows.
    void forget() {
        rows.clear();
        members.clear();
    }

    // A decode begins: each sequence is its own origin.
    void begin() {
        forget();
        was_restored = false;
        for (size_t s = 0; s < branches.size(); ++s) {
            branches[s] = {llama_seq_id(s), ALL};
            last[s] = -1;
        }
    }

    // Reserve memory for the rows of a batch, so that recording them cannot fail.
    void reserve(const llama_batch & batch) {
        size_t n_rows = 0, n_members = 0;
        for (int32_t i = 0; i < batch.n_tokens; ++i) {
            n_rows += batch.logits[i] != 0;
            n_members += batch.logits[i] ? size_t(batch.n_seq_id[i]) : 0;
        }
        rows.reserve(rows.size() + n_rows);
        members.reserve(members.size() + n_members);
    }

    // Record the next row, of this token.
    void decoded(llama_pos pos, const llama_seq_id * seqs, int32_t n) {
        rows.push_back({pos, members.size(), n});
        members.insert(members.end(), seqs, seqs + n);
        for (int32_t i = 0; i < n; ++i) {
            last[size_t(seqs[i])] = std::max(last[size_t(seqs[i])], pos);
        }
    }

    // Record the next row of an encode: it depends on no cells and stays valid.
    void encoded() { rows.push_back({0, members.size(), 0}); }

    // Cells at `from` or later were removed or moved, so later tokens are no longer valid.
    void removed(llama_seq_id seq, llama_pos from) {
        auto & limit = branches[size_t(seq)].limit;
        limit = std::min(limit, from);
    }

    // `dst` became a copy of `src` below `end`; 0 if the copy is not a prefix of src.
    void copied(llama_seq_id src, llama_seq_id dst, llama_pos end) {
        branches[size_t(dst)] = branches[size_t(src)];
        removed(dst, end);
    }

    // A sequence was restored: none of its tokens were in the last decode.
    void restored(llama_seq_id seq) {
        removed(seq, 0);
        was_restored = true;
    }
    // Whether a state was restored since the last decode; used to explain missing rows.
    bool is_restored() const { return was_restored; }

    void cleared() {
        for (auto & branch : branches) {
            branch.limit = 0;
        }
    }

    // Whether any sequence still holds a row's token after the same prefix.
    bool is_held(size_t row) const {
        const auto & r = rows[row];
        const auto   begin = members.begin() + std::ptrdiff_t(r.first), end = begin + r.n;
        return r.n == 0 || std::any_of(branches.begin(), branches.end(), [&](const branch & b) {
                   return r.pos < b.limit && std::find(begin, end, b.origin) != end;
               });
    }

    // Whether a sequence still holds all its rows, as pooled embeddings need.
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

    // The facts that change between two decodes, restored after a failed change.
    const branches_type & now() const { return branches; }
    void back_to(const branches_type & before) { branches = before; }

  private:
    static constexpr llama_pos ALL = std::numeric_limits<llama_pos>::max();

    struct row {
        llama_pos pos;
        size_t    first;  // index of its first member
        int32_t   n;
    };
    std::vector<row>          rows;
    std::vector<llama_seq_id> members;
    branches_type              branches{};
    std::array<llama_pos, 256> last{};      // highest position of a row, per sequence
    bool                       was_restored = false;
};

}  // namespace pykv
