# Find or fetch llama.cpp and define its static target `llama`.
#
# LLAMA_CPP_SOURCE_DIR (environment or -D) names a tree of one's own; otherwise
# vendor/llama.cpp is used and filled by vendor/fetch.py. No GPU backend is named
# here, so CMAKE_ARGS="-DGGML_CUDA=ON" reaches ggml untouched.

if(NOT LLAMA_CPP_SOURCE_DIR AND DEFINED ENV{LLAMA_CPP_SOURCE_DIR})
  set(LLAMA_CPP_SOURCE_DIR "$ENV{LLAMA_CPP_SOURCE_DIR}")
endif()

# What llama.cpp could do itself and is done faster here; or, to follow another llama.cpp, without it.
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

# Debug builds of ggml abort in more places: Release always, unless asked.
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

# ggml's code for AMX is left out. It computes products of one matrix alone, and reads and writes elsewhere where there
# are more, as with several recurrent sequences: wrong logits, or a crash. And GCC before 11.5, 12.4, 13.3 and 14.1
# drops the stores that _tile_loadconfig reads (GCC PR 114098).
include(CheckCXXSourceCompiles)
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
set(CMAKE_REQUIRED_FLAGS "-Werror -mno-amx-tile -mno-amx-int8 -mno-amx-bf16")
check_cxx_source_compiles("int main() { return 0; }" PYKVCACHE_HAS_AMX)
unset(CMAKE_REQUIRED_FLAGS)
unset(CMAKE_TRY_COMPILE_TARGET_TYPE)
foreach(part TILE INT8 BF16)
  set(GGML_AMX_${part} OFF)
endforeach()
include("${PROJECT_SOURCE_DIR}/src/pykvcache/_native/cpu/copies.cmake")

include("${PROJECT_SOURCE_DIR}/src/pykvcache/_native/rpc/rpc.cmake")

add_subdirectory("${LLAMA_CPP_SOURCE_DIR}" "${CMAKE_CURRENT_BINARY_DIR}/llama.cpp" EXCLUDE_FROM_ALL)

if(TARGET ggml-cpu AND PYKVCACHE_HAS_AMX)
  target_compile_options(ggml-cpu PRIVATE -mno-amx-tile -mno-amx-int8 -mno-amx-bf16)
endif()

# What ggml does not check when memory is short: see careful.h. C code is left by exceptions, too.
if(CMAKE_SYSTEM_NAME STREQUAL "Linux" AND CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang" AND TARGET ggml-cpu)
  function(pykvcache_put_in_front target file header)
    # In ggml's directory, and in that of the copies of its CPU code.
    set_property(SOURCE "${LLAMA_CPP_SOURCE_DIR}/ggml/src/${file}" TARGET_DIRECTORY ${target}
                 DIRECTORY "${PROJECT_SOURCE_DIR}" APPEND PROPERTY COMPILE_OPTIONS
                 -include "${PROJECT_SOURCE_DIR}/src/pykvcache/_native/${header}" ${ARGN})
  endfunction()
  function(pykvcache_careful target file name)
    pykvcache_put_in_front(${target} ${file} careful.h "-D${name}")
  endfunction()
  pykvcache_careful(ggml-base ggml.c PYKVCACHE_GGML)
  pykvcache_careful(ggml-base ggml-alloc.c PYKVCACHE_GGML_ALLOC)
  pykvcache_careful(ggml-base ggml-backend.cpp PYKVCACHE_GGML_BACKEND)
  pykvcache_careful(ggml-cpu ggml-cpu/ggml-cpu.c PYKVCACHE_GGML_CPU)
  pykvcache_careful(ggml-cpu ggml-cpu/ggml-cpu.cpp PYKVCACHE_GGML_CPU_CPP)
  if(NOT PYKVCACHE_PLAIN AND EXISTS "${LLAMA_CPP_SOURCE_DIR}/ggml/src/ggml-cpu/simd-mappings.h")
    pykvcache_put_in_front(ggml-cpu ggml-cpu/ops.cpp cpu/short_heads.h)
  endif()
  if(NOT PYKVCACHE_PLAIN AND CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    pykvcache_put_in_front(ggml-cpu ggml-cpu/ggml-cpu.c cpu/half_matrices.h)
    target_sources(ggml-cpu PRIVATE "${PROJECT_SOURCE_DIR}/src/pykvcache/_native/cpu/half_matrices.cpp")
  endif()
  target_compile_options(ggml-base PRIVATE $<$<COMPILE_LANGUAGE:C>:-fexceptions>)
  target_compile_options(ggml-cpu PRIVATE $<$<COMPILE_LANGUAGE:C>:-fexceptions>)
endif()
pykvcache_copy_cpu_code()
