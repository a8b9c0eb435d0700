#include "text.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <queue>
#include <stdexcept>

#include "guarded.h"

namespace pykv {

namespace {

constexpr int SPECIAL = LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_USER_DEFINED | LLAMA_TOKEN_ATTR_UNKNOWN;

bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

uint8_t byte_at(const std::string & text, size_t i) { return static_cast<uint8_t>(text[i]); }

}  // namespace

text_vocab::text_vocab(const llama_vocab * which) : vocab(which) {
    if (llama_vocab_type(vocab) == LLAMA_VOCAB_TYPE_NONE) {
        return;
    }
    const auto length = [&](llama_token id) { return std::strlen(llama_vocab_get_text(vocab, id)); };
    std::vector<llama_token> order;
    for (llama_token id = 0; id < llama_vocab_n_tokens(vocab); ++id) {
        if (llama_vocab_get_attr(vocab, id) & SPECIAL) {
            order.push_back(id);
        }
    }
    // llama.cpp's order; the order among equal lengths is std::sort's.
    std::sort(order.begin(), order.end(), [&](llama_token a, llama_token b) { return length(a) > length(b); });
    for (const llama_token id : order) {
        const int attr = llama_vocab_get_attr(vocab, id);
        sorted.push_back({llama_vocab_get_text(vocab, id), id, static_cast<uint32_t>(sorted.size()),
                          !(attr & (LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_UNKNOWN)),
                          (attr & LLAMA_TOKEN_ATTR_LSTRIP) != 0, (attr & LLAMA_TOKEN_ATTR_RSTRIP) != 0});
    }
    sorted.erase(std::remove_if(sorted.begin(), sorted.end(), [](const special & one) { return one.text.empty(); }),
                 sorted.end());
    std::sort(sorted.begin(), sorted.end(), [](const special & a, const special & b) {
        return a.text != b.text ? a.text < b.text : a.rank < b.rank;
    });
    by_rank.resize(order.size());
    for (size_t i = 0; i < sorted.size(); ++i) {
        by_rank[sorted[i].rank] = static_cast<uint32_t>(i);
        ++first[byte_at(sorted[i].text, 0) + 1];
    }
    for (size_t byte = 0; byte < 256; ++byte) {
        first[byte + 1] += first[byte];
    }
}

const text_vocab::special * text_vocab::find(const char * text, size_t at, size_t end, bool parse_special) const {
    const uint8_t   lead = static_cast<uint8_t>(text[at]);
    const special * low  = sorted.data() + first[lead];
    const special * high = sorted.data() + first[lead + 1];
    const special * best = nullptr;
    // [low, high) are the tokens whose first `depth` bytes match, shortest first.
    for (size_t depth = 1; low != high; ++depth) {
        // Of equal texts, take the first allowed one in llama.cpp's order.
        for (const special * one = low; one != high && one->text.size() == depth; ++one, ++low) {
            if ((one->always || parse_special) && (!best || best->text.size() < depth)) {
                best = one;
            }
        }
        if (at + depth >= end) {
            break;
        }
        const uint8_t next = static_cast<uint8_t>(text[at + depth]);
        low  = std::lower_bound(low, high, next, [=](const special & s, uint8_t b) { return byte_at(s.text, depth) < b; });
        high = std::upper_bound(low, high, next, [=](uint8_t b, const special & s) { return b < byte_at(s.text, depth); });
    }
    return best;
}

std::vector<text_vocab::fragment> text_vocab::partition(const char * text, size_t size, bool parse_special) const {
    // Candidates, in llama.cpp's order, then leftmost.
    const auto            key = [](const special & one, size_t at) { return uint64_t(one.rank) << 32 | at; };
    std::vector<uint64_t> found;
    for (size_t at = 0; at < size; ++at) {
        if (const special * one = find(text, at, size, parse_special)) {
            found.push_back(key(*one, at));
        }
    }
    std::priority_queue<uint64_t, std::vector<uint64_t>, std::greater<uint64_t>> queue({}, std::move(found));
    std::vector<fragment> specials;
    std::vector<bool>     taken(size);
    while (!queue.empty()) {
        const uint64_t which = queue.top();
        queue.pop();
        const special & one   = sorted[by_rank[which >> 32]];
        size_t          begin = which & UINT32_MAX;
        size_t          end   = begin;
        while (end < begin + one.text.size() && !taken[end]) {
            ++end;
        }
        if (end < begin + one.text.size()) {
            // Blocked by an earlier token; a shorter one may still fit.
            if (const special * shorter = end > begin ? find(text, begin, end, parse_special) : nullptr) {
                queue.push(key(*shorter, begin));
            }
            continue;
        }
        while (one.lstrip && begin > 0 && !taken[begin - 1] && is_space(text[begin - 1])) {
            --begin;
        }
        while (one.rstrip && end < size && !taken[end] && is_space(text[end])) {
            ++end;
        }
        std::fill(taken.begin() + begin, taken.begin() + end, true);
        specials.push_back({begin, end, one.token});
    }
    std::sort(specials.begin(), specials.end(), [](const fragment & a, const fragment & b) { return a.begin < b.begin; });
    std::vector<fragment> all;
    size_t                at = 0;
    for (const fragment & one : specials) {
        if (one.begin > at) {
            all.push_back({at, one.begin, LLAMA_TOKEN_NULL});
        }
        all.push_back(one);
        at = one.end;
    }
    if (at < size) {
        all.push_back({at, size, LLAMA_TOKEN_NULL});
    }
    return all;
}

void text_vocab::append(const char * text, size_t size, bool add_special, std::vector<llama_token> & out) const {
    if (llama_vocab_type(vocab) == LLAMA_VOCAB_TYPE_SPM && size) {
        tokenize_spm(*vocab, text, size, out);
        return;
    }
    const size_t before = out.size();
    size_t       room   = size + 8;
    for (;;) {
        out.resize(before + room);
        const int32_t n = llama_tokenize(vocab, text, static_cast<int32_t>(size), out.data() + before,
                                         static_cast<int32_t>(room), add_special, false);
        if (n >= 0) {
            out.resize(before + n);
            return;
        }
        if (n == INT32_MIN) {
            throw std::length_error("more than 2147483647 tokens");
        }
        room = static_cast<size_t>(-static_cast<int64_t>(n));
    }
}

void text_vocab::tokenize(const char * text, size_t size, bool add_special, bool parse_special, token_list & list) const {
    std::vector<llama_token> & out = list.tokens;
    std::vector<llama_token>   around;
    try {
        append("", 0, add_special, around);
    } catch (const std::runtime_error &) {
        list.problem = "the vocabulary has no special token to add: use add_special=False";
        return;
    }
    const bool begins = llama_vocab_type(vocab) == LLAMA_VOCAB_TYPE_WPM || llama_vocab_get_add_bos(vocab);
    const auto front  = around.begin() + (begins && !around.empty() ? 1 : 0);
    out.assign(around.begin(), front);
    try {
        for (const fragment & one : partition(text, size, parse_special)) {
            if (one.token >= 0) {
                out.push_back(one.token);
            } else {
                // After a special token or at the start, a fragment is tokenized anew, as in llama.cpp.
                append(text + one.begin, one.end - one.begin, false, out);
            }
        }
    } catch (const std::out_of_range &) {
        list.problem = "the vocabulary has no token for a byte of the text";
        return;
    }
    if (add_special && llama_vocab_get_add_bos(vocab) && out.size() > 1 && out[0] == out[1] && out[0] == llama_vocab_bos(vocab)) {
        log_warning("tokenize: the text begins with a BOS token, and one was added before it\n");
    }
    out.insert(out.end(), front, around.end());
    const llama_token n_vocab = llama_vocab_n_tokens(vocab);
    if (std::any_of(out.begin(), out.end(), [=](llama_token token) { return token < 0 || token >= n_vocab; })) {
        list.problem = "the vocabulary has no token for a part of the text, and no unknown token to stand for it";
    }
}

int32_t read_vocab(const llama_vocab * vocab, text_vocab & out) noexcept {
    return guarded_void([&] { out = text_vocab(vocab); });
}

int32_t tokenize(const text_vocab & vocab, const char * text, size_t size, bool add_special, bool parse_special,
                 token_list & out) noexcept {
    return guarded_void([&] { vocab.tokenize(text, size, add_special, parse_special, out); });
}

int32_t tokenize_whole(const llama_vocab * vocab, const char * text, size_t size, bool add_special, bool parse_special,
                       std::vector<llama_token> & out) noexcept {
    return guarded_void([&] {
        out.resize(4 * size + 8);
        out.resize(std::max(0, llama_tokenize(vocab, text, static_cast<int32_t>(size), out.data(),
                                              static_cast<int32_t>(out.size()), add_special, parse_special)));
    });
}

int32_t detokenize(const llama_vocab * vocab, const std::vector<llama_token> & tokens, bool remove_special,
                   bool unparse_special, size_t limit, std::string & out) noexcept {
    return guarded<int32_t>(CAUGHT, [&] {
        size_t size = 0;
        for (const llama_token token : tokens) {
            size += std::strlen(llama_vocab_get_text(vocab, token));
        }
        if (size > INT32_MAX) {
            return 0;  // llama.cpp counts bytes in 32 bits
        }
        for (;;) {
            out.resize(size);
            const int32_t n = llama_detokenize(vocab, tokens.data(), static_cast<int32_t>(tokens.size()), out.data(),
                                               static_cast<int32_t>(size), remove_special, unparse_special);
            if (n >= 0) {
                out.resize(n);
                return int32_t(out.size() <= limit);
            }
            size = static_cast<size_t>(-static_cast<int64_t>(n));
        }
    });
}

int32_t token_to_piece(const llama_vocab * vocab, llama_token token, char * out, int32_t room, bool special) noexcept {
    return guarded<int32_t>(CAUGHT, [&] { return llama_token_to_piece(vocab, token, out, room, 0, special); });
}

}  // namespace pykv
