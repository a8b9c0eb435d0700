// Two uses of llama.cpp's common/ library: grammars of JSON schemas, and the message format of a chat template.
// JSON in, JSON out; errors are std::exception.
#pragma once

#include <memory>
#include <string>

namespace pykv {

// Returns a GBNF grammar of the texts that match a JSON schema.
std::string schema_grammar(const std::string & schema);

// Format of a template's assistant messages: markers of reasoning and tool calls, grammar of tool calls, message
// parser. Immutable: any number of threads may parse at once.
class chat_format {
  public:
    // `request`: {"messages", "tools", "tool_choice", "parallel_tool_calls", "json_schema", "enable_thinking", "variables"}.
    chat_format(const std::string & source, const std::string & bos, const std::string & eos, const std::string & request);
    ~chat_format();

    // {"generation_prompt", "grammar", "lazy", "triggers", "stop", "thinking"}.
    const std::string & facts() const { return facts_; }
    // {"content", "reasoning", "tool_calls"}; for a partial text only the parts that are already certain.
    std::string parse(const std::string & text, bool is_partial) const;

  private:
    struct parser;
    std::unique_ptr<const parser> parser_;
    std::string                   facts_;
};

}  // namespace pykv
