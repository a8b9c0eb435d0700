// The grammar of a sampler. Runs llama.cpp's parser rule by rule, because its `parse` prints errors to stderr without
// returning them.
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "llama-cpp.h"
#include "llama-grammar.h"
#include "stages.h"

namespace pykv {

namespace {

const char * skip_space(const char * pos) {
    while (*pos == ' ' || *pos == '\t' || *pos == '\r' || *pos == '\n' || *pos == '#') {
        if (*pos == '#') {
            while (*pos && *pos != '\r' && *pos != '\n') {
                pos++;
            }
        } else {
            pos++;
        }
    }
    return pos;
}

// Most of the parser's messages end with " at " and the remaining text.
void locate(const std::string & text, grammar_fault & fault) {
    if (fault.why == "unexpected end of input") {
        fault.at = static_cast<int64_t>(text.size());
    } else if (fault.why.rfind("sto", 0) == 0) {  // std::stoul and std::stoull
        fault.why = "a number is too large";
    }
    for (size_t found = fault.why.find(" at "); found != std::string::npos; found = fault.why.find(" at ", found + 1)) {
        const std::string rest = fault.why.substr(found + 4);
        if (rest.size() <= text.size() && text.compare(text.size() - rest.size(), rest.size(), rest) == 0) {
            fault.at = static_cast<int64_t>(text.size() - rest.size());
            fault.why.resize(found);
            return;
        }
    }
}

// Start of each rule in the text, with the number of names known after it.
using rule_places = std::vector<std::pair<int64_t, size_t>>;

void find_undefined(const llama_grammar_parser & parser, const std::string & text, const rule_places & places,
                    grammar_fault & fault) {
    for (const auto & [name, id] : parser.symbol_ids) {
        if (id < parser.rules.size() && !parser.rules[id].empty()) {
            continue;
        }
        fault.why = "rule '" + name + "' is not defined";
        for (const auto & [begin, known] : places) {
            if (id < known) {
                const size_t found = text.find(name, static_cast<size_t>(begin));
                fault.at = found == std::string::npos ? begin : static_cast<int64_t>(found);
                return;
            }
        }
        return;
    }
}

// llama.cpp keeps a stack for each way to skip elements that may be empty, and compares all stacks at each character:
// with 2,500 of them, as of (("a"?){0,50}){0,50}, a token takes minutes.
constexpr double WAYS_MAX = 500;

struct ways {
    double n = -1;         // to skip elements at the start of a rule; -1 until it is known
    bool   empty = false;  // whether the rule may be empty
};

const ways & count_ways(const llama_grammar_rules & rules, std::vector<ways> & known, size_t id) {
    ways & it = known[id];
    if (it.n >= 0) {
        return it;
    }
    it.n = 0;  // llama.cpp refuses rules that begin with themselves
    double here = 0;
    bool   skips = true;
    for (const auto & element : rules[id]) {
        if (element.type == LLAMA_GRETYPE_ALT || element.type == LLAMA_GRETYPE_END) {
            it.n = std::max(it.n, here);
            it.empty = it.empty || skips;
            here = 0;
            skips = true;
        } else if (skips && element.type == LLAMA_GRETYPE_RULE_REF && element.value < rules.size()) {
            const ways & inner = count_ways(rules, known, element.value);
            here += std::max(inner.n, 1.0);
            skips = inner.empty;
        } else if (skips) {
            here += 1;
            skips = false;
        }
    }
    return it;
}

double most_ways(const llama_grammar_rules & rules) {
    std::vector<ways> known(rules.size());
    double            most = 0;
    for (size_t id = 0; id < rules.size(); id++) {
        most = std::max(most, count_ways(rules, known, id).n);
    }
    return most;
}

// Bounds lazy grammars: llama.cpp keeps all text before the trigger and searches it again after each token.
struct grammar_stage {
    static constexpr const char * name = "grammar";
    static constexpr size_t TEXT_MAX = 1024;
    static constexpr size_t TEXT_KEPT = 256;  // longer than any trigger

