// Splits text into words for BPE, in linear time.
//
// llama.cpp's unicode.cpp is compiled here, inside the library `llama`, with two functions renamed and
// replaced: matcher.h instead of std::regex, and no exception per invalid byte. llama.cpp's
// hand-written splitters stay in use.
#include <algorithm>
#include <cassert>
#include <map>
#include <regex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#define unicode_regex_split unicode_regex_split_std
#define unicode_cpts_from_utf8 unicode_cpts_from_utf8_std
#include "unicode.cpp"
#undef unicode_regex_split
#undef unicode_cpts_from_utf8

#include <array>
#include <cstring>
#include <iterator>

#include "matcher.h"
#include "text.h"

std::vector<uint32_t> unicode_cpts_from_utf8(const std::string & text);

namespace {

constexpr uint32_t REPLACEMENT = 0xFFFD;

// Length in bytes of the character at `at`; 0 if invalid.
size_t read_character(const std::string & text, size_t at, uint32_t & cpt) {
    const auto    byte = [&](size_t i) { return static_cast<uint8_t>(text[at + i]); };
    const uint8_t lead = byte(0);
    const size_t  size = lead < 0x80 ? 1 : lead < 0xC0 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF8 ? 4 : 0;
    if (size == 0 || at + size > text.size()) {
        return 0;
    }
    cpt = size == 1 ? lead : lead & (0xFF >> (size + 1));
    for (size_t i = 1; i < size; ++i) {
        if ((byte(i) & 0xC0) != 0x80) {
            return 0;
        }
        cpt = cpt << 6 | (byte(i) & 0x3F);
    }
    return cpt > 0x10FFFF ? 0 : size;  // llama.cpp reads larger ones, but cannot encode them
}

void append_utf8(std::string & out, uint32_t cpt) {
    const auto put = [&](uint32_t byte) { out.push_back(static_cast<char>(byte)); };
    if (cpt < 0x80) {
        put(cpt);
    } else if (cpt < 0x800) {
        put(0xC0 | cpt >> 6);
        put(0x80 | (cpt & 0x3F));
    } else if (cpt < 0x10000) {
        put(0xE0 | cpt >> 12);
        put(0x80 | (cpt >> 6 & 0x3F));
        put(0x80 | (cpt & 0x3F));
    } else {
        put(0xF0 | cpt >> 18);
        put(0x80 | (cpt >> 12 & 0x3F));
        put(0x80 | (cpt >> 6 & 0x3F));
        put(0x80 | (cpt & 0x3F));
    }
}

struct category {
    const char * name;
    int          flag;
};
// All letters are one category, as in llama.cpp.
constexpr category CATEGORIES[] = {
    {"\\p{N}", unicode_cpt_flags::NUMBER},      {"\\p{L}", unicode_cpt_flags::LETTER},
    {"\\p{P}", unicode_cpt_flags::PUNCTUATION}, {"\\p{M}", unicode_cpt_flags::ACCENT_MARK},
    {"\\p{S}", unicode_cpt_flags::SYMBOL},      {"\\p{Lu}", unicode_cpt_flags::LETTER},
    {"\\p{Ll}", unicode_cpt_flags::LETTER},     {"\\p{Lt}", unicode_cpt_flags::LETTER},
    {"\\p{Lm}", unicode_cpt_flags::LETTER},     {"\\p{Lo}", unicode_cpt_flags::LETTER},
};
struct stand_in {
    int          flag;
    uint8_t      byte;   // stand-in for non-ASCII characters of the category
    const char * ascii;  // its ASCII characters, in bracket syntax
};
constexpr stand_in STAND_INS[] = {
    {unicode_cpt_flags::NUMBER, 0xD1, "0-9"},
    {unicode_cpt_flags::LETTER, 0xD2, "A-Za-z"},
    {unicode_cpt_flags::PUNCTUATION, 0xD3, "!-#%-*,-/:-;?-@\\[-\\]_\\{\\}"},
    {unicode_cpt_flags::ACCENT_MARK, 0xD4, ""},
    {unicode_cpt_flags::SYMBOL, 0xD5, "\\$\\+<->^`\\|\\~"},
};
constexpr uint8_t NO_CATEGORY = 0xD0;
constexpr uint8_t SPACE       = 0x0B;  // any non-ASCII white space

uint8_t collapse(uint32_t cpt) {
    if (cpt < 128) {
        return static_cast<uint8_t>(cpt);
    }
    const unicode_cpt_flags flags = unicode_cpt_flags_from_cpt(cpt);
    if (flags.is_whitespace) {
        return SPACE;
    }
    for (const stand_in & one : STAND_INS) {
        if (flags.category_flag() == one.flag) {
            return one.byte;
        }
    }
    return NO_CATEGORY;
}

bool has_category(const std::string & pattern) {
    return std::any_of(std::begin(CATEGORIES), std::end(CATEGORIES),
                       [&](const category & one) { return pattern.find(one.name) != std::string::npos; });
}

// Convert a pattern to bytes, with `\p{..}` as the category's stand-in and its ASCII characters.
std::u32string collapse_pattern(const std::string & pattern) {
    std::u32string out;
    bool           inside = false;  // of brackets
    for (size_t i = 0; i < pattern.size(); ++i) {
        const char c = pattern[i];
        if (static_cast<uint8_t>(c) >= 128) {
            throw std::invalid_argument("a pattern with Unicode categories and characters outside ASCII");
        }
        if (c == '[' && (i == 0 || pattern[i - 1] != '\\')) {
            inside = true;
        } else if (c == ']' && inside && pattern[i - 1] != '\\') {
            inside = false;
        } else if (c == '\\') {
            const auto found = std::find_if(std::begin(CATEGORIES), std::end(CATEGORIES), [&](const category & one) {
                return pattern.compare(i, std::strlen(one.name), one.name) == 0;
            });
            if (found != std::end(CATEGORIES)) {
                const auto & stand = *std::find_if(std::begin(STAND_INS), std::end(STAND_INS),
                                                   [&](const stand_in & one) { return one.flag == found->flag; });
                out += inside ? U"" : U"[";
                out += static_cast<char32_t>(stand.byte);
                out += std::u32string(stand.ascii, stand.ascii + std::strlen(stand.ascii));
                out += inside ? U"" : U"]";
                i += std::strlen(found->name) - 1;
                continue;
            }
        }
        out += static_cast<char32_t>(c);
    }
    return out;
}

struct pattern {
    bool          collapsed;
    pykv::program what;
};

// Cached, because parsing takes longer than matching a word. Per thread, to avoid a lock that a fork could leave held.
const pattern & known_pattern(const std::string & text) {
    static thread_local std::map<std::string, pattern> known;
    auto found = known.find(text);
    if (found == known.end()) {
        const bool     collapsed = has_category(text);
        std::u32string characters;
        if (collapsed) {
            characters = collapse_pattern(text);
        } else {
            const auto cpts = unicode_cpts_from_utf8(text);
            characters.assign(cpts.begin(), cpts.end());
        }
        found = known.emplace(text, pattern{collapsed, pykv::read_pattern(characters)}).first;
    }
    return found->second;
}

// Each space becomes a separate word: no merge contains one, and llama.cpp asserts that.
std::vector<std::string> split_at_spaces(const std::vector<std::string> & words) {
    std::vector<std::string> result;
    result.reserve(words.size());
    for (const std::string & word : words) {
        size_t begin = 0;
        for (size_t at = word.find(' '); at != std::string::npos; at = word.find(' ', begin)) {
            if (at > begin) {
                result.push_back(word.substr(begin, at - begin));
            }
            result.emplace_back(" ");
            begin = at + 1;
        }
        if (begin < word.size() || word.empty()) {
            result.push_back(word.substr(begin));
        }
    }
    return result;
}

template <class Char>
std::vector<size_t> split(const pykv::program & what, const std::vector<Char> & text, const std::vector<size_t> & lengths) {
    std::vector<size_t>  result;
    pykv::matcher<Char> matcher(what);
    size_t               start = 0;
    for (const size_t length : lengths) {
        matcher.split(text.data() + start, length, result);
        start += length;
    }
    return result;
}

}  // namespace

