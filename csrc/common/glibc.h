// Included first in every file of a portable build (CMakeLists.txt).
//
// glibc 2.29 has new versions of five functions of libm, which set errno by other rules. These
// sources do not read errno, so they take the versions that every glibc has: then the library loads
// with glibc 2.28, as manylinux_2_28 asks.
#pragma once

#if defined(__linux__) && defined(__x86_64__)
#define FA_GLIBC "GLIBC_2.2.5"
#elif defined(__linux__) && defined(__aarch64__)
#define FA_GLIBC "GLIBC_2.17"
#endif

#ifdef FA_GLIBC
__asm__(".symver exp, exp@" FA_GLIBC);
__asm__(".symver exp2, exp2@" FA_GLIBC);
__asm__(".symver log, log@" FA_GLIBC);
__asm__(".symver log2, log2@" FA_GLIBC);
__asm__(".symver pow, pow@" FA_GLIBC);
#undef FA_GLIBC
#endif
