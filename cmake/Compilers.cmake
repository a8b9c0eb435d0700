# Enable C and C++, or say in one line that there is no compiler.
#
# A message that begins with a space is printed as it is; any other is folded.

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