std::vector<uint32_t> unicode_cpts_from_utf8(const std::string & text) {
    std::vector<uint32_t> result;
    result.reserve(text.size());
    for (size_t at = 0; at < text.size();) {
        uint32_t     cpt  = 0;
        const size_t size = read_character(text, at, cpt);
        result.push_back(size ? cpt : REPLACEMENT);
        at += size ? size : 1;
    }
    return result;
}

std::vector<std::string> unicode_regex_split(const std::string & raw, const std::vector<std::string> & patterns, bool byte_encode) {
    const std::vector<uint32_t> cpts = unicode_cpts_from_utf8(raw);
    if (cpts.empty()) {
        return {};
    }
    std::string text;  // decodes to the same characters in llama.cpp's splitters
    text.reserve(raw.size());
    for (const uint32_t cpt : cpts) {
        append_utf8(text, cpt);
    }
    std::vector<uint8_t>  collapsed;
    std::vector<uint32_t> wide;
    std::vector<size_t>   lengths = {cpts.size()};
    for (const std::string & one : patterns) {
        auto by_hand = unicode_regex_split_custom(text, one, lengths);
        if (!by_hand.empty()) {
            lengths = std::move(by_hand);
            continue;
        }
        const pattern & found = known_pattern(one);
        if (found.collapsed) {
            if (collapsed.empty()) {
                collapsed.resize(cpts.size());
                std::transform(cpts.begin(), cpts.end(), collapsed.begin(), collapse);
            }
            lengths = split(found.what, collapsed, lengths);
        } else {
            if (wide.empty()) {
                wide = cpts;
                for (uint32_t & cpt : wide) {
                    if (cpt > 0x7F && unicode_cpt_flags_from_cpt(cpt).is_whitespace) {
                        cpt = SPACE;
                    }
                }
            }
            lengths = split(found.what, wide, lengths);
        }
    }
    static const std::array<std::string, 256> shown = [] {
        std::array<std::string, 256> table;
        for (int byte = 0; byte < 256; ++byte) {
            table[byte] = unicode_byte_to_utf8(static_cast<uint8_t>(byte));
        }
        return table;
    }();
    std::vector<std::string> words;
    words.reserve(lengths.size());
    size_t at = 0;  // in text
    size_t i  = 0;  // in cpts
    for (const size_t length : lengths) {
        const size_t begin = at;
        for (const size_t end = i + length; i < end; ++i) {
            at += cpts[i] < 0x80 ? 1 : cpts[i] < 0x800 ? 2 : cpts[i] < 0x10000 ? 3 : 4;
        }
        words.emplace_back();
        if (!byte_encode) {
            words.back().assign(text, begin, at - begin);
            continue;
        }
        for (size_t b = begin; b < at; ++b) {
            words.back() += shown[static_cast<uint8_t>(text[b])];
        }
    }
    return byte_encode || text.find(' ') == std::string::npos ? words : split_at_spaces(words);
}

namespace pykv {

std::vector<std::string> split_text(const std::string & text, const std::vector<std::string> & patterns, bool byte_encode,
                                    bool with_std_regex) {
    if (!with_std_regex) {
        return unicode_regex_split(text, patterns, byte_encode);
    }
    const std::vector<std::string> words = unicode_regex_split_std(text, patterns, byte_encode);
    return byte_encode ? words : split_at_spaces(words);
}

}  // namespace pykv
