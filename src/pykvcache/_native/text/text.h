// Text to tokens: llama_tokenize over the stretches between special tokens, which are found here.
//
// llama.cpp looks for one special token after the other, and walks a list from its start for each
// that it finds: the time grows with the square of their number. The outcome here is the same.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "llama.h"

namespace pykv {

// What a text is made of: a special token (`token` >= 0), or the bytes from `begin` to `end`.
struct fragment {
    size_t      begin, end;
    llama_token token;
};

struct token_list {
    std::vector<llama_token> tokens;
    std::string              problem;  // why there are no tokens: what the vocabulary lacks
};

class text_vocab {
public:
    text_vocab() = default;
    explicit text_vocab(const llama_vocab * vocab);

    // The special tokens of a text, longest first as llama.cpp takes them, and what lies between.
    std::vector<fragment> partition(const char * text, size_t size, bool parse_special) const;

    void tokenize(const char * text, size_t size, bool add_special, bool parse_special, token_list & list) const;

private:
    struct special {
        std::string text;
        llama_token token;
        uint32_t    rank;  // in llama.cpp's order
        bool        always, lstrip, rstrip;
    };

    // The best that begins at text[at] and ends at `end` or before; null if none does.
    const special * find(const char * text, size_t at, size_t end, bool parse_special) const;
    void            append(const char * text, size_t size, bool add_special, std::vector<llama_token> & out) const;

    const llama_vocab *   vocab = nullptr;
    std::vector<special>  sorted;         // by text
    std::vector<uint32_t> by_rank;        // positions in `sorted`
    uint32_t              first[257] = {};  // where the texts begin that begin with a byte
};

// What SentencePiece makes of a text without special tokens.
void tokenize_spm(const llama_vocab & vocab, const char * text, size_t size, std::vector<llama_token> & out);

// llama_detokenize into a text of `limit` bytes at most; false if it is longer.
bool detokenize_to(const llama_vocab * vocab, const std::vector<llama_token> & tokens, bool remove_special,
                   bool unparse_special, size_t limit, std::string & out);

}  // namespace pykv
