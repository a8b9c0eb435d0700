// Creates and copies samplers. Runs llama.cpp's grammar parser rule by rule, because its `parse`
// prints errors to stderr without returning them.
#include "probe_sampler.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "llama-cpp.h"
#include "llama-grammar.h"

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
struct chat_grammar {
    static constexpr size_t TEXT_MAX = 1024;
    static constexpr size_t TEXT_KEPT = 256;  // longer than any trigger

    const llama_vocab *      vocab;
    std::string              text, root, prefix;
    std::vector<std::string> triggers;

    struct free_grammar {
        void operator()(llama_grammar * it) const { llama_grammar_free_impl(it); }
    };
    std::unique_ptr<llama_grammar, free_grammar> grammar;

    void begin() {
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

chat_grammar & chat_grammar_of(const llama_sampler * sampler) {
    return *static_cast<chat_grammar *>(sampler->ctx);
}

llama_sampler * chat_sampler(std::unique_ptr<chat_grammar> it);

llama_sampler_i chat_grammar_calls() {
    llama_sampler_i calls{};
    calls.name = [](const llama_sampler *) { return "chat-grammar"; };
    calls.accept = [](llama_sampler * self, llama_token token) { chat_grammar_of(self).accept(token); };
    calls.apply = [](llama_sampler * self, llama_token_data_array * found) {
        llama_grammar_apply_impl(*chat_grammar_of(self).grammar, found);
    };
    calls.reset = [](llama_sampler * self) { chat_grammar_of(self).begin(); };
    calls.clone = [](const llama_sampler * self) {
        const chat_grammar & from = chat_grammar_of(self);
        auto it = std::make_unique<chat_grammar>(
            chat_grammar{from.vocab, from.text, from.root, from.prefix, from.triggers, nullptr});
        it->grammar.reset(llama_grammar_clone_impl(*from.grammar));
        return chat_sampler(std::move(it));
    };
    calls.free = [](llama_sampler * self) { delete &chat_grammar_of(self); };
    return calls;
}

llama_sampler * chat_sampler(std::unique_ptr<chat_grammar> it) {
    static llama_sampler_i calls = chat_grammar_calls();
    llama_sampler * const  made = llama_sampler_init(&calls, it.get());
    it.release();  // the sampler frees it
    return made;
}

}  // namespace

llama_sampler * sampler_chat_grammar(const llama_vocab * vocab, const char * grammar, const char * root, const char * prefix,
                                     const std::vector<std::string> & triggers) noexcept {
    return guarded<llama_sampler *>(nullptr, [&] {
        auto it = std::make_unique<chat_grammar>(chat_grammar{vocab, grammar, root, prefix, triggers, nullptr});
        it->begin();
        return it->grammar ? chat_sampler(std::move(it)) : nullptr;
    });
}

llama_sampler * sampler_clone(const llama_sampler * sampler) noexcept {
    return guarded<llama_sampler *>(nullptr, [&] { return llama_sampler_clone(sampler); });
}

int32_t sampler_reset(llama_sampler * sampler) noexcept {
    return guarded_void([&] { llama_sampler_reset(sampler); });
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
            } catch (const std::bad_alloc &) {
                throw;
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
        find_undefined(parser, text, places, fault);
        if (fault.why.empty() && most_ways(parser.rules) > WAYS_MAX) {
            fault.why = "repeated parts that may be empty are nested too deeply";
        }
    });
}

int32_t grammar_rule_name(const llama_vocab * vocab, const char * grammar, uint32_t index, std::string & name) noexcept {
    return guarded_void([&] {
        llama_grammar_parser parser(vocab);
        for (const char * pos = skip_space(grammar); *pos;) {
            pos = parser.parse_rule(pos);
        }
        for (const auto & [symbol, id] : parser.symbol_ids) {
            if (id == index) {
                // Parenthesised groups become "name_7"; names in the text have no underscore.
                name = symbol.substr(0, symbol.find('_'));
            }
        }
    });
}

}  // namespace pykv
