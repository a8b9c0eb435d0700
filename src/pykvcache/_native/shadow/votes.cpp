#include "votes.h"

#include <algorithm>

namespace pykv::shadow {

namespace {

// Give back the places of what is there no more.
template <typename T>
void shrink(T & table) {
    if (table.bucket_count() > 8 * table.size() + 64) {
        table.rehash(0);
    }
}

// Votes of no weight still tell apart what has the same weight otherwise.
constexpr double LEAST_WEIGHT = 1e-9;

}  // namespace

BlockVotes::BlockVotes(int n_shadows)
    : all_((1u << n_shadows) - 1), heaps_(size_t{1} << n_shadows), weights_(static_cast<size_t>(n_shadows), 1.0) {}

uint32_t BlockVotes::of(uint32_t key) const {
    auto found = votes_.find(key);
    return found == votes_.end() ? all_ : found->second;
}

void BlockVotes::sent(const uint32_t * keys, size_t n) {
    for (size_t i = 0; i < n; i++) {
        votes_[keys[i]] = all_;
    }
}

void BlockVotes::gone(uint32_t bits, const uint32_t * keys, size_t n) {
    for (size_t i = 0; i < n; i++) {
        auto found = votes_.find(keys[i]);
        if (found == votes_.end()) {
            continue;
        }
        found->second &= ~bits;
        if (auto at = by_key_.find(keys[i]); at != by_key_.end()) {
            push(at->second, ends_.at(at->second));
        }
    }
}

void BlockVotes::forget(const uint32_t * keys, size_t n) {
    for (size_t i = 0; i < n; i++) {
        votes_.erase(keys[i]);
    }
}

void BlockVotes::keep(const uint32_t * keys, size_t n) {
    std::unordered_map<uint32_t, uint32_t> left;
    for (size_t i = 0; i < n; i++) {
        if (auto found = votes_.find(keys[i]); found != votes_.end()) {
            left.insert(*found);
        }
    }
    votes_.swap(left);
}

void BlockVotes::drop(uint32_t bits) {
    all_ &= ~bits;
    for (auto & one : votes_) {
        one.second &= ~bits;  // runs move to their heaps when they are met
    }
}

void BlockVotes::place(int64_t run, uint32_t key, int64_t last_use, int64_t end) {
    auto [at, is_new] = ends_.try_emplace(run);
    if (!is_new && at->second.key != key) {
        if (auto other = by_key_.find(at->second.key); other != by_key_.end() && other->second == run) {
            by_key_.erase(other);
        }
    }
    at->second.last_use = last_use;
    at->second.end = end;
    at->second.key = key;
    by_key_[key] = run;
    push(run, at->second);
}

void BlockVotes::withdraw(int64_t run) {
    auto at = ends_.find(run);
    if (at == ends_.end()) {
        return;
    }
    if (auto other = by_key_.find(at->second.key); other != by_key_.end() && other->second == run) {
        by_key_.erase(other);
    }
    ends_.erase(at);
}

void BlockVotes::push(int64_t run, End & end) {
    auto & heap = heaps_[of(end.key)];
    end.stamp = ++stamp_;
    heap.push_back({end.last_use, end.end, end.stamp, run});
    std::push_heap(heap.begin(), heap.end());
    if (++n_entries_ > 2 * ends_.size() + 64) {
        clean();
    }
}

bool BlockVotes::is_valid(const Entry & entry) const {
    auto at = ends_.find(entry.run);
    return at != ends_.end() && at->second.stamp == entry.stamp;
}

void BlockVotes::clean() {
    n_entries_ = 0;
    for (auto & heap : heaps_) {
        heap.erase(std::remove_if(heap.begin(), heap.end(), [&](const Entry & one) { return !is_valid(one); }), heap.end());
        std::make_heap(heap.begin(), heap.end());
        heap.shrink_to_fit();
        n_entries_ += heap.size();
    }
    n_popped_ = 0;
    shrink(votes_);
    shrink(ends_);
    shrink(by_key_);
}

void BlockVotes::weigh(const std::vector<double> & weights) {
    std::copy_n(weights.begin(), std::min(weights.size(), weights_.size()), weights_.begin());
    order_.clear();
}

void BlockVotes::sort() {
    std::vector<double> totals{0.0};
    for (double weight : weights_) {
        for (size_t i = 0, n = totals.size(); i < n; i++) {
            totals.push_back(totals[i] + weight + LEAST_WEIGHT);
        }
    }
    order_.resize(totals.size());
    for (size_t i = 0; i < order_.size(); i++) {
        order_[i] = static_cast<uint32_t>(i);
    }
    std::stable_sort(order_.begin(), order_.end(), [&](uint32_t a, uint32_t b) { return totals[a] < totals[b]; });
}

int64_t BlockVotes::least() {
    if (order_.empty()) {
        sort();
    }
    for (size_t i = 0; i < order_.size();) {
        auto & heap = heaps_[order_[i]];
        if (heap.empty()) {
            i++;
            continue;
        }
        Entry first = heap.front();
        bool is_there = is_valid(first);
        if (is_there && of(ends_.at(first.run).key) == order_[i]) {
            return first.run;
        }
        std::pop_heap(heap.begin(), heap.end());
        heap.pop_back();
        n_entries_--;
        n_popped_++;
        if (is_there) {  // its votes changed since
            push(first.run, ends_.at(first.run));
            i = 0;
        }
        if (n_popped_ > 2 * n_entries_ + 1024) {
            clean();
        }
    }
    return -1;
}

size_t BlockVotes::alike(const uint32_t * keys, size_t n) const {
    uint32_t last = of(keys[n - 1]);
    size_t low = 0, high = n - 1;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (of(keys[middle]) == last) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return n - low;
}

int64_t BlockVotes::memory() const noexcept {
    constexpr size_t VOTE = 32, END = 64, KEY = 32;  // nodes of the tables, with what malloc adds
    size_t buckets = votes_.bucket_count() + ends_.bucket_count() + by_key_.bucket_count();
    size_t entries = 0;
    for (const auto & heap : heaps_) {
        entries += heap.capacity();
    }
    size_t tables = buckets * sizeof(void *) + entries * sizeof(Entry) + heaps_.size() * (sizeof(heaps_[0]) + sizeof(uint32_t));
    return static_cast<int64_t>(votes_.size() * VOTE + ends_.size() * (END + KEY) + tables);
}

}  // namespace pykv::shadow
