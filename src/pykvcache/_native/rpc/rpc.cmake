# ggml's RPC: models on several machines, without InfiniBand.

set(PYKVCACHE_RPC OFF)
file(STRINGS "${LLAMA_CPP_SOURCE_DIR}/ggml/include/ggml-rpc.h" version REGEX "define RPC_PROTO_M[AI][JN]OR_VERSION")
string(REGEX MATCHALL "[0-9]+" version "${version}")
# Not Windows, whose sockets differ; protocol.h supports this version only.
if(UNIX AND version STREQUAL "7;0")
  set(GGML_RPC ON CACHE BOOL "ggml: use RPC")
  set(GGML_RPC_RDMA OFF CACHE BOOL "ggml: RDMA for RPC" FORCE)
  set(PYKVCACHE_RPC ${GGML_RPC})
elseif(GGML_RPC)
  message(WARNING "pykvcache: LlamaModel(rpc=...) is left out: it needs version 7.0 of ggml's RPC, on Linux or macOS")
endif()

# Add the sources to the extension, and replace ggml's transport.cpp by ours.
function(pykvcache_add_rpc target)
  set(folder "${PROJECT_SOURCE_DIR}/src/pykvcache/_native/rpc")
  if(NOT PYKVCACHE_RPC)
    target_sources(${target} PRIVATE "${folder}/absent.cpp")
    return()
  endif()
  set(ggml_folder "${LLAMA_CPP_SOURCE_DIR}/ggml/src/ggml-rpc")
  target_sources(${target} PRIVATE "${folder}/servers.cpp")
  target_sources(ggml-rpc PRIVATE "${folder}/transport.cpp")
  set_source_files_properties("${ggml_folder}/transport.cpp" TARGET_DIRECTORY ggml-rpc PROPERTIES HEADER_FILE_ONLY ON)
  target_include_directories(ggml-rpc PRIVATE "${ggml_folder}" "${PROJECT_SOURCE_DIR}/src/pykvcache/_native/guard")
endfunction()
