/* How the words of a leaf add up; points.py's `Kind`. */
#ifndef TESSERA_WORDS_H
#define TESSERA_WORDS_H

#include "aes.h"

#ifdef TESSERA_NATIVE

/* SET is of the C code alone: values that are not added to anything. */
enum kind { KIND_XOR = 0, KIND_SET = 1, KIND_32 = 4, KIND_64 = 8, KIND_128 = 16, KIND_61 = 61 };

#define PRIME ((1ull << 61) - 1)

/* Values below 2^64 - 8 to their residues. */
static inline uint64_t reduce61(uint64_t x) {
    x = (x & PRIME) + (x >> 61);
    return x >= PRIME ? x - PRIME : x;
}

__extension__ typedef unsigned __int128 wide;
typedef uint32_t four_words __attribute__((vector_size(16)));
typedef uint64_t two_words __attribute__((vector_size(16)));

#define ADD_WORDS(type, vector)                                              \
    for (; b + sizeof(vector) <= size; b += sizeof(vector)) {                \
        vector total, word;                                                  \
        memcpy(&total, to + b, sizeof total);                                \
        memcpy(&word, from + b, sizeof word);                                \
        total = minus ? total - word : total + word;                         \
        memcpy(to + b, &total, sizeof total);                                \
    }                                                                        \
    for (; b < size; b += sizeof(type)) {                                    \
        type total, word;                                                    \
        memcpy(&total, to + b, sizeof total);                                \
        memcpy(&word, from + b, sizeof word);                                \
        total = minus ? total - word : total + word;                         \
        memcpy(to + b, &total, sizeof total);                                \
    }

/* to += from, or -= where `minus`, word by word; words of a field may come unreduced. */
INLINE void add_words(uint8_t *restrict to, const uint8_t *restrict from, size_t size, int kind,
                      int minus) {
    size_t b = 0;
    switch (kind) {
    case KIND_32: ADD_WORDS(uint32_t, four_words) break;
    case KIND_64: ADD_WORDS(uint64_t, two_words) break;
    case KIND_128: ADD_WORDS(wide, wide) break;
    default: /* modulo 2^61 - 1 */
        for (; b < size; b += 8) {
            uint64_t total, word;
            memcpy(&total, to + b, 8);
            memcpy(&word, from + b, 8);
            total = reduce61(total + (minus ? PRIME - reduce61(word) : word));
            memcpy(to + b, &total, 8);
        }
    }
}

#endif
#endif
