// Which shadows hold each block, and which of the runs that may leave the fewest of them would keep.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace pykv::shadow {

class BlockVotes {
   public:
    explicit BlockVotes(int n_shadows);

    // All shadows were sent these blocks.
    void sent(const uint32_t * keys, size_t n);
    // The shadows of these bits have let these blocks go.
    void gone(uint32_t bits, const uint32_t * keys, size_t n);
    void forget(const uint32_t * keys, size_t n);
    // Forget all but these.
    void keep(const uint32_t * keys, size_t n);
    // The shadows of these bits vote no more.
    void drop(uint32_t bits);
    bool knows(uint32_t key) const { return votes_.count(key) != 0; }
    // All, if nobody knows the block.
    uint32_t of(uint32_t key) const;
    size_t size() const noexcept { return votes_.size(); }

    // A run may leave, whose last block has this key, whose path has so many blocks.
    void place(int64_t run, uint32_t key, int64_t last_use, int64_t end);
    void withdraw(int64_t run);
    void weigh(const std::vector<double> & weights);
    // The run that has the fewest votes at its end, by weight; among equals the least recently used; -1 if there is none.
    int64_t least();
    // How many of the last blocks have as many votes as the last one. Those before them have more.
    size_t alike(const uint32_t * keys, size_t n) const;

    int64_t memory() const noexcept;

   private:
    struct Entry {
        int64_t last_use, end, stamp, run;
        bool operator<(const Entry & other) const noexcept {  // std::push_heap puts the largest first
            return last_use != other.last_use ? last_use > other.last_use : end < other.end;
        }
    };
    struct End {
        int64_t last_use, end, stamp;
        uint32_t key;
    };

    void push(int64_t run, End & end);
    bool is_valid(const Entry & entry) const;
    void clean();
    void sort();

    uint32_t all_;
    // Of blocks that shadows were sent and nobody stored, too.
    std::unordered_map<uint32_t, uint32_t> votes_;
    std::unordered_map<int64_t, End> ends_;
    std::unordered_map<uint32_t, int64_t> by_key_;
    // One for each set of votes: entries of runs that changed since are skipped when met.
    std::vector<std::vector<Entry>> heaps_;
    std::vector<double> weights_;
    std::vector<uint32_t> order_;
    size_t n_entries_ = 0, n_popped_ = 0;
    int64_t stamp_ = 0;
};

}  // namespace pykv::shadow
