// What a policy of eviction is asked; each class is named as that of pykvcache.prefix.policies whose choices it makes.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace pykv::shadow {

class Tree;

using Id = int32_t;
constexpr Id NONE = -1, ROOT = 0;

// Blocks that follow each other and were always used together.
struct Run {
    std::vector<uint32_t> tokens;  // a number for each block
    Id parent = NONE, first_child = NONE, next = NONE, before = NONE;
    int32_t n_children = 0;
    uint32_t start_key = 0;
    int64_t start = 0, block_bytes = 0;
    int64_t uses = 0, created = 0, last_use = 0;
    bool is_held = false;

    // What the policy notes.
    bool is_listed = false, in_main = false;
    int8_t rounds = 0;
    Id life = NONE, older = NONE, newer = NONE;
    int64_t stamp = -1, place = 0;
    double floor = 0;

    int64_t n_blocks() const noexcept { return static_cast<int64_t>(tokens.size()); }
    int64_t n_bytes() const noexcept { return n_blocks() * block_bytes; }
    int64_t end() const noexcept { return start + n_blocks(); }
    // A number for the path up to and with a block: the same whenever it returns.
    uint32_t key(int64_t block) const noexcept;
};

class Policy {
   public:
    explicit Policy(Tree & tree) : tree_(tree) {}
    Policy(const Policy &) = delete;
    Policy & operator=(const Policy &) = delete;
    virtual ~Policy() = default;

    bool whole = false, declines = false;
    // The most blocks that may leave before it is asked again.
    int64_t most_blocks = INT64_MAX;

    virtual void resize(int64_t) {}
    virtual void asked(const uint32_t * /* tokens */, int64_t /* n */) {}
    virtual void added(Id) {}
    virtual void used(Id) {}
    virtual void split(Id /* head */, Id /* tail */) {}
    virtual void removing(Id, int64_t /* n_blocks */) {}
    virtual void evictable(Id) = 0;
    virtual Id victim() = 0;
    virtual int64_t memory() const noexcept = 0;
    // What hit-density has learned; nothing of the others.
    virtual void learned(std::vector<float> &, std::vector<double> &) const {}

   protected:
    Tree & tree_;
};

// Returns nothing where no policy has this name.
std::unique_ptr<Policy> make_policy(const std::string & name, Tree & tree);
std::unique_ptr<Policy> make_queue_policy(const std::string & name, Tree & tree);
std::unique_ptr<Policy> make_density_policy(const std::string & name, Tree & tree);
std::unique_ptr<Policy> make_adaptive_policy(const std::string & name, Tree & tree);

// A heap of evictable runs. Entries of runs that changed since are skipped when met.
class Leaves {
   public:
    using Priority = std::pair<double, int64_t>;

    void push(Tree & tree, Id id, Priority priority);
    Id first(Tree & tree);
    int64_t memory() const noexcept { return static_cast<int64_t>(heap_.capacity() * sizeof(Entry)); }

   private:
    struct Entry {
        Priority priority;
        int64_t stamp;
        Id id;
        bool operator<(const Entry & other) const noexcept {  // std::push_heap puts the largest first
            return priority != other.priority ? priority > other.priority : stamp > other.stamp;
        }
    };

    bool is_valid(Tree & tree, const Entry & entry) const;

    std::vector<Entry> heap_;
    size_t limit_ = 64;
};

// A dictionary in the order in which names were put in.
template <typename V>
class Ghosts {
   public:
    size_t size() const noexcept { return known_.size(); }

    // Take one out; false where there is none.
    bool pop(uint32_t key, V & value) {
        auto found = known_.find(key);
        if (found == known_.end()) {
            return false;
        }
        value = found->second.first;
        known_.erase(found);
        return true;
    }

    void put(uint32_t key, V value) {
        known_[key] = {value, ++number_};
        order_.emplace_back(key, number_);
        if (order_.size() > 2 * known_.size() + 64) {
            std::deque<std::pair<uint32_t, int64_t>> left;
            for (const auto & one : order_) {
                if (is_there(one)) {
                    left.push_back(one);
                }
            }
            order_.swap(left);
        }
    }

    // Take the first out; there is one.
    V pop_first() {
        while (!is_there(order_.front())) {
            order_.pop_front();
        }
        V value{};
        pop(order_.front().first, value);
        order_.pop_front();
        return value;
    }

    template <typename F>
    void each(F && call) const {
        for (const auto & one : known_) {
            call(one.second.first);
        }
    }

    int64_t memory() const noexcept {
        return static_cast<int64_t>(known_.size() * 56 + known_.bucket_count() * 8 + order_.size() * 16);
    }

   private:
    bool is_there(const std::pair<uint32_t, int64_t> & one) const {
        auto found = known_.find(one.first);
        return found != known_.end() && found->second.second == one.second;
    }

    std::unordered_map<uint32_t, std::pair<V, int64_t>> known_;
    std::deque<std::pair<uint32_t, int64_t>> order_;
    int64_t number_ = 0;
};

}  // namespace pykv::shadow
