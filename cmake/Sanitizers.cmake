# PYKVCACHE_SANITIZE: everything, llama.cpp included, under AddressSanitizer and UBSan.
#
# For `make asan`, not for use: the interpreter has to be started with libasan preloaded.

option(PYKVCACHE_SANITIZE "Build with AddressSanitizer and UndefinedBehaviorSanitizer" OFF)

if(PYKVCACHE_SANITIZE)
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang")
    message(FATAL_ERROR " pykvcache: PYKVCACHE_SANITIZE needs GCC or Clang, not ${CMAKE_CXX_COMPILER_ID}")
  endif()
  # After the build type's own flags: -O1 wins, NDEBUG stays (asserts of a debug build hide what follows).
  add_compile_options(-O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined)
  add_link_options(-fsanitize=address,undefined)
endif()
