// Which of ggml's CPU code runs: one piece, or copies for several instruction sets (copies.cmake).
//
// Asked before any of it runs: code for instructions that a processor lacks ends the process.
#pragma once

#include <string>
#include <vector>

namespace pykv {

// Use the copy of this name, or with "" the best one that this processor can run. What is wrong, or "".
std::string choose_cpu(const char * wanted);
// The name of the one that is used.
std::string cpu_name();
// The names of those in this build, the best first.
std::vector<std::string> cpu_names();
// What this processor has of all that compilers may use.
std::vector<std::string> cpu_features();

}  // namespace pykv
