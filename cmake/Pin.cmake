# Refuses an unsupported llama.cpp with one line before anything is compiled.
#
# Sets PYKVCACHE_HAS: the macros of functions that only some versions have.

# This number defines the layout of states; probe_state.h describes the versions.
set(known 3 4)
file(STRINGS "${LLAMA_CPP_SOURCE_DIR}/include/llama.h" version REGEX "define LLAMA_STATE_SEQ_VERSION ")
string(REGEX MATCH "[0-9]+$" version "${version}")
if(NOT version IN_LIST known)
  list(JOIN known " and " known)
  message(FATAL_ERROR " pykvcache: the llama.cpp in ${LLAMA_CPP_SOURCE_DIR} writes states of version '${version}': ${known} are known here (vendor/README.md)")
endif()

set(PYKVCACHE_HAS)
file(STRINGS "${LLAMA_CPP_SOURCE_DIR}/ggml/include/ggml-backend.h" found REGEX "[ &]ggml_backend_tensor_get_2d\\(")
if(found)
  list(APPEND PYKVCACHE_HAS PYKVCACHE_HAS_GGML_BACKEND_TENSOR_GET_2D)
endif()

# For another tree, first try to compile the files that include its private headers.
if(PYKVCACHE_OWN_LLAMA_CPP AND NOT "${PYKVCACHE_FITS}" STREQUAL "${LLAMA_CPP_SOURCE_DIR} ${PYKVCACHE_PLAIN}")
  set(native "${PROJECT_SOURCE_DIR}/src/pykvcache/_native")
  set(folders . context facts guard probe state text threads)
  list(TRANSFORM folders PREPEND "${native}/")
  if(PYKVCACHE_PLAIN)
    set(tried plain/plain.cpp)
  else()
    set(tried fast/moves.cpp fast/state_place.cpp)
  endif()
  list(APPEND tried probe/probe_cells.cpp probe/probe_kv.cpp probe/probe_state.cpp)
  list(TRANSFORM tried PREPEND "${native}/")
  list(TRANSFORM PYKVCACHE_HAS PREPEND "-D" OUTPUT_VARIABLE macros)
  set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
  try_compile(fits "${CMAKE_CURRENT_BINARY_DIR}/pin" SOURCES ${tried}
    CMAKE_FLAGS "-DINCLUDE_DIRECTORIES=${folders};${LLAMA_CPP_SOURCE_DIR}/src;${LLAMA_CPP_SOURCE_DIR}/include;${LLAMA_CPP_SOURCE_DIR}/ggml/include"
    COMPILE_DEFINITIONS ${macros} CXX_STANDARD 17 CXX_STANDARD_REQUIRED ON OUTPUT_VARIABLE said)
  unset(CMAKE_TRY_COMPILE_TARGET_TYPE)
  set(worked "${fits}")
  unset(fits CACHE)
  if(NOT worked)
    string(REGEX MATCH "error[^\n]*: [^\n]*" said "${said}")
    message(FATAL_ERROR " pykvcache: the llama.cpp in ${LLAMA_CPP_SOURCE_DIR} is not one that this version fits (${said}): see vendor/README.md; -DPYKVCACHE_PLAIN=ON needs less of it")
  endif()
  set(PYKVCACHE_FITS "${LLAMA_CPP_SOURCE_DIR} ${PYKVCACHE_PLAIN}" CACHE INTERNAL "the llama.cpp that was tried")
endif()
