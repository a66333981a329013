/* Integers of a given distribution from uniform words, by Walker's alias method.
 *
 * noise.py says what the function promises and checks every argument before a pointer comes here;
 * noise_reference.py is the twin in NumPy. The words are secret. No branch depends on them; which
 * entries of the table are read does, so a neighbour on the same CPU cache is not kept out. */
#include "aes.h"

#ifdef TESSERA_NATIVE

struct columns {
    const uint64_t *entries;
    unsigned bits, rest;
    uint64_t low;
    int32_t reach;
};

/* An entry whose threshold is met exactly leaves a bit in `tied`: unless the column shares with
 * itself, only a second word can decide. */
INLINE int32_t drawn(uint64_t word, const struct columns *of, uint64_t *tied) {
    uint64_t column = word >> of->rest, entry = of->entries[column];
    uint64_t other = entry & of->low, rest = (word << of->bits) >> of->bits, limit = entry >> of->bits;
    uint64_t own = 0 - (uint64_t)(rest < limit);
    *tied |= (uint64_t)(rest == limit) & (uint64_t)(other != column);
    return (int32_t)((column & own) | (other & ~own)) - of->reach;
}

/* `terms` is a constant where it is inlined. */
INLINE uint64_t alias_sums(const uint64_t *restrict words, size_t rows, size_t width, size_t terms,
                           const int32_t *restrict coefficients, size_t stride,
                           const struct columns *of, int32_t *restrict out) {
    uint64_t tied = 0;
    for (size_t r = 0; r < rows; r++) {
        const int32_t *by = coefficients + r * stride;
        for (size_t i = 0; i < width; i++) {
            int32_t sum = 0;
            for (size_t t = 0; t < terms; t++) sum += by[t] * drawn(*words++, of, &tied);
            *out++ = sum;
        }
    }
    return tied;
}

EXPORT int tessera_alias_sums(const uint64_t *restrict words, size_t rows, size_t width,
                              size_t terms, const int32_t *restrict coefficients, size_t stride,
                              const uint64_t *restrict table, size_t bits, size_t reach,
                              int32_t *restrict out) {
    struct columns of = {table, (unsigned)bits, 64 - (unsigned)bits, ((uint64_t)1 << bits) - 1,
                         (int32_t)reach};
    uint64_t tied;
    switch (terms) {
    case 1: tied = alias_sums(words, rows, width, 1, coefficients, stride, &of, out); break;
    case 2: tied = alias_sums(words, rows, width, 2, coefficients, stride, &of, out); break;
    case 4: tied = alias_sums(words, rows, width, 4, coefficients, stride, &of, out); break;
    default: tied = alias_sums(words, rows, width, terms, coefficients, stride, &of, out);
    }
    return tied != 0;
}

#endif
