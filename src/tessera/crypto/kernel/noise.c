/* Integers of a given distribution from uniform words, by Walker's alias method.
 *
 * noise.py says what the function promises and checks every argument before a pointer comes here;
 * noise_reference.py is the twin in NumPy. The words are secret. Which entries of the table are
 * read follows from them: noise is drawn at home, and timing is not defended against. */
#include "aes.h"

#ifdef TESSERA_NATIVE

#define COLUMN_BITS 12
#define HALF (1 << (COLUMN_BITS - 1))
#define REST ((1ull << (64 - COLUMN_BITS)) - 1)

INLINE int32_t drawn(uint64_t word, const uint64_t *restrict table) {
    uint64_t column = word >> (64 - COLUMN_BITS), entry = table[column];
    uint64_t other = entry & (2 * HALF - 1);
    return (int32_t)((word & REST) < entry >> COLUMN_BITS ? column : other) - HALF;
}

/* `terms` is a constant where it is inlined. */
INLINE void alias_sums(const uint64_t *restrict words, size_t rows, size_t width, size_t terms,
                       const int32_t *restrict coefficients, size_t stride,
                       const uint64_t *restrict table, int32_t *restrict out) {
    for (size_t r = 0; r < rows; r++) {
        const int32_t *by = coefficients + r * stride;
        for (size_t i = 0; i < width; i++) {
            int32_t sum = 0;
            for (size_t t = 0; t < terms; t++) sum += by[t] * drawn(*words++, table);
            *out++ = sum;
        }
    }
}

EXPORT int tessera_alias_sums(const uint64_t *restrict words, size_t rows, size_t width,
                              size_t terms, const int32_t *restrict coefficients, size_t stride,
                              const uint64_t *restrict table, int32_t *restrict out) {
    switch (terms) {
    case 2: alias_sums(words, rows, width, 2, coefficients, stride, table, out); break;
    case 4: alias_sums(words, rows, width, 4, coefficients, stride, table, out); break;
    default: alias_sums(words, rows, width, terms, coefficients, stride, table, out);
    }
    return 0;
}

#endif
