# Whether to build the extension that packs arguments, as FASTATTN_EXTENSION in the environment says:
# on, off or auto. It needs Python's headers, which not every machine has, and the stable ABI.

# Sets `include` to the folder of Python.h, or `why_not` to the reason not to build; fails where
# FASTATTN_EXTENSION is on.
function(fa_find_python source include why_not)
  set(wanted "$ENV{FASTATTN_EXTENSION}")
  if(wanted STREQUAL "")
    set(wanted auto)
  elseif(NOT wanted MATCHES "^(on|off|auto)$")
    message(FATAL_ERROR "FASTATTN_EXTENSION: got '${wanted}', expected on, off or auto")
  endif()

  set(reason "")
  if(wanted STREQUAL "off")
    set(reason "FASTATTN_EXTENSION was off")
  elseif("${SKBUILD_SABI_VERSION}" STREQUAL "")
    set(reason "pip builds it, for a CPython that has the stable ABI")
  elseif(NOT EXISTS "${Python_INCLUDE_DIR}/Python.h")
    set(reason "there is no ${Python_INCLUDE_DIR}/Python.h (Debian, Ubuntu: apt install python3-dev; Fedora: dnf install python3-devel)")
  else()
    execute_process(
      COMMAND "${CMAKE_CXX_COMPILER}" -std=c++17 -fsyntax-only "-I${Python_INCLUDE_DIR}" "${source}"
      OUTPUT_VARIABLE said ERROR_VARIABLE said RESULT_VARIABLE failed)
    if(failed)
      string(REGEX MATCH "[^\n]*error[^\n]*" said "${said}\n")
      set(reason "${Python_INCLUDE_DIR}/Python.h does not compile here: ${said}")
    endif()
  endif()
  if(reason AND wanted STREQUAL "on")
    message(FATAL_ERROR "FASTATTN_EXTENSION is on, but ${reason}")
  endif()
  set(${include} "${Python_INCLUDE_DIR}" PARENT_SCOPE)
  set(${why_not} "${reason}" PARENT_SCOPE)
endfunction()
