// What a vocabulary in a file's header can be that a load would not come back from.
//
// llama.cpp reads the tokenizers of some kinds into trees, by recursion, and tokenizes "\n" at once.
#include <algorithm>
#include <bitset>
#include <cstdio>
#include <cstring>
#include <vector>

#include "gguf.h"
#include "guarded.h"

namespace pykv {

namespace {

// Of a tree as deep as its longest token; real ones stay far below.
constexpr size_t TOKEN_BYTES_MAX = 1024;
// WordPiece copies, for each character, what follows it in every length up to this. Words of more than 100
// characters are unknown ones to the libraries that make such vocabularies.
constexpr size_t WORD_BYTES_MAX = 400;
// PLaMo's table has a row for each start of each end of a token, and is built from copies of them.
constexpr uint64_t CUBES_MAX = uint64_t(1) << 32;
// In a file that holds no embeddings of them.
constexpr uint64_t UNSEEN_TOKENS_MAX = uint64_t(1) << 24;

// The bytes of a token as llama.cpp reads them: \t, \n, \r and \xHH stand for one.
std::string unescape(const char * token) {
    std::string out;
    for (const char * c = token; *c; ++c) {
        if (*c != '\\') {
            out.push_back(*c);
            continue;
        }
        if (*++c == '\0') {
            break;
        }
        if (*c == 'x') {
            if (c[1] == '\0' || c[2] == '\0') {
                break;
            }
            const auto digit = [](char d) { return d >= 'a' ? d - 'a' + 10 : d - '0'; };
            out.push_back(static_cast<char>(digit(c[1]) * 16 + digit(c[2])));
            c += 2;
        } else {
            out.push_back(*c == 't' ? '\t' : *c == 'n' ? '\n' : *c == 'r' ? '\r' : *c);
        }
    }
    return out;
}

// From a byte that begins tokens without being one, no token may match: the search would never end.
std::string find_gap(const gguf_context * header, int64_t tokens) {
    std::bitset<256> begins, whole;
    for (size_t i = 0; i < gguf_get_arr_n(header, tokens); ++i) {
        const char * raw = gguf_get_arr_str(header, tokens, i);
        // llama.cpp gives a name to a token that has none.
        const std::string token = *raw ? unescape(raw) : "[EMPTY_" + std::to_string(i) + "]";
        if (!token.empty()) {
            begins.set(static_cast<uint8_t>(token[0]));
            whole.set(static_cast<uint8_t>(token[0]), whole[static_cast<uint8_t>(token[0])] || token.size() == 1);
        }
    }
    for (int byte = 0; byte < 256; ++byte) {
        if (begins[byte] && !whole[byte]) {
            char name[8];
            std::snprintf(name, sizeof name, "\\x%02x", byte);
            return std::string("tokenizer.ggml.tokens has no token for the byte ") + name + ", with which others begin";
        }
    }
    return {};
}

// The table that replaces characters, a tree in an array: one that loops may take each character of a
// text to its end.
std::string find_loop(const gguf_context * header) {
    const char *  name = "tokenizer.ggml.precompiled_charsmap";
    const int64_t key  = gguf_find_key(header, name);
    if (key < 0 || gguf_get_kv_type(header, key) != GGUF_TYPE_ARRAY) {
        return {};
    }
    const gguf_type type = gguf_get_arr_type(header, key);
    const size_t    size = gguf_get_arr_n(header, key);
    if ((type != GGUF_TYPE_INT8 && type != GGUF_TYPE_UINT8) || size < 4) {
        return {};  // the load says so
    }
    const char * data = static_cast<const char *>(gguf_get_arr_data(header, key));
    uint32_t     n    = 0;
    std::memcpy(&n, data, sizeof n);
    if (n > size - 4) {
        return {};
    }
    std::vector<uint32_t> nodes(n / 4);
    std::memcpy(nodes.data(), data + 4, nodes.size() * 4);
    const auto base = [&](size_t i) { return (nodes[i] >> 10) << ((nodes[i] & (1U << 9)) >> 6); };
    // Branches may grow together again, as real ones do: what must not be is a way that comes back.
    constexpr uint32_t UNSEEN = UINT32_MAX, OPEN = UINT32_MAX - 1;
    struct place {
        uint32_t node, base, next, height;
    };
    std::vector<uint32_t> heights(nodes.size(), UNSEEN);
    std::vector<place>    path;
    if (!nodes.empty()) {
        path.push_back({0, base(0), 1, 0});
    }
    while (!path.empty()) {
        place & at = path.back();
        if (at.next < 256) {
            const uint32_t c     = at.next++;
            const uint32_t child = at.base ^ c;
            if (child >= nodes.size() || (nodes[child] & ((1U << 31) | 0xFF)) != c) {
                continue;
            }
            if (heights[child] == OPEN || path.size() > TOKEN_BYTES_MAX) {
                return std::string(name) + " comes back to where it was, or is deeper than " + std::to_string(TOKEN_BYTES_MAX);
            }
            if (heights[child] == UNSEEN) {
                heights[child] = OPEN;
                path.push_back({child, child ^ base(child), 1, 0});
            } else {
                at.height = std::max(at.height, heights[child] + 1);
            }
        } else {
            const uint32_t height = at.height;
            heights[at.node]      = height;
            path.pop_back();
            if (!path.empty()) {
                path.back().height = std::max(path.back().height, height + 1);
            }
        }
    }
    return {};
}

// Without tokens a number says how many there are, and makes so many before a tensor is looked at.
std::string size_problem(const gguf_context * header) {
    const int64_t arch = gguf_find_key(header, "general.architecture");
    if (arch < 0 || gguf_get_kv_type(header, arch) != GGUF_TYPE_STRING) {
        return {};
    }
    const std::string key = gguf_get_val_str(header, arch) + std::string(".vocab_size");
    const int64_t     id  = gguf_find_key(header, key.c_str());
    if (id < 0 || gguf_get_kv_type(header, id) != GGUF_TYPE_UINT32) {
        return {};
    }
    // A token's row has a byte at least.
    const int64_t  rows = gguf_find_tensor(header, "token_embd.weight");
    const uint64_t most = rows < 0 ? UNSEEN_TOKENS_MAX : gguf_get_tensor_size(header, rows);
    const uint64_t n    = gguf_get_val_u32(header, id);
    if (n > most) {
        return key + " is " + std::to_string(n) + ": this file has room for " + std::to_string(most);
    }
    return {};
}

}  // namespace

std::string vocab_problem(const gguf_context * header) {
    const int64_t kind = gguf_find_key(header, "tokenizer.ggml.model");
    if (kind < 0 || gguf_get_kv_type(header, kind) != GGUF_TYPE_STRING) {
        return {};  // the load says what is wrong
    }
    const std::string model = gguf_get_val_str(header, kind);
    if (model == "none" || model == "no_vocab") {
        return size_problem(header);
    }
    const int64_t tokens = gguf_find_key(header, "tokenizer.ggml.tokens");
    if (tokens < 0 || gguf_get_kv_type(header, tokens) != GGUF_TYPE_ARRAY ||
        gguf_get_arr_type(header, tokens) != GGUF_TYPE_STRING) {
        return {};  // the load says what is wrong
    }
    const size_t n = gguf_get_arr_n(header, tokens);
    if (n == 0) {
        return "tokenizer.ggml.tokens is empty";
    }
    const bool   is_tree = model == "rwkv" || model == "t5" || model == "bert";
    const size_t most    = model == "bert" ? WORD_BYTES_MAX : TOKEN_BYTES_MAX;
    uint64_t     cubes   = 0;
    for (size_t i = 0; i < n && (is_tree || model == "plamo2"); ++i) {
        const uint64_t size = std::strlen(gguf_get_arr_str(header, tokens, i));
        if (size > most) {
            return "tokenizer.ggml.tokens[" + std::to_string(i) + "] has " + std::to_string(size) +
                   " bytes: the limit is " + std::to_string(most);
        }
        cubes += size * size * size;
        if (model == "plamo2" && cubes > CUBES_MAX) {
            return "tokenizer.ggml.tokens has too many long tokens: the cubes of their bytes pass 2^32 at " + std::to_string(i);
        }
    }
    return model == "rwkv" ? find_gap(header, tokens) : model == "t5" ? find_loop(header) : std::string();
}

}  // namespace pykv
