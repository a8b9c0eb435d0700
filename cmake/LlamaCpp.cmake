# Find or fetch llama.cpp and define its static target `llama`.
#
# LLAMA_CPP_SOURCE_DIR (environment or -D) names another tree; otherwise vendor/fetch.py
# fills vendor/llama.cpp. No GPU backend is named here, so CMAKE_ARGS="-DGGML_CUDA=ON"
# reaches ggml unchanged.

if(NOT LLAMA_CPP_SOURCE_DIR AND DEFINED ENV{LLAMA_CPP_SOURCE_DIR})
  set(LLAMA_CPP_SOURCE_DIR "$ENV{LLAMA_CPP_SOURCE_DIR}")
endif()

# fast/ redoes operations of llama.cpp faster. A plain build, for another llama.cpp, omits it.
option(PYKVCACHE_PLAIN "Change memories by llama.cpp's own functions alone" OFF)

if(LLAMA_CPP_SOURCE_DIR)
  set(PYKVCACHE_OWN_LLAMA_CPP ON)
  get_filename_component(LLAMA_CPP_SOURCE_DIR "${LLAMA_CPP_SOURCE_DIR}" ABSOLUTE BASE_DIR "${PROJECT_SOURCE_DIR}")
  if(NOT EXISTS "${LLAMA_CPP_SOURCE_DIR}/include/llama.h")
    message(FATAL_ERROR " pykvcache: LLAMA_CPP_SOURCE_DIR=${LLAMA_CPP_SOURCE_DIR} is not a llama.cpp source tree (no include/llama.h there)")
  endif()
else()
  execute_process(
    COMMAND "${Python_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/vendor/fetch.py"
    OUTPUT_VARIABLE LLAMA_CPP_SOURCE_DIR
    ERROR_VARIABLE fetch_error
    RESULT_VARIABLE fetch_result
    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_STRIP_TRAILING_WHITESPACE)
  if(NOT fetch_result EQUAL 0)
    message(FATAL_ERROR " ${fetch_error}")
  endif()
endif()
message(STATUS "pykvcache: llama.cpp sources in ${LLAMA_CPP_SOURCE_DIR}")
include(Pin)

# Release by default, because debug builds of ggml abort in more places.
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release)
endif()

# Static, hidden, position independent: the extension exports no llama_* or ggml_* symbol.
set(BUILD_SHARED_LIBS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_C_VISIBILITY_PRESET hidden)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)

foreach(extra APP COMMON TOOLS TESTS EXAMPLES SERVER UI MTMD)
  set(LLAMA_BUILD_${extra} OFF)
endforeach()
set(LLAMA_OPENSSL OFF)

# ggml's AMX code supports products of one matrix with one; with more, as for several recurrent sequences, it accesses
# wrong places. This option builds it, for this machine only; models with other products are loaded without it
# (_native/guard/header.cpp). Off, because no machine with AMX has run it yet.
option(PYKVCACHE_AMX "Build ggml's AMX code, for models that multiply by single matrices" OFF)
if(PYKVCACHE_AMX)
  # GCC PR 114098: drops the stores that _tile_loadconfig reads.
  set(gcc "${CMAKE_CXX_COMPILER_VERSION}")
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND (gcc VERSION_LESS 11.5 OR (gcc MATCHES "^12" AND gcc VERSION_LESS 12.4)
                                               OR (gcc MATCHES "^13" AND gcc VERSION_LESS 13.3)))
    message(FATAL_ERROR " pykvcache: PYKVCACHE_AMX needs GCC 11.5, 12.4, 13.3 or newer (GCC PR 114098), not ${gcc}")
  endif()
else()
  include(CheckCXXSourceCompiles)
  set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
  set(CMAKE_REQUIRED_FLAGS "-Werror -mno-amx-tile -mno-amx-int8 -mno-amx-bf16")
  check_cxx_source_compiles("int main() { return 0; }" PYKVCACHE_KNOWS_AMX)
  unset(CMAKE_REQUIRED_FLAGS)
  unset(CMAKE_TRY_COMPILE_TARGET_TYPE)
  foreach(part TILE INT8 BF16)
    set(GGML_AMX_${part} OFF)
  endforeach()
endif()
include("${PROJECT_SOURCE_DIR}/src/pykvcache/_native/cpu/copies.cmake")

include("${PROJECT_SOURCE_DIR}/src/pykvcache/_native/rpc/rpc.cmake")

add_subdirectory("${LLAMA_CPP_SOURCE_DIR}" "${CMAKE_CURRENT_BINARY_DIR}/llama.cpp" EXCLUDE_FROM_ALL)

if(TARGET ggml-cpu AND PYKVCACHE_KNOWS_AMX AND NOT PYKVCACHE_AMX)
  target_compile_options(ggml-cpu PRIVATE -mno-amx-tile -mno-amx-int8 -mno-amx-bf16)
endif()

# ggml's C code reports broken preconditions through our callback, which throws (_native/guard/guarded.h).
if(CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang" AND TARGET ggml-cpu)
  target_compile_options(ggml-base PRIVATE $<$<COMPILE_LANGUAGE:C>:-fexceptions>)
  target_compile_options(ggml-cpu PRIVATE $<$<COMPILE_LANGUAGE:C>:-fexceptions>)
endif()

# For ggml's directory, and that of the copies of its CPU code.
if(CMAKE_SYSTEM_NAME STREQUAL "Linux" AND CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang" AND TARGET ggml-cpu AND NOT PYKVCACHE_PLAIN
   AND EXISTS "${LLAMA_CPP_SOURCE_DIR}/ggml/src/ggml-cpu/simd-mappings.h")
  set_property(SOURCE "${LLAMA_CPP_SOURCE_DIR}/ggml/src/ggml-cpu/ops.cpp" TARGET_DIRECTORY ggml-cpu
               DIRECTORY "${PROJECT_SOURCE_DIR}" APPEND PROPERTY COMPILE_OPTIONS
               -include "${PROJECT_SOURCE_DIR}/src/pykvcache/_native/cpu/short_heads.h")
endif()
pykvcache_copy_cpu_code()
