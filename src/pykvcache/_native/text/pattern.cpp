// Compiles a pattern to a program of matcher.h.
#include <algorithm>
#include <stdexcept>

#include "matcher.h"

namespace pykv {

namespace {

enum class shape { set, sequence, choice, loop, look, end };

struct node {
    shape             what     = shape::sequence;
    bool              negative = false;
    uint32_t          min = 1, max = 1;
    char_set          set;
    std::vector<node> kids;
};

[[noreturn]] void refuse(const char * what, size_t at) {
    throw std::invalid_argument("regular expression: " + std::string(what) + " (at " + std::to_string(at) + ")");
}

class reader {
public:
    explicit reader(const std::u32string & pattern) : text(pattern) {}

    node read() {
        node all = read_choice();
        if (at < text.size()) {
            refuse("unmatched parenthesis", at);
        }
        return all;
    }

private:
    bool next_is(char32_t c) const { return at < text.size() && text[at] == c; }
    bool take(const char32_t * what) {
        const std::u32string_view rest = std::u32string_view(text).substr(at), word = what;
        if (rest.substr(0, word.size()) != word) {
            return false;
        }
        at += word.size();
        return true;
    }

    node read_choice() {
        node all{shape::choice};
        do {
            all.kids.push_back(read_sequence());
        } while (take(U"|"));
        const bool sets = std::all_of(all.kids.begin(), all.kids.end(), [](const node & k) { return k.what == shape::set; });
        for (size_t i = 1; sets && i < all.kids.size(); ++i) {
            all.kids[0].set.add(all.kids[i].set);
        }
        return sets || all.kids.size() == 1 ? node(all.kids[0]) : all;
    }

    node read_sequence() {
        node all{shape::sequence};
        while (at < text.size() && text[at] != '|' && text[at] != ')') {
            node next = read_quantified();
            // `(?=[a])[b]` is one character, so a loop over it is a run.
            if (next.what == shape::set && !all.kids.empty() && all.kids.back().what == shape::look &&
                !all.kids.back().negative && all.kids.back().kids[0].what == shape::set) {
                char_set neither = next.set.complement();
                neither.add(all.kids.back().kids[0].set.complement());
                next.set        = neither.complement();
                all.kids.back() = std::move(next);
            } else {
                all.kids.push_back(std::move(next));
            }
        }
        return all.kids.size() == 1 ? node(all.kids[0]) : all;
    }

    node read_quantified() {
        node     one = read_one();
        uint32_t min = 0, max = UNBOUNDED;
        if (take(U"+")) {
            min = 1;
        } else if (take(U"?")) {
            max = 1;
        } else if (take(U"{")) {
            min = max = read_number();
            if (take(U",")) {
                max = next_is('}') ? UNBOUNDED : read_number();
            }
            if (!take(U"}") || max < min) {
                refuse("not a repetition", at);
            }
        } else if (!take(U"*")) {
            return one;
        }
        if (next_is('?') || next_is('+') || next_is('*') || one.what == shape::look || one.what == shape::end) {
            refuse("a repetition that is not known", at);
        }
        node loop{shape::loop};
        loop.min = min;
        loop.max = max;
        loop.kids.push_back(std::move(one));
        return loop;
    }

    uint32_t read_number() {
        uint32_t value = 0;
        const size_t begin = at;
        for (; at < text.size() && text[at] >= '0' && text[at] <= '9'; ++at) {
            value = value * 10 + (text[at] - '0');
            if (value > 1000) {
                refuse("a repetition of more than 1000", at);
            }
        }
        if (at == begin) {
            refuse("a number is missing", at);
        }
        return value;
    }

    node read_one() {
        if (next_is('(')) {
            return read_group();
        }
        if (take(U"$")) {
            return {shape::end};
        }
        node one{shape::set};
        if (take(U"[")) {
            one.set = read_brackets();
        } else if (take(U".")) {
            one.set.add('\n', '\n');
            one.set.add('\r', '\r');
            one.set = one.set.complement();
        } else if (next_is('\\')) {
            read_escape(one.set);
        } else {
            const char32_t c = text[at++];
            if (std::u32string_view(U"*+?{^").find(c) != std::u32string_view::npos) {
                refuse("a character that means something else", at - 1);
            }
            one.set.add(c, c);
        }
        return one;
    }

    node read_group() {
        node group{shape::look};
        const bool look = take(U"(?=") || (group.negative = take(U"(?!"));
        if (!look && !take(U"(?:")) {
            take(U"(");
            if (next_is('?')) {
                refuse("a group that is not known", at);
            }
        }
        group.kids.push_back(read_choice());
        if (!take(U")")) {
            refuse("a parenthesis is missing", at);
        }
        return look ? group : node(group.kids[0]);
    }

