#include "tree.h"

#include <algorithm>
#include <stdexcept>

#include "keys.h"

namespace pykv::shadow {

namespace {

constexpr int64_t RUN_BYTES = sizeof(Run) + 48 + 32;  // with what malloc adds, and its place in the children's table
constexpr size_t MOST_GONE = 1 << 16;                 // of which the memory is kept

uint64_t child_key(Id parent, uint32_t token) { return static_cast<uint64_t>(parent) << 32 | token; }

}  // namespace

uint32_t Run::key(int64_t block) const noexcept {
    uint32_t value = start_key;
    for (int64_t i = 0; i <= block; i++) {
        value = next_key(value, reinterpret_cast<const unsigned char *>(&tokens[static_cast<size_t>(i)]), sizeof(uint32_t));
    }
    return value;
}

Tree::Tree(const char * policy, int64_t max_bytes) : max_bytes_(max_bytes) {
    runs_.push_back(std::make_unique<Run>());
    policy_ = make_policy(policy, *this);
    if (!policy_) {
        throw std::invalid_argument(std::string("there is no policy ") + policy);
    }
    policy_->resize(max_bytes);
}

int64_t Tree::memory() const noexcept {
    size_t tables = (runs_.capacity() + children_.bucket_count()) * sizeof(void *) + free_.capacity() * sizeof(Id) +
                    gone_.capacity() * sizeof(uint32_t);
    return RUN_BYTES * n_runs() + static_cast<int64_t>(sizeof(Tree) + tables) + token_bytes_ + policy_->memory();
}

std::vector<Id> Tree::runs() const {
    std::vector<Id> all;
    for (size_t i = 1; i < runs_.size(); i++) {
        if (runs_[i]) {
            all.push_back(static_cast<Id>(i));
        }
    }
    return all;
}

Id Tree::child(Id parent, uint32_t token) const {
    auto found = children_.find(child_key(parent, token));
    return found == children_.end() ? NONE : found->second;
}

Tree::Match Tree::match(const uint32_t * tokens, int64_t n) const {
    Id id = ROOT;
    int64_t at = 0;
    while (at < n) {
        Id next = child(id, tokens[at]);
        if (next == NONE) {
            break;
        }
        const auto & text = run(next).tokens;
        int64_t most = std::min(static_cast<int64_t>(text.size()), n - at);
        int64_t same = std::mismatch(text.begin(), text.begin() + most, tokens + at).first - text.begin();
        id = next;
        at += same;
        if (same < static_cast<int64_t>(text.size())) {
            return {id, same, at};
        }
    }
    return {id, run(id).n_blocks(), at};
}

// Where a run goes on behind the match it is cut in two.
Id Tree::end_of(const Match & match) {
    return match.offset < run(match.run).n_blocks() ? cut(match.run, match.offset) : match.run;
}

void Tree::forget_gone() {
    gone_.clear();
    if (gone_.capacity() > MOST_GONE) {
        gone_.shrink_to_fit();
    }
}

int64_t Tree::send(const uint32_t * tokens, int64_t n, int64_t block_bytes) {
    forget_gone();
    Match found = match(tokens, n);
    policy_->asked(tokens, n);
    clock_++;
    Id last = end_of(found);
    for (Id id = last; run(id).parent != NONE; id = run(id).parent) {
        run(id).uses++;
        run(id).last_use = clock_;
        policy_->used(id);
    }
    add(last, tokens + found.n_blocks, n - found.n_blocks, block_bytes);
    return found.n_blocks;
}

void Tree::insert(const uint32_t * tokens, int64_t n, int64_t block_bytes) {
    forget_gone();
    Match found = match(tokens, n);
    if (found.n_blocks < n) {
        add(end_of(found), tokens + found.n_blocks, n - found.n_blocks, block_bytes);
    }
}

int64_t Tree::uses_at(const uint32_t * tokens, int64_t n, int64_t place) const {
    Match found = match(tokens, std::min(n, place + 1));
    return found.n_blocks == place + 1 ? run(found.run).uses : 0;
}

void Tree::resize(int64_t max_bytes) {
    forget_gone();
    max_bytes_ = max_bytes;
    policy_->resize(max_bytes);
    fit();
    if (children_.bucket_count() > 8 * children_.size() + 64) {
        children_.rehash(0);
    }
}

Id Tree::new_run() {
    auto made = std::make_unique<Run>();
    if (!free_.empty()) {
        Id id = free_.back();
        free_.pop_back();
        runs_[static_cast<size_t>(id)] = std::move(made);
        return id;
    }
    runs_.push_back(std::move(made));
    return static_cast<Id>(runs_.size() - 1);
}

void Tree::add(Id parent, const uint32_t * tokens, int64_t n, int64_t block_bytes) {
    if (n <= 0) {
        return;
    }
    Id id = new_run();
    Run & made = run(id);
    Run & above = run(parent);
    made.tokens.assign(tokens, tokens + n);
    token_bytes_ += static_cast<int64_t>(made.tokens.capacity()) * 4;
    made.parent = parent;
    made.start = above.end();
    made.start_key = above.key(above.n_blocks() - 1);
    made.block_bytes = block_bytes;
    made.created = made.last_use = clock_;
    made.next = above.first_child;
    if (made.next != NONE) {
        run(made.next).before = id;
    }
    above.first_child = id;
    above.n_children++;
    children_[child_key(parent, tokens[0])] = id;
    n_bytes_ += made.n_bytes();
    n_blocks_ += n;
    policy_->added(id);
    bool fits = policy_->declines;
    if (!fits) {
        // The others go first, whatever the policy thinks of something that was never used.
        run(id).is_held = true;
        fits = fit();
        run(id).is_held = false;
    }
    policy_->evictable(id);
    if (policy_->declines || !fits) {
        fit();
    }
}

// The first blocks become a run of their own, before the rest, which keeps its place in the policy.
Id Tree::cut(Id tail, int64_t n_blocks) {
    Id head = new_run();
    Run & first = run(head);
    Run & rest = run(tail);
    auto middle = rest.tokens.begin() + n_blocks;
    token_bytes_ -= static_cast<int64_t>(rest.tokens.capacity()) * 4;
    std::vector<uint32_t> left(middle, rest.tokens.end());
    first.tokens.assign(rest.tokens.begin(), middle);
    rest.tokens.swap(left);
    token_bytes_ += static_cast<int64_t>(first.tokens.capacity() + rest.tokens.capacity()) * 4;
    first.parent = rest.parent;
    first.start = rest.start;
    first.start_key = rest.start_key;
    first.block_bytes = rest.block_bytes;
    first.created = rest.created;
    first.last_use = rest.last_use;
    first.uses = rest.uses;
    first.first_child = tail;
    first.n_children = 1;
    first.next = rest.next;
    first.before = rest.before;
    if (first.next != NONE) {
        run(first.next).before = head;
    }
    if (first.before != NONE) {
        run(first.before).next = head;
    } else {
        run(first.parent).first_child = head;
    }
    rest.next = rest.before = NONE;
    rest.parent = head;
    rest.start += n_blocks;
    rest.start_key = first.key(n_blocks - 1);
    children_[child_key(first.parent, first.tokens[0])] = head;
    children_[child_key(head, rest.tokens[0])] = tail;
    policy_->split(head, tail);
    return head;
}

bool Tree::fit() {
    while (n_bytes_ > max_bytes_) {
        Id id = policy_->victim();
        if (id == NONE) {
            return false;
        }
        const Run & one = run(id);
        int64_t n = one.n_blocks();
        if (!policy_->whole && one.block_bytes > 0) {
            n = std::min({n, (n_bytes_ - max_bytes_ + one.block_bytes - 1) / one.block_bytes, policy_->most_blocks});
        }
        remove(id, n);
    }
    return true;
}

void Tree::remove(Id id, int64_t n) {
    Run & one = run(id);
    gone_.insert(gone_.end(), one.tokens.end() - n, one.tokens.end());
    policy_->removing(id, n);
    n_bytes_ -= n * one.block_bytes;
    n_blocks_ -= n;
    if (n < one.n_blocks()) {
        one.tokens.resize(one.tokens.size() - static_cast<size_t>(n));
        if (2 * one.tokens.size() <= one.tokens.capacity()) {
            token_bytes_ -= static_cast<int64_t>(one.tokens.capacity()) * 4;
            std::vector<uint32_t>(one.tokens).swap(one.tokens);
            token_bytes_ += static_cast<int64_t>(one.tokens.capacity()) * 4;
        }
        return;
    }
    Id parent = one.parent;
    unlink(id);
    if (is_evictable(parent)) {
        policy_->evictable(parent);
    }
}

void Tree::unlink(Id id) {
    Run & one = run(id);
    Run & above = run(one.parent);
    children_.erase(child_key(one.parent, one.tokens[0]));
    if (one.next != NONE) {
        run(one.next).before = one.before;
    }
    if (one.before != NONE) {
        run(one.before).next = one.next;
    } else {
        above.first_child = one.next;
    }
    above.n_children--;
    token_bytes_ -= static_cast<int64_t>(one.tokens.capacity()) * 4;
    free_.push_back(id);
    runs_[static_cast<size_t>(id)].reset();
}

}  // namespace pykv::shadow
