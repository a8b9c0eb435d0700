// Functions that common/ calls from files that are not built: string helpers, and functions that need a model, a
// logger or a terminal. Chat formats need no model, and nothing is logged.
#include <cstdarg>
#include <cstdio>
#include <stdexcept>

#include "common.h"
#include "log.h"

std::string string_join(const std::vector<std::string> & values, const std::string & separator) {
    std::string joined;
    for (size_t i = 0; i < values.size(); i++) {
        joined += (i ? separator : "") + values[i];
    }
    return joined;
}

std::vector<std::string> string_split(const std::string & text, const std::string & delimiter) {
    std::vector<std::string> parts;
    size_t begin = 0;
    for (size_t end; (end = text.find(delimiter, begin)) != std::string::npos; begin = end + delimiter.size()) {
        parts.push_back(text.substr(begin, end - begin));
    }
    parts.push_back(text.substr(begin));
    return parts;
}

std::string string_repeat(const std::string & text, size_t n) {
    std::string repeated;
    for (size_t i = 0; i < n; i++) {
        repeated += text;
    }
    return repeated;
}

void string_replace_all(std::string & text, const std::string & search, const std::string & replace) {
    if (search.empty()) {
        return;
    }
    for (size_t at = 0; (at = text.find(search, at)) != std::string::npos; at += replace.size()) {
        text.replace(at, search.size(), replace);
    }
}

int common_log_get_verbosity_thold() {
    return -1;  // below every level
}

common_log * common_log_main() {
    return nullptr;
}

void common_log_add(common_log *, ggml_log_level, const char *, ...) {}

// Failed assertions throw here instead of ending the process.
extern "C" void ggml_abort(const char * file, int line, const char * format, ...) {
    char    text[512];
    va_list arguments;
    va_start(arguments, format);
    const int n = std::snprintf(text, sizeof(text), "%s:%d: ", file, line);
    std::vsnprintf(text + n, sizeof(text) - static_cast<size_t>(n), format, arguments);
    va_end(arguments);
    throw std::logic_error(text);
}

namespace {

[[noreturn]] void no_model() {
    throw std::logic_error("chat formats are found without a model");
}

}  // namespace

std::string common_token_to_piece(const llama_vocab *, llama_token, bool) {
    no_model();
}

std::vector<llama_token> common_tokenize(const llama_vocab *, const std::string &, bool, bool) {
    no_model();
}

const char * llama_model_chat_template(const llama_model *, const char *) {
    no_model();
}

int32_t llama_chat_apply_template(const char *, const llama_chat_message *, size_t, bool, char *, int32_t) {
    no_model();
}

const llama_vocab * llama_model_get_vocab(const llama_model *) {
    no_model();
}

llama_token llama_vocab_bos(const llama_vocab *) {
    no_model();
}

llama_token llama_vocab_eos(const llama_vocab *) {
    no_model();
}

bool llama_vocab_get_add_bos(const llama_vocab *) {
    no_model();
}

bool llama_vocab_get_add_eos(const llama_vocab *) {
    no_model();
}
