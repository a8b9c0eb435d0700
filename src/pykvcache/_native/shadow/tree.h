// A tree of blocks without keys and values, as pykvcache.prefix.tree has it, where each block is one number.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "policy.h"

namespace pykv::shadow {

// What comes after a run, by the first number: found by both.
struct ChildHash {
    size_t operator()(uint64_t key) const noexcept {
        key *= 0x9E3779B97F4A7C15ull;
        return static_cast<size_t>(key ^ (key >> 32));
    }
};

class Tree {
   public:
    // Throws std::invalid_argument where no policy has this name.
    Tree(const char * policy, int64_t max_bytes);

    // Look a prompt up, count it as a use and add what is new; return how many of its blocks were known.
    int64_t send(const uint32_t * tokens, int64_t n, int64_t block_bytes);
    // Add what is new, and count no use.
    void insert(const uint32_t * tokens, int64_t n, int64_t block_bytes);
    int64_t n_known(const uint32_t * tokens, int64_t n) const { return match(tokens, n).n_blocks; }
    // How often the block at this place of a path was used; 0 where it is not here.
    int64_t uses_at(const uint32_t * tokens, int64_t n, int64_t place) const;
    void resize(int64_t max_bytes);

    int64_t max_bytes() const noexcept { return max_bytes_; }
    int64_t n_bytes() const noexcept { return n_bytes_; }
    int64_t n_blocks() const noexcept { return n_blocks_; }
    int64_t n_runs() const noexcept { return static_cast<int64_t>(runs_.size() - free_.size()) - 1; }
    int64_t memory() const noexcept;
    const std::vector<uint32_t> & gone() const noexcept { return gone_; }
    Policy & policy() noexcept { return *policy_; }

    // For policies.
    Run & run(Id id) noexcept { return *runs_[static_cast<size_t>(id)]; }
    const Run & run(Id id) const noexcept { return *runs_[static_cast<size_t>(id)]; }
    bool is_here(Id id) const noexcept { return runs_[static_cast<size_t>(id)] != nullptr; }
    // Of all heaps: a run that moves to another one is no longer valid in the first.
    int64_t next_stamp() noexcept { return ++stamps_; }
    std::vector<Id> runs() const;
    bool is_evictable(Id id) const noexcept {
        if (!is_here(id)) {
            return false;
        }
        const Run & one = run(id);
        return one.n_children == 0 && !one.is_held && one.parent != NONE && !one.tokens.empty();
    }

   private:
    struct Match {
        Id run;
        int64_t offset, n_blocks;
    };

    Match match(const uint32_t * tokens, int64_t n) const;
    Id end_of(const Match & match);
    Id child(Id parent, uint32_t token) const;
    void add(Id parent, const uint32_t * tokens, int64_t n, int64_t block_bytes);
    Id new_run();
    Id cut(Id tail, int64_t n_blocks);
    bool fit();
    void remove(Id id, int64_t n);
    void unlink(Id id);
    void forget_gone();

    // Nothing where a run has left, until another one has its number.
    std::vector<std::unique_ptr<Run>> runs_;
    std::vector<Id> free_;
    std::unordered_map<uint64_t, Id, ChildHash> children_;
    std::unique_ptr<Policy> policy_;
    // The numbers of blocks that left during the last call.
    std::vector<uint32_t> gone_;
    int64_t max_bytes_ = 0, n_bytes_ = 0, n_blocks_ = 0, clock_ = 0;
    int64_t token_bytes_ = 0, stamps_ = 0;
};

}  // namespace pykv::shadow
