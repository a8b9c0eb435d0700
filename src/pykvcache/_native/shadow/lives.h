// Lives of runs, from their last use on, also of those that left: hit-density counts how they end.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "policy.h"

namespace pykv::shadow {

struct Life {
    int64_t began = 0, turn = 0, uses = 0, start = 0;
    uint32_t key = 0;
    int32_t kind = 0, place = -1, n_owners = 0;
    Id run = NONE, below = NONE;
    bool was_passed = false, was_cut = false, is_over = false;
};

// Each life is owned by a run, by a list, by the life before it: it is gone when nobody has it.
class Lives {
   public:
    Id make(int64_t turn, int64_t uses) {
        Id id;
        if (free_.empty()) {
            lives_.push_back(std::make_unique<Life>());
            id = static_cast<Id>(lives_.size() - 1);
        } else {
            id = free_.back();
            lives_[static_cast<size_t>(id)] = std::make_unique<Life>();
            free_.pop_back();
        }
        (*this)[id].turn = turn;
        (*this)[id].uses = uses;
        return id;
    }
    Life & operator[](Id id) noexcept { return *lives_[static_cast<size_t>(id)]; }
    Id take(Id id) noexcept {
        (*this)[id].n_owners++;
        return id;
    }
    // A chain of lives may be long: no recursion.
    void drop(Id id) {
        while (id != NONE && --(*this)[id].n_owners == 0) {
            free_.push_back(id);
            Id below = (*this)[id].below;
            lives_[static_cast<size_t>(id)].reset();
            id = below;
        }
    }
    int64_t memory() const noexcept {
        size_t tables = lives_.capacity() * sizeof(void *) + free_.capacity() * sizeof(Id);
        return static_cast<int64_t>((lives_.size() - free_.size()) * (sizeof(Life) + 16) + tables);
    }

   private:
    std::vector<std::unique_ptr<Life>> lives_;
    std::vector<Id> free_;
};

}  // namespace pykv::shadow
