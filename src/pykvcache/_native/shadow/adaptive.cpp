// The default policy, as pykvcache.prefix.policies.adaptive decides where there are no checkpoints and nobody counts its
// notes: for the simulator, whose real tree is a shadow, too.
#include <algorithm>
#include <array>
#include <cmath>
#include <deque>

#include "keys.h"
#include "tree.h"
#include "votes.h"

namespace pykv::shadow {

namespace {

constexpr std::array<const char *, 6> EXPERTS = {"hit-density", "s3fifo", "lru", "lfu", "slru", "cost-aware"};
constexpr size_t MOST_LOGGED = 1000;
constexpr double HALF_LIFE = 1000, SPREAD = 0.02;

using Keys = std::vector<uint32_t>;

class Adaptive : public Policy {
   public:
    explicit Adaptive(Tree & tree) : Policy(tree), first_(make_policy(EXPERTS[0], tree)), votes_(EXPERTS.size()) {
        declines = first_->declines;
    }

    void resize(int64_t max_bytes) override {
        max_bytes_ = max_bytes;
        first_->resize(max_bytes);
    }

    void asked(const uint32_t * tokens, int64_t n) override {
        Keys keys = keys_of(0, tokens, n);
        if (shadows_.empty()) {
            if (log_.size() == MOST_LOGGED) {
                log_.pop_front();
            }
            log_.push_back(std::move(keys));
            return;
        }
        look_up(keys);
        if (is_full_) {
            for (size_t i = 0; i < shadows_.size(); i++) {
                if (shadows_[i]->max_bytes() != bytes_) {
                    shadows_[i]->resize(bytes_);
                    hear(i);
                }
            }
            is_full_ = false;
        }
        weigh();
    }

    void added(Id id) override {
        const Run & run = tree_.run(id);
        block_bytes_ = std::max<int64_t>(run.block_bytes, 1);
        bytes_ += run.n_bytes();
        if (shadows_.empty()) {
            first_->added(id);
            return;
        }
        note(id);
        const Keys & keys = keys_[static_cast<size_t>(id)];
        bool is_known = votes_.knows(keys.front()) && votes_.of(keys.front()) != 0 && votes_.knows(keys.back());
        if (!is_known) {
            show(id);
        }
    }

    void used(Id id) override {
        if (shadows_.empty()) {
            first_->used(id);
        } else {
            place(id);
        }
    }

    void split(Id head, Id tail) override {
        if (shadows_.empty()) {
            first_->split(head, tail);
            return;
        }
        make_place(head);
        Keys &first = keys_[static_cast<size_t>(head)], &rest = keys_[static_cast<size_t>(tail)];
        auto middle = rest.begin() + tree_.run(head).n_blocks();
        first.assign(rest.begin(), middle);
        rest.erase(rest.begin(), middle);
        number(head);
    }

    void removing(Id id, int64_t n_blocks) override {
        bytes_ -= n_blocks * tree_.run(id).block_bytes;
        if (shadows_.empty()) {
            first_->removing(id, n_blocks);
            return;
        }
        Keys & keys = keys_[static_cast<size_t>(id)];
        withdraw(id);
        votes_.forget(keys.data() + keys.size() - n_blocks, static_cast<size_t>(n_blocks));
        keys.resize(keys.size() - static_cast<size_t>(n_blocks));
        if (!keys.empty()) {
            place(id);
        }
    }

    void evictable(Id id) override {
        if (shadows_.empty()) {
            first_->evictable(id);
        } else {
            place(id);
        }
    }

    Id victim() override {
        is_full_ = true;
        if (shadows_.empty()) {
            begin();
        }
        for (int64_t number = votes_.least(); number >= 0; number = votes_.least()) {
            Id id = by_number_.at(number);
            if (tree_.is_evictable(id)) {
                const Keys & keys = keys_[static_cast<size_t>(id)];
                most_blocks = static_cast<int64_t>(votes_.alike(keys.data(), keys.size()));
                return id;
            }
            withdraw(id);
        }
        return NONE;
    }

    int64_t memory() const noexcept override {
        int64_t taken = first_->memory() + votes_.memory();
        for (const auto & shadow : shadows_) {
            taken += shadow->memory();
        }
        return taken;
    }

   private:
    static Keys keys_of(uint32_t key, const uint32_t * tokens, int64_t n) {
        Keys keys(static_cast<size_t>(n));
        for (size_t i = 0; i < keys.size(); i++) {
            keys[i] = key = next_key(key, reinterpret_cast<const unsigned char *>(tokens + i), sizeof(uint32_t));
        }
        return keys;
    }

