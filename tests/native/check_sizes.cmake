# Fails when a kernel file's code for the baseline is more than five times that for AVX2, whose
# registers are twice as wide: what is inlined everywhere takes the compiler minutes.
set(bad "")
foreach(object other IN ZIP_LISTS OBJECTS OTHERS)
  file(SIZE ${object} bytes)
  file(SIZE ${other} bytes_of_other)
  math(EXPR limit "5 * ${bytes_of_other}")
  if(bytes GREATER limit)
    string(APPEND bad "\n  ${object}: ${bytes} bytes, of AVX2 ${bytes_of_other}")
  endif()
endforeach()
if(bad)
  message(FATAL_ERROR "expected at most five times the code of AVX2, got:${bad}")
endif()
