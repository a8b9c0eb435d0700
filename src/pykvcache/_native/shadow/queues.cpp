// Two queues, against prompts that come only once: slru and s3fifo.
#include <algorithm>

#include "tree.h"

namespace pykv::shadow {

namespace {

class SLRU : public Policy {
   public:
    using Policy::Policy;

    void resize(int64_t max_bytes) override {
        limit_ = 0.8 * static_cast<double>(max_bytes);
        demote();
    }
    void added(Id id) override { tree_.run(id).place = ++clock_; }
    void used(Id id) override {
        Run & run = tree_.run(id);
        run.place = ++clock_;
        if (run.is_listed) {
            unlink(id);
        } else {
            bytes_ += run.n_bytes();
        }
        link_before(id, NONE);
        enter(id);
        demote();
    }
    void split(Id head, Id tail) override {
        Run & one = tree_.run(tail);
        tree_.run(head).place = one.place;
        if (one.is_listed) {
            link_before(head, oldest_);
            unlink(tail);
            link_before(tail, oldest_);
        }
    }
    void removing(Id id, int64_t n_blocks) override {
        Run & run = tree_.run(id);
        if (run.is_listed) {
            bytes_ -= n_blocks * run.block_bytes;
            if (n_blocks == run.n_blocks()) {
                unlink(id);
            }
        }
    }
    void evictable(Id id) override { enter(id); }
    Id victim() override {
        Id id = probation_.first(tree_);
        return id != NONE ? id : last_resort_.first(tree_);
    }
    int64_t memory() const noexcept override { return probation_.memory() + last_resort_.memory(); }

   private:
    void demote() {
        while (static_cast<double>(bytes_) > limit_ && oldest_ != NONE) {
            Id id = oldest_;
            unlink(id);
            bytes_ -= tree_.run(id).n_bytes();
            tree_.run(id).place = ++clock_;
            enter(id);
        }
    }
    void enter(Id id) {
        if (tree_.is_evictable(id)) {
            const Run & run = tree_.run(id);
            (run.is_listed ? last_resort_ : probation_).push(tree_, id, {static_cast<double>(run.place), 0});
        }
    }
    // The protected ones, the least recently used first; before none: as the last.
    void link_before(Id id, Id other) {
        Run & run = tree_.run(id);
        run.newer = other;
        run.older = other == NONE ? newest_ : tree_.run(other).older;
        (run.older == NONE ? oldest_ : tree_.run(run.older).newer) = id;
        (other == NONE ? newest_ : tree_.run(other).older) = id;
        run.is_listed = true;
    }
    void unlink(Id id) {
        Run & run = tree_.run(id);
        (run.older == NONE ? oldest_ : tree_.run(run.older).newer) = run.newer;
        (run.newer == NONE ? newest_ : tree_.run(run.newer).older) = run.older;
        run.is_listed = false;
    }

    double limit_ = 0;
    Leaves probation_, last_resort_;
    Id oldest_ = NONE, newest_ = NONE;
    int64_t bytes_ = 0, clock_ = 0;
};

class S3FIFO : public Policy {
   public:
    using Policy::Policy;

    void resize(int64_t max_bytes) override {
        budget_ = max_bytes;
        limit_ = 0.1 * static_cast<double>(max_bytes);
    }
    void added(Id id) override {
        int64_t size = 0;
        bool is_known = ghosts_.pop(tree_.run(id).key(0), size);
        if (is_known) {
            ghost_bytes_ -= size;
        } else {
            small_bytes_ += tree_.run(id).n_bytes();
        }
        put(id, 0, is_known);
    }
    void used(Id id) override {
        Run & run = tree_.run(id);
        run.rounds = static_cast<int8_t>(std::min(run.rounds + 1, 3));
    }
    void split(Id head, Id tail) override {
        Run & first = tree_.run(head);
        const Run & rest = tree_.run(tail);
        first.rounds = rest.rounds;
        first.in_main = rest.in_main;
        first.place = rest.place;
    }
    void removing(Id id, int64_t n_blocks) override {
        const Run & run = tree_.run(id);
        if (run.in_main) {
            return;
        }
        int64_t size = n_blocks * run.block_bytes, before = 0;
        small_bytes_ -= size;
        uint32_t key = run.key(run.n_blocks() - n_blocks);
        ghosts_.pop(key, before);
        ghost_bytes_ += size - before;
        ghosts_.put(key, size);
        while (ghost_bytes_ > budget_ && ghosts_.size() > 0) {
            ghost_bytes_ -= ghosts_.pop_first();
        }
    }
    void evictable(Id id) override {
        const Run & run = tree_.run(id);
        (run.in_main ? main_ : small_).push(tree_, id, {static_cast<double>(run.place), 0});
    }
    Id victim() override {
        while (true) {
            Id small = small_.first(tree_), main = main_.first(tree_);
            bool from_small = small != NONE && (static_cast<double>(small_bytes_) > limit_ || main == NONE);
            Id id = from_small ? small : main;
            if (id == NONE) {
                return NONE;
            }
            const Run & run = tree_.run(id);
            if (run.rounds == 0) {
                return id;
            }
            if (!run.in_main) {
                small_bytes_ -= run.n_bytes();
            }
            put(id, run.in_main ? run.rounds - 1 : 0, true);
            evictable(id);
        }
    }
    int64_t memory() const noexcept override { return small_.memory() + main_.memory() + ghosts_.memory(); }

   private:
    void put(Id id, int rounds, bool in_main) {
        Run & run = tree_.run(id);
        run.rounds = static_cast<int8_t>(rounds);
        run.in_main = in_main;
        run.place = ++clock_;
    }

    double limit_ = 0;
    int64_t budget_ = 0, small_bytes_ = 0, ghost_bytes_ = 0, clock_ = 0;
    Leaves small_, main_;
    Ghosts<int64_t> ghosts_;
};

}  // namespace

std::unique_ptr<Policy> make_queue_policy(const std::string & name, Tree & tree) {
    if (name == "slru") {
        return std::make_unique<SLRU>(tree);
    }
    if (name == "s3fifo") {
        return std::make_unique<S3FIFO>(tree);
    }
    return nullptr;
}

}  // namespace pykv::shadow
