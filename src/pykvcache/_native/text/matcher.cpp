// Character sets, and the interpreter of matcher.h's programs.
#include "matcher.h"

#include <algorithm>

namespace pykv {

bool char_set::has_high(uint32_t c) const {
    const auto after = std::upper_bound(high.begin(), high.end(), c,
                                        [](uint32_t value, const auto & range) { return value < range.first; });
    return after != high.begin() && c <= std::prev(after)->second;
}

void char_set::add(uint32_t first, uint32_t last) {
    for (uint32_t c = first; c <= last && c < 256; ++c) {
        low.set(c);
    }
    if (last < 256) {
        return;
    }
    high.emplace_back(std::max(first, uint32_t(256)), last);
    std::sort(high.begin(), high.end());
    size_t kept = 0;
    for (size_t i = 1; i < high.size(); ++i) {
        if (high[i].first <= high[kept].second) {
            high[kept].second = std::max(high[kept].second, high[i].second);
        } else {
            high[++kept] = high[i];
        }
    }
    high.resize(kept + 1);
}

void char_set::add(const char_set & other) {
    low |= other.low;
    for (const auto & range : other.high) {
        add(range.first, range.second);
    }
}

char_set char_set::complement() const {
    char_set result;
    result.low    = ~low;
    uint32_t from = 256;
    for (const auto & range : high) {
        if (from < range.first) {
            result.high.emplace_back(from, range.first - 1);
        }
        from = range.second + 1;
    }
    if (from != 0) {
        result.high.emplace_back(from, UINT32_MAX);
    }
    return result;
}

template <class Char>
void matcher<Char>::split(const Char * new_text, size_t size, std::vector<size_t> & lengths) {
    text = new_text;
    n    = static_cast<uint32_t>(size);
    stretches.assign(prog.n_runs, {});
    failed.assign(prog.n_heads, {});
    matched.assign(prog.n_heads, {});
    uint32_t last = 0;
    for (uint32_t pos = 0, end; pos < n;) {
        if (!match(0, pos, end, false)) {
            ++pos;
            continue;
        }
        if (pos > last) {
            lengths.push_back(pos - last);
        }
        lengths.push_back(end - pos);
        last = end;
        pos  = std::max(end, pos + 1);
    }
    if (last < n) {
        lengths.push_back(n - last);
    }
}

template <class Char> bool matcher<Char>::match(uint32_t pc, uint32_t pos, uint32_t & end, bool ahead) {
    const size_t base = stack.size();
    for (;;) {
        const instruction & in = code[pc];
        bool                ok = true;
        switch (in.what) {
            case op::one:
                ok = pos < n && prog.sets[in.set].has(text[pos]);
                pos += ok;
                ++pc;
                break;
            case op::run:
                ok = enter_run(pc, pos);
                break;
            case op::split:
                stack.push_back({pc++, pos, 0});
                break;
            case op::jump:
                pc = in.to;
                break;
            case op::head:
                if (ahead && is_marked(matched, in.memo, pos)) {
                    return succeed(base, ahead);
                }
                ok = !is_marked(failed, in.memo, pos);
                if (ok) {
                    stack.push_back({pc++, pos, 0});
                }
                break;
            case op::look: {
                // Recursion depth depends on the pattern, not on the text.
                uint32_t ignored = 0;
                ok               = match(pc + 1, pos, ignored, true) != in.negative;
                pc               = in.to;
                break;
            }
            case op::end:
                ok = pos == n;
                ++pc;
                break;
            case op::done:
                end = pos;
                return succeed(base, ahead);
        }
        if (!ok && !go_back(base, pc, pos)) {
            return false;
        }
    }
}

template <class Char> bool matcher<Char>::succeed(size_t base, bool ahead) {
    // A lookahead's result does not depend on its length.
    for (size_t i = base; ahead && i < stack.size(); ++i) {
        const instruction & in = code[stack[i].pc];
        if (in.what == op::head) {
            mark(matched, in.memo, stack[i].pos);
        }
    }
    stack.resize(base);
    return true;
}

// Backtrack to the last choice with an alternative.
template <class Char> bool matcher<Char>::go_back(size_t base, uint32_t & pc, uint32_t & pos) {
    while (stack.size() > base) {
        choice &            last = stack.back();
        const instruction & in   = code[last.pc];
        if (in.what == op::split) {
            pc  = in.to;
            pos = last.pos;
            stack.pop_back();
            return true;
        }
        if (in.what == op::head) {
            if (last.low == 0) {  // the body failed: leave the loop here
                last.low = 1;
                pc       = in.to;
                pos      = last.pos;
                return true;
            }
            mark(failed, in.memo, last.pos);
        } else {  // a run: give up one character
            stretch & known = stretches[in.memo];
            if (known.begin <= last.pos && last.pos <= known.end && known.failed_from == last.pos + 1) {
                known.failed_from = last.pos;
            }
            if (last.pos > last.low) {
                pos = --last.pos;
                pc  = last.pc + 1;
                return true;
            }
        }
        stack.pop_back();
    }
    return false;
}

template <class Char> uint32_t matcher<Char>::stretch_end(const instruction & in, uint32_t pos) {
    stretch & known = stretches[in.memo];
    if (known.begin <= pos && pos <= known.end) {
        return known.end;
    }
    const char_set & set = prog.sets[in.set];
    uint32_t         i   = pos;
    while (i < n && set.has(text[i])) {
        if (++i == known.begin && known.begin <= known.end) {
            known.begin = pos;
            return known.end;
        }
    }
    known = {pos, i, i + 1};
    return i;
}

template <class Char> bool matcher<Char>::enter_run(uint32_t & pc, uint32_t & pos) {
    const instruction & in  = code[pc];
    uint32_t            end = stretch_end(in, pos);
    if (end - pos < in.min) {
        return false;
    }
    const uint32_t low = pos + in.min;
    if (in.max == UNBOUNDED) {
        // Continuing from any of [failed_from, end] is known to fail.
        const uint32_t failed_from = stretches[in.memo].failed_from;
        if (low >= failed_from) {
            return false;
        }
        end = std::min(end, failed_from - 1);
    } else if (end - pos > in.max) {
        end = pos + in.max;
    }
    if (end > low) {
        stack.push_back({pc, end, low});
    }
    pos = end;
    ++pc;
    return true;
}

template <class Char>
bool matcher<Char>::is_marked(std::vector<std::vector<bool>> & marks, uint32_t head, uint32_t pos) const {
    return !marks[head].empty() && marks[head][pos];
}

template <class Char>
void matcher<Char>::mark(std::vector<std::vector<bool>> & marks, uint32_t head, uint32_t pos) const {
    if (marks[head].empty()) {
        marks[head].resize(static_cast<size_t>(n) + 1);
    }
    marks[head][pos] = true;
}

template class matcher<uint8_t>;
template class matcher<uint32_t>;

}  // namespace pykv
