# Fails when an object of instruction set ISA defines a symbol that the linker may merge with that
# of another object (nm: W, V, u) outside of the set's own namespace: the copy that wins might need
# instructions that the machine has not.
set(bad "")
foreach(object IN LISTS OBJECTS)
  execute_process(COMMAND ${NM} --defined-only ${object}
    OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[^\n]* [WVu] [^\n]*" mergeable "${symbols}")
  foreach(symbol IN LISTS mergeable)
    if(NOT symbol MATCHES "N7anychip3cpu[0-9]+${ISA}")
      string(APPEND bad "\n  ${object}: ${symbol}")
    endif()
  endforeach()
endforeach()
if(bad)
  message(FATAL_ERROR "expected no mergeable symbols outside of namespace ${ISA}, got:${bad}")
endif()
