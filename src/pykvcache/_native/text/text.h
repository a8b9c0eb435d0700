// Tokenizes text: finds special tokens, as llama.cpp does in quadratic time, and calls llama_tokenize on the fragments
// between them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "llama.h"

namespace pykv {

struct token_list {
    std::vector<llama_token> tokens;
    std::string              problem;  // what the vocabulary lacks; "" on success
};

class text_vocab {
public:
    text_vocab() = default;
    explicit text_vocab(const llama_vocab * vocab);

    void tokenize(const char * text, size_t size, bool add_special, bool parse_special, token_list & list) const;

private:
    // A fragment of text: a special token (`token` >= 0), or the bytes [begin, end).
    struct fragment {
        size_t      begin, end;
        llama_token token;
    };
    struct special {
        std::string text;
        llama_token token;
        uint32_t    rank;  // in llama.cpp's order
        bool        always, lstrip, rstrip;
    };

    // Split a text at special tokens, longest first, like llama.cpp.
    std::vector<fragment> partition(const char * text, size_t size, bool parse_special) const;
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

// Each returns CAUGHT on error.
int32_t read_vocab(const llama_vocab * vocab, text_vocab & out) noexcept;
int32_t tokenize(const text_vocab & vocab, const char * text, size_t size, bool add_special, bool parse_special,
                 token_list & out) noexcept;
// llama.cpp's own version, for tests.
int32_t tokenize_whole(const llama_vocab * vocab, const char * text, size_t size, bool add_special, bool parse_special,
                       std::vector<llama_token> & out) noexcept;
// 0 if the text has more bytes than `limit`.
int32_t detokenize(const llama_vocab * vocab, const std::vector<llama_token> & tokens, bool remove_special,
                   bool unparse_special, size_t limit, std::string & out) noexcept;
int32_t token_to_piece(const llama_vocab * vocab, llama_token token, char * out, int32_t room, bool special) noexcept;

// Words of a text by llama.cpp's patterns, with our matcher or std::regex; tests compare both.
std::vector<std::string> split_text(const std::string & text, const std::vector<std::string> & patterns, bool byte_encode,
                                    bool with_std_regex);

}  // namespace pykv