    const llama_vocab *      vocab;
    std::string              text, root, prefix;
    std::vector<std::string> triggers;

    struct free_grammar {
        void operator()(llama_grammar * it) const { llama_grammar_free_impl(it); }
    };
    std::unique_ptr<llama_grammar, free_grammar> grammar;

    grammar_stage(const llama_vocab * v, const char * t, const char * r, const char * p,
                 const std::vector<std::string> & found)
        : vocab(v), text(t), root(r), prefix(p), triggers(found) {
        reset();
    }
    grammar_stage(grammar_stage &&) = default;
    grammar_stage(const grammar_stage & other)
        : vocab(other.vocab), text(other.text), root(other.root), prefix(other.prefix), triggers(other.triggers),
          grammar(llama_grammar_clone_impl(*other.grammar)) {}

    void reset() {
        std::vector<const char *> patterns;
        for (const auto & trigger : triggers) {
            patterns.push_back(trigger.c_str());
        }
        grammar.reset(llama_grammar_init_impl(vocab, text.c_str(), root.c_str(), !triggers.empty(), patterns.data(),
                                              patterns.size(), nullptr, 0));
        if (grammar && !prefix.empty()) {
            llama_grammar_accept_str(*grammar, prefix);
        }
    }

    void apply(llama_token_data_array & found) { llama_grammar_apply_impl(*grammar, &found); }

    void accept(llama_token token) {
        llama_grammar_accept_impl(*grammar, token);
        std::string & waiting = grammar->trigger_buffer;
        if (!grammar->awaiting_trigger || waiting.size() <= TEXT_MAX) {
            return;
        }
        auto & tokens = grammar->trigger_buffer_positions;
        auto   first = tokens.begin();
        while (first != tokens.end() && first->second.first + TEXT_KEPT < waiting.size()) {
            ++first;
        }
        if (first == tokens.end()) {
            return;
        }
        // A placeholder for the dropped beginning, so that a pattern with ^ does not match.
        const size_t gone = first->second.first - 1;
        waiting.erase(0, gone);
        waiting[0] = '\x01';
        tokens.erase(tokens.begin(), first);
        for (auto & one : tokens) {
            one.second.first -= gone;
            one.second.second -= gone;
        }
    }
};

}  // namespace

llama_sampler * sampler_grammar(const llama_vocab * vocab, const char * grammar, const char * root, const char * prefix,
                                const std::vector<std::string> & triggers) noexcept {
    return guarded<llama_sampler *>(nullptr, [&] {
        grammar_stage it(vocab, grammar, root, prefix, triggers);
        return it.grammar ? own_sampler<grammar_stage>::make(std::move(it)) : nullptr;
    });
}

int32_t find_grammar_fault(const llama_vocab * vocab, const char * grammar, grammar_fault & fault) noexcept {
    return guarded_void([&] {
        const std::string    text(grammar);
        llama_grammar_parser parser(vocab);
        rule_places places;
        const char * const begin = text.c_str();
        for (const char * pos = skip_space(begin); *pos;) {
            fault.at = pos - begin;
            try {
                pos = parser.parse_rule(pos);
            } catch (const std::exception & error) {
                fault.why = error.what();
                locate(text, fault);
                return;
            }
            places.emplace_back(fault.at, parser.symbol_ids.size());
        }
        fault.at = -1;
        if (places.empty()) {
            fault.why = "there is no rule in it";
        }
        fault.rules.resize(parser.rules.size());
        for (const auto & [symbol, id] : parser.symbol_ids) {
            if (id < fault.rules.size()) {
                // Parenthesised groups become "name_7"; names in the text have no underscore.
                fault.rules[id] = symbol.substr(0, symbol.find('_'));
            }
        }
        find_undefined(parser, text, places, fault);
        if (fault.why.empty() && most_ways(parser.rules) > WAYS_MAX) {
            fault.why = "repeated parts that may be empty are nested too deeply";
        }
    });
}

}  // namespace pykv
