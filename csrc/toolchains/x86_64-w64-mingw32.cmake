# Compiles for Windows on x86-64 with Debian's cross compiler (g++-mingw-w64-x86-64-posix):
#   cmake --toolchain csrc/toolchains/x86_64-w64-mingw32.cmake ...
set(CMAKE_SYSTEM_NAME Windows)
set(CMAKE_SYSTEM_PROCESSOR AMD64)
set(CMAKE_C_COMPILER x86_64-w64-mingw32-gcc-posix)
set(CMAKE_CXX_COMPILER x86_64-w64-mingw32-g++-posix)
