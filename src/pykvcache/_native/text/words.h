// Words of a text by llama.cpp's patterns, with our matcher or std::regex; tests compare both.
#pragma once

#include <string>
#include <vector>

namespace pykv {

std::vector<std::string> split_text(const std::string & text, const std::vector<std::string> & patterns, bool byte_encode,
                                    bool with_std_regex);

}  // namespace pykv
