// Ctrl-C in the middle of a long text: every loop over it asks now and then whether to go on.
#pragma once

#include <chrono>
#include <cstdint>

namespace pykv {

// Thrown out of the walk; no std::exception, so that no handler of llama.cpp's takes it.
struct interrupted {};

// What is asked on this thread whether to stop; null unless the call can be interrupted.
struct listener {
    bool (*stops)(void * who) = nullptr;
    void *   who   = nullptr;
    int64_t  next  = 0;  // nanoseconds of the clock
    uint32_t looks = 0;
};
inline thread_local listener listening;

constexpr int64_t NANOSECONDS_BETWEEN = 30'000'000;

inline int64_t nanoseconds() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline void look_at_clock() {
    listener &    mine = listening;
    const int64_t now  = nanoseconds();
    if (now < mine.next) {
        return;
    }
    const bool stops = mine.stops(mine.who);
    mine.next = nanoseconds() + NANOSECONDS_BETWEEN;
    if (stops) {
        throw interrupted();
    }
}

// To be called for each step of a walk, or for every few of one that is quick.
inline void look() {
    listener & mine = listening;
    if (mine.stops && (++mine.looks & 0xFF) == 0) {
        look_at_clock();
    }
}
// For each byte or character, where a step takes a nanosecond.
inline void look_at(uint64_t i) {
    if ((i & 0xFFFF) == 0 && listening.stops) {
        look_at_clock();
    }
}

// While it lives, `stops(who)` is asked some thirty times a second.
struct may_stop {
    may_stop(bool (*stops)(void *), void * who) {
        if (stops) {
            listening = {stops, who, nanoseconds() + NANOSECONDS_BETWEEN, 0};
        }
    }
    ~may_stop() { listening.stops = nullptr; }
    may_stop(const may_stop &) = delete;
    may_stop & operator=(const may_stop &) = delete;
};

}  // namespace pykv
