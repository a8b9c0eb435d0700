# Join the objects of one copy into OUT: only ENTRIES stay visible, with _COPY behind their names.
#
# Run by copies.cmake. Refuses static initialisers, which would run before a copy is chosen.

function(run)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE result OUTPUT_VARIABLE said ERROR_VARIABLE said)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR " pykvcache: ${ARGV}: ${said}")
  endif()
  set(said "${said}" PARENT_SCOPE)
endfunction()

string(REPLACE "|" ";" objects "${OBJECTS}")
string(REPLACE " " ";" entries "${ENTRIES}")
run("${LD}" -r --force-group-allocation -o "${OUT}" ${objects})
run("${OBJDUMP}" -h "${OUT}")
if(said MATCHES "[.](preinit_array|init_array|ctors)")
  file(REMOVE "${OUT}")
  message(FATAL_ERROR " pykvcache: ggml's CPU code for ${COPY} has code that runs at load (${CMAKE_MATCH_1})")
endif()
set(options "")
foreach(entry IN LISTS entries)
  list(APPEND options --redefine-sym "${entry}=${entry}_${COPY}" --keep-global-symbol "${entry}_${COPY}")
endforeach()
run("${OBJCOPY}" ${options} "${OUT}")
