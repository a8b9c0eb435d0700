// hit-density: of some runs drawn at random the one with the least hits to be expected per byte and time.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "density.h"
#include "draws.h"
#include "lives.h"
#include "tree.h"

namespace pykv::shadow {

namespace {

constexpr size_t SAMPLE = 32, GHOSTS_PER_LEAF = 4;

int bits_of(int64_t value) {
    int bits = 0;
    for (; value > 0; value >>= 1) {
        bits++;
    }
    return bits;
}

class HitDensity : public Policy {
   public:
    explicit HitDensity(Tree & tree) : Policy(tree), ended_(ENDS * TABLE), new_(ENDS * TABLE) { declines = true; }

    void added(Id id) override {
        tick(tree_.run(id).last_use);
        const Run & run = tree_.run(id);
        Id mine = own(id, turn(id), 0);
        Id ghost = NONE;
        if (ghosts_.pop(run.key(0), ghost)) {
            lives_[mine].uses = lives_[ghost].uses + 1;
        }
        // From here on the ghost is in no list, and owned here.
        while (ghost != NONE) {
            Life & past = lives_[ghost];
            if (!past.is_over) {
                end(past, USED);
                past.is_over = true;
            }
            lives_[mine].turn = std::max(lives_[mine].turn, past.turn + 1);
            Id below = past.below;
            if (below != NONE) {
                lives_.take(below);
                int64_t at = lives_[below].start - run.start;
                if (at < 0 || at >= run.n_blocks() || run.key(at) != lives_[below].key) {
                    lives_.drop(below);
                    below = NONE;
                }
            }
            lives_.drop(ghost);
            ghost = below;
        }
        begin(lives_[mine]);
    }

    void used(Id id) override {
        tick(tree_.run(id).last_use);
        Life & life = lives_[tree_.run(id).life];
        end(life, life.was_cut || tree_.is_evictable(id) ? USED : USED_INSIDE);
        life.was_cut = life.was_passed = false;
        life.uses++;
        begin(life);
    }

    void split(Id head, Id tail) override {
        Id old = tree_.run(tail).life;
        Id made = own(head, lives_[old].turn, lives_[old].uses);
        Life &now = lives_[made], &past = lives_[old];
        now.was_passed = past.was_passed;
        now.began = past.began;
        now.kind = past.kind;
        if (tree_.is_evictable(tail)) {
            now.was_cut = true;
            end(past, UNUSED);
        }
        past.was_passed = true;
        begin(past);
    }

    void evictable(Id id) override {
        Id life = tree_.run(id).life;
        if (lives_[life].place < 0) {
            lives_[life].place = static_cast<int32_t>(leaves_.size());
            leaves_.push_back(lives_.take(life));
        }
    }

    void removing(Id id, int64_t n_blocks) override {
        Run & run = tree_.run(id);
        Id life;
        if (n_blocks < run.n_blocks()) {
            // The life goes on with the blocks that stay.
            const Life & goes_on = lives_[run.life];
            int64_t turn = goes_on.turn, uses = goes_on.uses;
            life = lives_.take(lives_.make(turn, uses));
            lives_[life].is_over = true;
        } else {
            life = run.life;  // what the run owned the list of ghosts owns
            lives_[life].run = run.life = NONE;
            Id above = tree_.run(run.parent).life;
            if (above != NONE) {
                Id before = lives_[above].below;
                lives_[above].below = lives_.take(life);
                lives_.drop(before);
            }
        }
        int64_t first = run.n_blocks() - n_blocks;
        lives_[life].key = run.key(first);
        lives_[life].start = run.start + first;
        Id same = NONE;
        if (ghosts_.pop(lives_[life].key, same)) {
            forget(same);
        }
        ghosts_.put(lives_[life].key, life);
        while (ghosts_.size() > GHOSTS_PER_LEAF * (leaves_.size() + 64)) {
            forget(ghosts_.pop_first());
        }
    }

    Id victim() override {
        if (density_.empty()) {
            density_.resize(TABLE);
            weigh();
        }
        Id best = NONE;
        double least = std::numeric_limits<double>::infinity();
        int64_t oldest = 0;
        for (Id id : drawn()) {
            const Life & life = lives_[id];
            const Run & run = tree_.run(life.run);
            double value = density_[static_cast<size_t>(life.kind * BUCKETS + bucket_of(now_ - life.began))];
            double worth = run.block_bytes ? value / static_cast<double>(run.block_bytes) : 1e300;
            if (worth < least || (worth == least && life.began < oldest)) {
                best = life.run;
                least = worth;
                oldest = life.began;
            }
        }
        return best;
    }

    int64_t memory() const noexcept override {
        return static_cast<int64_t>(leaves_.capacity() * sizeof(Id)) + ENDS * TABLE * 8 + TABLE * 8 + lives_.memory() +
               ghosts_.memory();
    }

