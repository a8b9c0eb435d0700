#include "chat_format.h"

#include "chat.h"
#include "json-schema-to-grammar.h"
#include "json.h"

namespace pykv {

namespace {

common_chat_templates_inputs inputs_of(const common_json & request) {
    common_chat_templates_inputs inputs;
    inputs.messages            = common_chat_msgs_parse_oaicompat(request.at("messages"));
    inputs.tools               = common_chat_tools_parse_oaicompat(request.at("tools"));
    inputs.tool_choice         = common_chat_tool_choice_parse_oaicompat(request.at("tool_choice"));
    inputs.parallel_tool_calls = request.at("parallel_tool_calls").get<bool>();
    inputs.enable_thinking     = request.at("enable_thinking").get<bool>();
    inputs.reasoning_format    = COMMON_REASONING_FORMAT_AUTO;
    if (!request.at("json_schema").is_null()) {
        inputs.json_schema = request.at("json_schema").dump();
    }
    for (const auto & [name, value] : request.at("variables").items()) {
        inputs.chat_template_kwargs[name] = value.dump();
    }
    return inputs;
}

// The grammar begins where the pattern's first group matches, or the whole pattern if it has none.
std::string trigger_pattern(const common_grammar_trigger & trigger) {
    if (trigger.type != COMMON_GRAMMAR_TRIGGER_TYPE_WORD) {
        return trigger.value;
    }
    std::string pattern;
    for (const char c : trigger.value) {
        if (std::string_view(".^$|()*+?[]{}\\/-").find(c) != std::string_view::npos) {
            pattern += '\\';
        }
        pattern += c;
    }
    return pattern;
}

}  // namespace

std::string schema_grammar(const std::string & schema) {
    return json_schema_to_grammar(common_json::parse(schema), true);
}

struct chat_format::parser {
    common_chat_parser_params params;

    explicit parser(const common_chat_params & found) : params(found) {
        params.reasoning_format = COMMON_REASONING_FORMAT_AUTO;
        params.parser.load(found.parser);
    }
};

chat_format::chat_format(const std::string & source, const std::string & bos, const std::string & eos,
                         const std::string & request) {
    const auto templates = common_chat_templates_init(nullptr, source, bos, eos);
    const auto found     = common_chat_templates_apply(templates.get(), inputs_of(common_json::parse(request)));
    parser_              = std::make_unique<const parser>(found);

    common_json triggers = common_json::array();
    for (const auto & trigger : found.grammar_triggers) {
        triggers.push_back(trigger_pattern(trigger));
    }
    const common_json facts = {
        { "generation_prompt", found.generation_prompt },
        { "grammar",           found.grammar           },
        { "lazy",              found.grammar_lazy      },
        { "triggers",          triggers                },
        { "stop",              found.additional_stops  },
        { "thinking",          found.supports_thinking },
    };
    facts_ = facts.dump_safe();
}

chat_format::~chat_format() = default;

std::string chat_format::parse(const std::string & text, bool is_partial) const {
    const common_chat_msg message = common_chat_parse(text, is_partial, parser_->params);
    common_json           calls   = common_json::array();
    for (const auto & call : message.tool_calls) {
        calls.push_back({
            { "name",      call.name      },
            { "arguments", call.arguments },
            { "id",        call.id        },
        });
    }
    const common_json found = {
        { "content",    message.content           },
        { "reasoning",  message.reasoning_content },
        { "tool_calls", calls                     },
    };
    return found.dump_safe();
}

}  // namespace pykv
