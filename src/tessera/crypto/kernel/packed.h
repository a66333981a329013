/* Words of up to 25 bits from one stream of bits, four at a time.
 *
 * Wherever such a word begins, four bytes hold it. They are moved to a place of their own, up by
 * what brings the word to bit 7 (a product, since each of the four moves by another number), and
 * down again. */
#ifndef TESSERA_PACKED_H
#define TESSERA_PACKED_H

#include "aes.h"

#ifdef TESSERA_NATIVE

#define PACKED_TARGET __attribute__((target("aes,sse4.1")))
#define FOUR_BITS 25   /* of a word, at most */
#define FOUR_WINDOW 16 /* bytes that are read, wherever the first word begins */

/* For a stream whose next word begins at each of the bits of a byte. */
typedef struct {
    uint8_t order[8][16];
    uint32_t scale[8][4];
    unsigned bits;
} unpacking;

INLINE void begin_unpacking(unpacking *u, unsigned bits) {
    u->bits = bits;
    for (unsigned phase = 0; phase < 8; phase++)
        for (unsigned i = 0; i < 4; i++) {
            const unsigned at = phase + i * bits;
            for (unsigned b = 0; b < 4; b++) u->order[phase][4 * i + b] = (uint8_t)(at / 8 + b);
            u->scale[phase][i] = 1u << (7 - at % 8);
        }
}

/* The four words from bit `at` on. */
INLINE PACKED_TARGET __m128i four_packed(const unpacking *u, const uint8_t *data, size_t at) {
    const __m128i order = _mm_loadu_si128((const __m128i *)u->order[at % 8]);
    const __m128i scale = _mm_loadu_si128((const __m128i *)u->scale[at % 8]);
    const __m128i window = _mm_loadu_si128((const __m128i *)(data + at / 8));
    const __m128i moved = _mm_mullo_epi32(_mm_shuffle_epi8(window, order), scale);
    return _mm_and_si128(_mm_srli_epi32(moved, 7), _mm_set1_epi32((int)((1u << u->bits) - 1)));
}

#endif
#endif
