// Reads a state's bytes from several pieces.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "probe_state.h"

namespace pykv {

// Bytes in several pieces, read as one.
class cursor {
  public:
    explicit cursor(const std::vector<state_piece> & pieces) : pieces(pieces) {}

    void skip(uint64_t n) {
        at += n;
        while (n > 0) {
            if (i == pieces.size()) {
                throw fault{STATE_TRUNCATED, "ends before byte " + std::to_string(at), 0, int64_t(at), "bytes", true};
            }
            const uint64_t step = std::min<uint64_t>(n, pieces[i].size - inside);
            inside += step;
            n -= step;
            if (inside == pieces[i].size) {
                ++i;
                inside = 0;
            }
        }
    }

    // Take a run of bytes; copied only if it crosses pieces.
    template <class F> void take(uint64_t n, F && use) {
        while (n > 0) {
            if (i == pieces.size()) {
                throw fault{STATE_TRUNCATED, "ends before byte " + std::to_string(at + n), 0, int64_t(at + n), "bytes", true};
            }
            const uint64_t step = std::min<uint64_t>(n, pieces[i].size - inside);
            use(pieces[i].data + inside, step);
            n -= step;
            skip(step);
        }
    }

    void read(void * dst, uint64_t n) {
        auto * out = static_cast<uint8_t *>(dst);
        take(n, [&](const uint8_t * from, uint64_t step) {
            std::memcpy(out, from, step);
            out += step;
        });
    }

    template <class T> T get() {
        T value;
        read(&value, sizeof(value));
        return value;
    }

    // Peek at the next bytes, if they are in one piece.
    const uint8_t * direct(uint64_t n) const {
        return i < pieces.size() && n <= pieces[i].size - inside ? pieces[i].data + inside : nullptr;
    }

    // A cursor over the same bytes that starts at an offset.
    cursor from(uint64_t offset) const {
        cursor other(pieces);
        other.skip(offset);
        return other;
    }

    uint64_t tell() const { return at; }

    uint64_t left() const {
        uint64_t n = 0;
        for (size_t j = i; j < pieces.size(); ++j) {
            n += pieces[j].size;
        }
        return n - inside;
    }

  private:
    const std::vector<state_piece> & pieces;
    size_t   i = 0;
    uint64_t inside = 0, at = 0;
};

}  // namespace pykv
