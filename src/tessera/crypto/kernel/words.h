/* How the words of a leaf add up; points.py's `Kind`. */
#ifndef TESSERA_WORDS_H
#define TESSERA_WORDS_H

#include "aes.h"

#ifdef TESSERA_NATIVE

enum kind { KIND_XOR = 0, KIND_32 = 4, KIND_64 = 8, KIND_128 = 16, KIND_61 = 61 };

#define PRIME ((1ull << 61) - 1)

/* Values below 2^64 - 8 to their residues. */
static inline uint64_t reduce61(uint64_t x) {
    x = (x & PRIME) + (x >> 61);
    return x >= PRIME ? x - PRIME : x;
}

__extension__ typedef unsigned __int128 wide;

#endif
#endif
