#include "choices.h"

#include <algorithm>

#include "copy_threads.h"

namespace pykv {

namespace {

// Minimum work per thread (chooser::cost) that pays for another thread: about 10 us.
constexpr size_t COST_PER_THREAD = 32768;

}  // namespace

void choices::begin(size_t n, int n_threads) {
    all.resize(n);
    if (lists.size() != size_t(std::max(1, n_threads))) {
        lists.resize(size_t(std::max(1, n_threads)));
    }
}

void choices::choose(one & each, int32_t n_vocab, chooser::candidate_list & list) noexcept {
    each.code = each.sampler->choose(each.row, n_vocab, list, each.token);
    if (each.code == CAUGHT) {
        // caught() is thread-local and lasts until the next call.
        each.why = caught();
        each.no_memory = caught_memory();
    }
}

void choices::recall(size_t i) const noexcept {
    const device_link * lost = watched_links ? lost_link(*watched_links) : nullptr;
    if (lost) {
        note_lost(*lost);
    } else {
        note_caught(all[i].why.c_str(), all[i].no_memory);
    }
}

void choices::run(int32_t n_vocab) noexcept {
    struct choosing final : team {
        choices & mine;
        int32_t   n_vocab;
        counter   jobs;

        choosing(choices & c, int32_t n) : mine(c), n_vocab(n), jobs(c.all.size()) { may_miss_workers = true; }
        void work(int index) override {
            for (size_t i; jobs.take(i);) {
                mine.choose(mine.all[i], n_vocab, mine.lists[size_t(index)]);
            }
        }
    };
    size_t cost = 0;
    bool   has_call = false;
    for (const one & each : all) {
        cost += each.sampler->cost(n_vocab);
        has_call |= each.sampler->has_call;
    }
    const size_t most = std::min({lists.size(), all.size(), cost / COST_PER_THREAD});
    choosing(*this, n_vocab).run(most > 1 && !has_call ? int(most) : 1);
}

}  // namespace pykv
