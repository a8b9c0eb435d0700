// The numbers that random.Random(1).random() of Python gives, so that both draw the same runs.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace pykv::shadow {

// The Mersenne Twister (Matsumoto and Nishimura, 1998), seeded with an array of one number: 1.
class Draws {
   public:
    Draws() noexcept {
        state_[0] = 19650218u;
        for (size_t i = 1; i < N; i++) {
            state_[i] = mixed(1812433253u, i) + static_cast<uint32_t>(i);
        }
        size_t i = 1;
        for (size_t k = 0; k < N; k++) {
            state_[i] = (state_[i] ^ mixed(1664525u, i)) + 1u;
            i = advance(i);
        }
        for (size_t k = 0; k < N - 1; k++) {
            state_[i] = (state_[i] ^ mixed(1566083941u, i)) - static_cast<uint32_t>(i);
            i = advance(i);
        }
        state_[0] = 0x80000000u;
    }

    // From 0 on, below 1.
    double next() noexcept {
        uint32_t high = draw() >> 5, low = draw() >> 6;
        return (high * 67108864.0 + low) / 9007199254740992.0;
    }

   private:
    static constexpr size_t N = 624, M = 397;

    uint32_t mixed(uint32_t factor, size_t i) const noexcept { return (state_[i - 1] ^ (state_[i - 1] >> 30)) * factor; }
    size_t advance(size_t i) noexcept {
        if (++i >= N) {
            state_[0] = state_[N - 1];
            i = 1;
        }
        return i;
    }

    uint32_t draw() noexcept {
        if (at_ == N) {
            for (size_t i = 0; i < N; i++) {
                uint32_t both = (state_[i] & 0x80000000u) | (state_[(i + 1) % N] & 0x7FFFFFFFu);
                state_[i] = state_[(i + M) % N] ^ (both >> 1) ^ (both & 1 ? 0x9908B0DFu : 0u);
            }
            at_ = 0;
        }
        uint32_t value = state_[at_++];
        value ^= value >> 11;
        value ^= (value << 7) & 0x9D2C5680u;
        value ^= (value << 15) & 0xEFC60000u;
        return value ^ (value >> 18);
    }

    std::array<uint32_t, N> state_;
    size_t at_ = N;
};

}  // namespace pykv::shadow
