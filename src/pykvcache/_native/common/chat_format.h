// llama.cpp's common/ library, of which two things are used: grammars of JSON schemas, and how the messages of a chat
// template are written. JSON in, JSON out; a failure is a std::exception.
#pragma once

#include <memory>
#include <string>

namespace pykv {

// A GBNF grammar of the texts that a JSON schema allows.
std::string schema_grammar(const std::string & schema);

// How a template's assistant messages are written: markers of reasoning and tool calls, the grammar of tool calls, and
// the parser of a message. Constant: any number of threads may parse at once.
class chat_format {
  public:
    // `request`: {"messages", "tools", "tool_choice", "parallel_tool_calls", "json_schema", "enable_thinking", "variables"}.
    chat_format(const std::string & source, const std::string & bos, const std::string & eos, const std::string & request);
    ~chat_format();

    // {"generation_prompt", "grammar", "lazy", "triggers", "stop", "thinking"}.
    const std::string & facts() const { return facts_; }
    // {"content", "reasoning", "tool_calls"}; of a partial text what is certain so far.
    std::string parse(const std::string & text, bool is_partial) const;

  private:
    struct parser;
    std::unique_ptr<const parser> parser_;
    std::string                   facts_;
};

}  // namespace pykv
