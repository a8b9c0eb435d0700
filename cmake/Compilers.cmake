# Enable C and C++, or report a missing compiler in one line.
#
# CMake prints messages that begin with a space unchanged; it folds others.

include(CheckLanguage)
foreach(language C CXX)
  check_language(${language})
  if(NOT CMAKE_${language}_COMPILER)
    string(REPLACE "CXX" "C++" name "${language}")
    string(REGEX REPLACE "^C$" "CC" variable "${language}")
    message(FATAL_ERROR " pykvcache: no working ${name} compiler found: install one (g++ or clang++; Visual Studio Build Tools on Windows), or let ${variable} name it (${variable}='$ENV{${variable}}' now)")
  endif()
  enable_language(${language})
endforeach()
