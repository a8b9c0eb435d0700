// The words of a text by llama.cpp's patterns, by our matcher or by std::regex: tests compare the two.
#pragma once

#include <string>
#include <vector>

namespace pykv {

std::vector<std::string> split_text(const std::string & text, const std::vector<std::string> & patterns, bool byte_encode,
                                    bool with_std_regex);

}  // namespace pykv