    // Make the shadows, with the prompts up to now.
    void begin() {
        hits_.fill(0);
        for (size_t i = 0; i < EXPERTS.size(); i++) {
            for (int64_t part : {2, 4}) {
                Tree trial(EXPERTS[i], max_bytes_ / part);
                for (const Keys & keys : log_) {
                    hits_[i] += static_cast<double>(trial.send(keys.data(), static_cast<int64_t>(keys.size()), block_bytes_)) / 2;
                }
            }
        }
        for (const char * name : EXPERTS) {
            shadows_.push_back(std::make_unique<Tree>(name, max_bytes_));
        }
        std::vector<Id> runs = tree_.runs();
        for (Id id : runs) {
            note(id);
        }
        show_rest(runs);
        for (; !log_.empty(); log_.pop_front()) {
            look_up(log_.front());
        }
        weigh();
        for (Id id : runs) {
            place(id);
        }
    }

    // What no prompt had.
    void show_rest(std::vector<Id> runs) {
        std::sort(runs.begin(), runs.end(), [&](Id a, Id b) {
            const Run &one = tree_.run(a), &other = tree_.run(b);
            return one.last_use != other.last_use ? one.last_use < other.last_use : one.start < other.start;
        });
        std::unordered_map<uint32_t, bool> had;
        for (const Keys & keys : log_) {
            for (uint32_t key : keys) {
                had[key] = true;
            }
        }
        for (Id id : runs) {
            if (!had.count(keys_[static_cast<size_t>(id)].back())) {
                show(id);
            }
        }
    }

    void show(Id id) {
        std::vector<Id> runs;
        for (Id at = id; tree_.run(at).parent != NONE; at = tree_.run(at).parent) {
            runs.push_back(at);
        }
        Keys path;
        for (; !runs.empty(); runs.pop_back()) {
            const Keys & keys = keys_[static_cast<size_t>(runs.back())];
            path.insert(path.end(), keys.begin(), keys.end());
        }
        sent(path);
        for (size_t i = 0; i < shadows_.size(); i++) {
            shadows_[i]->insert(path.data(), static_cast<int64_t>(path.size()), block_bytes_);
            hear(i);
        }
    }

    void look_up(const Keys & keys) {
        sent(keys);
        const double fade = std::pow(0.5, 1 / HALF_LIFE);
        for (size_t i = 0; i < shadows_.size(); i++) {
            int64_t found = shadows_[i]->send(keys.data(), static_cast<int64_t>(keys.size()), block_bytes_);
            hits_[i] = hits_[i] * fade + static_cast<double>(found);
            hear(i);
        }
    }

    void sent(const Keys & keys) {
        if (votes_.size() > most_) {
            Keys all;
            for (Id id : tree_.runs()) {
                const Keys & own = keys_[static_cast<size_t>(id)];
                all.insert(all.end(), own.begin(), own.end());
            }
            votes_.keep(all.data(), all.size());
            most_ = 2 * votes_.size() + 256;
        }
        votes_.sent(keys.data(), keys.size());
    }

    void hear(size_t i) {
        const auto & gone = shadows_[i]->gone();
        votes_.gone(1u << i, gone.data(), gone.size());
    }

    void weigh() {
        double most = *std::max_element(hits_.begin(), hits_.end());
        std::vector<double> weights;
        for (double hits : hits_) {
            weights.push_back(std::exp((hits - most) / (SPREAD * most + 1)));
        }
        votes_.weigh(weights);
    }

    void make_place(Id id) {
        if (keys_.size() <= static_cast<size_t>(id)) {
            keys_.resize(static_cast<size_t>(id) + 1);
        }
    }

    void number(Id id) {
        tree_.run(id).place = ++numbers_;
        by_number_[numbers_] = id;
    }

    // Know a run, with the keys of its blocks.
    void note(Id id) {
        make_place(id);
        const Run & run = tree_.run(id);
        keys_[static_cast<size_t>(id)] = keys_of(run.start_key, run.tokens.data(), run.n_blocks());
        number(id);
    }

    void place(Id id) {
        if (tree_.is_evictable(id)) {
            const Run & run = tree_.run(id);
            by_number_[run.place] = id;
            votes_.place(run.place, keys_[static_cast<size_t>(id)].back(), run.last_use, run.end());
        }
    }

    void withdraw(Id id) {
        votes_.withdraw(tree_.run(id).place);
        by_number_.erase(tree_.run(id).place);
    }

    std::unique_ptr<Policy> first_;  // decides until the first block has to leave
    BlockVotes votes_;
    std::vector<std::unique_ptr<Tree>> shadows_;
    std::array<double, EXPERTS.size()> hits_{};
    std::deque<Keys> log_;
    // By run: the numbers of its blocks, as shadows know them.
    std::vector<Keys> keys_;
    std::unordered_map<int64_t, Id> by_number_;
    int64_t max_bytes_ = 0, bytes_ = 0, block_bytes_ = 1, numbers_ = 0;
    size_t most_ = 256;
    bool is_full_ = false;
};

}  // namespace

std::unique_ptr<Policy> make_adaptive_policy(const std::string & name, Tree & tree) {
    return name == "adaptive" ? std::make_unique<Adaptive>(tree) : nullptr;
}

}  // namespace pykv::shadow