    // Add an escape's characters; return its value if it is a single character.
    uint32_t read_escape(char_set & set) {
        constexpr uint32_t MANY = UINT32_MAX;
        if (++at >= text.size()) {
            refuse("nothing after a backslash", at);
        }
        const char32_t c = text[at++];
        char_set       named;
        switch (c) {
            case 's': case 'S':
                named.add('\t', '\r');
                named.add(' ', ' ');
                break;
            case 'd': case 'D':
                named.add('0', '9');
                break;
            case 'r': return add_one(set, '\r');
            case 'n': return add_one(set, '\n');
            case 't': return add_one(set, '\t');
            default:
                if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9')) {
                    refuse("an escape that is not known", at - 1);
                }
                return add_one(set, c);
        }
        set.add(c == 'S' || c == 'D' ? named.complement() : named);
        return MANY;
    }

    static uint32_t add_one(char_set & set, uint32_t c) {
        set.add(c, c);
        return c;
    }

    char_set read_brackets() {
        char_set   set;
        const bool negative = take(U"^");
        while (!next_is(']')) {
            if (at >= text.size()) {
                refuse("a bracket is missing", at);
            }
            const uint32_t first = read_in_brackets(set);
            if (next_is('-') && at + 1 < text.size() && text[at + 1] != ']') {
                ++at;
                const uint32_t last = read_in_brackets(set);
                if (first > last || last == UINT32_MAX) {
                    refuse("a range that runs backwards", at);
                }
                set.add(first, last);
            }
        }
        ++at;
        return negative ? set.complement() : set;
    }

    uint32_t read_in_brackets(char_set & set) {
        if (next_is('\\')) {
            return read_escape(set);
        }
        if (next_is('[') && at + 1 < text.size() && std::u32string_view(U".:=").find(text[at + 1]) != std::u32string_view::npos) {
            refuse("a class of POSIX", at);
        }
        return add_one(set, text[at++]);
    }

    const std::u32string & text;
    size_t                 at = 0;
};

// Minimum length of a match, and whether it can have characters.
size_t shortest(const node & what) {
    size_t sum = 0, least = SIZE_MAX;
    switch (what.what) {
        case shape::set: return 1;
        case shape::loop: return what.min * shortest(what.kids[0]);
        case shape::sequence:
            for (const node & kid : what.kids) {
                sum += shortest(kid);
            }
            return sum;
        case shape::choice:
            for (const node & kid : what.kids) {
                least = std::min(least, shortest(kid));
            }
            return least;
        default: return 0;
    }
}

class writer {
public:
    program result;

    void write(const node & what) {
        if (result.code.size() > 20000) {
            refuse("too long", result.code.size());
        }
        switch (what.what) {
            case shape::set: {
                const size_t at = emit(op::one);
                result.code[at].set = add_set(what.set);
                break;
            }
            case shape::sequence:
                for (const node & kid : what.kids) {
                    write(kid);
                }
                break;
            case shape::choice: write_choice(what); break;
            case shape::loop: write_loop(what); break;
            case shape::look: {
                const size_t at          = emit(op::look);
                result.code[at].negative = what.negative;
                write(what.kids[0]);
                emit(op::done);
                result.code[at].to = here();
                break;
            }
            case shape::end: emit(op::end); break;
        }
    }

    size_t emit(op what) {
        instruction in{};
        in.what = what;
        result.code.push_back(in);
        return result.code.size() - 1;
    }

private:
    uint32_t here() const { return static_cast<uint32_t>(result.code.size()); }

    uint32_t add_set(const char_set & set) {
        result.sets.push_back(set);
        return static_cast<uint32_t>(result.sets.size() - 1);
    }

    void write_choice(const node & what) {
        std::vector<size_t> exits;
        for (size_t i = 0; i < what.kids.size(); ++i) {
            const bool   last  = i + 1 == what.kids.size();
            const size_t split = last ? 0 : emit(op::split);
            write(what.kids[i]);
            if (!last) {
                exits.push_back(emit(op::jump));
                result.code[split].to = here();
            }
        }
        for (const size_t exit : exits) {
            result.code[exit].to = here();
        }
    }

    void write_loop(const node & what) {
        const node & body = what.kids[0];
        if (body.what == shape::set) {
            const size_t  at = emit(op::run);
            instruction & in = result.code[at];
            in.min  = what.min;
            in.max  = what.max;
            in.memo = result.n_runs++;
            in.set  = add_set(body.set);
            return;
        }
        if (shortest(body) == 0) {
            refuse("a repetition of nothing", 0);
        }
        for (uint32_t i = 0; i < what.min; ++i) {
            write(body);
        }
        if (what.max == UNBOUNDED) {
            const size_t head         = emit(op::head);
            result.code[head].memo    = result.n_heads++;
            write(body);
            result.code[emit(op::jump)].to = static_cast<uint32_t>(head);
            result.code[head].to      = here();
            return;
        }
        std::vector<size_t> splits;
        for (uint32_t i = what.min; i < what.max; ++i) {
            splits.push_back(emit(op::split));
            write(body);
        }
        for (const size_t split : splits) {
            result.code[split].to = here();
        }
    }
};

}  // namespace

program read_pattern(const std::u32string & pattern) {
    const node all = reader(pattern).read();
    // Empty matches are supported only if all matches are empty: std::regex_iterator searches again after one.
    if (shortest(all) == 0 && all.what != shape::look) {
        refuse("may match nothing", 0);
    }
    writer out;
    out.write(all);
    out.emit(op::done);
    return std::move(out.result);
}

}  // namespace pykv
