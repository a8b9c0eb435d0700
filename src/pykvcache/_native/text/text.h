// Tokenizes text: finds special tokens, as llama.cpp does in quadratic time, and calls llama_tokenize on the fragments
// between them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "llama.h"

namespace pykv {

// A fragment of text: a special token (`token` >= 0), or the bytes [begin, end).
struct fragment {
    size_t      begin, end;
    llama_token token;
};

struct token_list {
    std::vector<llama_token> tokens;
    std::string              problem;  // what the vocabulary lacks; "" on success
};

class text_vocab {
public:
    text_vocab() = default;
    explicit text_vocab(const llama_vocab * vocab);

    // Split a text at special tokens, longest first, like llama.cpp.
    std::vector<fragment> partition(const char * text, size_t size, bool parse_special) const;

    void tokenize(const char * text, size_t size, bool add_special, bool parse_special, token_list & list) const;

private:
    struct special {
        std::string text;
        llama_token token;
        uint32_t    rank;  // in llama.cpp's order
        bool        always, lstrip, rstrip;
    };

    // Best special token in text[at, end) that begins at `at`; null if none.
    const special * find(const char * text, size_t at, size_t end, bool parse_special) const;
    void            append(const char * text, size_t size, bool add_special, std::vector<llama_token> & out) const;

    const llama_vocab *   vocab = nullptr;
    std::vector<special>  sorted;         // by text
    std::vector<uint32_t> by_rank;        // positions in `sorted`
    uint32_t              first[257] = {};  // start of the texts of each first byte
};

// SentencePiece's tokens of a text without special tokens.
void tokenize_spm(const llama_vocab & vocab, const char * text, size_t size, std::vector<llama_token> & out);

// llama_detokenize into at most `limit` bytes; false if the text is longer.
bool detokenize_to(const llama_vocab * vocab, const std::vector<llama_token> & tokens, bool remove_special,
                   bool unparse_special, size_t limit, std::string & out);

}  // namespace pykv
