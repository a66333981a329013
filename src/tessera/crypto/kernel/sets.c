/* Sets of indices: the rows that clients share, and their encoding as Elias-Fano codes.
 *
 * sets.py says what each function promises and checks every argument before a pointer comes here;
 * sets_reference.py is the twin in NumPy. Nothing here is secret, and nothing allocates. */
#include "aes.h"

#ifdef TESSERA_NATIVE

EXPORT int tessera_shared_counts(const int64_t *restrict starts, const uint32_t *restrict clients,
                                 const int64_t *restrict own, size_t rows,
                                 int64_t *restrict counts) {
    for (size_t i = 0; i < rows; i++) {
        const uint32_t *at = clients + starts[own[i]], *end = clients + starts[own[i] + 1];
        while (at < end) counts[*at++]++;
    }
    return 0;
}

/* Clients whose next place is below 0 are passed over. */
EXPORT int tessera_shared_rows(const int64_t *restrict starts, const uint32_t *restrict clients,
                               const int64_t *restrict own, size_t rows, int64_t *restrict next,
                               uint64_t *restrict indices) {
    for (size_t i = 0; i < rows; i++) {
        const uint32_t *at = clients + starts[own[i]], *end = clients + starts[own[i] + 1];
        for (; at < end; at++) {
            int64_t to = next[*at];
            if (to < 0) continue;
            indices[to] = i;
            next[*at] = to + 1;
        }
    }
    return 0;
}

INLINE uint8_t *put_varint(uint8_t *out, uint64_t value) {
    for (; value > 0x7f; value >>= 7) *out++ = (uint8_t)(value & 0x7f) | 0x80;
    *out++ = (uint8_t)value;
    return out;
}

/* The low bits of every index side by side. Whole words are stored, and what is beyond the bits
 * so far is written again by the next: up to 8 bytes beyond the end are touched. */
INLINE uint8_t *put_low_bits(uint8_t *out, const uint64_t *set, uint64_t count, unsigned low) {
    uint64_t pending = 0, mask = (1ull << low) - 1;
    unsigned filled = 0;
    for (uint64_t k = 0; k < count; k++) {
        uint64_t bits = set[k] & mask;
        pending |= bits << filled;
        memcpy(out, &pending, 8);
        if (filled + low >= 64) { /* the word is full: go on with what did not fit */
            out += 8;
            pending = bits >> (64 - filled); /* filled is over 0: low is below 64 */
            filled = filled + low - 64;
        } else {
            filled += low;
            out += filled >> 3;
            pending >>= filled & ~7u;
            filled &= 7;
        }
    }
    if (filled) {
        memcpy(out, &pending, 8);
        out += (filled + 7) >> 3;
    }
    return out;
}

INLINE unsigned floor_log2(uint64_t value) { return value ? 63 - (unsigned)__builtin_clzll(value) : 0; }

EXPORT int tessera_encode_sets(const uint64_t *restrict indices, const int64_t *bounds, size_t sets,
                               unsigned least_bits, uint8_t *out, int64_t *ends) {
    uint8_t *start = out;
    for (size_t s = 0; s < sets; s++) {
        const uint64_t *set = indices + bounds[s];
        uint64_t count = (uint64_t)(bounds[s + 1] - bounds[s]);
        out = put_varint(out, count);
        if (count) {
            uint64_t top = set[count - 1];
            unsigned low = floor_log2(top / count);
            uint64_t unary = (top >> low) + count;
            int bitmap = top < count * low + unary; /* then one bit for each place is shorter */
            uint64_t bytes = ((bitmap ? top : unary - 1) >> 3) + 1;
            out = put_varint(out, top);
            uint8_t *least = out + ((count * least_bits + 7) >> 3);
            if (low && !bitmap) out = put_low_bits(out, set, count, low);
            memset(out, 0, bytes);
            for (uint64_t k = 0; k < count; k++) {
                uint64_t bit = bitmap ? set[k] : (set[k] >> low) + k;
                out[bit >> 3] |= (uint8_t)(1u << (bit & 7));
            }
            out += bytes;
            if (out < least) memset(out, 0, (size_t)(least - out)), out = least;
        }
        ends[s] = out - start;
    }
    return 0;
}

#endif
