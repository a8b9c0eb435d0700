// Bounds the depth of llama.cpp's message parser: it recurses per nesting level, and 4,000 brackets overflow the stack.
#include <stdexcept>

// Its includes come first, so that the macro below applies to its own text only.
#include "common.h"
#include "json-schema-to-grammar.h"
#include "json-schema.h"
#include "json.h"
#include "log.h"
#include "peg-parser.h"
#include "trie.h"
#include "unicode.h"

#include <algorithm>
#include <initializer_list>
#include <map>
#include <memory>
#include <regex>
#include <set>

namespace {

// One level of the recursion; a nested JSON array takes about six.
class parser_level {
  public:
    parser_level() {
        if (depth >= LEVELS_MAX) {
            throw std::length_error("it is nested too deep");
        }
        depth++;
    }
    ~parser_level() { depth--; }
    parser_level(const parser_level &) = delete;
    parser_level & operator=(const parser_level &) = delete;

  private:
    static constexpr int    LEVELS_MAX = 1200;
    static thread_local int depth;
};

thread_local int parser_level::depth = 0;

}  // namespace

// Each level passes here: the executor made in common_peg_arena::parse.
#define exec(...) exec(__VA_ARGS__); const parser_level level
#include "peg-parser.cpp"