    void learned(std::vector<float> & ended, std::vector<double> & density) const override {
        ended = ended_;
        density = density_;
    }

   private:
    Id own(Id id, int64_t turn, int64_t uses) {
        Id life = lives_.take(lives_.make(turn, uses));
        lives_[life].run = id;
        tree_.run(id).life = life;
        return life;
    }

    void begin(Life & life) {
        life.began = now_;
        int64_t kind = std::min<int64_t>(life.turn, TURNS - 1) * 2 + life.was_passed;
        life.kind = static_cast<int32_t>(kind * USES + std::min(bits_of(life.uses), USES - 1));
    }

    void end(const Life & life, int how) {
        new_[static_cast<size_t>(how * TABLE + life.kind * BUCKETS + bucket_of(now_ - life.began))]++;
    }

    void tick(int64_t now) {
        now_ = std::max(now_, now);
        if (now_ >= next_) {
            learn();
            next_ = now_ + std::min<int64_t>(std::max<int64_t>(now_ / 4, 16), 256);
        }
    }

    // How many prompts in a row went on from each other, this one included.
    int64_t turn(Id id) {
        const Run & run = tree_.run(id);
        const Run & parent = tree_.run(run.parent);
        if (parent.life == NONE) {
            return 0;
        }
        if (parent.n_children > 3) {
            return 1;
        }
        for (Id other = parent.first_child; other != NONE; other = tree_.run(other).next) {
            const Run & one = tree_.run(other);
            // What the prompt before had more, say a block that was not full, is not another branch.
            bool is_short = one.n_blocks() <= std::max<int64_t>(1, run.start / 20);
            bool was_passed = one.life != NONE && lives_[one.life].was_passed;
            if (other != id && !(was_passed && is_short)) {
                return 1;
            }
        }
        return lives_[parent.life].turn + 1;
    }

    void forget(Id ghost) {
        Life & life = lives_[ghost];
        Id below = life.below;
        life.below = NONE;
        if (!life.is_over) {
            end(life, UNUSED);
            life.is_over = true;
        }
        lives_.drop(below);
        lives_.drop(ghost);
    }

    bool may_leave(Id life) { return lives_[life].run != NONE && tree_.is_evictable(lives_[life].run); }

    void withdraw(size_t place) {
        Id gone = leaves_[place], last = leaves_.back();
        leaves_.pop_back();
        lives_[gone].place = -1;
        if (place < leaves_.size()) {
            leaves_[place] = last;
            lives_[last].place = static_cast<int32_t>(place);
        }
        lives_.drop(gone);
    }

    const std::vector<Id> & drawn() {
        if (leaves_.size() <= SAMPLE) {
            for (size_t place = leaves_.size(); place-- > 0;) {
                if (!may_leave(leaves_[place])) {
                    withdraw(place);
                }
            }
            return leaves_;
        }
        drawn_.clear();
        while (!leaves_.empty() && drawn_.size() < SAMPLE) {
            auto place = static_cast<size_t>(draws_.next() * static_cast<double>(leaves_.size()));
            if (may_leave(leaves_[place])) {
                drawn_.push_back(leaves_[place]);
            } else {
                withdraw(place);
            }
        }
        return drawn_;
    }

    // Take in what was counted since the last time; the older counts less from then on.
    void learn() {
        for (size_t i = 0; i < ended_.size(); i++) {
            ended_[i] = static_cast<float>(static_cast<double>(ended_[i]) + new_[i]);
            new_[i] = 0;
        }
        if (!density_.empty()) {
            weigh();
        }
        for (float & each : ended_) {
            each *= static_cast<float>(DECAY);
        }
    }

    void weigh() {
        std::vector<float> all = ended_;
        // Lives that still go on reached their age as well.
        auto goes_on = [&](Id id) {
            const Life & life = lives_[id];
            all[static_cast<size_t>(TABLE + life.kind * BUCKETS + bucket_of(now_ - life.began))] += 1;
        };
        for (Id life : leaves_) {
            if (may_leave(life)) {
                goes_on(life);
            }
        }
        ghosts_.each([&](Id life) {
            if (!lives_[life].is_over) {
                goes_on(life);
            }
        });
        hit_density(all.data(), density_.data());
    }

    Draws draws_;
    int64_t now_ = 0, next_ = 0;
    Lives lives_;
    std::vector<Id> leaves_, drawn_;
    Ghosts<Id> ghosts_;
    // Lives that ended with a use, without one, and with a use while others followed: with the older counting less, and new.
    std::vector<float> ended_;
    std::vector<uint32_t> new_;
    // Computed from when somebody chooses by it.
    std::vector<double> density_;
};

}  // namespace

std::unique_ptr<Policy> make_density_policy(const std::string & name, Tree & tree) {
    return name == "hit-density" ? std::make_unique<HitDensity>(tree) : nullptr;
}

}  // namespace pykv::shadow
