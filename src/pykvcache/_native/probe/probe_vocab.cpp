// SentencePiece's merges, equal to llama.cpp's, which copies all earlier tokens for each character that is written as
// bytes.
#include <algorithm>
#include <queue>

#include "llama-vocab.h"
#include "text.h"

namespace pykv {

namespace {

struct symbol {
    int    prev, next;
    size_t begin, size;
};

struct pair {
    int    left, right;
    float  score;
    size_t size;

    // The queue pops its greatest element: highest score, then leftmost.
    bool operator<(const pair & other) const {
        return score < other.score || (score == other.score && left > other.left);
    }
};

size_t character_size(char lead) {
    const auto byte = static_cast<uint8_t>(lead);
    return byte < 0xC0 ? 1 : byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
}

}  // namespace

void tokenize_spm(const llama_vocab & vocab, const char * raw, size_t size, std::vector<llama_token> & out) {
    std::string text = vocab.get_add_space_prefix() ? "\xE2\x96\x81" : "";
    for (size_t i = 0; i < size; ++i) {
        if (raw[i] == ' ') {
            text += "\xE2\x96\x81";
        } else {
            text += raw[i];
        }
    }
    std::vector<symbol> symbols;
    for (size_t at = 0; at < text.size();) {
        const int    index = static_cast<int>(symbols.size());
        const size_t n     = std::min(character_size(text[at]), text.size() - at);
        symbols.push_back({index - 1, at + n == text.size() ? -1 : index + 1, at, n});
        at += n;
    }
    std::priority_queue<pair> queue;
    std::string               both;
    const auto                add = [&](int left, int right) {
        if (left < 0 || right < 0) {
            return;
        }
        both.assign(text, symbols[left].begin, symbols[left].size + symbols[right].size);
        const llama_token token = vocab.text_to_token(both);
        if (token != LLAMA_TOKEN_NULL) {
            queue.push({left, right, vocab.get_token_data(token).score, both.size()});
        }
    };
    for (int i = 1; i < static_cast<int>(symbols.size()); ++i) {
        add(i - 1, i);
    }
    while (!queue.empty()) {
        const pair best = queue.top();
        queue.pop();
        symbol & left  = symbols[best.left];
        symbol & right = symbols[best.right];
        if (left.size == 0 || right.size == 0 || left.size + right.size != best.size) {
            continue;  // one of the pair was merged since
        }
        left.size += right.size;
        right.size = 0;
        left.next  = right.next;
        if (right.next >= 0) {
            symbols[right.next].prev = best.left;
        }
        add(left.prev, best.left);
        add(best.left, left.next);
    }
    for (int i = symbols.empty() ? -1 : 0; i != -1; i = symbols[i].next) {
        both.assign(text, symbols[i].begin, symbols[i].size);
        const llama_token token = vocab.text_to_token(both);
        if (token != LLAMA_TOKEN_NULL) {
            out.push_back(token);
            continue;
        }
        for (const char byte : both) {
            out.push_back(vocab.byte_to_token(static_cast<uint8_t>(byte)));
        }
    }
}

}  // namespace pykv
