// SentencePiece's pairs, merged as llama.cpp merges them, in time that grows with the text; and tokens
// back to text.
//
// llama.cpp's own session reserves room anew for each character that is written as bytes, and copies
// all tokens before it each time.
#include <queue>
#include <stdexcept>

#include "interrupt.h"
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

    // Last in the queue's order is first out: the highest score, of equal ones the leftmost.
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
        look_at(i);
        if (raw[i] == ' ') {
            text += "\xE2\x96\x81";
        } else {
            text += raw[i];
        }
    }
    std::vector<symbol> symbols;
    for (size_t at = 0; at < text.size();) {
        look();
        const int    index = static_cast<int>(symbols.size());
        const size_t n     = std::min(character_size(text[at]), text.size() - at);
        symbols.push_back({index - 1, at + n == text.size() ? -1 : index + 1, at, n});
        at += n;
    }
    std::priority_queue<pair> queue;
    std::string               both;
    const auto                add = [&](int left, int right) {
        look();
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
            continue;  // one of them was merged since
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
        look();
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

namespace {

// The text without the spaces of which `drops(i)` says so: the last one before byte i, or the one there.
template <class Drops> void drop_spaces(std::string & text, Drops && drops) {
    std::string kept;
    kept.reserve(text.size());
    for (size_t i = 0; i < text.size(); ++i) {
        look_at(i);
        const bool after_space = i > 0 && text[i - 1] == ' ';
        size_t     skipped     = 0;
        if (after_space && drops(i, skipped)) {
            kept.pop_back();
        }
        kept.push_back(text[i]);
        i += skipped;
    }
    text = std::move(kept);
}

// What "clean_up_tokenization_spaces" means: none before punctuation, around a single apostrophe, before 's.
void clean_spaces(std::string & text) {
    const auto at = [&](size_t i) { return i < text.size() ? text[i] : '\0'; };
    drop_spaces(text, [&](size_t i, size_t &) { return text[i] == '?' || text[i] == '!' || text[i] == '.' || text[i] == ','; });
    drop_spaces(text, [&](size_t i, size_t & skipped) {
        skipped = text[i] == '\'' && at(i + 1) == ' ';
        return skipped != 0;
    });
    drop_spaces(text, [&](size_t i, size_t &) {
        const char a = at(i + 1), b = at(i + 2);
        return text[i] == '\'' && (a == 's' || a == 'm' || ((a == 'r' || a == 'v') && b == 'e'));
    });
}

}  // namespace

bool detokenize_to(const llama_vocab & vocab, const std::vector<llama_token> & tokens, bool remove_special,
                   bool unparse_special, size_t limit, std::string & out) {
    auto at = tokens.begin(), end = tokens.end();
    bool remove_space = vocab.get_add_space_prefix();
    if (remove_special && vocab.get_add_bos() && at != end && *at == vocab.token_bos()) {
        remove_space = false;
        ++at;
    }
    if (remove_special && vocab.get_add_eos() && at != end && end[-1] == vocab.token_eos()) {
        --end;
    }
    std::string piece(64, '\0');
    for (; at != end; ++at, remove_space = false) {
        look();
        int32_t n = vocab.token_to_piece(*at, piece.data(), static_cast<int32_t>(piece.size()), remove_space, unparse_special);
        if (n < 0) {
            piece.resize(static_cast<size_t>(-static_cast<int64_t>(n)));
            n = vocab.token_to_piece(*at, piece.data(), static_cast<int32_t>(piece.size()), remove_space, unparse_special);
        }
        out.append(piece, 0, static_cast<size_t>(std::max(n, 0)));
        if (out.size() > limit) {
            return false;
        }
    }
    if (vocab.get_clean_spaces()) {
        clean_spaces(out);
    }
    return true;
}

}  // namespace pykv
