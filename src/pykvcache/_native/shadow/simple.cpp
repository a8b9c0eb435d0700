// One priority for each run: lru, fifo, lfu, cost-aware, and the orders of other programs.
#include <algorithm>

#include "tree.h"

namespace pykv::shadow {

void Leaves::push(Tree & tree, Id id, Priority priority) {
    Run & run = tree.run(id);
    run.stamp = tree.next_stamp();
    heap_.push_back({priority, run.stamp, id});
    std::push_heap(heap_.begin(), heap_.end());
    if (heap_.size() > limit_) {
        auto left = std::remove_if(heap_.begin(), heap_.end(), [&](const Entry & one) { return !is_valid(tree, one); });
        heap_.erase(left, heap_.end());
        std::make_heap(heap_.begin(), heap_.end());
        heap_.shrink_to_fit();
        limit_ = 2 * heap_.size() + 64;
    }
}

bool Leaves::is_valid(Tree & tree, const Entry & entry) const {
    return tree.is_evictable(entry.id) && tree.run(entry.id).stamp == entry.stamp;
}

Id Leaves::first(Tree & tree) {
    while (!heap_.empty()) {
        if (is_valid(tree, heap_.front())) {
            return heap_.front().id;
        }
        std::pop_heap(heap_.begin(), heap_.end());
        heap_.pop_back();
        if (heap_.capacity() > 8 * heap_.size() + 1024) {
            heap_.shrink_to_fit();
            limit_ = 2 * heap_.size() + 64;
        }
    }
    return NONE;
}

namespace {

// The run with the smallest priority, which may change when the run is used.
class ByPriority : public Policy {
   public:
    using Policy::Policy;
    void used(Id id) override {
        if (tree_.is_evictable(id)) {
            evictable(id);
        }
    }
    void evictable(Id id) override { leaves_.push(tree_, id, priority(tree_.run(id))); }
    Id victim() override { return leaves_.first(tree_); }
    int64_t memory() const noexcept override { return leaves_.memory(); }

   protected:
    virtual Leaves::Priority priority(const Run & run) const = 0;

   private:
    Leaves leaves_;
};

class LRU : public ByPriority {
   public:
    using ByPriority::ByPriority;

   protected:
    Leaves::Priority priority(const Run & run) const override { return {static_cast<double>(run.last_use), 0}; }
};

class FIFO : public ByPriority {
   public:
    using ByPriority::ByPriority;

   protected:
    Leaves::Priority priority(const Run & run) const override { return {static_cast<double>(run.created), 0}; }
};

class LFU : public ByPriority {
   public:
    using ByPriority::ByPriority;

   protected:
    Leaves::Priority priority(const Run & run) const override { return {static_cast<double>(run.uses), run.last_use}; }
};

class CostAware : public ByPriority {
   public:
    using ByPriority::ByPriority;
    void added(Id id) override { tree_.run(id).floor = floor_; }
    void used(Id id) override {
        tree_.run(id).floor = floor_;
        ByPriority::used(id);
    }
    void split(Id head, Id tail) override { tree_.run(head).floor = tree_.run(tail).floor; }
    void removing(Id id, int64_t) override { floor_ = std::max(floor_, worth(tree_.run(id))); }

   protected:
    Leaves::Priority priority(const Run & run) const override { return {worth(run), 0}; }

   private:
    // A block is one token here.
    static double worth(const Run & run) {
        double time = 1.0 + 1.0 / 16384 * static_cast<double>(2 * run.end() - 1);
        double uses = static_cast<double>(run.uses + 1), bytes = static_cast<double>(std::max<int64_t>(run.block_bytes, 1));
        return run.floor + uses * time / bytes;
    }

    double floor_ = 0;
};

class WholePrompts : public ByPriority {
   public:
    explicit WholePrompts(Tree & tree) : ByPriority(tree) { whole = true; }
    void added(Id id) override {
        Run & run = tree_.run(id);
        run.place = run.last_use;
        tree_.run(run.parent).place = -1;
    }
    void split(Id head, Id) override { tree_.run(head).place = -1; }

   protected:
    Leaves::Priority priority(const Run & run) const override { return {static_cast<double>(run.place), 0}; }
};

class LlamaServer : public WholePrompts {
   public:
    using WholePrompts::WholePrompts;
    void used(Id id) override {
        Run & run = tree_.run(id);
        if (run.place >= 0) {
            run.place = run.last_use;
        }
        ByPriority::used(id);
    }
};

}  // namespace

std::unique_ptr<Policy> make_policy(const std::string & name, Tree & tree) {
    if (name == "lru" || name == "vllm") {
        return std::make_unique<LRU>(tree);
    }
    if (name == "fifo") {
        return std::make_unique<FIFO>(tree);
    }
    if (name == "lfu") {
        return std::make_unique<LFU>(tree);
    }
    if (name == "cost-aware") {
        return std::make_unique<CostAware>(tree);
    }
    if (name == "mlx-lm") {
        return std::make_unique<WholePrompts>(tree);
    }
    if (name == "llama-server") {
        return std::make_unique<LlamaServer>(tree);
    }
    if (auto made = make_queue_policy(name, tree)) {
        return made;
    }
    if (auto made = make_density_policy(name, tree)) {
        return made;
    }
    return make_adaptive_policy(name, tree);
}

}  // namespace pykv::shadow
