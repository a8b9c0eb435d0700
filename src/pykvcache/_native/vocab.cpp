// llama.cpp's tokenizers, which look on their way through a text whether they are to go on (interrupt.h).
//
// llama-vocab.cpp is compiled here, inside the library `llama`. For each character or pair all of its
// tokenizers look into a map or a tree, or at a length, so that none gets far without it.
#include "llama-vocab.h"

#include "ggml.h"
#include "gguf.h"
#include "llama-impl.h"
#include "llama-model-loader.h"
#include "unicode.h"

#include <algorithm>
#include <cassert>
#include <cctype>
#include <cfloat>
#include <cmath>
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <forward_list>
#include <limits>
#include <map>
#include <queue>
#include <set>
#include <string>
#include <unordered_map>

#include "interrupt.h"

namespace {

// Words of text that is not written in GPT-2's characters may have spaces. Each becomes a word: no merge has
// one, and llama.cpp asserts that where it looks for a merge.
std::vector<std::string> words_without_spaces(const std::string & text, const std::vector<std::string> & patterns,
                                              bool byte_encode) {
    std::vector<std::string> words = unicode_regex_split(text, patterns, byte_encode);
    if (byte_encode || text.find(' ') == std::string::npos) {
        return words;
    }
    std::vector<std::string> result;
    result.reserve(words.size());
    for (const std::string & word : words) {
        size_t begin = 0;
        for (size_t at = word.find(' '); at != std::string::npos; at = word.find(' ', begin)) {
            pykv::look();
            if (at > begin) {
                result.push_back(word.substr(begin, at - begin));
            }
            result.emplace_back(" ");
            begin = at + 1;
        }
        if (begin < word.size()) {
            result.push_back(word.substr(begin));
        }
    }
    return result;
}

}  // namespace

#define unicode_regex_split words_without_spaces
#define find(what, ...) find((pykv::look(), what), ##__VA_ARGS__)
#define unicode_cpt_to_utf8(cpt) unicode_cpt_to_utf8((pykv::look(), cpt))
#define unicode_len_utf8(byte) unicode_len_utf8((pykv::look(), byte))
#include "llama-vocab.cpp"
