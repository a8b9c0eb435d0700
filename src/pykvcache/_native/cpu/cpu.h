// Chooses among copies of ggml's CPU code for several instruction sets (copies.cmake), before any of that code runs.
#pragma once

#include <string>
#include <vector>

namespace pykv {

// Use the named copy, or with "" the best one that this processor can run. Returns an error text, or "".
std::string choose_cpu(const char * wanted);
// Name of the copy in use.
std::string cpu_name();
// Names of the copies in this build, best first.
std::vector<std::string> cpu_names();
// Features of this processor, among those that compilers may use.
std::vector<std::string> cpu_features();

}  // namespace pykv
