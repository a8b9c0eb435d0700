// Regular expressions for long texts: the ones with which llama.cpp splits text into words.
//
// std::regex recurses once per character and rescans runs of characters. Here choices are on an
// explicit stack and failures are remembered, so the time is linear in any text. Semantics are
// ECMAScript's (first matching alternative, greedy loops), limited to the syntax that llama.cpp
// uses; other syntax is a std::invalid_argument when the pattern is parsed.
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace pykv {

// A set of characters: a table for the first 256, sorted ranges for the others.
struct char_set {
    std::bitset<256>                           low;
    std::vector<std::pair<uint32_t, uint32_t>> high;

    bool has(uint32_t c) const { return c < 256 ? low[c] : has_high(c); }
    bool has_high(uint32_t c) const;
    void add(uint32_t first, uint32_t last);
    void add(const char_set & other);
    char_set complement() const;
};

enum class op : uint8_t {
    one,    // a character of `set`
    run,    // `min` to `max` characters of `set`, as many as possible
    split,  // try the next instruction, then `to`
    jump,   // go to `to`
    head,   // head of a loop over a group: body follows, exit at `to`
    look,   // lookahead: the code up to `done` must match (must not, if `negative`); continue at `to`
    end,    // of the text
    done,
};

struct instruction {
    op       what;
    bool     negative = false;
    uint32_t to       = 0;
    uint32_t set      = 0;
    uint32_t min      = 1;
    uint32_t max      = 1;
    uint32_t memo     = 0;  // number among the runs, or among the heads
};

constexpr uint32_t UNBOUNDED = UINT32_MAX;

struct program {
    std::vector<instruction> code;
    std::vector<char_set>    sets;
    uint32_t                 n_runs  = 0;
    uint32_t                 n_heads = 0;
};

// Parse `pattern`, of bytes or code points like the text.
program read_pattern(const std::u32string & pattern);

template <class Char> class matcher {
public:
    matcher(const program & what) : code(what.code.data()), prog(what) {}

    // Append the lengths of the matches in text[0, n) and of the gaps between them, as
    // std::regex_iterator finds them.
    void split(const Char * text, size_t n, std::vector<size_t> & lengths);

private:
    struct choice {
        uint32_t pc, pos, low;
    };
    // For one `run`: the last stretch of its set, and the position from which continuing fails.
    struct stretch {
        uint32_t begin = 1, end = 0, failed_from = 0;
    };

    bool     match(uint32_t pc, uint32_t pos, uint32_t & end, bool ahead);
    bool     succeed(size_t base, bool ahead);
    bool     go_back(size_t base, uint32_t & pc, uint32_t & pos);
    uint32_t stretch_end(const instruction & in, uint32_t pos);
    bool     enter_run(uint32_t & pc, uint32_t & pos);
    bool     is_marked(std::vector<std::vector<bool>> & marks, uint32_t head, uint32_t pos) const;
    void     mark(std::vector<std::vector<bool>> & marks, uint32_t head, uint32_t pos) const;

    const instruction *            code;
    const program &                prog;
    const Char *                   text = nullptr;
    uint32_t                       n    = 0;
    std::vector<choice>            stack;
    std::vector<stretch>           stretches;
    std::vector<std::vector<bool>> failed, matched;  // per head and position
};

extern template class matcher<uint8_t>;
extern template class matcher<uint32_t>;

}  // namespace pykv
